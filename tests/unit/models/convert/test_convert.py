"""``megatron-packed convert``: lossless in both directions, little memory, errors with a cause."""

import errno
import json
import math
import os
import shutil
import weakref
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_packed.checkpoint.errors import CheckpointError
from megatron_packed.checkpoint.load import load_checkpoint
from megatron_packed.checkpoint.sealed_json import seal, unseal
from megatron_packed.checkpoint.tensor_shard import TensorShard, whole_tensors
from megatron_packed.cli.convert import FAMILY_NAMES as OFFERED
from megatron_packed.cli.main import main
from megatron_packed.config.parser.parse import parse
from megatron_packed.models.convert import import_huggingface
from megatron_packed.models.convert.export_huggingface import to_huggingface
from megatron_packed.models.convert.families.family import OneOf
from megatron_packed.models.convert.families.registry import FAMILIES, WRITTEN
from megatron_packed.models.convert.huggingface_config import model_of
from megatron_packed.models.convert.huggingface_files import INDEX, SINGLE, write_files
from megatron_packed.models.convert.import_huggingface import open_model
from megatron_packed.models.convert.model_weights import weights_of
from megatron_packed.models.convert.trained_config import obstacles
from support.converted_model import FAMILIES as SMALL
from support.converted_model import (
    FIELDS,
    assert_same,
    change_fields,
    contents,
    converted,
    from_hf,
    opened,
    to_hf,
    write_model,
    write_tensors,
)
from support.json_lines import read_json

SUPER = {"moe_latent_size": 12, "n_group": 2, "topk_group": 1}
"""Fields of Nemotron-H models with latent experts, and with groups of experts."""


@pytest.mark.parametrize(
    ("family", "bf16", "tied", "changes"),
    [
        ("nemotron_h", False, False, SUPER),
        ("nemotron_h", True, True, {}),
        ("llama", True, True, {}),
        ("mixtral", False, False, {}),
    ],
)
def test_there_and_back_is_the_same_to_the_bit(family, bf16, tied, changes, tmp_path, capsys):
    hf, ours, back = tmp_path / "hf", tmp_path / "ours", tmp_path / "back"
    changes = {**changes, "tie_word_embeddings": tied}
    written = write_model(hf, family, bf16=bf16, max_file_bytes=9000, **changes)
    if "moe_latent_size" in changes:
        mixer = "backbone.layers.1.mixer."
        shapes = {name.removeprefix(mixer): list(value.shape) for name, value in written.items()}
        assert shapes["fc1_latent_proj.weight"] == [12, 32]
        assert shapes["fc2_latent_proj.weight"] == [32, 12]
        assert shapes["experts.3.up_proj.weight"] == [16, 12]
        assert shapes["shared_experts.up_proj.weight"] == [24, 32]
    assert ("lm_head.weight" in written) is not tied and len(list(hf.glob("*.safetensors"))) >= 3
    (hf / "tokenizer.json").write_text("{}")
    (hf / "code.py").write_text("raise SystemExit")
    assert from_hf(hf, ours, *["--bf16"] * bf16) == 0
    assert "rounded" not in capsys.readouterr().out

    (tmp_path / "data.jsonl").write_text("{}")
    data = f"--data-path {tmp_path / 'data.jsonl'} --seq-length 32 --train-iters 1 --lr 1e-3"
    config = parse([f"@{ours / 'model.args'}", *data.split()])
    assert config.model == model_of(read_json(hf / "config.json"), hf)[1]
    assert config.training.bf16 is bf16 and config.data.tokenizer_model == str(hf)

    assert to_hf(back, ours, "--hf-config", hf / "config.json") == 0
    assert "rounded" not in capsys.readouterr().out
    assert_same(contents(back), written)
    assert sorted(os.listdir(back)) == ["config.json", SINGLE, "tokenizer.json"]
    assert (back / "config.json").read_bytes() == (hf / "config.json").read_bytes()


def test_an_export_without_the_original_keeps_every_bit_of_the_checkpoint(tmp_path):
    written = write_model(tmp_path / "hf", bf16=True)
    # Without --bf16 the checkpoint is in float32.
    assert from_hf(tmp_path / "hf", tmp_path / "ours") == 0
    (tmp_path / "config.json").write_text(json.dumps(FIELDS))
    to_huggingface(
        tmp_path / "ours", tmp_path / "back", tmp_path / "config.json", max_file_bytes=30_000
    )
    index = read_json(tmp_path / "back" / INDEX)
    assert len(set(index["weight_map"].values())) > 3
    assert index["metadata"]["total_size"] == sum(4 * tensor.numel() for tensor in written.values())
    assert_same(
        contents(tmp_path / "back"), {name: tensor.float() for name, tensor in written.items()}
    )


def test_rounding_is_reported(tmp_path, capsys):
    converted(tmp_path, "--bf16")
    assert "tensors were rounded to bf16, for example embedding.weight" in capsys.readouterr().out


def test_the_rows_that_pad_the_vocabulary_are_zeros(tmp_path):
    write_model(tmp_path / "hf")
    table = opened(tmp_path / "hf")[1]["output.weight"]
    assert table.shape == (128, 32) and table[61:].abs().max() == 0 and table[:61].abs().min() > 0


def test_one_tensor_exists_at_a_time(tmp_path):
    given = []

    def made():
        assert all(array() is None for array in given), "an earlier tensor is still in memory"
        array = np.ones(1000, dtype=np.float32)
        given.append(weakref.ref(array))
        return torch.from_numpy(array)

    from megatron_packed.checkpoint.save import save_checkpoint

    shards = [TensorShard.whole(name, torch.empty(1000, device="meta")) for name in "abc"]
    save_checkpoint(tmp_path / "ours", 0, shards, {}, values=lambda shard: made())
    found = {name: torch.zeros(1000) for name in "abc"}
    load_checkpoint(tmp_path / "ours", whole_tensors(found))
    assert all(tensor.eq(1).all() for tensor in found.values())
    (tmp_path / "theirs").mkdir()
    write_files(
        tmp_path / "theirs",
        [(n, torch.float32, (10, 100)) for n in "abc"],
        lambda name: made(),
        10**6,
    )
    assert len(given) == 6 and contents(tmp_path / "theirs")["c"].shape == (10, 100)


# -- config.json -----------------------------------------------------------------------------------


def test_the_families_of_the_command_line():
    assert OFFERED == WRITTEN


@pytest.mark.parametrize("name", FAMILIES)
def test_a_missing_value_means_the_supported_value(name):
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(name).to_dict()
    for keys in FAMILIES[name].must_be.values():
        for key, value in keys.items():
            found = config.get(key, value)
            assert (list(found) if isinstance(value, list) else found) == value, key


@pytest.mark.parametrize(("name", "base"), [("llama", 10_000.0), ("mixtral", 1_000_000.0)])
def test_rotary_options_flat_and_absent(name, base):
    fields = dict(SMALL[name])
    assert model_of(fields, Path())[1].rotary_base == 500_000.0
    del fields["rope_theta"]
    assert model_of(fields, Path())[1].rotary_base == base
    for wrong, sentence in (
        (
            {"rope_scaling": {"type": "linear"}},
            "rope_type is 'linear', but only 'default' and 'llama3' are supported",
        ),
        ({"sliding_window": 4096}, "sliding_window is 4096"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
    ):
        with pytest.raises(CheckpointError) as error:
            model_of({**fields, **wrong}, Path())
        assert sentence in str(error.value)


@pytest.mark.parametrize("spelling", ["hub", "transformers 4", "transformers 5"])
def test_patterns_as_each_writes_them(spelling):
    words = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
    if spelling == "transformers 5":
        words |= {"M": "linear_attention", "*": "full_attention"}
    fields = dict(FIELDS)
    if spelling != "hub":
        fields["layers_block_type"] = [
            words[symbol] for symbol in fields.pop("hybrid_override_pattern")
        ]
    assert model_of(fields, Path())[1].hybrid_layer_pattern == "ME*M-"


REFUSED = {
    "model_type": ("gpt2", "or bamba or granitemoehybrid, found 'gpt2'"),
    "sliding_window": (4096, "sliding_window is 4096, but only None is supported"),
    "use_conv_bias": (False, "use_conv_bias is False, but only True is supported"),
    "mamba_proj_bias": (True, "mamba_proj_bias is True"),
    "attention_bias": (True, "attention_bias is True"),
    "mlp_hidden_act": ("silu", "mlp_hidden_act is 'silu', but only 'relu2' is supported"),
    "time_step_limit": ([0.001, math.inf], "time_step_limit is [0.001, inf]"),
    "norm_topk_prob": (
        False,
        "norm_topk_prob is False, but with num_experts_per_tok 2 only True is supported",
    ),
    "n_group": (4, "gives a token groups with 1 experts"),
    "topk_group": ("1", "topk_group is '1'; it must be a whole number"),
    "rms_norm_eps": (1e-6, "rms_norm_eps is 1e-06, which contradicts layer_norm_epsilon 1e-05"),
    "num_hidden_layers": (6, "num_hidden_layers is 6, but the pattern has 5 layers"),
    "hybrid_override_pattern": ("MG", "'MG'; only M, *, - and E may occur in it"),
    "quantization_config": (
        {"quant_method": "fp8"},
        "quantization_config says that the weights are quantised ('fp8'); take the model in bf16",
    ),
    "_attn_implementation_internal": ("some/kernel", "but this option is unknown"),
    "hidden_size": (31.5, "hidden_size is 31.5; it must be a whole number"),
    "vocab_size": (True, "vocab_size is True; it must be a whole number"),
}


@pytest.mark.parametrize("key", REFUSED)
def test_options_that_are_not_built_are_refused_by_name(key, tmp_path, capsys):
    value, sentence = REFUSED[key]
    write_model(tmp_path / "hf")
    change_fields(tmp_path / "hf", **{key: value})
    assert from_hf(tmp_path / "hf", tmp_path / "ours") == 4
    assert sentence in capsys.readouterr().err and not (tmp_path / "ours").exists()


def test_groups_that_are_chosen_by_other_sums_are_refused():
    """Megatron adds topk // group_topk scores of a group, and transformers always two."""
    groups = {"n_routed_experts": 12, "n_group": 4, "topk_group": 2}
    for topk, fits in ((3, False), (4, True), (5, True), (6, False)):
        fields = {**FIELDS, **groups, "num_experts_per_tok": topk}
        if fits:
            assert model_of(fields, Path())[1].limiting_expert_groups == (4, 2)
        else:
            with pytest.raises(CheckpointError, match="n_group is 4 and topk_group 2, but"):
                model_of(fields, Path())
    model = model_of({**FIELDS, **groups, "num_experts_per_tok": 4}, Path())[1]
    assert not obstacles(FAMILIES["nemotron_h"], model)
    [other] = obstacles(FAMILIES["nemotron_h"], replace(model, moe_router_topk=6))
    assert other.startswith("--moe-router-group-topk 2 with --moe-router-topk 6 (the family")
    assert "--moe-router-num-groups 4" in " ".join(obstacles(FAMILIES["mixtral"], model))


def test_sizes_that_no_memory_holds_are_refused_by_the_tensors(tmp_path, capsys):
    write_model(tmp_path / "hf", "llama")
    change_fields(tmp_path / "hf", head_dim=2 * 10**9)
    assert from_hf(tmp_path / "hf", tmp_path / "ours") == 4
    assert "shape" in capsys.readouterr().err


def test_all_problems_are_reported_and_keys_can_be_ignored():
    fields = {
        **FIELDS,
        "sliding_window": 8,
        "attention_bias": True,
        "new": 1,
        "vocab_size": None,
        "head_dim": None,
    }
    del fields["chunk_size"]
    with pytest.raises(CheckpointError) as error:
        model_of(fields, Path())
    missing = ("chunk_size is missing", "vocab_size is null", "head_dim is null")
    for words in (*missing, "sliding_window is 8", "attention_bias is True", "new is 1"):
        assert words in str(error.value)
    assert model_of({**FIELDS, "new": 1}, Path(), ["new"]) == model_of(FIELDS, Path())


# -- files -----------------------------------------------------------------------------------------


def edit_index(hf, name, file):
    index = read_json(hf / INDEX)
    index["weight_map"][name] = file
    (hf / INDEX).write_text(json.dumps(index))


def rewrite(hf, change):
    """Apply ``change`` to the tensors of a model, and write all of them into one file."""
    tensors = contents(hf)
    change(tensors)
    write_tensors(hf, tensors)


def shorten(hf):
    path = sorted(hf.glob("*.safetensors"))[1]
    os.truncate(path, path.stat().st_size - 1)


NORM = "backbone.norm_f.weight"
DAMAGE = {
    "outside": (
        lambda hf: edit_index(hf, NORM, "../other/model.safetensors"),
        f"the file of tensor {NORM} is outside",
    ),
    "absolute": (
        lambda hf: edit_index(hf, NORM, "/etc/a.safetensors"),
        f"the file of tensor {NORM} is outside",
    ),
    "no file": (
        lambda hf: edit_index(hf, NORM, "absent.safetensors"),
        "absent.safetensors: does not exist, but the",
    ),
    "elsewhere": (
        lambda hf: edit_index(hf, NORM, "model-00001-of-00008.safetensors"),
        f"the index names the wrong file for tensor {NORM}",
    ),
    "not in its file": (
        lambda hf: edit_index(hf, "new", "model-00001-of-00008.safetensors"),
        "files do not contain: new",
    ),
    "truncated": (shorten, "the tensors do not fill the file"),
    "both": (lambda hf: (hf / SINGLE).touch(), "found both"),
    "missing": (lambda hf: rewrite(hf, lambda t: t.pop(NORM)), f"{NORM} is missing"),
    "extra": (lambda hf: rewrite(hf, lambda t: t.update(new=torch.zeros(2))), "new is extra"),
    "extra with control characters": (
        lambda hf: rewrite(hf, lambda t: t.update({"a\x1b\nb": torch.zeros(2)})),
        "a\\x1b\\nb is extra",
    ),
    "shape": (
        lambda hf: rewrite(hf, lambda t: t.update({NORM: torch.ones(31)})),
        f"{NORM} has shape [31]",
    ),
    "dtype": (
        lambda hf: rewrite(hf, lambda t: t.update({NORM: torch.ones(32, dtype=torch.int8)})),
        f"the dtype of {NORM}",
    ),
    "NaN": (
        lambda hf: rewrite(hf, lambda t: t[NORM].fill_(math.nan)),
        "is not finite: expected finite values",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_files_that_do_not_hold_the_model_are_refused(damage, tmp_path, capsys):
    hf, ours = tmp_path / "hf", tmp_path / "ours"
    write_model(hf)
    assert len(list(hf.glob("*.safetensors"))) == 8
    spoil, sentence = DAMAGE[damage]
    spoil(hf)
    assert from_hf(hf, ours) == 4
    assert sentence in capsys.readouterr().err and not list(ours.glob("step*"))


CANNOT, ELSEWHERE = "cannot be written", "name another directory by --to-hf"
PATHS = {
    "--from-hf absent --save new": "absent: does not exist; name the directory of a downloaded model",
    "--from-hf hf/config.json --save new": "config.json: is not a directory; name the directory of a downloaded model",
    "--from-hf empty --save new": "empty/config.json: does not exist; name the config.json of a model",
    "--from-hf only --save new": "only: no weights: expected model.safetensors or model.safetensors.index.json, found "
    "neither; download the weights as safetensors",
    "--from-hf pickled --save new": "model.bin is a pickle, which is not read because",
    "--from-hf hf --save hf/config.json": "config.json: the directory cannot be listed: expected a directory of "
    "checkpoints, found Not a directory",
    "--to-hf new --load absent --hf-config hf/config.json": "absent: no checkpoint: expected "
    "step_<number>/manifest.json, found no such directory; name a directory that a run saved",
    "--to-hf new --load empty --hf-config hf": "hf: is a directory; name the config.json file in it",
}


@pytest.mark.parametrize("command", PATHS)
def test_wrong_paths_are_reported(command, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("hf", "empty", "only", "pickled"):
        Path(name).mkdir()
    for name in ("hf", "only", "pickled"):
        Path(name, "config.json").write_text(json.dumps(FIELDS))
    Path("pickled/model.bin").touch()
    assert main(["convert", *command.split()]) == 4
    said = capsys.readouterr().err
    assert PATHS[command] in said and "Errno" not in said and not Path("new").exists()


def test_links_as_in_the_cache_of_the_hub_are_followed(tmp_path):
    written = write_model(tmp_path / "blobs")
    (tmp_path / "snapshot").mkdir()
    for path in (tmp_path / "blobs").iterdir():
        (tmp_path / "snapshot" / path.name).symlink_to(Path("..", "blobs", path.name))
    _, files, _ = open_model(tmp_path / "snapshot", bf16=False)
    assert torch.equal(files.read(NORM), written[NORM])


def test_what_an_export_refuses(tmp_path, capsys):
    hf, ours = converted(tmp_path)
    # The directory contains a checkpoint now.
    assert from_hf(hf, ours) == 4
    assert "already contains checkpoints" in capsys.readouterr().err

    def export(**changes):
        (tmp_path / "config.json").write_text(json.dumps({**FIELDS, **changes}))
        code = to_hf(tmp_path / "back", ours, "--hf-config", tmp_path / "config.json")
        return code, capsys.readouterr().err

    code, said = export(routed_scaling_factor=1.0)
    assert code == 4 and "--moe-router-topk-scaling-factor is 1.0 in config.json" in said
    assert export(vocab_size=60)[0] == 4
    manifest = ours / "step_00000000" / "manifest.json"
    written = manifest.read_bytes()
    for forged in (
        7,
        [],
        {"model": [], "training": {"bf16": True}},
        {"model": {"hidden_size": "x"}, "training": {}},
    ):
        fields = unseal(written, manifest)
        manifest.write_bytes(seal({**fields, "metadata": {"config": forged}}))
        code, said = export()
        assert code == 4 and "has invalid metadata: config" in said, said
    manifest.write_bytes(written)
    shard = ours / "step_00000000" / "rank_00000.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    code, said = export()
    assert code == 4 and "do not match their checksum" in said
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("back")]
    (tmp_path / "back").mkdir()
    (tmp_path / "back" / "notes").touch()
    assert "is not empty" in export()[1]
    (tmp_path / "back").rename(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "notes").unlink()
    # A rename does not replace a symbolic link, even to an empty directory.
    (tmp_path / "back").symlink_to("elsewhere")
    assert "is not a directory" in export()[1]


def test_a_directory_that_cannot_be_written_is_reported_as_typed(tmp_path, capsys, monkeypatch):
    """Errors name the directory that the user gave, not the temporary directory."""
    hf, ours = converted(tmp_path)
    (tmp_path / "file").touch()

    def export(to):
        code = to_hf(to, ours, "--hf-config", hf / "config.json")
        return code, capsys.readouterr().err

    def refusing(error, *file):
        def refuses(*_, **__):
            raise OSError(error, os.strerror(error), *map(str, file))

        return refuses

    def rename(source, target):
        raise OSError(errno.ENOTEMPTY, "Directory not empty", str(source), 0, str(target))

    before, new = sorted(tmp_path.iterdir()), tmp_path / "new"
    for place in (tmp_path / "file" / "new", tmp_path / "file" / "far" / "new"):
        assert export(place) == (4, f"convert: {place}: {CANNOT}: Not a directory; {ELSEWHERE}\n")
    for (owner, name), refuses, said in (
        (
            (Path, "mkdir"),
            refusing(errno.EACCES, tmp_path),
            f"{new}: {CANNOT}: Permission denied; {ELSEWHERE}",
        ),
        (
            (os, "fsync"),
            refusing(errno.ENOSPC),
            f"{new}: {CANNOT}: No space left on device; {ELSEWHERE}",
        ),
        ((os, "rename"), rename, f"{new}: {CANNOT}: Directory not empty; {ELSEWHERE}"),
        (
            (shutil, "copyfileobj"),
            refusing(errno.EACCES, hf / "config.json"),
            f"{hf / 'config.json'}: Permission denied",
        ),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, refuses)
            assert export(new) == (4, f"convert: {said}\n")
    assert sorted(tmp_path.iterdir()) == before


def test_of_two_conversions_at_the_same_time_into_one_directory_one_writes(
    tmp_path, capsys, monkeypatch
):
    hf, ours = tmp_path / "hf", tmp_path / "ours"
    write_model(hf)

    def meanwhile(name, opened):
        """Start a second conversion in the middle of the first."""

        def with_another(*args, **kwargs):
            monkeypatch.undo()
            codes.append(from_hf(hf, ours, "--bf16"))
            return opened(*args, **kwargs)

        codes = []
        monkeypatch.setattr(import_huggingface, name, with_another)
        return [from_hf(hf, ours), *codes]

    # The first conversion has read the model; it then finds the checkpoint of the second.
    assert meanwhile("open_model", open_model) == [4, 0]
    assert "already contains checkpoints" in capsys.readouterr().err
    args = (ours / "model.args").read_text()
    assert "--bf16" in args and len(list(ours.glob("step*"))) == 1
    shutil.rmtree(ours)
    # While the first conversion writes, the second finds the directory locked.
    assert meanwhile("save_weights", import_huggingface.save_weights) == [0, 4]
    assert "another run writes its checkpoints to this directory" in capsys.readouterr().err
    assert "--bf16" not in (ours / "model.args").read_text()


@pytest.mark.parametrize(
    "command",
    [
        "--from-hf a",
        "--from-hf a --save b --load c",
        "--to-hf a",
        "--to-hf a --load b --hf-family lama",
        "--to-hf a --load b --ckpt-step bets",
        "--to-hf a --load b --hf-config c --hf-family llama",
        "--to-hf a --load b --hf-base c --hf-family llama",
        "--from-hf a --save b --hf-base c",
        "--save a",
    ],
)
def test_options_that_do_not_belong_together(command):
    try:
        assert main(["convert", *command.split()]) == 2
    except SystemExit as ended:
        assert ended.code == 2


def test_tensors_outside_the_text_model_are_passed_over_and_copied(tmp_path, capsys, monkeypatch):
    """An export copies them from the original to the bit, or names those that it lacks."""
    hf, ours = tmp_path / "hf", tmp_path / "ours"
    family = replace(FAMILIES["llama"], set_aside=("model.visual.", "mtp."))
    monkeypatch.setitem(FAMILIES, "llama", family)
    write_model(hf, "llama")
    assert from_hf(hf, tmp_path / "plain") == 0
    assert "Passed over" not in capsys.readouterr().out
    more = {name: torch.randn(3, 2, 5, 4, 4) for name in ("model.visual.a", "model.visual.b.c")}
    more["mtp.fc.weight"] = torch.randn(4).bfloat16()
    rewrite(hf, lambda tensors: tensors.update(more))
    assert from_hf(hf, ours) == 0
    counted = "2 tensors model.visual.*, 1 tensors mtp.*"
    assert f"not part of the text model: {counted}." in capsys.readouterr().out

    def export(name, *original):
        assert to_hf(tmp_path / name, ours, *original) == 0
        return contents(tmp_path / name), capsys.readouterr().out

    found, said = export("copied", "--hf-base", hf)
    assert_same(found, contents(hf))
    assert f"Copied from {hf}: {counted}." in said and "Not written" not in said
    found, said = export("dropped", "--hf-config", hf / "config.json")
    assert found.keys() == contents(hf).keys() - more.keys()
    assert f"Not written: {counted}. To copy them from the original, give --hf-base." in said
    shutil.copyfile(hf / "config.json", tmp_path / "config.json")
    found, said = export("alone", "--hf-config", tmp_path / "config.json")
    assert found.keys() == contents(hf).keys() - more.keys()
    assert "Not written: model.visual.*, mtp.*." in said


def test_a_directory_without_weights_is_no_original(tmp_path, capsys):
    hf, ours = converted(tmp_path)
    for path in hf.glob("*.safetensors*"):
        path.unlink()
    assert to_hf(tmp_path / "back", ours, "--hf-base", hf) == 4
    assert "no weights" in capsys.readouterr().err and not (tmp_path / "back").exists()


def test_files_decide_between_names(tmp_path):
    """Experts are read one by one or together, and written back as they were."""
    family = FAMILIES["mixtral"]
    one = family.names["E"]["mixer.experts.fc1"]
    names = {**family.names["E"], "mixer.experts.fc1": OneOf((one, "experts.gate_up_proj"))}
    family = replace(family, names={**family.names, "E": names})
    config = model_of(SMALL["mixtral"], tmp_path)[1]

    def parts(files):
        weights = weights_of(family, config, torch.float32, files)
        return {part.name: part.shape for part in weights["layers.1.mixer.experts.fc1"].parts}

    each = parts({})
    assert len(each) == 6 and set(each.values()) == {(48, 32)}
    together = {"model.layers.0.experts.gate_up_proj": (3, 96, 32)}
    assert parts(together) == together
    assert parts({"model.layers.0.experts.gate_up_proj": (3, 95, 32)}) == together
    assert parts({**each, **together}) == each


def pack_experts(tensors):
    """Replace the tensors of experts by two tensors per layer, and add the prefix of vision files."""
    for layer in range(2):
        experts = f"model.layers.{layer}.mlp.experts"

        def take(part, experts=experts):
            return torch.stack([tensors.pop(f"{experts}.{e}.{part}_proj.weight") for e in range(4)])

        tensors[f"{experts}.gate_up_proj"] = torch.cat([take("gate"), take("up")], dim=1)
        tensors[f"{experts}.down_proj"] = take("down")
    for name in [name for name in tensors if name.startswith("model.")]:
        renamed = name.replace("model.", "model.language_model.", 1)
        tensors[renamed] = tensors.pop(name)


def test_experts_in_one_tensor_and_the_prefix_of_vision_files_are_read(tmp_path):
    """Both spellings of a model give the same tensors, and each returns to its own files."""
    hf, packed, ours = tmp_path / "hf", tmp_path / "packed", tmp_path / "ours"
    write_model(hf, "qwen3_5_moe_text", bf16=True)
    shutil.copytree(hf, packed)
    rewrite(packed, pack_experts)
    assert_same(opened(hf)[1], opened(packed)[1])
    assert from_hf(packed, ours) == 0
    for original in (hf, packed):
        back = tmp_path / f"back_{original.name}"
        assert to_hf(back, ours, "--hf-base", original) == 0
        assert_same(contents(back), contents(original))


def test_a_link_under_the_name_of_the_flags_is_not_followed(tmp_path, capsys):
    write_model(tmp_path / "hf", "nemotron_h")
    (tmp_path / "ours").mkdir()
    (tmp_path / "victim").write_text("precious")
    (tmp_path / "ours" / "model.args").symlink_to(tmp_path / "victim")
    assert from_hf(tmp_path / "hf", tmp_path / "ours") == 0, capsys.readouterr().err
    assert (tmp_path / "victim").read_text() == "precious"
    assert "--hidden-size" in (tmp_path / "ours" / "model.args").read_text()
