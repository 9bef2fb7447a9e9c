"""Folder of checkpoints and log of a run, claimed before its data is read.

A run replaces no checkpoint and no log of another run. Two runs that write at once are excluded by
locks.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from megatron_packed.checkpoint.directory import RootLock, claim_directory, scan
from megatron_packed.checkpoint.errors import CheckpointError
from megatron_packed.checkpoint.rank_agreement import Ranks
from megatron_packed.config.run import RunConfig
from megatron_packed.config.sections.checkpoint import CheckpointConfig
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.reporting.log_file import LogFile, RunIdentity
from megatron_packed.training.failures import StatusFolder


class ClaimedOutputs:
    """Folder of checkpoints and log that this run has locked.

    Both are locked until `release` or the end of the process.
    """

    def __init__(self) -> None:
        self.lock: RootLock | None = None
        """Rank 0's lock on the folder of checkpoints."""
        self.status_folder: StatusFolder | None = None
        """The folder of checkpoints. None until this run may write ``STATUS.json`` there, since it
        must not replace another run's status."""
        self.log: LogFile | None = None
        """The file of ``--log-jsonl``, on rank 0."""

    def claim(self, config: RunConfig, groups: ParallelGroups) -> None:
        """Lock the folder and the log; a collective of all ranks.

        This also detects a folder that cannot be written or that the machines do not share.

        Raises:
            CheckpointError: on all ranks: the folder cannot be used, another run writes to it, or
                it has checkpoints of another run.
            ConfigError: on rank 0: the log belongs to another run, or another run writes it.
        """
        options = config.checkpoint
        if options.save is not None:
            self._claim_folder(options, groups)
        if groups.rank == 0 and config.logging.log_jsonl is not None:
            self.log = LogFile(config.logging.log_jsonl)
            # The id of a run that resumes is known after the load; `LogFile.begin` compares it.
            self.log.refuse(RunIdentity.from_config("", config), partial(resumable_runs, options))

    def _claim_folder(self, options: CheckpointConfig, groups: ParallelGroups) -> None:
        assert options.save is not None
        ranks = Ranks.from_groups(groups)
        # The lock comes first: another run could save between the check and the lock.
        self.lock = claim_directory(options.save, ranks=ranks)
        agree = partial(
            ranks.agree_with_rank_0,
            what=f"preparing {options.save} for checkpoints",
            cure="training did not start",
        )
        agree(lambda: refuse_other_runs(options))
        # Only now: the STATUS.json of another run must stay.
        folder = StatusFolder(options.save)
        try:
            # When all ranks agree, the old status is gone, and any rank may write a new one.
            agree(folder.clear)
        except CheckpointError:
            folder.close()
            raise
        self.status_folder = folder

    def release(self) -> None:
        """Let other runs of this process use the folder and the log."""
        if self.status_folder is not None:
            self.status_folder.close()
        if self.lock is not None:
            self.lock.close()
        if self.log is not None:
            self.log.close()
        self.status_folder = self.lock = self.log = None


def resumable_runs(options: CheckpointConfig) -> set[str]:
    """Return the ids of the runs that these options may resume.

    Raises:
        CheckpointError: the folder in ``--load`` cannot be listed.
    """
    if options.load is None or options.finetune:
        return set()
    manifests = (candidate.manifest for candidate in scan(Path(options.load)))
    return {manifest.run_id for manifest in manifests if manifest is not None}


def refuse_other_runs(options: CheckpointConfig) -> None:
    """Check that the folder of ``--save`` has no checkpoints of another run.

    The run would replace those of the same steps. The folder that ``--load`` names is allowed.

    Raises:
        CheckpointError: the folder has such checkpoints, or cannot be listed.
    """
    if options.save is None or options.saves_where_it_loads:
        return
    run_ids = resumable_runs(options)
    others = [
        candidate.path.name
        for candidate in scan(Path(options.save))
        if candidate.manifest is None or candidate.manifest.run_id not in run_ids
    ]
    if others:
        raise CheckpointError(
            "another run has saved here, and this run would replace its checkpoints",
            path=options.save,
            expected="a folder without checkpoints, or that of --load",
            found=f"{len(others):,} of them, the newest {others[0]}",
            cure=f"add --load {options.save} to resume that run (with --finetune to begin a new one "
            "from its weights), or give --save another folder",
        )
