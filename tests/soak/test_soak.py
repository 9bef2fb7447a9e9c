"""A few cases of each long check; README.md lists commands for more cases."""

import random
from pathlib import Path

import pytest


def test_damaged_files():
    import damage

    assert damage.main(files=21, seed=2) == 0


def test_models_of_transformers():
    pytest.importorskip("transformers")
    import transformers_models

    assert (
        transformers_models.main(
            4, 2, ["nemotron_h", "nemotron_h_super", "qwen3_5", "olmo_hybrid", "granitemoehybrid"]
        )
        == 0
    )


def test_random_models():
    import random_models_gpu

    assert random_models_gpu.main(3, 4, "cpu") == 0


def test_random_layouts(monkeypatch):
    """Layouts equal one process, and errors of a loss, a weight or a copy are detected."""
    import random_layouts
    from _layout_cases import Found

    kept = []
    real = random_layouts.differences
    monkeypatch.setattr(
        random_layouts, "differences", lambda *found: kept.append(found) or real(*found)
    )
    assert random_layouts.main(6, 1) == 0

    def changed(rank, loss, weight):
        losses, (shards,) = rank.losses.clone(), rank.states
        losses[0] *= 1 + loss
        (name, shape, extent, tensor), *rest = shards
        return Found(losses, [[(name, shape, extent, tensor * (1 + weight)), *rest]])

    steps, alone = kept[0]
    for loss, weight, all_ranks, words in (
        (1e-7, 0, True, "losses of step 1 differ by 1.0e-07"),
        (1e-7, 0, False, "ranks report different losses of step 1"),
        (0, 1e-7, True, "differs by 1.0e-07 of step 1"),
    ):
        first = [
            changed(r, loss, weight) if all_ranks or not n else r for n, r in enumerate(steps[0])
        ]
        assert words in " ".join(real([first, *steps[1:]], alone)), words


def scaled_dq(attend, q_TNH, k_TKH, v_TKH, **options):
    if q_TNH.requires_grad:
        q_TNH.register_hook(lambda gradient: 0.8 * gradient)
    return attend(q_TNH, k_TKH, v_TKH, **options)


def faint_leak(attend, *tensors, **options):
    out_TNH = attend(*tensors, **options)
    return out_TNH + 2e-3 * out_TNH.mean(dim=0)


@pytest.mark.parametrize(
    ("fault", "words"),
    [(scaled_dq, "layers.0.mixer.qkv.weight q: error 0.2"), (faint_leak, "of other documents")],
)
def test_random_models_detect_a_fault_of_a_kernel(fault, words, monkeypatch):
    import random_models_gpu
    from _random_models import draw_case

    from megatron_packed.layers import attention

    def attend(*tensors, **options):
        kernel = options["backend"] == "auto"
        return fault(original, *tensors, **options) if kernel else original(*tensors, **options)

    original = attention.varlen_attention
    monkeypatch.setattr(attention, "varlen_attention", attend)
    drawn = ((number, draw_case(random.Random(f"1 {number}"))) for number in range(1000))
    number = next(
        number
        for number, case in drawn
        if case.model["hybrid_layer_pattern"] == "*" and len(case.lengths) > 2 and case.slots < 300
    )
    result = random_models_gpu.check(number, 1, "cpu")
    assert result.status == "failed" and words in result.text
    assert "varlen_attention reference" in result.kernels


def test_numbers_of_two_checkouts(tmp_path: Path) -> None:
    """A checkout equals itself, and another loss or another weight is detected."""
    import same_numbers
    from safetensors.torch import load_file, save_file

    name = "one process"
    found = same_numbers.compare(same_numbers.HERE, "cpu", [name], tmp_path / "runs", 1)
    assert found == {name: []}
    here, other = (tmp_path / "runs" / "one_process" / side for side in ("here", "other"))
    [line] = [x for x in (here / "log.jsonl").read_text().splitlines() if '"iteration": 5' in x]
    log = (here / "log.jsonl").read_text()
    (here / "log.jsonl").write_text(log.replace(line, line.replace('"lm_loss": ', '"lm_loss": 1')))
    [said] = same_numbers.different_lines(here, other)
    assert said.startswith("iteration 5: lm_loss 1")
    timed = log.replace('"lm_loss": ', '"offload_put_ms": 1, "offload_hidden": 1, "lm_loss": ')
    (here / "log.jsonl").write_text(timed)
    assert same_numbers.different_lines(here, other) == []
    path = here / "checkpoints" / "step_00000006" / "rank_00000.safetensors"
    tensors = load_file(path)
    name = "model/final_norm.weight[0:32]"
    tensors[name][3] += 1e-6
    save_file(tensors, path)
    assert same_numbers.different_checkpoints(here, other) == [f"tensor {name} of {path.name}"]
