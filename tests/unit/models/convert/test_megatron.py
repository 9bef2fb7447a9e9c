"""Weights of Megatron's checkpoints: equal to the bit, and nothing in a hostile file is run."""

import io
import os
import pickle
import pickletools
import shutil
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed import checkpoint
from torch.distributed.checkpoint import FileSystemReader

from megatron_packed.checkpoint.errors import CheckpointError
from megatron_packed.config.sections.model import ModelConfig
from megatron_packed.data.tokenizers.limited_process import Limits
from megatron_packed.models.convert.megatron.arguments import model_of_arguments
from megatron_packed.models.convert.megatron.export_megatron import to_megatron
from megatron_packed.models.convert.megatron.folders import find
from megatron_packed.models.convert.megatron.import_megatron import from_megatron
from megatron_packed.models.convert.megatron.pickle_process import OBJECTS, PickleProcess
from megatron_packed.models.convert.megatron.restricted_pickle import RefusedPickle, load
from support import megatron_checkpoint as theirs
from support.converted_model import convert, imported
from support.damaged_megatron import HOSTILE, damaged_copies, make_hostile

MAMBA = "decoder.layers.0.mixer."
MOE = "decoder.layers.3.mlp."
DEPTH = "mtp.layers.0.mtp_model_layer.layers."
MODEL = {
    **{name: theirs.ARGS[name] for name in theirs.ARGS if name != "group_query_attention"},
    "moe_router_load_balancing_type": "aux_loss",
    "residual_multiplier": 0.5,
}
"""Options of the hybrid model, with an option that Megatron does not have."""


pytestmark = pytest.mark.usefixtures("reader")


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    """Return a checkpoint with an optimizer, which is not changed."""
    folder, found = tmp_path_factory.mktemp("theirs") / "c", theirs.tensors()
    state = {**found, **theirs.optimizer(found)}
    theirs.write(folder, state, theirs.TRAINED_ARGS, common_file=True, more=theirs.TRAINED)
    return folder


def refusal(folder: Path, **options: bool) -> str:
    """Check that ``folder/c`` is refused and nothing is written; return the sentence."""
    with pytest.raises(CheckpointError) as raised:
        from_megatron(folder / "c", folder / "ours", **options)
    assert not list(folder.glob("ours/step_*"))
    return str(raised.value)


def expected(found: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return some parameters as megatron-core's modules hold them, from the stored tensors."""

    def joined(name: str, sections: str) -> Tensor:
        return torch.cat([found[f"{MAMBA}{name}.{section}"] for section in sections.split()])

    return {
        "embedding.weight": found["embedding.word_embeddings.weight"],
        "layers.0.norm.weight": found[f"{MAMBA}in_proj.layer_norm_weight"],
        "layers.0.mixer.in_proj.weight": joined("in_proj.weight", "z x B C dt"),
        "layers.0.mixer.conv1d.weight": joined("conv1d.weight", "x B C")[:, 0],
        "layers.0.mixer.conv1d.bias": joined("conv1d.bias", "x B C"),
        "layers.0.mixer.norm.weight": found[f"{MAMBA}norm.weight"],
        "layers.1.mixer.qkv.weight": found["decoder.layers.1.self_attention.linear_qkv.weight"],
        "layers.2.mixer.fc1.weight": found["decoder.layers.2.mlp.linear_fc1.weight"],
        "layers.3.mixer.experts.fc1": found[f"{MOE}experts.experts.linear_fc1.weight"],
        "layers.3.mixer.experts.fc2": found[f"{MOE}experts.experts.linear_fc2.weight"],
        "layers.3.mixer.fc1_latent_proj.weight": found[f"{MOE}fc1_latent_proj.weight"],
        "layers.3.mixer.fc2_latent_proj.weight": found[f"{MOE}fc2_latent_proj.weight"],
        "layers.3.mixer.router.expert_bias": found[f"{MOE}router.expert_bias"],
        "final_norm.weight": found["decoder.final_norm.weight"],
        "mtp.0.enorm.weight": found["mtp.layers.0.enorm.weight"],
        "mtp.0.hnorm.weight": found["mtp.layers.0.hnorm.weight"],
        "mtp.0.eh_proj.weight": found["mtp.layers.0.eh_proj.weight"],
        "mtp.0.final_norm.weight": found["mtp.layers.0.final_layernorm.weight"],
        "layers.4.mixer.proj.weight": found[f"{DEPTH}0.self_attention.linear_proj.weight"],
        "layers.5.norm.weight": found[f"{DEPTH}1.pre_mlp_layernorm.weight"],
        "layers.5.mixer.experts.fc2": found[f"{DEPTH}1.mlp.experts.experts.linear_fc2.weight"],
        "output.weight": found["output_layer.weight"],
    }


@pytest.mark.parametrize(("parts", "common_file"), [(1, True), (2, False), (4, False)])
def test_weights_of_any_cut_are_equal_to_the_bit(parts, common_file, tmp_path):
    found = theirs.tensors()
    theirs.write(tmp_path / "c", found, parts=parts, common_file=common_file)
    done = from_megatron(tmp_path / "c", tmp_path / "ours")
    ours = imported(done.saved.path)
    wanted = expected(found)
    assert all(torch.equal(ours[name], wanted[name]) for name in wanted)
    assert sum(t.numel() for t in ours.values()) == sum(t.numel() for t in found.values())
    assert done.model.vocab_size == 128 and "--bf16" not in done.flags


def test_bf16_weights_stay_bf16_and_float32_weights_are_reported(tmp_path, capsys):
    found = theirs.tensors(torch.bfloat16)
    theirs.write(tmp_path / "c", found)
    words = ["--bf16", "--from-megatron", tmp_path / "c", "--save", tmp_path / "ours"]
    assert convert(*words) == 0
    ours = imported(tmp_path / "ours" / "step_00000000")
    assert torch.equal(ours["output.weight"], found["output_layer.weight"])
    assert ours["layers.0.mixer.A_log"].dtype == torch.float32
    assert "rounded" not in capsys.readouterr().out
    theirs.write(tmp_path / "wide")
    words = ["--bf16", "--from-megatron", tmp_path / "wide", "--save", tmp_path / "narrow"]
    assert convert(*words) == 0
    assert "tensors were rounded to bf16" in capsys.readouterr().out


def test_layers_of_a_gpt_model_are_taken_from_stacked_tensors(tmp_path):
    """Layer n is the layers 2n and 2n + 1; its tensors are entry n of the first dimension."""
    draw = torch.Generator().manual_seed(1)
    layer = {
        "self_attention.linear_qkv.layer_norm_weight": (16,),
        "self_attention.linear_qkv.weight": (32, 16),
        "self_attention.linear_proj.weight": (16, 16),
        "mlp.linear_fc1.layer_norm_weight": (16,),
        "mlp.linear_fc1.weight": (48, 16),
        "mlp.linear_fc2.weight": (16, 24),
    }
    shapes = {
        "embedding.word_embeddings.weight": (128, 16),
        **{f"decoder.layers.{name}": (3, *shape) for name, shape in layer.items()},
        "decoder.final_layernorm.weight": (16,),
        "output_layer.weight": (128, 16),
        "mtp.layers.0.enorm.weight": (16,),
        "mtp.layers.0.hnorm.weight": (16,),
        "mtp.layers.0.eh_proj.weight": (16, 32),
        "mtp.layers.0.final_layernorm.weight": (16,),
        **{f"mtp.layers.0.transformer_layer.{name}": shape for name, shape in layer.items()},
    }
    found = {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}
    args = {
        **{name: value for name, value in theirs.ARGS.items() if name[0] != "m"},
        "hybrid_layer_pattern": None,
        "num_experts": None,
        "num_layers": 3,
        "mtp_num_layers": 1,
        "position_embedding_type": "rope",
    }
    theirs.write(tmp_path / "c", found, args, parts=3)
    done = from_megatron(tmp_path / "c", tmp_path / "ours")
    ours = imported(done.saved.path)
    assert done.model.hybrid_layer_pattern == "*-*-*-/*-"
    depth = found["mtp.layers.0.transformer_layer.mlp.linear_fc2.weight"]
    assert torch.equal(ours["layers.7.mixer.fc2.weight"], depth)
    for number in range(3):
        qkv = found["decoder.layers.self_attention.linear_qkv.weight"][number]
        fc2 = found["decoder.layers.mlp.linear_fc2.weight"][number]
        assert torch.equal(ours[f"layers.{2 * number}.mixer.qkv.weight"], qkv)
        assert torch.equal(ours[f"layers.{2 * number + 1}.mixer.fc2.weight"], fc2)


def test_folders_of_megatron_nemo_and_bridge_are_found(tmp_path):
    for number in (5, 20):
        theirs.write(tmp_path / "run" / f"iter_{number:07d}")
    assert find(tmp_path / "run").name == "iter_0000020"
    assert find(tmp_path / "run", 5).name == "iter_0000005"
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("5")
    assert find(tmp_path / "run").name == "iter_0000005"
    theirs.write(tmp_path / "nemo" / "weights", args=None)
    assert find(tmp_path / "nemo").name == "weights"
    with pytest.raises(CheckpointError, match="iter_0000009: is missing"):
        find(tmp_path / "run", 9)


def test_a_checkpoint_without_options_needs_the_flags_of_its_model(tmp_path, capsys):
    """Names of NeMo begin with ``module.``."""
    found = {f"module.{name}": tensor for name, tensor in theirs.tensors().items()}
    theirs.write(tmp_path / "nemo" / "weights", found, None)
    theirs.write(tmp_path / "c")
    words = ["--from-megatron", tmp_path / "nemo", "--save", tmp_path / "ours"]
    assert convert(*words) == 4
    assert "has no options of Megatron (args); give the flags" in capsys.readouterr().err
    done = from_megatron(tmp_path / "c", tmp_path / "first")
    flags = tmp_path / "model.args"
    flags.write_text(done.flags)
    assert convert(*words, f"@{flags}") == 0
    ours, first = imported(tmp_path / "ours" / "step_00000000"), imported(done.saved.path)
    assert all(torch.equal(ours[name], first[name]) for name in first)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"multi_latent_attention": True}, "--multi-latent-attention True, which is not supported"),
        ({"moe_latent_size": None}, "decoder.layers.3.mlp.fc1_latent_proj.weight is extra"),
        (
            {"hybrid_layer_pattern": "M*-E/*E/*E"},
            "mtp.layers.1.mtp_model_layer.layers.1.mlp.fc2_latent_proj.weight is missing",
        ),
        ({"hybrid_layer_pattern": "M*-E"}, "mtp.layers.0.enorm.weight is extra"),
        ({"mtp_hsm": True}, "--mtp-hsm True, which is not supported"),
        ({"hidden_size": 32}, "but the model needs [128, 32]"),
        (
            {"hybrid_layer_pattern": "M*-", "num_experts": None},
            "decoder.layers.3.pre_mlp_layernorm.weight is extra",
        ),
        ({"hidden_size": None}, "its options are damaged"),
        ({"normalization": 3}, "must be text"),
        ({"add_qkv_bias": True}, "self_attention.linear_qkv.bias is missing"),
    ],
)
def test_models_that_are_not_built_are_refused_by_name(change, sentence, tmp_path, capsys):
    theirs.write(tmp_path / "c", theirs.tensors(), {**theirs.ARGS, **change})
    assert convert("--from-megatron", tmp_path / "c", "--save", tmp_path / "ours") == 4
    assert sentence in capsys.readouterr().err and not (tmp_path / "ours").exists()


def _set(name: str, text: str):
    return lambda folder: (folder / name).write_text(text)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (_set("mp_rank_00", ""), "has the format torch; load it with Megatron"),
        (_set("metadata.json", '{"sharded_backend": "zarr"}'), "has the format zarr"),
        (lambda folder: (folder / "metadata.json").unlink(), "its format is fsdp_dtensor"),
        (lambda folder: (folder / ".metadata").unlink(), "has no .metadata"),
        (lambda folder: (folder / "modelopt_state").mkdir(), "has modelopt_state"),
        (lambda folder: (folder / "__0_0.distcp").unlink(), "__0_0.distcp: is missing"),
        (_set("metadata.json", "["), "is damaged"),
    ],
)
def test_other_formats_are_refused_with_what_to_do(change, sentence, tmp_path):
    theirs.write(tmp_path / "c")
    change(tmp_path / "c")
    assert sentence in refusal(tmp_path) and not (tmp_path / "ours").exists()


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("place", [".metadata", "common.pt", "item", "train_state.pt", "moment"])
def test_a_pickle_that_calls_something_is_refused_and_not_run(name, place, written, tmp_path):
    shutil.copytree(written, tmp_path / "c")
    make_hostile(tmp_path / "c", place, HOSTILE[name](tmp_path / "was_run"))
    said = refusal(tmp_path, bf16=True)
    assert "\n" not in said and "Traceback" not in said
    assert not (tmp_path / "was_run").exists()


def test_a_file_that_grows_without_bound_is_refused():
    """Each of 64 tuples holds the previous one twice; as text they have 2**64 values."""
    pairs = b"".join(b"h%ch%c\x86q%c" % (n, n, n + 1) for n in range(64))
    process = PickleProcess(Limits(cpu_seconds=0.3))
    with pytest.raises(RefusedPickle, match=r"not finished after 0\.3 s of CPU time"):
        process.read(OBJECTS, b"\x80\x02()q\x00" + pairs + b"t.")
    process.close()
    many = b"\x80\x02()q\x00" + pairs[: 7 * 20] + b"t."  # 2**21 values and more are too many
    process = PickleProcess()
    with pytest.raises(RefusedPickle, match=r"has more than 1,000,000 values"):
        process.read(OBJECTS, many)
    process.close()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("relative_path", "../c/__0_0.distcp"),
        ("relative_path", "/etc/passwd"),
        ("relative_path", ".metadata"),
        ("relative_path", 7),
        ("offset", -4),
        ("offset", 10**9),
        ("length", 10),
        ("length", "long"),
    ],
)
def test_places_outside_of_the_files_are_refused(field, value, tmp_path):
    theirs.write(tmp_path / "c")
    with theirs.changed_metadata(tmp_path / "c") as metadata:
        setattr(next(iter(metadata.storage_data.values())), field, value)
    refusal(tmp_path)


def test_parts_that_overlap_or_leave_a_hole_are_refused(tmp_path):
    theirs.write(tmp_path / "c", theirs.tensors(), parts=2)
    name = "output_layer.weight"
    with theirs.changed_metadata(tmp_path / "c") as metadata:
        chunk = metadata.state_dict_metadata[name].chunks[1]
        chunk.offsets = torch.Size([63, 0])
        ((index, place),) = [
            (i, p) for i, p in metadata.storage_data.items() if i.fqn == name and i.offset[0] == 64
        ]
        del metadata.storage_data[index]
        metadata.storage_data[type(index)(name, torch.Size([63, 0]))] = place
    assert "do not cover its shape" in refusal(tmp_path)


def test_damaged_checkpoints_are_refused_or_give_the_same_state(tmp_path):
    """`tools/megatron_damage.py` has 200 copies."""
    assert damaged_copies(tmp_path, 15, seed=3, common_file=True) > 5


def test_plain_values_are_read_as_pickle_reads_them():
    value = {"a": [1, -2, 2**70, 1.5, None, True], "b": ("x", b"y", {"z": ()}), "c": set()}
    for protocol in (2, 3, 4, 5):
        data = pickle.dumps({**value, "c": []}, protocol)
        assert load(data) == {**value, "c": []}
    assert load(pickle.dumps(torch.Size([2, 3]))) == (2, 3)


def test_every_opcode_that_builds_objects_by_name_is_refused():
    refused = {"INST", "OBJ", "EXT1", "EXT2", "EXT4", "PERSID", "NEWOBJ_EX", "REDUCE", "BUILD"}
    codes = {op.name: op.code.encode("latin-1") for op in pickletools.opcodes}
    for name in refused:
        with pytest.raises(RefusedPickle):
            load(b"\x80\x04" + codes[name] + b"\x01\x00\x00\x00a\na\n.")
    archive = io.BytesIO()
    torch.save(torch.ones(2, dtype=torch.complex64), archive)
    record = zipfile.ZipFile(archive).read("archive/data.pkl")
    with pytest.raises(RefusedPickle, match=r"torch\.ComplexFloatStorage"):
        load(record)


def test_a_memo_larger_than_the_file_is_refused_before_memory_is_taken():
    with pytest.raises(RefusedPickle, match="its memo has no place 4026531840"):
        load(b"\x80\x02Nr\x00\x00\x00\xf0.")


def test_a_state_for_a_class_is_refused():
    """Otherwise a pickle could change what later pickles of the same process mean."""
    for state in (b"}X\x01\x00\x00\x00aK\x01s", b"N}X\x04\x00\x00\x00nameX\x01\x00\x00\x00xs\x86"):
        with pytest.raises(RefusedPickle, match="is damaged"):
            load(b"\x80\x02cmegatron.core.enums\nKind\n" + state + b"b.")


@pytest.mark.parametrize("depths", [1, 3])
def test_weights_written_back_are_those_that_megatron_wrote(depths, tmp_path, capsys):
    """torch's own reader finds the same names, shapes and bits, also if depths share them."""
    found = theirs.tensors()
    changes = {"hybrid_layer_pattern": "M*-E" + "/*E" * depths, "mtp_num_layers": depths}
    changes["mtp_use_repeated_layer"] = depths > 1
    theirs.write(tmp_path / "c", found, {**theirs.ARGS, **changes}, parts=2)
    done = from_megatron(tmp_path / "c", tmp_path / "ours")
    back = tmp_path / "back"
    words = ["--to-megatron", back, "--load", tmp_path / "ours"]
    assert convert(*words) == 0 and f"--load {back} --finetune" in capsys.readouterr().out
    assert (back / "latest_checkpointed_iteration.txt").read_text() == "release"
    reader = FileSystemReader(back / "release")
    names = set(reader.read_metadata().state_dict_metadata)
    assert names == {*found, "common_state/shard_0_1"}
    read = {name: torch.zeros_like(tensor) for name, tensor in found.items()}
    checkpoint.load(read, storage_reader=reader, no_dist=True)
    assert all(torch.equal(read[name], found[name]) for name in found)
    assert from_megatron(back, tmp_path / "again").model == done.model
    assert convert(*words) == 4 and "exists; name a new directory" in capsys.readouterr().err


def test_the_vocabulary_without_padding_comes_back(tmp_path):
    """Megatron itself stores the padded rows only, which are all its vocabulary."""
    theirs.write(tmp_path / "c")
    model = replace(from_megatron(tmp_path / "c", tmp_path / "all").model, vocab_size=100)
    from_megatron(tmp_path / "c", tmp_path / "ours", model=model)
    to_megatron(tmp_path / "ours", tmp_path / "back")
    assert from_megatron(tmp_path / "back", tmp_path / "again").model == model
    for wrong in (0, 129, "100", None):
        args = {**theirs.ARGS, "unpadded_vocab_size": wrong}
        assert model_of_arguments(args, 128, tmp_path).vocab_size == 128


def test_a_model_that_megatron_does_not_have_is_not_written(tmp_path, capsys):
    theirs.write(tmp_path / "c", args=None)
    model = from_megatron(tmp_path / "c", tmp_path / "ours", model=ModelConfig(**MODEL)).model
    assert model.residual_multiplier == 0.5 and model.vocab_size == 128
    back = tmp_path / "back"
    assert convert("--to-megatron", back, "--load", tmp_path / "ours") == 4 and not back.exists()
    assert "--residual-multiplier, which Megatron does not have" in capsys.readouterr().err


@pytest.mark.parametrize("module", [b"pathlib", b"pathlib._local"])
def test_paths_as_each_python_writes_them(module):
    """Python 3.13 writes paths with the name of a private module."""
    made = load(b"c" + module + b"\nPosixPath\n\x8c\x04runs\x85R.")
    assert (made.name, made.arguments) == (f"{module.decode()}.PosixPath", ("runs",))
    with pytest.raises(RefusedPickle, match=r"names pathlib\._local\.os"):
        load(b"cpathlib._local\nos\n.")


def test_members_of_enumerations_as_python_3_11_wrote_them():
    """Python 3.11.0 to 3.11.3 writes ``getattr(enumeration, member)``; other calls are refused."""
    calls = b"cbuiltins\ngetattr\n"
    member = b"\x8c\x04SAVE\x86R."
    made = load(calls + b"cmegatron.core.enums\nKind\n" + member)
    assert (made.name, made.arguments) == ("megatron.core.enums.Kind", ("SAVE",))
    for other in (b"cpathlib\nPath\n", b"\x8c\x02os"):
        with pytest.raises(RefusedPickle, match=r"names builtins\.getattr"):
            load(calls + other + member)
    process = PickleProcess()
    with pytest.raises(RefusedPickle, match=r"names builtins\.getattr"):
        process.read(OBJECTS, calls + b".")  # it is an option, and not called
    process.close()


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _device(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def _directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("change", [_pipe, _device, _directory])
@pytest.mark.parametrize("name", [".metadata", "common.pt", "metadata.json", "__0_0.distcp"])
def test_what_is_no_plain_file_is_refused_at_once(change, name, written, tmp_path):
    """A pipe would wait for its writer, and a device would never end."""
    shutil.copytree(written, tmp_path / "c")
    change(tmp_path / "c" / name)
    assert "is a directory, pipe or device, not a file" in refusal(tmp_path)
    tracker = tmp_path / "latest_checkpointed_iteration.txt"
    tracker.touch()
    change(tracker)
    with pytest.raises(CheckpointError, match=r"iteration\.txt: is a directory, pipe or device"):
        from_megatron(tmp_path, tmp_path / "ours")


def test_links_to_files_are_read(written, tmp_path):
    """A download of the Hugging Face Hub consists of links."""
    (tmp_path / "c").mkdir()
    for file in written.iterdir():
        (tmp_path / "c" / file.name).symlink_to(file)
    assert from_megatron(tmp_path / "c", tmp_path / "ours").model.vocab_size == 128


HUGE, INFINITE = 10**400, float("inf")


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({}, "num_layers is missing, not a whole number from 1 to 1,000"),
        ({"num_layers": INFINITE}, "num_layers is inf, not a whole number"),
        ({"num_layers": 10**9}, "num_layers is 1000000000, not a whole number"),
        ({"num_layers": True}, "num_layers is True, not a whole number"),
        ({"num_layers": 2, "mtp_num_layers": 10**9}, "mtp_num_layers is 1000000000, not"),
        ({"num_layers": 2, "moe_layer_freq": 0}, "moe_layer_freq is 0, not a whole number from 1"),
        ({"num_layers": 2, "moe_layer_freq": "a"}, "moe_layer_freq is 'a', not a whole number"),
        ({"hybrid_layer_pattern": "M" * 10**6}, "the layer pattern has 1,000,000 characters"),
        ({"hybrid_layer_pattern": ["M"] * 10**5}, "the layer pattern has 500,000 characters"),
        ({"hybrid_layer_pattern": "M*", "rotary_base": HUGE}, "int too large to convert"),
        ({"hybrid_layer_pattern": "M*", "norm_epsilon": HUGE}, "--norm-epsilon inf"),
        ({"hybrid_layer_pattern": "M*", "hidden_size": HUGE}, "must fit into 32 bits"),
        ({"hybrid_layer_pattern": "M*", "normalization": "\x1b" * 10**6}, "--normalization"),
        (
            {"num_layers": 2, "window_size": [8, 0], "window_attn_skip_freq": [1] * 10**5},
            "--window-attn",
        ),
        ({"hybrid_layer_pattern": "M*", "softmax_type": "x" * 10**6}, "--softmax-type xxx"),
    ],
)
def test_options_of_any_type_and_size_are_refused_in_a_sentence(values, sentence, tmp_path):
    args = {name: value for name, value in theirs.ARGS.items() if name != "hybrid_layer_pattern"}
    theirs.write(tmp_path / "c", theirs.tensors(), {**args, **values}, common_file=True)
    said = refusal(tmp_path)
    assert sentence in said and len(said) < 1200 and said.isprintable()


def test_options_are_examined_in_the_process_with_limits():
    """An option that would take long or much memory ends the process, not this program."""
    process = PickleProcess(Limits(memory_bytes=2**28))
    assert process.model_problem(theirs.ARGS, 128) is None
    with pytest.raises(RefusedPickle, match="its process ended"):
        process.model_problem({**theirs.ARGS, "hybrid_layer_pattern": "M" * 2**28}, 128)
