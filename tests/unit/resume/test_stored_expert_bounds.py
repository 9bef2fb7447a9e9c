"""Tests of the bounds of expert buffers in checkpoints."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from megatron_packed.layers.moe.expert_room import ExpertRoom, Load, bounded_rows
from megatron_packed.resume.stored_expert_bounds import restore_bounds, stored_bounds


def model_of(dispatcher: str, ep_size: int = 2) -> SimpleNamespace:
    return SimpleNamespace(
        expert_room=ExpertRoom.from_factor("auto"),
        ep=SimpleNamespace(size=ep_size),
        config=SimpleNamespace(moe_token_dispatcher_type=dispatcher),
    )


@pytest.mark.parametrize(
    ("before", "after", "kept"),
    [
        (("alltoall",), ("alltoall",), True),
        (("allgather",), ("allgather",), True),
        (("alltoall", 4), ("alltoall", 2), False),
        # allgather has no parts and so no bound of them; alltoall cannot begin with 0 rows.
        (("allgather",), ("alltoall",), False),
        (("alltoall",), ("allgather",), False),
    ],
)
def test_only_bounds_of_the_same_dispatcher_and_ranks_are_kept(
    before: tuple, after: tuple, kept: bool
) -> None:
    stored, resumed = model_of(*before), model_of(*after)
    stored.expert_room.fit(Load(1.5, 2.0 if before[0] == "alltoall" else 0.0))
    planned = resumed.expert_room.bounds
    restore_bounds(resumed, stored_bounds(stored))
    assert resumed.expert_room.observed == kept
    assert resumed.expert_room.bounds == (stored.expert_room.bounds if kept else planned)


def test_a_buffer_has_a_row_if_no_token_was_routed() -> None:
    assert bounded_rows(100.0, 0.0, 200) == 1
