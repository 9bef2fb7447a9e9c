"""Tests of the reasons for which a run refuses a checkpoint."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_packed.config.run import RunConfig
from megatron_packed.config.serialise import from_dict, to_dict
from megatron_packed.resume.allowed_changes import (
    _TOKENS,
    CheckpointUse,
    _optimizer_refusal,
    _precision_refusal,
    noted_keys,
    refusal_of_use,
)
from megatron_packed.resume.compared_runs import AskedRun, Resumed

OLD = Path(__file__).parents[2] / "end_to_end/old_checkpoints"
MANIFEST = OLD / "text/checkpoints/step_00000012/manifest.json"


def config_of(**options: Any) -> RunConfig:
    words = "--mock-data --hybrid-layer-pattern - --hidden-size 8 --seq-length 64 --lr 1e-2"
    return RunConfig.from_args([*words.split(), "--train-iters", "2"], **options)


@pytest.mark.parametrize(
    ("bf16", "run", "words"),
    [
        (False, True, "trained without --bf16, and a load does not change precisions; leave it"),
        (True, True, "trained with --bf16, and a load does not change precisions; give it in this"),
        (False, False, "this run too, or convert the weights again with --bf16"),
        (True, False, "this run too, or convert the weights again without --bf16"),
    ],
)
def test_another_precision_is_refused_with_the_cure(bf16: bool, run: bool, words: str) -> None:
    """Converted weights, which store no packing, can also be converted again."""
    stored = Resumed({"config": {"training": {"bf16": bf16}} | ({"packing": {}} if run else {})})
    same, other = (AskedRun(config=config_of(bf16=value)) for value in (bf16, not bf16))
    refusal = _precision_refusal(other, stored)
    assert refusal is not None and words in refusal
    assert refusal.endswith("in this run too") == run
    assert _precision_refusal(same, stored) is None


@pytest.mark.parametrize(
    ("strictness", "refused"),
    [
        ("raise_all", True),
        ("raise_unexpected", True),
        ("assume_ok_unexpected", True),
        ("log_unexpected", False),
        ("log_all", False),
        ("ignore_all", False),
    ],
)
def test_moments_may_be_missing_if_the_load_may_keep_start_values(
    strictness: str, refused: bool
) -> None:
    run = AskedRun(config=config_of(save="a", load="a", dist_ckpt_strictness=strictness))
    stored = Resumed({"config": {"checkpoint": {"save_optim": False}}})
    found = _optimizer_refusal(run, stored)
    allows = run.config.checkpoint.allows_unexpected
    assert (found is not None, not allows) == (refused, refused)


def test_changes_are_printed_by_the_sections_of_the_table() -> None:
    """Only a phase may change its data and packs, and the routing of its model."""
    assert noted_keys(begins=False) == ["optim", "training"]
    of_phase = set(noted_keys(begins=True))
    assert of_phase - set(_TOKENS) == {"model", "packing", "optim", "training"}
    assert of_phase >= set(_TOKENS)


def test_the_first_refused_row_gives_the_sentence() -> None:
    metadata: dict[str, Any] = json.loads(MANIFEST.read_text())["metadata"]
    run = AskedRun(config=config_of(bf16=True))
    said = {
        use: refusal_of_use(use, run, metadata) for use in (CheckpointUse.WARN, CheckpointUse.INFER)
    }
    assert str(said[CheckpointUse.WARN]).startswith("belongs to another model: ")
    assert str(said[CheckpointUse.INFER]).startswith("was trained without --bf16")
    del metadata["plan_hash"]
    assert "plan_hash is missing" in str(refusal_of_use(CheckpointUse.RESUME, run, metadata))


def test_explain_allows_what_the_requested_phase_may_change() -> None:
    metadata: dict[str, Any] = json.loads(MANIFEST.read_text())["metadata"]
    model = from_dict({**to_dict(config_of()), "model": metadata["config"]["model"]}).model
    config = replace(config_of(), model=replace(model, rotary_base=model.rotary_base + 1))
    said = refusal_of_use(CheckpointUse.INFER, AskedRun(config=config), metadata)
    assert str(said).endswith("or change them in a new phase (--begin-phase NAME)")
    begins = replace(config.checkpoint, load="a", begin_phase="two")
    phase = AskedRun(config=replace(config, checkpoint=begins))
    assert refusal_of_use(CheckpointUse.INFER, phase, metadata) is None
