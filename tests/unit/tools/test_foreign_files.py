"""Altered files of transformers' random models: equal logits, or a refusal that leaves nothing.

`tools/foreign_files.py` makes more of both.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
from common import foreign_conversion as foreign
from common.altered_models import FILE_CHANGES, alter, old_form
from support.huggingface_models import FAMILIES, computes_wrong_groups
from support.json_lines import read_json

MISSING = object()


def saved(folder: Path, family: str, number: int = 0) -> Path:
    model = FAMILIES[family](random.Random(f"{family} {number}"), number)
    if computes_wrong_groups(model):
        pytest.skip("this version of transformers computes wrong logits of several groups")
    model.save_pretrained(folder / "hf", max_shard_size="20KB")
    (folder / "roots").mkdir()
    return folder / "hf"


def change(folder: Path, changes: dict[str, Any]) -> None:
    path = folder / "config.json"
    fields = {**read_json(path), **changes}
    fields = {key: value for key, value in fields.items() if value is not MISSING}
    path.write_text(json.dumps(fields))


THETA = {"rope_type": "default", "rope_theta": 50.0}
ALTERED: dict[str, tuple[str, int, dict[str, Any], tuple[str, ...]]] = {
    "positions under the older key": (
        "olmo_hybrid",
        0,
        {"rope_scaling": THETA, "rope_parameters": MISSING},
        (),
    ),
    "a stale base beside null": ("llama", 0, {"rope_theta": 50.0, "rope_parameters": None}, ()),
    "a window of some layers": (
        "qwen2",
        1,
        {"layer_types": None, "max_window_layers": 0, "num_key_value_heads": None},
        (),
    ),
    "an epsilon under another name": (
        "nemotron_h",
        0,
        {"layer_norm_epsilon": MISSING, "norm_eps": 1e-2},
        ("norm_eps",),
    ),
    "a limit of time steps": ("nemotron_h", 4, {"time_step_min": 0.5}, ("time_step_min",)),
    "a division of loaded weights": (
        "mamba2",
        1,
        {"rescale_prenorm_residual": True},
        ("rescale_prenorm_residual",),
    ),
    "too many layers": ("llama", 0, {"num_hidden_layers": 10**6}, ("num_hidden_layers",)),
}
"""Family, number of the model, changes of config.json, and the key that a refusal names."""


@pytest.mark.parametrize("case", ALTERED)
def test_altered_options_give_the_logits_of_transformers_or_a_refusal(case, tmp_path):
    family, number, changes, named = ALTERED[case]
    folder = saved(tmp_path, family, number)
    change(folder, changes)
    found = foreign.outcome(folder, tmp_path / "roots" / "ours", named)
    assert found.outcome == (foreign.REFUSED if named else foreign.EQUAL), found.said


@pytest.mark.parametrize("family", ["nemotron_h", "qwen3_moe", "granitemoehybrid", "qwen3_5"])
def test_old_files_are_exported_with_their_logits(family, tmp_path):
    folder = saved(tmp_path, family)
    fields = read_json(folder / "config.json")
    old_form(fields)
    (folder / "config.json").write_text(json.dumps(fields))
    root = tmp_path / "roots" / "ours"
    assert foreign.outcome(folder, root, ()).outcome == foreign.EQUAL
    for case, found in foreign.exports(folder, root, tmp_path / "back"):
        assert found.outcome == foreign.EQUAL, (case, found.said)


@pytest.mark.parametrize("number", range(len(FILE_CHANGES)))
def test_altered_files_are_refused_by_the_command(number, tmp_path):
    folder = saved(tmp_path, "mixtral")
    made = FILE_CHANGES[number](folder, random.Random(number))
    found = foreign.outcome(folder, tmp_path / "roots" / "ours", made.named, command=True)
    beside = "tokenizer" in made.text or "generation_config" in made.text
    expected = (foreign.EQUAL, foreign.ACCEPTED) if beside else (foreign.REFUSED,)
    assert found.outcome in expected, (made.text, found)


def test_alterations_depend_on_the_seed_alone(tmp_path):
    made = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        folder = saved(tmp_path / name, "qwen3_5", 1)
        draw = random.Random(1)
        made.append([alter(folder, draw) for _ in range(2)])
    assert made[0] == made[1]


def test_each_fault_of_a_conversion_is_an_outcome(tmp_path, monkeypatch):
    folder, root = saved(tmp_path, "llama"), tmp_path / "roots" / "ours"

    def outcome(named=("hidden_size",)):
        return foreign.outcome(folder, root, named).outcome

    def leave(folder, root, *, command):
        root.mkdir()
        raise foreign.CheckpointError("hidden_size is wrong")

    def fail(folder, root, *, command):
        raise KeyError("hidden_size")

    def refuse(folder, root, *, command):
        raise foreign.CheckpointError("vocab_size is wrong\nand more" if lines else "vocab_size")

    checkpoint = foreign.convert(folder, root, command=True)
    assert all(one.outcome == foreign.EQUAL for _, one in foreign.exports(folder, checkpoint, root))
    logits = foreign.our_logits(checkpoint)
    monkeypatch.setattr(foreign, "convert", lambda *given, command: checkpoint)
    monkeypatch.setattr(foreign, "our_logits", lambda path: [one * 1.001 for one in logits])
    assert outcome() == foreign.WRONG
    change(folder, {"initializer_range": None})
    assert outcome() == foreign.ACCEPTED
    root = tmp_path / "roots" / "more" / "ours"
    root.parent.mkdir()
    lines = False
    for convert, expected in (
        (fail, foreign.TRACEBACK),
        (refuse, foreign.UNNAMED),
        (leave, foreign.LEFT),
    ):
        monkeypatch.setattr(foreign, "convert", convert)
        assert outcome() == expected
    root.rmdir()
    monkeypatch.setattr(foreign, "convert", refuse)
    lines = True
    assert outcome(("vocab_size",)) == foreign.TRACEBACK
