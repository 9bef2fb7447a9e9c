"""The two runs of a resume: the run that saved a checkpoint, and the run that continues from it.

Options of packs and schedule, the limit on documents per pack, and the phases are read before a
resumed run opens its data.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from megatron_packed.checkpoint.errors import CheckpointMismatchError
from megatron_packed.checkpoint.rank_agreement import ONE_PROCESS, Ranks
from megatron_packed.checkpoint.run_metadata import (
    ADAPTERS,
    NO_HASHES,
    PHASES,
    DataHashes,
    Metadata,
    Phase,
    RunProgress,
    metadata_problem,
)
from megatron_packed.config.options import Stored
from megatron_packed.config.resumed_options import (
    packs_as_stored,
    partition_as_stored,
    schedule_as_stored,
    sums_as_stored,
    takes_schedule,
    with_implied,
)
from megatron_packed.config.run import RunConfig, unchecked_stored
from megatron_packed.config.serialise import changed_options, restoring_words, to_dict
from megatron_packed.data.packing.pack_plan import PackPlan
from megatron_packed.distributed.groups import ParallelGroups

COMPARED = ("config", "plan_hash", *DataHashes._fields, "progress", "room", PHASES, ADAPTERS)
"""Keys of the metadata that `Resumed` needs."""


@dataclass(frozen=True, kw_only=True, eq=False)
class AskedRun:
    """Run that may start from a checkpoint, as far as the two are compared."""

    config: RunConfig
    vocab_size: int = 0
    """Vocabulary of the tokenizer; 0 if it is unknown."""
    plan: PackPlan | None = None
    """Order of the packs; None without data."""
    hashes: DataHashes = NO_HASHES
    """Hashes of the data."""
    planned: Resumed | None = None
    """The checkpoint for which the data was planned; None if nothing is resumed."""
    changed_files: str = ""
    """Clause about files that options name and whose content has changed; empty without any."""

    @cached_property
    def options(self) -> dict[str, dict[str, Any]]:
        """The configuration as a JSON object, as checkpoints store it."""
        return to_dict(self.config)

    def changes(self, stored: Stored, keys: Collection[str]) -> tuple[str, str]:
        """Return the changed ones of some options, and the cure that restores them; empty without any.

        Args:
            stored: configuration of the checkpoint.
            keys: sections or single options.
        """
        both = (stored, self.options)
        return "; ".join(changed_options(*both, keys)), restoring_words(*both, keys)


@dataclass(frozen=True, eq=False)
class Resumed:
    """Checkpoint from which a run continues: its configuration, and the position in its packs.

    Args:
        metadata: valid metadata of the checkpoint, with the keys `COMPARED`.
        phase: name of ``--begin-phase``.
    """

    metadata: Metadata
    phase: str | None = None

    @property
    def options(self) -> Stored:
        """Configuration of the checkpoint's run."""
        options: Stored = self.metadata["config"]
        return options

    @cached_property
    def config(self) -> RunConfig:
        """The configuration, unchecked; options that it lacks have defaults."""
        return unchecked_stored(with_implied(self.options))

    @property
    def imported(self) -> bool:
        """True if another program trained the checkpoint, which has no packs."""
        return "packing" not in self.options

    @property
    def untrained(self) -> bool:
        """True for converted weights, which no run can continue."""
        return self.imported and "iteration" not in self.metadata["progress"]

    @property
    def packs_per_step(self) -> int:
        return 0 if self.imported else self.config.packs_per_step()

    @cached_property
    def progress(self) -> RunProgress:
        """Progress of the checkpoint's run."""
        saved = self.metadata["progress"]
        # Older checkpoints do not count packs; all steps of their runs had the same number of packs.
        packs = saved.get("iteration", 0) * self.packs_per_step
        return RunProgress(**{"consumed_packs": packs, **saved})

    @property
    def samples(self) -> int:
        """Samples that the checkpoint's run has trained on."""
        return self.progress.samples(self.config.packing.micro_batch_size)

    @property
    def hashes(self) -> DataHashes:
        """Hashes of the data of the checkpoint's run."""
        return DataHashes.from_metadata(self.metadata)

    @property
    def room(self) -> int | str | None:
        """Limit on documents per pack (`Packer.room`); `AUTO`: the largest number in epoch 0."""
        room: int | str | None = self.metadata.get("room", self.config.room)
        return room

    @cached_property
    def phases(self) -> tuple[Phase, ...]:
        """Phases of the run, the current one last; a phase that this run begins is included."""
        phases = tuple(Phase(**phase) for phase in self.metadata.get(PHASES, ()))
        if self.phase is None or self.phase in [phase.name for phase in phases[-1:]]:
            return phases
        return (*phases, Phase(self.phase, self.progress.iteration))

    @property
    def begins(self) -> bool:
        """True if this run begins a phase."""
        return len(self.phases) > len(self.metadata.get(PHASES, ()))

    @property
    def has_new_packs(self) -> bool:
        """True if this run does not continue the packs of the checkpoint."""
        return self.begins or self.imported

    @property
    def phase_start(self) -> int:
        """Steps of the run before its current phase."""
        return self.phases[-1].iteration if self.phases else 0

    def is_of(self, plan: PackPlan | None) -> bool:
        """Return True if the checkpoint's position refers to this plan, or to none."""
        hashes = ("",) if plan is None else (plan.hash, plan.hash_with(self.packs_per_step))
        return self.metadata["plan_hash"] in hashes

    def progress_in(
        self, config: RunConfig, plan: PackPlan | None, hashes: DataHashes
    ) -> RunProgress:
        """Return the progress with which this run continues.

        A new phase has its own lowest validation loss, and so has a run that validates on other
        documents. A phase begins its plan at the first pack, except
        if neither data nor packs change: then it continues with the next pack.

        Args:
            config: configuration of this run.
            plan: plan of its training data.
            hashes: hashes of its data.
        """
        done = self.progress
        # The mean over other documents is no measure of progress.
        if not self.begins:
            return done.without_best() if hashes.validates_otherwise(self.hashes) else done
        begun = replace(done.without_best(), validated_at=done.iteration)
        same_batch = config.packing.micro_batch_size == self.config.packing.micro_batch_size
        same_data = hashes.data_hash == self.hashes.data_hash and same_batch
        if plan is not None and self.is_of(plan) and same_data:
            return begun
        return replace(begun, plan_packs=done.consumed_packs, plan_samples=self.samples)


def resumed_options(
    config: RunConfig, groups: ParallelGroups
) -> tuple[RunConfig, Resumed | None, list[str]]:
    """Return the configuration with the options of packs and sums, and if requested the schedule, of
    the checkpoint that the run resumes.

    A collective: rank 0 reads the manifest, and all ranks take the same decision. The later load
    handles damaged checkpoints and checkpoints of other runs.

    Returns:
        The configuration; the packs of the checkpoint, None for a new run; lines for the console
        about options that come from the checkpoint.
    Raises:
        CheckpointError: the checkpoint's metadata is invalid.
        ConfigError: the schedule of the checkpoint does not fit the other options.
    """
    resumed = checkpoint_to_resume(config, groups)
    if resumed is None:
        return config, None, []
    config, lines = continued_options(config, resumed, groups.world_size)
    return config, resumed, lines


def checkpoint_to_resume(config: RunConfig, groups: ParallelGroups | None = None) -> Resumed | None:
    """Return the newest checkpoint that the run continues; None for a new run.

    A collective of ``groups``. A program that only inspects a run passes None, and reads it alone.

    Raises:
        CheckpointError: the checkpoint's metadata is invalid.
    """
    options = config.checkpoint
    if options.load is None or not options.resumes:
        return None
    from megatron_packed.checkpoint.load import newest_metadata

    # Only rank 0 reads, because on a shared file system the folder may look different on each
    # machine.
    metadata = newest_metadata(
        options.load,
        COMPARED,
        ranks=ONE_PROCESS if groups is None else Ranks.from_groups(groups),
        step=options.ckpt_step,
        problem=metadata_problem,
    )
    # The load refuses to resume from converted weights.
    if metadata is None or (resumed := Resumed(metadata, options.begin_phase)).untrained:
        return None
    return resumed


def continued_options(
    config: RunConfig, resumed: Resumed, processes: int
) -> tuple[RunConfig, list[str]]:
    """Return the configuration with which a run of ``processes`` continues a checkpoint, and lines
    about the options that come from it.

    Raises:
        CheckpointError: the checkpoint has no schedule, which the run requests.
        ConfigError: the schedule of the checkpoint does not fit the other options.
    """
    config, flags, unfit = sums_as_stored(config, resumed.options, processes)
    lines = [
        f"options taken from the checkpoint, so that sums keep their order: {' '.join(flags)}"
    ] * bool(flags)
    lines += [
        f"options of the checkpoint that do not fit this run: {' '.join(unfit)}; sums are added "
        "in another order"
    ] * bool(unfit)
    config, flags = partition_as_stored(config, resumed.options)
    if not resumed.has_new_packs:
        config, of_packs = packs_as_stored(config, resumed.options)
        flags += of_packs
    if flags:
        lines.append(
            f"options taken from the checkpoint, so that packs do not change: {' '.join(flags)}"
        )
    if takes_schedule(config):
        if "optim" not in resumed.options:
            raise CheckpointMismatchError(
                "has no schedule; leave out --use-checkpoint-opt_param-scheduler, and give the "
                "flags of the schedule",
                path=config.checkpoint.load,
            )
        config, changed = schedule_as_stored(config, resumed.options)
        if changed:
            lines.append(f"schedule of the checkpoint: {'; '.join(changed)}")
    return config, lines
