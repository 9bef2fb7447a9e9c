"""A few cases of each long check; `tools/README.md` lists commands for more cases."""

import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from support.json_lines import read_lines


def test_damaged_files():
    import damage

    assert damage.main(files=21, seed=2) == 0


def test_flipped_bits():
    import damage

    assert damage.main(files=10, seed=3, kinds=("flip_bit",)) == 0


def test_hostile_files(tmp_path, capsys):
    """Readers refuse a few payloads of each kind, and a payload that is taken counts as silent."""
    import payloads

    readers = ["costs", "indexed data", "JSON lines", "template", "Megatron checkpoint"]
    assert payloads.main(readers, every=24, out=tmp_path / "rows", patience=300) == 0
    assert [line["outcome"] for line in read_lines(tmp_path / "rows")]
    ended = payloads.Ended(0, "", 0, 0.0)
    canary = payloads.Canary(tmp_path / "was_run", tmp_path, "secret")
    before = payloads.outside_state(canary)
    taken = payloads.Payload("costs", "x", lambda folder, _: None)

    def outcome(**changes):
        case = tmp_path.parent / "case"
        return payloads.outcome(taken, ended._replace(**changes), canary, before, case)

    assert outcome() == "silent" and outcome(code=2) == "refused" and outcome(code=None) == "hang"
    assert outcome(code=1, text="Traceback (most recent call last)") == "traceback"
    assert (
        outcome(code=2, text="\x1b[31m") == "raw" and outcome(code=2, text="secret") == "executed"
    )
    canary.file.touch()
    assert outcome(code=2) == "executed"


def test_models_of_transformers():
    pytest.importorskip("transformers")
    import transformers_models

    assert (
        transformers_models.main(
            4, 2, ["nemotron_h", "nemotron_h_super", "qwen3_5", "olmo_hybrid", "granitemoehybrid"]
        )
        == 0
    )


def test_files_of_transformers():
    """A random model of each family, and two altered copies, are equal or refused by name."""
    pytest.importorskip("transformers")
    import foreign_files

    assert foreign_files.main(1, 30, 2, list(foreign_files.FAMILIES), None) == 0


def test_outcomes_of_files_are_counted(tmp_path, capsys, monkeypatch):
    pytest.importorskip("transformers")
    import foreign_files

    out = tmp_path / "outcomes.jsonl"
    rows = [
        {"kind": "random", "family": "llama", "number": 0, "case": "converted", "outcome": kind}
        for kind in (foreign_files.foreign.EQUAL, foreign_files.foreign.WRONG)
    ]
    monkeypatch.setattr(foreign_files, "rows", lambda *given: iter(rows))
    assert foreign_files.main(2, 0, 1, ["llama"], out) == 1
    assert capsys.readouterr().out.endswith("converted | 1 | 0 | 0 | 1 | 0 | 0 | 0\n1 of 2\n")
    assert read_lines(out) == rows


def test_mutations_are_counted(tmp_path, capsys):
    import mutations

    def row(name, text, replacement, test="test_double"):
        return mutations.Mutation(name, file, text, replacement, [f"tests/test_sums.py::{test}"])

    file, source = "megatron_packed/sums.py", "def double(x):\n    return 2 * x\n"
    (tmp_path / "tests").mkdir()
    (tmp_path / file).parent.mkdir()
    (tmp_path / file).with_name("__init__.py").touch()
    (tmp_path / file).write_text(source)
    (tmp_path / "tests" / "test_sums.py").write_text(
        "from megatron_packed.sums import double\n\ndef test_double():\n    assert double(3) == 6\n"
    )
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    rows = [
        row("other", "2 *", "3 *"),
        row("equal", "2 * x", "x + x"),
        row("old", "2 * y", "3 * y"),
        row("twice", "x", "y"),
        row("gone", "2 *", "3 *", "test_gone"),
    ]
    moved = [
        rows[number]._replace(file="megatron_packed/old.py").place(tmp_path) for number in (0, 2)
    ]
    assert moved == [tmp_path / file, None]
    assert mutations.main(rows[:1], tmp_path) == 0
    assert mutations.main(rows, tmp_path) == 1
    _, *found, last = capsys.readouterr().out.splitlines()[3:]
    outcomes = [line.split()[0] for line in found]
    assert outcomes == ["killed", "survived", "stale", "stale", "untested"] and last == "1 of 5"
    assert "test_double" in found[0]
    assert (tmp_path / file).read_text() == source
    assert all(row.replacement != row.text and row.tests for row in mutations.read_mutations())


def test_random_models():
    import random_models_gpu

    assert random_models_gpu.main(3, 4, "cpu") == 0


def test_random_layouts(monkeypatch):
    """Layouts equal one process, and errors of losses, norms, weights and copies are detected."""
    import random_layouts

    kept, drawn = [], []
    draw, compare = random_layouts.draw_accepted, random_layouts.differences
    monkeypatch.setattr(
        random_layouts, "draw_accepted", lambda *case: drawn.append(draw(*case)) or drawn[-1]
    )
    monkeypatch.setattr(
        random_layouts, "differences", lambda *found: kept.append(found) or compare(*found)
    )
    # These four cases have every axis and kind of layer, and two of them go on in another layout.
    assert random_layouts.main(4, 320) == 0
    assert {case.case.graphs.get("cuda_graph_impl") for case in drawn} == {
        None,
        "local",
        "full_iteration",
    }
    assert any(case.case.graphs.get("cuda_graph_modules") for case in drawn)
    assert any(case.other for case in drawn)
    for (steps, _), case in zip(kept, drawn):
        replays = sum(rank.replays for ranks in steps for rank in ranks)
        assert bool(replays) == bool(case.case.graphs) or case.case.graphs.get("cuda_graph_modules")
    ranks = [len(steps[0]) for steps, _ in kept]
    steps, alone = kept[ranks.index(2)]

    def found(slot=0, loss=0.0, weight=0.0, only=None):
        """Return the differences after changes of one rank, or of all ranks."""
        changed = []
        for number, rank in enumerate(steps[0]):
            mine = only in (None, number)
            losses = rank.losses.clone()
            losses[slot] *= 1 + loss * mine
            factor = {"model/final_norm.weight": 1 + weight * mine}
            shards = [
                (name, shape, extent, tensor * factor.get(name, 1))
                for name, shape, extent, tensor in rank.states[0]
            ]
            changed.append(rank._replace(losses=losses, states=[shards]))
        return compare([changed, *steps[1:]], alone)

    assert found() == []
    for changes, words in (
        ({"loss": 1e-7}, "losses in step 1 differ by 1.0e-07"),
        ({"loss": 1e-7, "only": 1}, "ranks report different losses in step 1"),
        ({"slot": -1, "loss": 1e-4}, "gradient norm in step 1 differ by 1.0e-04"),
        ({"weight": 1e-7}, "model/final_norm.weight differs by 1.0e-07 in step 1"),
        ({"weight": 1e-7, "only": 1}, "copies of model/final_norm.weight differ in step 1"),
    ):
        assert words in " ".join(found(**changes)), words


def test_rounded_attention_is_the_reference_without_rounding(monkeypatch):
    from common import rounded_attention
    from megatron_packed.ops.varlen_attention import reference

    def attend(queries_per_key):
        generator = torch.Generator().manual_seed(0)
        heads = (2 * queries_per_key, 2, 2)
        inputs = [
            torch.randn(5, head, 4, generator=generator, dtype=torch.float64).requires_grad_()
            for head in heads
        ]
        out = reference._attend_block(*inputs, torch.ones(5, 5).tril().bool())
        weights = torch.randn(out.shape, generator=generator, dtype=torch.float64)
        return [out, *torch.autograd.grad((out * weights).sum(), inputs)]

    exact = [attend(number) for number in (1, 3)]
    with rounded_attention.rounded_attention():
        rounded = [attend(number) for number in (1, 3)]
        monkeypatch.setattr(rounded_attention, "rounded", lambda x: x)
        torch.testing.assert_close([attend(number) for number in (1, 3)], exact)
    errors = [
        float((x - y).detach().norm() / y.detach().norm())
        for found, want in zip(rounded, exact)
        for x, y in zip(found, want)
    ]
    assert min(errors) > 1e-4 and max(errors) < 2e-2
    torch.testing.assert_close([attend(number) for number in (1, 3)], exact, rtol=0, atol=0)


def test_the_largest_error_of_several_draws_counts():
    from common.kernel_errors import FACTOR, FLOOR, compare

    exact = {"loss": torch.full((1, 40), 2.0)}
    near, far = ({"loss": exact["loss"] * (1 + error)} for error in (0.01, 0.1))
    allowed = FLOOR + FACTOR * 0.1
    for draws in ([(exact, near), (exact, far)], [(exact, far), (exact, near)]):
        share, text = compare(draws, {"loss": exact["loss"] * 1.2})[0]
        assert share == pytest.approx(0.2 / allowed, rel=1e-3) and "plain bf16 0.1" in text
    assert compare([(exact, near)], far)[0][0] > 1


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
    from common.random_models import draw_case
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
    from safetensors.torch import load_file, save_file

    import same_numbers

    name = "one process"
    found = same_numbers.compare(same_numbers.REPOSITORY, "cpu", [name], tmp_path / "runs", 1)
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


def test_jobs_on_a_real_slurm():
    """Jobs on two nodes of a real SLURM train to their end, with and without scontrol."""
    import real_slurm

    if real_slurm.missing():
        pytest.skip(real_slurm.missing())
    assert real_slurm.main(["start"]) == 0


def test_traced_run():
    """Every phase of a run is found, and a start visits no file of options that are off."""
    import traced_run

    command = [sys.executable, traced_run.__file__, "--list", traced_run.BEFORE_SECOND_STEP]
    traced = subprocess.run(command, capture_output=True, text=True)
    assert traced.returncode == 0, traced.stderr
    table, _, functions = traced.stdout.split("\nphase ")[1].partition("\ncheckpoint/")
    phases = {line[:24].strip(): line[24:].split() for line in table.splitlines()}
    for name in (*traced_run.STARTS.values(), *(f"step {number}" for number in (1, 2, 3, 4))):
        files, calls, switches, _ = (int(number.replace(",", "")) for number in phases[name])
        assert 0 < files <= calls and files <= switches, name
    visited = dict(line.split(": ") for line in f"checkpoint/{functions}".splitlines())
    assert "__call__" in visited["training/train_step.py"]
    off = (
        "cli/",
        "cuda_graphs/",
        "memory/",
        "explain/capabilities",
        "explain/report",
    )
    off += ("data/tokenizers/chat_template", "data/tokenizers/template_process", "data/sources/hub")
    off += ("reporting/charts", "reporting/experiment_trackers", "inputs/sample", "resume/restore")
    assert [file for file in visited if file.startswith(off)] == []


def test_flags_are_collected_from_both_kinds_of_scripts(tmp_path: Path) -> None:
    from megatron_script_flags import collect

    case = tmp_path / "tests/functional_tests/test_cases/hybrid/one"
    case.mkdir(parents=True)
    (case / "model_config.yaml").write_text(
        'ENV_VARS:\n  A: 1\nMODEL_ARGS:\n  --bf16: true\n  --lr: 1e-4 # high\n  --modules: "[a b]"\n'
    )
    (tmp_path / "examples/mamba").mkdir(parents=True)
    (tmp_path / "examples/mamba/train.sh").write_text(
        'options=" \\\n  --lr 3 \\\n --spec a b \\\n --no-x\\\n # --old 1\n --dir ${DIR}"\n'
        "torchrun --nproc_per_node 8 run.py --last 1 --end\n"
    )
    (tmp_path / "examples/post_training/modelopt").mkdir(parents=True)
    (tmp_path / "examples/post_training/modelopt/finetune.sh").write_text("")
    assert collect(tmp_path) == {
        "--bf16": "",
        "--dir": "${DIR}",
        "--end": "",
        "--last": "1",
        "--lr": "3",
        "--modules": "a b",
        "--spec": "a b",
    }


def test_an_older_manifest_may_write_null_for_an_empty_list() -> None:
    import same_numbers

    assert same_numbers.different_entries({"names": []}, {"names": None}) == []
    [said] = same_numbers.different_entries({"names": []}, {"names": 0})
    assert said == "manifest.names: [], not 0"


def test_an_older_manifest_may_lack_an_option() -> None:
    from same_numbers import different_entries

    newer, options = {"optim": {"lr": 1, "new": 2}}, "manifest.metadata.config"
    assert different_entries(newer, {"optim": {"lr": 1}}, options) == []
    assert different_entries(newer, {"optim": {"lr": 2}}, options) != []
    assert different_entries({"optim": {}}, newer, options) != []
    assert different_entries(newer, {"optim": {"lr": 1}}) != []
