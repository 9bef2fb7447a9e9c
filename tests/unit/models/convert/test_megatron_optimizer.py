"""Moments, counters and schedules of Megatron's checkpoints: equal to the bit, or left out."""

import copy
import pickle
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from megatron_packed.checkpoint.errors import CheckpointError
from megatron_packed.checkpoint.manifest import Manifest, read_manifest
from megatron_packed.checkpoint.read_tensors import read_tensor
from megatron_packed.checkpoint.run_metadata import metadata_problem
from megatron_packed.models.convert.megatron import optimizer_state
from megatron_packed.models.convert.megatron.import_megatron import from_megatron
from megatron_packed.models.convert.megatron.names import new_weights
from megatron_packed.optim.master_remainders import split_masters
from support import megatron_checkpoint as theirs
from support.damaged_megatron import Runs, replace_pickle

pytestmark = pytest.mark.usefixtures("reader")
PREFIX = "optimizer.state"
MASTER = "param"


def converted(folder: Path, **options) -> tuple[dict[str, Tensor], Manifest, tuple[str, ...]]:
    """Return all tensors of the converted checkpoint, its manifest, and the sentences."""
    done = from_megatron(folder, folder.with_name(f"ours_{folder.name}"), **options)
    manifest = read_manifest(done.saved.path)
    tensors = {name: read_tensor(done.saved.path, name, manifest) for name in manifest.tensors}
    return tensors, manifest, done.notes


def refusal(folder: Path) -> str:
    """Check that ``folder/c`` is refused and nothing is written; return the sentence."""
    with pytest.raises(CheckpointError) as raised:
        converted(folder / "c")
    assert "\n" not in str(raised.value) and not list(folder.glob("ours_c/step_*"))
    return str(raised.value)


def scheduled(folder: Path, args: dict[str, object] = theirs.TRAINED_ARGS, **changes: object):
    """Return what `converted` does, for a checkpoint whose schedule has changes."""
    more = copy.deepcopy(theirs.TRAINED)
    more["opt_param_scheduler"].update(changes)
    theirs.write_trained(folder / "c", args=args, more=more)
    return converted(folder / "c")


def expected(state: dict[str, Tensor], kind: str, model) -> dict[str, Tensor]:
    """Return the tensors of one kind in the rows of this project's parameters."""
    found = {}
    for weight, names in new_weights(model, torch.float32):
        if all(f"{PREFIX}.{kind}.{name}" in state for name in names.values()):
            found[weight.name] = weight.join(
                lambda part, names=names: state[f"{PREFIX}.{kind}.{names[part]}"]
            )
    return found


@pytest.mark.parametrize(("parts", "master"), [(1, "param"), (2, "fp32_param"), (4, "param")])
def test_moments_and_masters_of_any_cut_are_equal_to_the_bit(parts, master, tmp_path):
    found = theirs.tensors(torch.bfloat16)
    state = theirs.optimizer(found, master)
    args = theirs.TRAINED_ARGS
    theirs.write(tmp_path / "c", {**found, **state}, args, parts=parts, more=theirs.TRAINED)
    ours, manifest, notes = converted(tmp_path / "c", bf16=True)
    model = from_megatron(tmp_path / "c", tmp_path / "again").model
    wide = read_manifest(tmp_path / "again" / "step_00000007")
    count = 0
    for theirs_kind, kind in (("exp_avg", "exp_avg"), ("exp_avg_sq", "exp_avg_sq")):
        for name, tensor in expected(state, theirs_kind, model).items():
            assert torch.equal(ours[f"optimizer/{kind}/{name}"], tensor), name
            count += 1
    for name, tensor in expected(state, master, model).items():
        low = ours[f"model/{name}"].dtype == torch.bfloat16
        assert torch.equal(ours[f"optimizer/master/{name}" if low else f"model/{name}"], tensor)
        # Without --bf16 the weights themselves are the float32 values.
        again = read_tensor(tmp_path / "again" / "step_00000007", f"model/{name}", wide)
        assert torch.equal(again, tensor)
    assert count == 2 * sum(name.startswith("optimizer/exp_avg/") for name in ours)
    assert ours["optimizer/step"].tolist() == [6.0]
    assert torch.equal(ours["model/output.weight"], found["output_layer.weight"])
    assert manifest.step == 7 and manifest.metadata["progress"] == {
        "iteration": 7,
        "validated_at": 7,
        "plan_samples": 14,
        "consumed_tokens": 14 * 32,
    }
    optim = manifest.metadata["config"]["optim"]
    assert metadata_problem(manifest.metadata) is None
    assert (optim["lr"], optim["min_lr"], optim["adam_beta2"]) == (0.003, 0.0001, 0.95)
    assert (optim["lr_decay_samples"], optim["lr_warmup_samples"]) == (400, 4)
    assert (optim["weight_decay"], optim["clip_grad"], optim["lr_decay_iters"]) == (0.1, 0.5, None)
    [note] = notes
    assert "iteration 7 are imported: --load continues after 14 samples" in note


@pytest.mark.parametrize("stored_as", [torch.int16, torch.float32], ids=str)
def test_remainders_of_masters_and_low_moments_are_equal_to_the_bit(stored_as, tmp_path):
    """Checkpoints of Megatron's precision-aware optimizer; all masters are imported in float32.

    The layout fully_reshardable has its whole-numbered remainders in float32.
    """
    found = theirs.tensors(torch.bfloat16)
    state = theirs.optimizer(found)
    stored = {
        name: tensor if f".{MASTER}." in name else tensor.bfloat16()
        for name, tensor in state.items()
    }
    for name, tensor in found.items():
        master = f"{PREFIX}.{MASTER}.{name}"
        if tensor.dtype == torch.bfloat16 and master in state:
            found[name], rest = split_masters(state[master])
            stored[master] = rest.to(stored_as)
    args = {**theirs.TRAINED_ARGS, "use_precision_aware_optimizer": True}
    theirs.write(tmp_path / "c", {**found, **stored}, args, parts=2, more=theirs.TRAINED)
    ours, _, _ = converted(tmp_path / "c", bf16=True)
    model = from_megatron(tmp_path / "c", tmp_path / "again").model
    wide = read_manifest(tmp_path / "again" / "step_00000007")
    for name, tensor in expected(state, MASTER, model).items():
        low = ours[f"model/{name}"].dtype == torch.bfloat16
        assert torch.equal(ours[f"optimizer/master/{name}" if low else f"model/{name}"], tensor)
        again = read_tensor(tmp_path / "again" / "step_00000007", f"model/{name}", wide)
        assert torch.equal(again, tensor)
    for name, tensor in expected(stored, "exp_avg", model).items():
        assert torch.equal(ours[f"optimizer/exp_avg/{name}"], tensor.float())


def test_masters_of_a_precision_aware_optimizer_without_remainders_are_imported(tmp_path):
    """TransformerEngine before 2.1 has no remainders."""
    found = theirs.tensors(torch.bfloat16)
    state = theirs.optimizer(found)
    args = {**theirs.TRAINED_ARGS, "use_precision_aware_optimizer": True}
    theirs.write(tmp_path / "c", {**found, **state}, args, more=theirs.TRAINED)
    ours, _, _ = converted(tmp_path / "c", bf16=True)
    master = state[f"{PREFIX}.{MASTER}.output_layer.weight"]
    assert torch.equal(ours["optimizer/master/output.weight"], master)


def test_weights_are_the_masters_of_a_checkpoint_without_them(tmp_path):
    """Optimizers in float32 have none. Several optimizers may have numbers in their names."""
    found = theirs.tensors()
    state = theirs.optimizer(found, prefix="chained_1.")
    state = {name: tensor for name, tensor in state.items() if ".state.param." not in name}
    groups = {"state": {"common_step": torch.tensor(6.0)}, "param_groups": [{"lr": 0.1}]}
    more = {**theirs.TRAINED, "optimizer": {0: groups, 1: groups}}
    theirs.write(tmp_path / "c", {**found, **state}, theirs.TRAINED_ARGS, more=more)
    ours, _, _ = converted(tmp_path / "c", bf16=True)
    table = found["embedding.word_embeddings.weight"]
    assert torch.equal(ours["optimizer/master/embedding.weight"], table)
    assert torch.equal(ours["model/embedding.weight"], table.bfloat16())
    name = f"chained_1.{PREFIX}.exp_avg.output_layer.weight"
    assert torch.equal(ours["optimizer/exp_avg/output.weight"], state[name])
    assert ours["optimizer/step"].tolist() == [6.0]


def test_a_missing_master_of_rounded_weights_is_refused(tmp_path):
    """Float32 parameters of optimizers that are not distributed have no second copy."""
    found = theirs.tensors(torch.bfloat16)
    exact = "decoder.layers.0.mixer.A_log"
    found[exact] = found[exact].float()
    state = theirs.optimizer(found, "fp32_param")
    del state[f"{PREFIX}.fp32_param.{exact}"]
    args, more = theirs.TRAINED_ARGS, theirs.TRAINED
    theirs.write(tmp_path / "c", {**found, **state}, args, more=more)
    ours, _, _ = converted(tmp_path / "c", bf16=True)
    assert torch.equal(ours["model/layers.0.mixer.A_log"], found[exact])
    del state[f"{PREFIX}.fp32_param.output_layer.weight"]
    theirs.write(tmp_path / "d", {**found, **state}, args, more=more)
    with pytest.raises(CheckpointError, match=r"no float32 values of output_layer\.weight"):
        converted(tmp_path / "d", bf16=True)


def test_counters_of_nemo_have_other_names(tmp_path):
    """NeMo has a list of optimizers, no schedule of Megatron and no options."""
    found = theirs.tensors()
    theirs.write(tmp_path / "c", found, theirs.TRAINED_ARGS)
    model = from_megatron(tmp_path / "c", tmp_path / "model").model
    found = {f"module.{name}": tensor for name, tensor in found.items()}
    state = theirs.optimizer(found)
    more = {
        "optimizer": [theirs.TRAINED["optimizer"]],
        "global_step": 7,
        "PreTrainingDataModule": {"consumed_samples": 56},
    }
    folder = tmp_path / "nemo" / "weights"
    theirs.write(folder, {**found, **state}, None, common_file=True, more=more)
    ours, manifest, notes = converted(tmp_path / "nemo", model=model)
    name = "output_layer.weight"
    assert torch.equal(
        ours["optimizer/exp_avg/output.weight"], state[f"{PREFIX}.exp_avg.module.{name}"]
    )
    assert ours["optimizer/step"].tolist() == [6.0]
    assert (manifest.step, manifest.metadata["progress"]["plan_samples"]) == (7, 56)
    assert (
        "has no learning-rate schedule" in notes[1] and "optim" not in manifest.metadata["config"]
    )


def test_moments_that_are_stored_as_blocks_are_put_together(tmp_path):
    """Older versions store (rows, columns) as (row blocks, column blocks, block size)."""
    state = theirs.optimizer(theirs.tensors(), "fp32_param")
    counts = {"linear_fc1.weight": 2, "linear_proj.weight": 4, "z": 2, "conv1d.bias.x": 2}
    blocks = {
        name: tuple(
            next((n for end, n in counts.items() if name.endswith(end)), 1) if dim == 0 else 1
            for dim in range(tensor.dim())
        )
        for name, tensor in state.items()
    }
    blocks[f"{PREFIX}.exp_avg.decoder.layers.2.mlp.linear_fc2.weight"] = (1, 4)
    blocks[f"{PREFIX}.exp_avg.decoder.layers.3.mlp.experts.experts.linear_fc1.weight"] = (4, 2, 2)
    theirs.write_trained(tmp_path / "plain", state)
    theirs.write_trained(tmp_path / "c", state, blocks=blocks)
    plain, _, _ = converted(tmp_path / "plain")
    ours, _, _ = converted(tmp_path / "c")
    assert ours.keys() == plain.keys() and all(torch.equal(ours[n], plain[n]) for n in plain)


def without(*keys):
    def change(state, more, args):
        for name in [name for name in state if any(key in name for key in keys)]:
            del state[name]

    return change


def buckets(state, more, args):
    state.clear()
    state["optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_x.bucket_idx_0.param"] = (
        torch.zeros(7)
    )


def no_steps(state, more, args):
    more["optimizer"] = {"optimizer": {"param_groups": [{"lr": 0.1}]}}


def momentum(state, more, args):
    for name in list(state):
        state[name.replace("exp_avg.", "momentum_buffer.")] = state.pop(name)


def no_iteration(state, more, args):
    more["iteration"] = None


def no_samples(state, more, args):
    del more["opt_param_scheduler"]
    del args["consumed_train_samples"]


def unknown(state, more, args):
    state["optimizer.status.exp_avg.output_layer.weight"] = torch.zeros(2)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (buckets, "in flat buffers that depend on its layout (dp_reshardable)"),
        (without("exp_avg_sq"), "The optimizer is not Adam (it has exp_avg, master)"),
        (momentum, "The optimizer is not Adam (it has exp_avg_sq, master, momentum_buffer)"),
        (without("exp_avg.output"), "The optimizer has no exp_avg of output.weight"),
        (
            without("exp_avg_sq.decoder.layers.0.mixer.in_proj.weight.B"),
            "no exp_avg_sq of layers.0",
        ),
        (no_steps, "The optimizer's number of steps is not in the checkpoint"),
        (no_iteration, "The iteration of the optimizer is not in the checkpoint"),
        (no_samples, "The number of samples so far is not in the checkpoint"),
        (unknown, "master, optimizer.status.exp_avg.output_layer.weight)"),
    ],
)
def test_weights_alone_are_imported_with_one_sentence(change, sentence, tmp_path):
    state, more = theirs.optimizer(theirs.tensors()), copy.deepcopy(theirs.TRAINED)
    args = {**theirs.TRAINED_ARGS}
    change(state, more, args)
    theirs.write_trained(tmp_path / "c", state, args, more)
    ours, manifest, [note] = converted(tmp_path / "c")
    assert sentence in note and note.endswith(
        ": only the weights are imported, and training begins with new moments."
    )
    assert not any(name.startswith("optimizer/") for name in ours)
    assert manifest.step == 0 and manifest.metadata["progress"] == {}


def test_counters_come_from_megatron_bridge_too(tmp_path):
    """Its checkpoints have no args; train_state.pt has the counters as tensors."""
    found = theirs.tensors()
    theirs.write(tmp_path / "c", found, theirs.TRAINED_ARGS)
    model = from_megatron(tmp_path / "c", tmp_path / "model").model
    folder = tmp_path / "bridge" / "iter_0000009"
    more = {**theirs.TRAINED, "iteration": None}
    theirs.write(folder, {**found, **theirs.optimizer(found)}, None, more=more)
    counters = {"step": 9, "consumed_train_samples": 18, "floating_point_operations_so_far": 2.5e9}
    state = {name: torch.tensor(value) for name, value in counters.items()}
    torch.save({**state, "do_train": torch.tensor(True)}, folder / "train_state.pt")
    (folder.parent / "latest_checkpointed_iteration.txt").write_text("9")
    (folder / "run_config.yaml").write_text("model: {}")
    with pytest.raises(
        CheckpointError, match=r"give the flags .*run_config\.yaml has their values"
    ):
        converted(tmp_path / "bridge")
    _, manifest, notes = converted(tmp_path / "bridge", model=model)
    assert manifest.step == 9 and manifest.metadata["progress"]["plan_samples"] == 18
    assert "at 18 samples; in Megatron it was at 14" in notes[1]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"lr_decay_style": "inverse-square-root"}, "--lr-decay-style 'inverse-square-root'"),
        ({"lr_decay_steps": -3}, "--lr-decay-samples -3"),
        ({"max_lr": "x" * 999}, "--lr"),
        ({"start_wd": 0.01}, "--start-weight-decay 0.01"),
        ({"start_wd": 0.2, "wd_incr_style": "linear"}, "--end-weight-decay 0.1"),
        ({"start_wd": 0.0, "wd_incr_style": "square"}, "--weight-decay-incr-style 'square'"),
        ({"end_wd": float("inf")}, "--end-weight-decay inf"),
        ({"min_lr": [1]}, "--min-lr"),
    ],
)
def test_schedules_that_are_not_built_are_named(change, sentence, tmp_path):
    ours, manifest, notes = scheduled(tmp_path, **change)
    assert sentence in notes[1] and "\n" not in notes[1] and len(notes[1]) < 500
    assert "optimizer/step" in ours
    assert "optim" not in manifest.metadata["config"]


def test_a_rising_weight_decay_is_imported(tmp_path):
    rise = {"start_wd": 0.01, "wd_incr_style": "cosine", "wd_incr_steps": 40}
    optim = scheduled(tmp_path, **rise)[1].metadata["config"]["optim"]
    assert (optim["start_weight_decay"], optim["end_weight_decay"]) == (0.01, 0.1)
    assert (optim["weight_decay_incr_style"], optim["weight_decay_incr_samples"]) == ("cosine", 40)


def steps(value):
    def change(state, more):
        more["optimizer"]["optimizer"]["param_groups"][1]["step"] = value

    return change


def tensor(name, value):
    def change(state, more):
        state[f"{PREFIX}.{name}.output_layer.weight"] = value

    return change


def renamed(state, more):
    name = f"{PREFIX}.param.output_layer.weight"
    state[name.replace("layer", "lay")] = state.pop(name)


def twice(state, more):
    name = f"{PREFIX}.exp_avg.output_layer.weight"
    state[f"chained_0.{name}"] = state[name]


DAMAGE = {
    "two steps": (steps(5), "has the steps 5, 6.0"),
    "a negative step": (steps(-6), "has the steps"),
    "a step that is text": (steps("x"), "has the steps"),
    "half a step": (steps(6.5), "has the steps"),
    "an endless step": (steps(float("inf")), "has the steps"),
    "another shape": (tensor("exp_avg", torch.zeros(128, 8)), "but its parameter is [128, 16]"),
    "integers": (tensor("param", torch.zeros(128, 16, dtype=torch.int16)), "of torch.int16"),
    "negative squares": (tensor("exp_avg_sq", -torch.ones(128, 16)), "output.weight is negative"),
    "not a number": (tensor("exp_avg", torch.full((128, 16), torch.nan)), "is not finite"),
    "another name": (renamed, "param.output_lay.weight belongs to no tensor of the model"),
    "a tensor twice": (twice, "has exp_avg of output_layer.weight twice"),
    "a negative iteration": (lambda _, more: more.update(iteration=-7), "its iteration is -7"),
    "an iteration that is text": (lambda _, more: more.update(iteration="7"), "its iteration is 7"),
    "an iteration without end": (lambda _, more: more.update(iteration=2**80), "its iteration is"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_state_of_an_optimizer_is_refused_in_one_sentence(name, tmp_path):
    state, more = theirs.optimizer(theirs.tensors()), copy.deepcopy(theirs.TRAINED)
    change, sentence = DAMAGE[name]
    change(state, more)
    theirs.write_trained(tmp_path / "c", state, more=more)
    assert sentence in refusal(tmp_path)


@pytest.mark.parametrize(
    "shape", [[128], [127, 16], [2, 2, 2], "text", [0, 16], [-128, -16], [2**40, 2**40]]
)
def test_blocks_that_do_not_fit_are_refused(shape, tmp_path):
    name = f"{PREFIX}.exp_avg.output_layer.weight"
    theirs.write_trained(tmp_path / "c", blocks={name: (4, 1)})
    with theirs.changed_metadata(tmp_path / "c") as metadata:
        metadata.mcore_data[name]["nd_reformulated_orig_global_shape"] = shape
    refusal(tmp_path)


def test_counters_of_megatron_bridge_run_nothing(tmp_path):
    theirs.write_trained(tmp_path / "c", more={})
    path = tmp_path / "c" / "train_state.pt"
    torch.save({"step": torch.tensor(3)}, path)
    replace_pickle(path, pickle.dumps(Runs(open, str(tmp_path / "was_run"), "w")))
    assert re.search(r"train_state\.pt: names _?io\.open", refusal(tmp_path))
    assert not (tmp_path / "was_run").exists()


@pytest.mark.parametrize("stored", [(3, 1, 683), (4, 3, 171), (1, 2048), (0, 1, 512)])
def test_blocks_that_do_not_divide_the_shape_are_refused(stored, tmp_path):
    name = f"{PREFIX}.exp_avg.output_layer.weight"
    theirs.write_trained(
        tmp_path / "c", {**theirs.optimizer(theirs.tensors()), name: torch.zeros(stored)}
    )
    with theirs.changed_metadata(tmp_path / "c") as metadata:
        metadata.mcore_data = {name: {"nd_reformulated_orig_global_shape": [128, 16]}}
    assert "which do not fit" in refusal(tmp_path)


@pytest.mark.parametrize("value", [None, float("nan"), 10**400, "\x1b[31m" * 999, [[]], {}, True])
def test_schedules_of_any_type_give_a_note_and_no_traceback(value, tmp_path):
    args = {**theirs.TRAINED_ARGS, "lr_wsd_decay_iters": "x", "global_batch_size": 10**9}
    notes = [*scheduled(tmp_path, args, max_lr=value)[2]]
    for name in ("min_lr", "lr_warmup_steps", "lr_decay_steps", "num_steps", "end_wd"):
        schedule = {**theirs.TRAINED["opt_param_scheduler"], name: value}
        common = {"args": args, "opt_param_scheduler": schedule}
        notes += optimizer_state._schedule(SimpleNamespace(common=common), [], 14)[1]
    assert all(note.isprintable() and len(note) < 500 for note in notes)


@pytest.mark.parametrize(
    ("name", "value"), [("betas", 1.0), ("betas", [0.9]), ("eps", 10**400), ("step", [1])]
)
def test_constants_of_any_type_give_no_traceback(name, value, tmp_path):
    more = copy.deepcopy(theirs.TRAINED)
    for group in more["optimizer"]["optimizer"]["param_groups"]:
        group[name] = value
    theirs.write_trained(tmp_path / "c", more=more)
    if name == "step":
        assert "its optimizer has the steps [1]" in refusal(tmp_path)
    else:
        assert "The schedule is not imported" in converted(tmp_path / "c")[2][1]
