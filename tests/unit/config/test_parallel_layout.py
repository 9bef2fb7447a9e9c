"""Ranks of every group, compared with enumerated coordinates, and layouts that are refused."""

import itertools

import pytest

from megatron_packed.config.errors import ConfigError
from megatron_packed.config.parallel_layout import GROUP_AXES, ParallelLayout

SIZES = (1, 2, 3, 4, 8)
LAYOUTS = [
    ParallelLayout(
        world_size=tp * cp * dp, tp_size=tp, cp_size=cp, ep_size=ep, expert_tp_size=expert_tp
    )
    for tp, cp, dp, ep in itertools.product(SIZES, repeat=4)
    for expert_tp in {1, tp, 2 if tp == 4 else 1}
    if tp * cp * dp <= 32 and tp * cp * dp % (expert_tp * ep) == 0
]


def coordinates(layout: ParallelLayout, axis: str) -> tuple[tuple[str, ...], list[tuple[int, ...]]]:
    """Return the axis names of the grid that contains ``axis``, and the enumerated coordinates of
    all ranks.
    """
    if axis in ("tp", "cp", "dp", "dp_cp", "tp_cp"):
        names, sizes = ("dp", "cp", "tp"), (layout.dp_size, layout.cp_size, layout.tp_size)
    else:
        names = ("expert_dp", "ep", "expert_tp")
        sizes = (layout.expert_dp_size, layout.ep_size, layout.expert_tp_size)
    return names, list(itertools.product(*map(range, sizes)))


@pytest.mark.parametrize("axis", GROUP_AXES)
def test_a_group_is_the_ranks_that_differ_in_its_axes_alone(axis: str) -> None:
    assert len(LAYOUTS) > 200
    for layout in LAYOUTS:
        names, places = coordinates(layout, axis)
        assert len(places) == layout.world_size
        fixed = [i for i, name in enumerate(names) if name not in GROUP_AXES[axis]]
        for rank, place in enumerate(places):
            expected = tuple(
                r for r, other in enumerate(places) if all(other[i] == place[i] for i in fixed)
            )
            assert layout.ranks(axis, rank) == expected
            assert expected[layout.rank_in(axis, rank)] == rank
            assert layout.size(axis) == len(expected)
        members = [rank for group in layout.groups(axis) for rank in group]
        assert sorted(members) == list(range(layout.world_size))


def test_known_layouts() -> None:
    # Groups of Megatron's order tp-cp-ep-dp for 8 ranks.
    layout = ParallelLayout(world_size=8, tp_size=2, cp_size=2, ep_size=4, expert_tp_size=1)
    for axis, groups in {
        "tp": [(0, 1), (2, 3), (4, 5), (6, 7)],
        "cp": [(0, 2), (1, 3), (4, 6), (5, 7)],
        "dp": [(0, 4), (1, 5), (2, 6), (3, 7)],
        "dp_cp": [(0, 2, 4, 6), (1, 3, 5, 7)],
        "tp_cp": [(0, 1, 2, 3), (4, 5, 6, 7)],
        "ep": [(0, 1, 2, 3), (4, 5, 6, 7)],
        "expert_dp": [(0, 4), (1, 5), (2, 6), (3, 7)],
    }.items():
        assert layout.groups(axis) == groups, axis
    folded = ParallelLayout(world_size=8, tp_size=2, ep_size=2)
    assert folded.expert_tp_size == 2 and folded.groups("expert_tp") == folded.groups("tp")
    assert folded.groups("ep") == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert folded.groups("expert_tp_ep") == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert folded.groups("expert_dp") == [(0, 4), (1, 5), (2, 6), (3, 7)]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (
            {"tp_size": 3},
            "--tensor-model-parallel-size 3: does not divide the 8 processes; give 1, 2, 4 or 8.",
        ),
        (
            {"tp_size": 2, "cp_size": 3},
            "--context-parallel-size 3: times --tensor-model-parallel-size (2) does not divide the 8 processes; "
            "give 1, 2 or 4.",
        ),
        (
            {"tp_size": 4, "ep_size": 4},
            "--expert-model-parallel-size 4: times --expert-tensor-parallel-size (4) does not divide the 8 processes; "
            "give 1 or 2, or give --expert-tensor-parallel-size 2.",
        ),
        (
            {"tp_size": 8, "ep_size": 2},
            "--expert-model-parallel-size 2: times --expert-tensor-parallel-size (8) does not divide the 8 processes; "
            "give 1, or start more processes, or give --expert-tensor-parallel-size 4.",
        ),
        (
            {"tp_size": 4, "expert_tp_size": 3},
            "--expert-tensor-parallel-size 3: does not divide --tensor-model-parallel-size (4); give 1, 2 or 4.",
        ),
        (
            {"expert_tp_size": 2},
            "--expert-tensor-parallel-size 2: does not divide --tensor-model-parallel-size (1); give 1.",
        ),
        ({"tp_size": 0}, "--tensor-model-parallel-size 0: must be at least 1; give 1 or more."),
        (
            {"cp_size": 16, "ep_size": 3},
            "--context-parallel-size 16: times --tensor-model-parallel-size (1) does not divide the 8 processes; "
            "give 1, 2, 4 or 8.\n"
            "--expert-model-parallel-size 3: times --expert-tensor-parallel-size (1) does not divide the 8 processes; "
            "give 1, 2, 4 or 8.",
        ),
    ],
)
def test_a_layout_that_cannot_work_is_refused_with_those_that_can(
    sizes: dict[str, int], message: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        ParallelLayout(world_size=8, **sizes)
    assert str(raised.value) == message
