"""Files whose tensors do not fit config.json: what is wrong, and the cure that helps."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_packed.models.convert.huggingface_files import SINGLE
from support.converted_model import (
    assert_same,
    change_fields,
    contents,
    from_hf,
    to_hf,
    write_model,
    write_tensors,
)
from support.data_helpers import metaspace, save_tokenizer

TABLE, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def change(hf: Path, tensors: dict[str, torch.Tensor], **fields: Any) -> None:
    """Write the tensors in place of those of a model, and change fields of its config.json."""
    write_tensors(hf, tensors)
    change_fields(hf, **fields)


def quantise(hf: Path, dtype: str) -> None:
    """Rename the dtype of a tensor whose size in bytes stays, as in files of FP8."""
    path = hf / SINGLE
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    entry = header[TABLE]
    entry["shape"], entry["dtype"] = [*entry["shape"], 4], dtype
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


def filled(value: float) -> torch.Tensor:
    """Return a table of the vocabulary with one value."""
    return torch.full((61, 32), value)


CASES = {
    "tied with another head": (
        lambda hf, t: change(hf, t, tie_word_embeddings=True),
        f"tie_word_embeddings is true, but {HEAD} differs from {TABLE}; set tie_word_embeddings to "
        "false in config.json, if the model has two tables",
    ),
    "untied without a head": (
        lambda hf, t: change(hf, {name: t[name] for name in t if name != HEAD}),
        f"tie_word_embeddings is false, but the files have no {HEAD}; set tie_word_embeddings to "
        "true in config.json, if the model shares its table",
    ),
    "resized tables": (
        lambda hf, t: change(hf, t, vocab_size=55),
        f"{TABLE} and {HEAD} have 61 rows, but vocab_size is 55; set vocab_size to 61 in "
        "config.json, if the model's tables were resized",
    ),
    "resized tables of a tied model": (
        lambda hf, t: change(
            hf,
            {name: t[name] for name in t if name != HEAD},
            vocab_size=70,
            tie_word_embeddings=True,
        ),
        f"{TABLE} has 61 rows, but vocab_size is 70; set vocab_size to 61",
    ),
    "one resized table": (
        lambda hf, t: change(hf, {**t, HEAD: t[HEAD][:60]}),
        f"{HEAD} has shape [60, 32], but config.json implies [61, 32]; config.json and the weights "
        "belong to different models",
    ),
    "fewer layers than the files": (
        lambda hf, t: change(hf, t, num_hidden_layers=1),
        "model.layers.1.input_layernorm.weight is extra",
    ),
    "integers": (
        lambda hf, t: change(hf, {**t, TABLE: t[TABLE].to(torch.int8)}),
        f"the dtype of {TABLE}: expected one of F32, BF16, F16, found I8; take the model in bf16, "
        "which is often published beside the quantised one, or dequantise",
    ),
    "scales of a quantised model": (
        lambda hf, t: change(hf, {**t, "model.layers.0.mlp.up_proj.weight_scale_inv": filled(1.0)}),
        "weight_scale_inv is extra; take the model in bf16",
    ),
    "FP8": (
        lambda hf, t: quantise(hf, "F8_E4M3"),
        f"the dtype F8_E4M3 of tensor '{TABLE}' is not supported; F64, F32,",
    ),
    "an infinity": (
        lambda hf, t: change(hf, {**t, HEAD: filled(math.inf)}),
        "output.weight is not finite: expected finite values",
    ),
    "a value that bf16 rounds to infinity": (
        lambda hf, t: change(hf, {**t, HEAD: filled(3.4e38)}),
        "output.weight is not finite: expected finite values",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_refusal_has_the_cure_and_leaves_nothing(case, tmp_path, capsys):
    spoil, sentence = CASES[case]
    hf, ours = tmp_path / "hf", tmp_path / "far" / "ours"
    tensors = write_model(hf, "llama", max_file_bytes=10**9)
    spoil(hf, tensors)
    assert from_hf(hf, ours, *["--bf16"] * ("bf16 rounds" in case)) == 4
    said = capsys.readouterr().err
    assert sentence in said and not ours.parent.exists()
    for harmful in ("again", "damaged", "--ignore-key", "was published"):
        assert harmful not in said


def test_rotary_buffers_of_old_files_are_passed_over_and_copied_back(tmp_path, capsys):
    hf, ours, back = tmp_path / "hf", tmp_path / "ours", tmp_path / "back"
    buffers = {
        f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": torch.rand(4) for layer in range(2)
    }
    tensors = {**write_model(hf, "llama", max_file_bytes=10**9), **buffers}
    change(hf, tensors)
    assert from_hf(hf, ours) == 0
    assert "2 tensors *.rotary_emb.inv_freq." in capsys.readouterr().out
    assert to_hf(back, ours, "--hf-base", hf) == 0
    assert_same(contents(back), tensors)


def test_a_conversion_says_that_the_tokenizer_is_larger_than_the_table(tmp_path, capsys):
    hf, ours = tmp_path / "hf", tmp_path / "ours"
    write_model(hf, "llama")
    engine = metaspace()
    save_tokenizer(hf, engine)
    entries = engine.get_vocab_size()
    assert entries > 61
    assert from_hf(hf, ours) == 0
    said = capsys.readouterr().out
    assert f"--vocab-size 61 is less than the {entries} entries of the tokenizer" in said
