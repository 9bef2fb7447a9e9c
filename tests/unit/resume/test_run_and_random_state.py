"""Progress in checkpoints, and schedules after a change of the batch size."""

from types import SimpleNamespace
from typing import Any

import pytest

from megatron_packed.checkpoint.run_metadata import RunProgress
from megatron_packed.config.run import RunConfig
from megatron_packed.config.section import section_fields
from megatron_packed.config.sections.data import DataConfig
from megatron_packed.resume.allowed_changes import _TOKENS, _schedule_refusal
from megatron_packed.resume.compared_runs import AskedRun, Resumed

MODEL = "--mock-data --hybrid-layer-pattern - --hidden-size 8 --seq-length 64 --lr 1e-2"
MODEL += " --micro-batch-size 2"
PLAN: Any = SimpleNamespace()
PACKING = {"global_batch_size": 12, "micro_batch_size": 2}


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        (
            {"progress": {"iteration": 7, "consumed_packs": 30}, "config": {"packing": PACKING}},
            RunProgress(iteration=7, consumed_packs=30),
        ),
        # an old checkpoint without packs: all its steps had the same number
        (
            {"progress": {"iteration": 7}, "config": {"packing": PACKING}},
            RunProgress(iteration=7, consumed_packs=42),
        ),
        ({"progress": {}, "config": {"model": {}}}, RunProgress()),  # converted weights
    ],
)
def test_packs_that_a_run_has_trained_on(metadata: dict[str, Any], expected: RunProgress) -> None:
    assert Resumed(metadata).progress == expected


@pytest.mark.parametrize(
    ("batch", "consumed", "refused"),
    [(12, 42, False), (12, 30, True), (16, 42, True), (16, 56, False)],
    ids=["never another", "another before the last", "another now", "another, and as many by now"],
)
def test_a_schedule_in_two_units_needs_steps_of_one_size_so_far(
    batch: int, consumed: int, refused: bool
) -> None:
    """A schedule in two units is refused if any earlier step had another batch size.

    The steps before the checkpoint's last change count, too.
    """
    metadata = {
        "progress": {"iteration": 7, "consumed_packs": consumed},
        "config": {"packing": PACKING},
    }
    for length, fails in (("--train-iters 20", refused), ("--train-samples 240", False)):
        flags = f"{MODEL} {length} --lr-warmup-samples 12 --global-batch-size {batch}"
        run = AskedRun(config=RunConfig.from_args(flags.split()), plan=PLAN)
        assert bool(_schedule_refusal(run, Resumed(metadata))) == fails


def test_counts_that_a_checkpoint_does_not_have_begin_at_zero() -> None:
    saved = {"progress": {"iteration": 7, "consumed_packs": 42, "skipped_steps": 2}, "config": {}}
    found = Resumed({**saved, "config": {"packing": PACKING}}).progress
    assert (
        found.skipped_steps,
        found.steps_without_targets,
        found.spikes,
        found.skipped_spikes,
    ) == (2, 0, 0, 0)


def test_every_option_of_the_training_data_is_named_when_a_resume_is_refused() -> None:
    """A data option is compared with the checkpoint unless it does not change training tokens."""
    same_tokens = {
        "data.valid_data_path",
        "data.test_data_path",
        "data.max_bad_fraction",
        "data.data_cache_path",
        "data.mmap_bin_files",
        "data.num_workers",
        "data.padded_vocab_size",
    }
    options = {about.key for about in section_fields(DataConfig)}
    assert options - set(_TOKENS) == same_tokens
