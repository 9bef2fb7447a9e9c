"""Facts of a checkpoint that a resumed run needs before it opens its data.

These are the options of its packs and schedule, the limit on documents per pack, and the phases.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_packed.checkpoint.errors import CheckpointMismatchError
from megatron_packed.checkpoint.rank_agreement import Ranks
from megatron_packed.checkpoint.run_metadata import (
    NO_HASHES,
    PHASES,
    DataHashes,
    Metadata,
    Phase,
    RunProgress,
    holds_only_weights,
    metadata_problem,
    packs_per_step_of,
    phases_of,
    progress_of,
)
from megatron_packed.config.resumed_options import (
    packs_as_stored,
    room_of,
    schedule_as_stored,
    takes_schedule,
)
from megatron_packed.config.run import RunConfig
from megatron_packed.data.packing.pack_plan import PackPlan
from megatron_packed.distributed.groups import ParallelGroups

_LOOKED_AT = 4_000_000
"""Largest number of documents that are packed to find the largest remaining pack.

Packing this number takes about ten seconds.
"""
_READ = ("config", "plan_hash", *DataHashes._fields, "progress", "room", PHASES)


@dataclass(frozen=True, kw_only=True)
class Resumed:
    """Packs of a checkpoint's run, and the position in them."""

    room: int | str | None
    """Limit on documents per pack (`Packer.room`); `AUTO`: the largest number in epoch 0."""
    plan_hash: str
    packs_per_step: int
    progress: RunProgress
    """Progress of the checkpoint's run."""
    hashes: DataHashes = NO_HASHES
    """Hashes of the data of the checkpoint's run."""
    micro_batch_size: int = 1
    phases: tuple[Phase, ...] = ()
    """Phases of the run, the current one last; a phase that this run begins is included."""
    begins: bool = False
    """True if this run begins a phase."""
    imported: bool = False
    """True if another program trained the checkpoint, which has no packs."""

    @classmethod
    def from_metadata(cls, metadata: Metadata, phase: str | None = None) -> Resumed:
        """Build the object from a checkpoint's metadata, which has been validated.

        Args:
            metadata: metadata of the checkpoint.
            phase: name of ``--begin-phase``.
        """
        progress, phases = progress_of(metadata), phases_of(metadata)
        begins = phase is not None and phase not in [last.name for last in phases[-1:]]
        if phase is not None and begins:
            phases += (Phase(phase, progress.iteration),)
        return cls(
            room=metadata["room"] if "room" in metadata else room_of(metadata["config"]),
            plan_hash=metadata["plan_hash"],
            hashes=DataHashes.from_metadata(metadata),
            packs_per_step=packs_per_step_of(metadata),
            micro_batch_size=metadata["config"].get("packing", {}).get("micro_batch_size", 1),
            progress=progress,
            phases=phases,
            begins=begins,
            imported="packing" not in metadata["config"],
        )

    @property
    def has_new_packs(self) -> bool:
        """True if this run does not continue the packs of the checkpoint."""
        return self.begins or self.imported

    @property
    def phase_start(self) -> int:
        """Steps of the run before its current phase."""
        return self.phases[-1].iteration if self.phases else 0

    def is_of(self, plan: PackPlan) -> bool:
        """Return True if the checkpoint's position refers to this plan."""
        return self.plan_hash in (plan.hash, plan.hash_with(self.packs_per_step))

    def progress_in(
        self, config: Mapping[str, Any], plan: PackPlan | None, hashes: DataHashes
    ) -> RunProgress:
        """Return the progress with which this run continues.

        A new phase has its own lowest validation loss, and so has a run that validates on other
        documents. A phase begins its plan at the first pack, except
        if neither data nor packs change: then it continues with the next pack.

        Args:
            config: configuration of this run, in the form of `serialise.to_dict`.
            plan: plan of its training data.
            hashes: hashes of its data.
        """
        done = self.progress
        # The mean over other documents is no measure of progress.
        if not self.begins:
            return done.without_best() if hashes.validates_otherwise(self.hashes) else done
        begun = replace(done.without_best(), validated_at=done.iteration)
        data_and_batch = (hashes.data_hash, config["packing"]["micro_batch_size"])
        same_data = data_and_batch == (self.hashes.data_hash, self.micro_batch_size)
        if plan is not None and self.is_of(plan) and same_data:
            return begun
        samples = done.samples(self.micro_batch_size)
        return replace(begun, plan_packs=done.consumed_packs, plan_samples=samples)

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
            config.last_iteration(self.progress.samples_ahead(config.packing))
            - self.progress.iteration
        )
        # If the packs have a limit within the largest capacity, all of them fit, and no epoch needs
        # to be packed.
        if min(limits, default=largest + 1) <= largest or steps <= 0:
            return
        looked_at = 0
        first = self.progress.consumed_packs - self.progress.plan_packs
        for packs in plan.epochs_of(first, first + steps * plan.packs_per_step):
            yield packs.documents_per_pack
            looked_at += packs.order.size
            if looked_at > _LOOKED_AT:
                return


def begun_phase(options: Mapping[str, Any]) -> str | None:
    """Return ``--begin-phase`` of options in the form of `serialise.to_dict`."""
    name: str | None = options.get("checkpoint", {}).get("begin_phase")
    return name


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
    from megatron_packed.checkpoint.load import newest_metadata

    # Only rank 0 reads, because on a shared file system the folder may look different on each
    # machine.
    metadata = newest_metadata(
        options.load,
        _READ,
        ranks=Ranks.from_groups(groups),
        step=options.ckpt_step,
        problem=metadata_problem,
    )
    # The load refuses to resume from converted weights.
    if metadata is None or holds_only_weights(metadata):
        return config, None, []
    stored, lines = metadata["config"], []
    resumed = Resumed.from_metadata(metadata, options.begin_phase)
    config, flags = (config, []) if resumed.has_new_packs else packs_as_stored(config, stored)
    if flags:
        lines.append(
            f"options taken from the checkpoint, so that packs do not change: {' '.join(flags)}"
        )
    if takes_schedule(config):
        if "optim" not in stored:
            raise CheckpointMismatchError(
                "has no schedule; leave out --use-checkpoint-opt_param-scheduler, and give the "
                "flags of the schedule",
                path=options.load,
            )
        config, changed = schedule_as_stored(config, stored)
        if changed:
            lines.append(f"schedule of the checkpoint: {'; '.join(changed)}")
    return config, resumed, lines
