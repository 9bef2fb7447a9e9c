"""Process groups of a parallel layout: which ranks belong to each group, computed for any world
size without torch.

Every rank has a place in two grids over the same world. Dense layers use ``DP x CP x TP``, expert
layers ``expert DP x EP x expert TP``. The last axis varies fastest, so tensor-parallel ranks are
neighbours, on one machine if it is large enough. This is Megatron's order ``tp-cp-ep-dp`` and its
folding: ``TP x CP x DP = expert TP x EP x expert DP = world size``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Literal

from megatron_packed.config.errors import ConfigError, Problem, Problems

AxisName = Literal[
    "tp", "cp", "tp_cp", "dp", "dp_cp", "ep", "expert_tp", "expert_tp_ep", "expert_dp"
]

DENSE_AXES: tuple[AxisName, ...] = ("dp", "cp", "tp")
EXPERT_AXES: tuple[AxisName, ...] = ("expert_dp", "ep", "expert_tp")
"""Axes of the expert grid, slowest first; `DENSE_AXES` are the axes of the dense grid."""

GROUP_AXES: dict[AxisName, tuple[AxisName, ...]] = {
    "tp": ("tp",),
    "cp": ("cp",),
    "tp_cp": ("cp", "tp"),
    "dp": ("dp",),
    "dp_cp": ("dp", "cp"),
    "ep": ("ep",),
    "expert_tp": ("expert_tp",),
    "expert_tp_ep": ("ep", "expert_tp"),
    "expert_dp": ("expert_dp",),
}
"""Axes along which the ranks of each kind of group differ."""


@dataclass(frozen=True, kw_only=True)
class ParallelLayout:
    """Sizes of the parallel axes of a model, with the groups of ranks that follow from them.

    Example:
        8 ranks with ``tp_size=2, ep_size=2, expert_tp_size=1``: the tensor-parallel group of rank 5
        is ``(4, 5)``, its data-parallel group ``(1, 3, 5, 7)``, its expert-parallel group ``(4,
        5)``, its expert-data-parallel group ``(1, 3, 5, 7)``.

    Raises:
        ConfigError: the sizes form no layout; the error lists sizes that do.
    """

    world_size: int = 1
    tp_size: int = 1
    cp_size: int = 1
    ep_size: int = 1
    expert_tp_size: int | None = None
    """Tensor-parallel size of the experts; ``None`` means ``tp_size``."""

    def __post_init__(self) -> None:
        problems = list(
            layout_problems(
                self.world_size,
                tp_size=self.tp_size,
                cp_size=self.cp_size,
                ep_size=self.ep_size,
                expert_tp_size=self.expert_tp_size,
            )
        )
        if problems:
            raise ConfigError(problems)
        if self.expert_tp_size is None:
            object.__setattr__(self, "expert_tp_size", self.tp_size)

    @property
    def dp_size(self) -> int:
        """Number of replicas of the dense layers; each trains on different packs."""
        return self.world_size // (self.tp_size * self.cp_size)

    @property
    def expert_dp_size(self) -> int:
        """Number of replicas of each expert."""
        return self.world_size // (self._expert_tp_size * self.ep_size)

    @property
    def _expert_tp_size(self) -> int:
        assert self.expert_tp_size is not None  # set in __post_init__
        return self.expert_tp_size

    def size(self, axis: AxisName) -> int:
        """Return the number of ranks in a group of this kind."""
        return prod(self._grid(axis)[name] for name in GROUP_AXES[axis])

    def rank_in(self, axis: AxisName, rank: int) -> int:
        """Return the index, from 0, of global ``rank`` in its group of this kind."""
        return self.ranks(axis, rank).index(rank)

    def ranks(self, axis: AxisName, rank: int) -> tuple[int, ...]:
        """Return the global ranks, in ascending order, of the group of this kind that contains
        ``rank``.
        """
        members, stride = [0], 1
        for name, size in reversed(self._grid(axis).items()):
            place = rank // stride % size
            places = range(size) if name in GROUP_AXES[axis] else (place,)
            members = [stride * p + member for p in places for member in members]
            stride *= size
        return tuple(members)

    def groups(self, axis: AxisName) -> list[tuple[int, ...]]:
        """Return all groups of this kind, ordered by their first rank; every rank is in exactly one
        group.
        """
        return sorted({self.ranks(axis, rank) for rank in range(self.world_size)})

    def _grid(self, axis: AxisName) -> dict[AxisName, int]:
        """Return the sizes of the grid that contains ``axis``, slowest first."""
        if GROUP_AXES[axis][0] in DENSE_AXES:
            return {"dp": self.dp_size, "cp": self.cp_size, "tp": self.tp_size}
        return {
            "expert_dp": self.expert_dp_size,
            "ep": self.ep_size,
            "expert_tp": self._expert_tp_size,
        }


def layout_problems(
    world_size: int,
    *,
    tp_size: int = 1,
    cp_size: int = 1,
    ep_size: int = 1,
    expert_tp_size: int | None = None,
) -> Problems:
    """Yield the problems that prevent these sizes from forming a layout of ``world_size``
    processes.

    Each problem lists the sizes that would fit.
    """
    sizes = {
        "WORLD_SIZE": world_size,
        "--tensor-model-parallel-size": tp_size,
        "--context-parallel-size": cp_size,
        "--expert-model-parallel-size": ep_size,
        "--expert-tensor-parallel-size": 1 if expert_tp_size is None else expert_tp_size,
    }
    too_small = [name for name, size in sizes.items() if size < 1]
    if too_small:
        for name in too_small:
            yield Problem(name, str(sizes[name]), "must be at least 1", "give 1 or more")
        return
    tp, cp, ep = tp_size, cp_size, ep_size
    expert_tp = tp if expert_tp_size is None else expert_tp_size
    if world_size % tp:
        yield Problem(
            "--tensor-model-parallel-size",
            str(tp),
            f"does not divide the {world_size} processes",
            _choose(world_size),
        )
    elif world_size % (tp * cp):
        yield Problem(
            "--context-parallel-size",
            str(cp),
            f"{_times(tp, '--tensor-model-parallel-size')} does not "
            f"divide the {world_size} processes",
            _choose(world_size // tp),
        )
    if tp % expert_tp:
        yield Problem(
            "--expert-tensor-parallel-size",
            str(expert_tp),
            f"does not divide --tensor-model-parallel-size ({tp})",
            f"give {_either(size for size in range(1, tp + 1) if tp % size == 0)}",
        )
    elif world_size % expert_tp == 0 and world_size % (expert_tp * ep):
        yield Problem(
            "--expert-model-parallel-size",
            str(ep),
            f"{_times(expert_tp, '--expert-tensor-parallel-size')} "
            f"does not divide the {world_size} processes",
            _choose(world_size // expert_tp) + _smaller_expert_tp(world_size, tp, ep, expert_tp),
        )


def _smaller_expert_tp(world_size: int, tp: int, ep: int, expert_tp: int) -> str:
    """Return the largest smaller expert tensor-parallel size that fits, as a further cure."""
    fits = [
        size for size in range(1, expert_tp) if tp % size == 0 and world_size % (size * ep) == 0
    ]
    return f", or give --expert-tensor-parallel-size {fits[-1]}" if fits else ""


def _times(factor: int, option: str) -> str:
    return f"times {option} ({factor})"


def _choose(number: int) -> str:
    """Return a cure that lists the divisors of ``number``."""
    divisors = [size for size in range(1, number + 1) if number % size == 0]
    if len(divisors) == 1:
        return "give 1, or start more processes"
    return f"give {_either(divisors)}"


def _either(sizes: Iterable[int]) -> str:
    """Return sizes as text, for example ``1, 2 or 4``."""
    *first, last = sorted(sizes)
    return f"{', '.join(map(str, first))} or {last}" if first else str(last)
