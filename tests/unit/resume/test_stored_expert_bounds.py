"""Tests of the bounds of expert buffers in checkpoints."""

from __future__ import annotations

import pytest

from megatron_packed.layers.moe.expert_room import ExpertRoom, Load, bounded_rows


@pytest.mark.parametrize(
    ("before", "after", "kept"),
    [
        (("alltoall", 2), ("alltoall", 2), True),
        (("allgather", 2), ("allgather", 2), True),
        (("alltoall", 4), ("alltoall", 2), False),
        # allgather has no parts and so no bound of them; alltoall cannot begin with 0 rows.
        (("allgather", 2), ("alltoall", 2), False),
        (("alltoall", 2), ("allgather", 2), False),
    ],
)
def test_only_bounds_of_the_same_dispatcher_and_ranks_are_kept(
    before: tuple, after: tuple, kept: bool
) -> None:
    (dispatcher, ep_size), (later_dispatcher, later_ep_size) = before, after
    stored, resumed = ExpertRoom.from_factor("auto"), ExpertRoom.from_factor("auto")
    assert stored.state(ep_size) is None
    stored.fit(Load(1.5, 2.0 if dispatcher == "alltoall" else 0.0))
    planned, state = resumed.bounds, stored.state(ep_size)
    assert state is not None
    resumed.load_state(state, later_ep_size, sends_parts=later_dispatcher == "alltoall")
    assert resumed.observed == kept
    assert resumed.bounds == (stored.bounds if kept else planned)


def test_a_buffer_has_a_row_if_no_token_was_routed() -> None:
    assert bounded_rows(100.0, 0.0, 200) == 1
