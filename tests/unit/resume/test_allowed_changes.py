"""Tests of the reasons for which a run refuses a checkpoint."""

from types import SimpleNamespace

import pytest
import torch

from megatron_packed.config.sections.checkpoint import CheckpointConfig
from megatron_packed.resume.allowed_changes import CheckpointRefusals, precision_refusal


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
    metadata = {"config": {"training": {"bf16": bf16}} | ({"packing": {}} if run else {})}
    refusal = precision_refusal(metadata, torch.float32 if bf16 else torch.bfloat16)
    assert refusal is not None and words in refusal
    assert refusal.endswith("in this run too") == run
    assert precision_refusal(metadata, torch.bfloat16 if bf16 else torch.float32) is None


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
    run = SimpleNamespace(config={"checkpoint": {"dist_ckpt_strictness": strictness}})
    metadata = {"config": {"checkpoint": {"save_optim": False}}}
    found = CheckpointRefusals._optimizer_refusal(run, metadata)  # type: ignore[arg-type]
    allows = CheckpointConfig(dist_ckpt_strictness=strictness).allows_unexpected
    assert (found is not None, not allows) == (refused, refused)
