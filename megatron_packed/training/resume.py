"""Facts of a checkpoint that a resumed run needs before it opens its data.

These are the options of the checkpoint's packs and schedule, and the limit on documents per pack.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_packed.checkpoint.errors import CheckpointMismatchError
from megatron_packed.checkpoint.load import newest_metadata
from megatron_packed.config.resumed_options import packs_as_stored
from megatron_packed.config.resumed_schedule import schedule_as_stored, takes_schedule
from megatron_packed.config.run import RunConfig
from megatron_packed.config.sections.cuda_graph import AUTO
from megatron_packed.data.packing.pack_plan import PackPlan
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.training.checkpoint_metadata import (
    metadata_problem,
    packs_per_step_of,
    progress_of,
)

_LOOKED_AT = 4_000_000
"""Largest number of documents that are packed to find the largest remaining pack.

Packing this number takes about ten seconds.
"""
_READ = ("config", "plan_hash", "progress", "room")


@dataclass(frozen=True, kw_only=True)
class Resumed:
    """Packs of a checkpoint's run, and the position in them."""

    room: int | str | None
    """Limit on documents per pack (`Packer.room`); `AUTO`: the largest number in epoch 0."""
    plan_hash: str
    packs_per_step: int
    iteration: int
    consumed_packs: int

    @classmethod
    def of(cls, metadata: Mapping[str, Any]) -> Resumed:
        """Build the object from a checkpoint's metadata, which has been validated."""
        progress = progress_of(metadata)
        return cls(
            room=metadata["room"] if "room" in metadata else room_of(metadata["config"]),
            plan_hash=metadata["plan_hash"],
            packs_per_step=packs_per_step_of(metadata),
            iteration=progress.iteration,
            consumed_packs=progress.consumed_packs,
        )

    def is_of(self, plan: PackPlan) -> bool:
        """Return True if the checkpoint's position refers to this plan."""
        return self.plan_hash in (plan.hash, plan.hash_with(self.packs_per_step))

    def packs_to_come(
        self, config: RunConfig, plan: PackPlan, in_first: int
    ) -> Iterator[NDArray[np.int64]]:
        """Yield documents per pack of each remaining epoch, if packs may exceed the capacities.

        At most about `_LOOKED_AT` documents are packed. Later packs that exceed the capacities run
        eagerly and are counted.

        Args:
            config: configuration of the run.
            plan: plan of the training data.
            in_first: most documents of a pack of epoch 0.
        """
        # A resumed run must not change its packs, and a remaining epoch may have a pack with more
        # documents than epoch 0.
        largest = (config.cuda_graph.capacities or (in_first,))[-1]
        limits = [
            limit
            for limit in (plan.room, config.packing.max_documents_per_pack)
            if limit is not None
        ]
        steps = (
            config.last_iteration(self.consumed_packs - self.iteration * plan.packs_per_step)
            - self.iteration
        )
        # If the packs have a limit within the largest capacity, all of them fit, and no epoch needs
        # to be packed.
        if min(limits, default=largest + 1) <= largest or steps <= 0:
            return
        looked_at = 0
        for packs in plan.epochs_of(
            self.consumed_packs, self.consumed_packs + steps * plan.packs_per_step
        ):
            yield packs.documents_per_pack
            looked_at += packs.order.size
            if looked_at > _LOOKED_AT:
                return


def check_capacities(config: RunConfig, most: int) -> None:
    """Check that the given capacities hold the checkpoint's packs, which a resumed run keeps.

    Args:
        config: configuration of the run.
        most: most documents in a pack.
    Raises:
        CheckpointMismatchError: a pack has more documents than the largest capacity.
    """
    capacities = config.cuda_graph.capacities
    if capacities is not None and most > capacities[-1]:
        numbers = " ".join(map(str, (*capacities, most)))
        raise CheckpointMismatchError(
            f"give --cuda-graph-max-packed-seqs {numbers} (or auto) to resume with graphs: a resumed run keeps its "
            f"packs, which hold up to {most} documents, and the largest capacity is {capacities[-1]}",
            path=config.checkpoint.load,
        )


def room_of(options: Mapping[str, Any]) -> int | str | None:
    """Return `Resumed.room` of a new run with options in the form of `serialise.to_dict`."""
    graphs = options.get("cuda_graph", {})
    if (
        graphs.get("cuda_graph_impl", "none") == "none"
        or options["packing"].get("packing_method") != "balanced"
    ):
        return None
    return max(graphs.get("cuda_graph_max_packed_seqs") or (), default=AUTO)


def resumed_options(
    config: RunConfig, groups: ParallelGroups
) -> tuple[RunConfig, Resumed | None, list[str]]:
    """Return the configuration with the packing options, and if requested the schedule, of the
    checkpoint that the run resumes.

    A collective: rank 0 reads the manifest, and all ranks take the same decision. The later load
    handles damaged checkpoints and checkpoints of other runs.

    Returns:
        The configuration; the packs of the checkpoint, None for a new run; lines for the console
        about options that come from the checkpoint.
    Raises:
        CheckpointError: the checkpoint's metadata is invalid.
        ConfigError: the schedule of the checkpoint does not fit the other options.
    """
    options = config.checkpoint
    if options.load is None or options.finetune:
        return config, None, []
    # Only rank 0 reads, because on a shared file system the folder may look different on each
    # machine.
    metadata = newest_metadata(
        options.load,
        _READ,
        rank=groups.rank,
        world_size=groups.world_size,
        group=groups.world_group,
        step=options.ckpt_step,
        problem=metadata_problem,
    )
    # Converted weights have no packing options; the load refuses to resume from them.
    if metadata is None or "packing" not in metadata["config"]:
        return config, None, []
    stored, lines = metadata["config"], []
    config, flags = packs_as_stored(config, stored)
    if flags:
        lines.append(
            f"options taken from the checkpoint, so that packs do not change: {' '.join(flags)}"
        )
    if takes_schedule(config):
        config, changed = schedule_as_stored(config, stored)
        if changed:
            lines.append(f"schedule of the checkpoint: {'; '.join(changed)}")
    return config, Resumed.of(metadata), lines
