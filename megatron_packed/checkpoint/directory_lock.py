"""A run's hold on the directory of its checkpoints, from before its first step.

Without it, a directory that cannot be written would be found out at the first save, hours later,
and two runs with one ``--save`` would publish their checkpoints in turns: each save is whole, and
the newest is of either run.
"""

from __future__ import annotations

import os
import time
from contextlib import closing, suppress
from pathlib import Path

import torch.distributed as dist

from megatron_packed.checkpoint.directory import RUN_LOCK, RootLock, remove_leftovers
from megatron_packed.checkpoint.errors import CheckpointError
from megatron_packed.checkpoint.rank_agreement import Ranks, on_rank_0


def claim_directory(
    root: str | os.PathLike[str],
    *,
    rank: int = 0,
    world_size: int = 1,
    group: dist.ProcessGroup | None = None,
    patience: float = 5.0,
) -> RootLock | None:
    """Make ``root`` if it is missing and keep other runs out of it until this process ends; a
    collective of all ranks.

    What dead saves left there is removed. A file system without locks keeps no run out, and keeps
    leftovers.

    Args:
        patience: seconds that a run waits for the one before it: a killed process lets go only when
        it is gone.
    Returns:
        What rank 0 holds; None elsewhere.
    Raises:
        CheckpointError: on all ranks: the directory cannot be written, or another run is at work in
            it.
    """
    held: list[RootLock] = []
    Ranks(rank=rank, world_size=world_size, group=group).agree(
        on_rank_0(rank, lambda: held.append(_lock(Path(root), patience))),
        f"preparing {root} for checkpoints",
        cure="nothing was trained",
    )
    return held[0] if held else None


def _lock(root: Path, patience: float) -> RootLock:
    root.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + patience
    while True:
        try:
            lock = RootLock(root, RUN_LOCK)
            break
        except CheckpointError:
            if time.monotonic() >= deadline:
                raise
        time.sleep(0.1)
    with (
        suppress(CheckpointError),
        closing(RootLock(root)) as saving,
    ):  # a tool that saves here cleans up itself
        if saving.warning is None:
            remove_leftovers(root)
    return lock
