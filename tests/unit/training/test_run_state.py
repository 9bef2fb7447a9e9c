"""How far the run of a checkpoint was."""

from typing import Any

import pytest

from megatron_packed.training.state import Progress, progress_of

PACKING = {"global_batch_size": 12, "micro_batch_size": 2}


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        (
            {"progress": {"iteration": 7, "consumed_packs": 30}, "config": {"packing": PACKING}},
            Progress(iteration=7, consumed_packs=30),
        ),
        # saved before packs were counted, when all steps had equally many
        ({"progress": {"iteration": 7}, "config": {"packing": PACKING}}, Progress(iteration=7, consumed_packs=42)),
        ({"progress": {}, "config": {"model": {}}}, Progress()),  # converted weights
    ],
)
def test_packs_that_a_run_has_trained_on(metadata: dict[str, Any], expected: Progress) -> None:
    assert progress_of(metadata) == expected
