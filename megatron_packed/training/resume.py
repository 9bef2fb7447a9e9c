"""Facts of a checkpoint that a resumed run needs before its data is opened: options and room of its
packs.
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
"""Documents that the packs to come are looked at for, which takes some ten seconds."""
_READ = ("config", "plan_hash", "progress", "room")


@dataclass(frozen=True, kw_only=True)
class Resumed:
    """The packs of a checkpoint's run, and how far it was."""

    room: int | str | None
    """Documents that its packs keep to (`Packer.room`); `AUTO`: as many as the fullest pack of the
    first epoch has.
    """
    plan_hash: str
    packs_per_step: int
    iteration: int
    consumed_packs: int

    @classmethod
    def of(cls, metadata: Mapping[str, Any]) -> Resumed:
        """Read it from a checkpoint's metadata, which is sound."""
        progress = progress_of(metadata)
        return cls(
            room=metadata["room"] if "room" in metadata else room_of(metadata["config"]),
            plan_hash=metadata["plan_hash"],
            packs_per_step=packs_per_step_of(metadata),
            iteration=progress.iteration,
            consumed_packs=progress.consumed_packs,
        )

    def is_of(self, plan: PackPlan) -> bool:
        """Return whether the checkpoint's position is one in this plan."""
        return self.plan_hash in (plan.hash, plan.hash_with(self.packs_per_step))

    def packs_to_come(
        self, config: RunConfig, plan: PackPlan, in_first: int
    ) -> Iterator[NDArray[np.int64]]:
        """Yield the documents of each pack of the epochs that are still trained on, if capacities
        may not hold them.

        No more than `_LOOKED_AT` documents are packed for it. Later packs that do not fit run
        eagerly, and are counted.

        Args:
            in_first: most documents of a pack of the first epoch.
        """
        # Packs stay as they are, and the first epoch may not have the fullest of those to come.
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
        # Packs that keep to a limit fit the largest capacity: no epoch has to be packed to know.
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
    """Compare given capacities with the most documents in a pack of the checkpoint, which stays as
    it is.

    Raises:
        CheckpointMismatchError: there is too little room.
    """
    capacities = config.cuda_graph.capacities
    if capacities is not None and most > capacities[-1]:
        numbers = " ".join(map(str, (*capacities, most)))
        raise CheckpointMismatchError(
            f"give --cuda-graph-max-packed-seqs {numbers} (or auto) to resume with graphs: packs stay as they are in "
            f"the checkpoint, where they hold up to {most} documents, and the largest capacity is {capacities[-1]}",
            path=config.checkpoint.load,
        )


def room_of(options: Mapping[str, Any]) -> int | str | None:
    """Return `Resumed.room` of a run that begins with these options (`serialise.to_dict`)."""
    graphs = options.get("cuda_graph", {})
    if (
        graphs.get("cuda_graph_impl", "none") == "none"
        or options["packing"].get("packing_method") != "balanced"
    ):
        return None
    return max(graphs.get("cuda_graph_max_packed_seqs") or (), default=AUTO)


def resumed_packs(
    config: RunConfig, groups: ParallelGroups
) -> tuple[RunConfig, Resumed | None, list[str]]:
    """Return the configuration with the packs of the checkpoint that the run goes on from, if there
    is one.

    A collective: rank 0 reads the manifest, and all ranks decide alike. Damaged checkpoints and
    those of other runs are left to the load.

    Returns:
        the configuration; what is known of the checkpoint, None in a run that begins; flags taken
        from there.
    Raises:
        CheckpointError: the checkpoint's metadata is not what a run writes.
    """
    options = config.checkpoint
    if options.load is None or options.finetune:
        return config, None, []
    # Rank 0 reads and all decide alike: a folder may look different on each machine.
    metadata = newest_metadata(
        options.load,
        _READ,
        rank=groups.rank,
        world_size=groups.world_size,
        group=groups.world_group,
        step=options.ckpt_step,
        problem=metadata_problem,
    )
    # Without packing these are converted weights, which the load refuses.
    if metadata is None or "packing" not in metadata["config"]:
        return config, None, []
    config, flags = packs_as_stored(config, metadata["config"])
    return config, Resumed.of(metadata), flags
