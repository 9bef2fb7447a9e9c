"""Which ranks form which groups: the arithmetic of a parallel layout, for any world, without torch.

Every rank has a place in two grids over the same world. Dense layers see ``DP x CP x TP``, expert
layers see ``expert DP x EP x expert TP``; the last axis runs fastest, so tensor-parallel ranks are
neighbours, on one machine if it is large enough. This is Megatron's order ``tp-cp-ep-dp``, and its
folding: ``TP x CP x DP = expert TP x EP x expert DP = world size``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Literal

from megatron_packed.config.errors import ConfigError, Problem

Axis = Literal["tp", "cp", "tp_cp", "dp", "dp_cp", "ep", "expert_tp", "expert_tp_ep", "expert_dp"]

DENSE_AXES: tuple[Axis, ...] = ("dp", "cp", "tp")
EXPERT_AXES: tuple[Axis, ...] = ("expert_dp", "ep", "expert_tp")
"""Axes of the two grids, slowest first."""

GROUP_AXES: dict[Axis, tuple[Axis, ...]] = {
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
"""Every kind of group: the axes of one grid along which its ranks differ."""


@dataclass(frozen=True, kw_only=True)
class ParallelLayout:
    """Sizes by which the ranks of a world share a model.

    Example:
        8 ranks with ``tp_size=2, ep_size=2, expert_tp_size=1``: the tensor-parallel group of rank 5
        is ``(4, 5)``, its data-parallel group ``(1, 3, 5, 7)``, its expert-parallel group ``(4,
        5)``, its expert-data-parallel group ``(1, 3, 5, 7)``.

    Raises:
        ConfigError: such a layout does not exist; it names the sizes that do.
    """

    world_size: int = 1
    tp_size: int = 1
    cp_size: int = 1
    ep_size: int = 1
    expert_tp_size: int | None = None
    """``None`` takes ``tp_size``."""

    def __post_init__(self) -> None:
        found = list(
            layout_problems(
                self.world_size,
                tp_size=self.tp_size,
                cp_size=self.cp_size,
                ep_size=self.ep_size,
                expert_tp_size=self.expert_tp_size,
            )
        )
        if found:
            raise ConfigError(found)
        if self.expert_tp_size is None:
            object.__setattr__(self, "expert_tp_size", self.tp_size)

    @property
    def dp_size(self) -> int:
        """Replicas of the dense layers: ranks that train on different packs."""
        return self.world_size // (self.tp_size * self.cp_size)

    @property
    def expert_dp_size(self) -> int:
        """Replicas of each expert."""
        return self.world_size // (self._expert_tp_size * self.ep_size)

    @property
    def _expert_tp_size(self) -> int:
        assert self.expert_tp_size is not None  # set in __post_init__
        return self.expert_tp_size

    def size(self, axis: Axis) -> int:
        """Ranks in a group of this kind."""
        return prod(self._grid(axis)[name] for name in GROUP_AXES[axis])

    def rank_in(self, axis: Axis, rank: int) -> int:
        """Place of global ``rank`` in its group of this kind, from 0."""
        return self.ranks(axis, rank).index(rank)

    def ranks(self, axis: Axis, rank: int) -> tuple[int, ...]:
        """Global ranks of the group of this kind that ``rank`` belongs to, ascending."""
        members, stride = [0], 1
        for name, size in reversed(self._grid(axis).items()):
            place = rank // stride % size
            places = range(size) if name in GROUP_AXES[axis] else (place,)
            members = [stride * p + member for p in places for member in members]
            stride *= size
        return tuple(members)

    def groups(self, axis: Axis) -> list[tuple[int, ...]]:
        """All groups of this kind, by their first rank: every rank is in exactly one."""
        return sorted({self.ranks(axis, rank) for rank in range(self.world_size)})

    def _grid(self, axis: Axis) -> dict[Axis, int]:
        """Sizes of the grid that ``axis`` belongs to, slowest first."""
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
) -> Iterator[Problem]:
    """Why these sizes are no layout of ``world_size`` processes, each with the sizes that would do."""
    given = {
        "WORLD_SIZE": world_size,
        "--tensor-model-parallel-size": tp_size,
        "--context-parallel-size": cp_size,
        "--expert-model-parallel-size": ep_size,
        "--expert-tensor-parallel-size": 1 if expert_tp_size is None else expert_tp_size,
    }
    too_small = [name for name, size in given.items() if size < 1]
    if too_small:
        for name in too_small:
            yield Problem(name, str(given[name]), "there is no such size", "give 1 or more")
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
    if expert_tp not in (1, tp):
        yield Problem(
            "--expert-tensor-parallel-size",
            str(expert_tp),
            f"is neither 1 nor --tensor-model-parallel-size ({tp})",
            f"give {_either({1, tp})}",
        )
    elif world_size % expert_tp == 0 and world_size % (expert_tp * ep):
        yield Problem(
            "--expert-model-parallel-size",
            str(ep),
            f"{_times(expert_tp, '--expert-tensor-parallel-size')} "
            f"does not divide the {world_size} processes",
            _choose(world_size // expert_tp),
        )


def _times(factor: int, option: str) -> str:
    return f"times {option} ({factor})"


def _choose(number: int) -> str:
    """A cure that lists the divisors of ``number``."""
    divisors = [size for size in range(1, number + 1) if number % size == 0]
    if len(divisors) == 1:
        return "give 1, or start more processes"
    return f"give {_either(divisors)}"


def _either(sizes: Iterable[int]) -> str:
    """``1, 2 or 4``"""
    *first, last = sorted(sizes)
    return f"{', '.join(map(str, first))} or {last}" if first else str(last)
