"""Saving of a checkpoint: each rank writes one file, and rank 0 publishes all files together.

[Note: commit protocol]

 1. Rank 0 checks that the lock file of the run is still in the root and takes the lock for saves.
    It removes files of killed saves and creates ``step_N.tmp-<id>/``.
 2. Each rank writes its file to that directory, with checksums of the bytes in memory. It syncs the
    file and the directory. Rank 0 also writes and syncs the attached files.
 3. Rank 0 gathers the records of all files and compares the file sizes with those that it sees. It
    writes ``manifest.json`` (temporary file, sync, rename) and syncs the directory, which is then
    complete.
 4. Rank 0 renames the directory to ``step_N``, which publishes the checkpoint. An older checkpoint
    of the same step is first renamed to ``step_N.replaced-<id>``, a name that a load still finds.
 5. Rank 0 syncs the root, reads the manifest back, compares the sizes again and writes the file
    ``latest``. Then it removes old checkpoints. Each is renamed before its deletion, so that a
    partly deleted directory never has a checkpoint's name.

After a crash of any rank at any point, the previous or the new checkpoint is complete.
"""

from __future__ import annotations

import json
import os
import shutil
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import torch.distributed as dist
from torch import Tensor

from megatron_packed.checkpoint.directory import (
    LATEST,
    RootLock,
    check_sizes,
    remove_checkpoint,
    remove_leftovers,
    scan,
    step_name,
    temporary_name,
    write_durably,
)
from megatron_packed.checkpoint.errors import CheckpointError
from megatron_packed.checkpoint.latest_hint import encode_hint, read_hint
from megatron_packed.checkpoint.manifest import (
    MANIFEST,
    MAX_ATTACHED_BYTES,
    AttachedFile,
    FileRecord,
    Manifest,
    encode_extent,
    encode_manifest,
    header_metadata,
    merge_tensors,
    read_manifest,
)
from megatron_packed.checkpoint.rank_agreement import Ranks
from megatron_packed.checkpoint.retention import superseded
from megatron_packed.checkpoint.sealed_json import Json, JsonFields
from megatron_packed.checkpoint.shard_file import write_shard_file
from megatron_packed.checkpoint.tensor_shard import DTYPE_NAMES, TensorShard
from megatron_packed.files.regular_files import StrPath
from megatron_packed.files.written_files import sync_path


@dataclass(frozen=True, kw_only=True)
class SavedCheckpoint:
    """Description of a published checkpoint."""

    path: Path
    step: int
    sequence: int
    num_bytes: int
    seconds: float
    removed: tuple[str, ...]
    """Names of older checkpoints that were removed."""
    warnings: tuple[str, ...]
    """Problems that did not prevent the save: a file system without locks, a damaged ``latest``, or
    an error when ``latest`` was written or an old checkpoint removed. The checkpoint is intact."""


def _no_fault(site: str) -> None:
    """Do nothing at a point of the protocol; default of ``on_site``."""


def save_checkpoint(
    root: StrPath,
    step: int,
    shards: Sequence[TensorShard],
    metadata: JsonFields,
    *,
    rank: int = 0,
    world_size: int = 1,
    group: dist.ProcessGroup | None = None,
    run_id: str = "run",
    config_hash: str = "",
    keep_last: int | None = None,
    keep_every: int | None = None,
    keep_step: int | None = None,
    on_site: Callable[[str], None] = _no_fault,
    values: Callable[[TensorShard], Tensor] | None = None,
    run_lock: RootLock | None = None,
    attached: Mapping[str, str] | None = None,
) -> SavedCheckpoint:
    """Write and publish a checkpoint of ``step``; a collective of all ranks.

    When the function returns, the checkpoint is durable and published.

    Args:
        root: directory of the run's checkpoints, on a file system that all ranks share; created if
            missing.
        shards: ranges that this rank writes. All ranks together must write each element of each
            tensor exactly once (`split_replicated`).
        metadata: JSON object (configuration, position in the data, ...) that a load returns. The
            metadata of rank 0 is stored.
        run_id: identifier of the run. A save removes only old checkpoints of the same run, so a
            resumed run must pass the same identifier.
        config_hash: fingerprint of the configuration, stored in the manifest and in all files.
        keep_last: number of checkpoints of this run to keep, including the new one; None keeps all.
        keep_every: also keep checkpoints whose step is a multiple of this number.
        keep_step: also keep the checkpoint of this step.
        on_site: called with the name of each point in `SAVE_SITES` that is reached.
        values: returns the tensor of a shard when the shard is written. The shard's own tensor may
            then be on the meta device.
        run_lock: on rank 0, the result of `claim_directory`. The save fails if the lock file is no
            longer in ``root``.
        attached: texts that belong to the weights, by file name. Those of rank 0 are written.
    Raises:
        CheckpointError: the same on all ranks, with the failing rank and the path. Nothing was
            published unless the message reports a publication. The previous checkpoint is
            unchanged.
    """
    save = CheckpointSave(
        root=Path(root),
        step=step,
        metadata=metadata,
        run_id=run_id,
        config_hash=config_hash,
        keep_last=keep_last,
        keep_every=keep_every,
        keep_step=keep_step,
        ranks=Ranks(rank=rank, world_size=world_size, group=group),
        on_site=on_site,
        values=values,
        run_lock=run_lock,
        attached=dict(attached or {}),
    )
    return save.run(shards)


_NOTHING = "nothing was published, and the previous checkpoint is unchanged"


@dataclass(kw_only=True)
class CheckpointSave:
    """Part of one rank in one save. See [Note: commit protocol]."""

    root: Path
    step: int
    metadata: JsonFields
    run_id: str
    config_hash: str
    keep_last: int | None
    keep_every: int | None
    keep_step: int | None
    ranks: Ranks
    on_site: Callable[[str], None]
    values: Callable[[TensorShard], Tensor] | None = None
    run_lock: RootLock | None = None
    attached: Mapping[str, str] = field(default_factory=dict)
    temporary: Path | None = None
    """Directory of this save on rank 0 until it is published; None before, after, and elsewhere."""

    def run(self, shards: Sequence[TensorShard]) -> SavedCheckpoint:
        """Run all steps of the protocol together with the other ranks."""
        begin = time.monotonic()
        with ExitStack() as stack:
            try:
                [plan, *_] = self.ranks.agree(
                    lambda: self.held(lambda: self.prepare(stack, shards)),
                    f"preparing to save step {self.step!r} in {self.root}",
                    cure=_NOTHING,
                )
                # `prepare` has checked that the step is an integer.
                final = self.root / step_name(self.step)
                temporary = self.root / temporary_name(final.name, plan["save_id"])
                facts = self.ranks.agree(
                    lambda: self.held(lambda: self.write(temporary, plan["save_id"], shards)),
                    f"writing {temporary}",
                    cure=_NOTHING,
                )
                published = self.ranks.agree_with_rank_0(
                    lambda: self.held(lambda: self.publish(temporary, plan, facts)),
                    f"publishing {temporary}",
                    cure=_NOTHING,
                )
            except CheckpointError:
                self.discard()
                raise
            report = self.ranks.agree_with_rank_0(
                lambda: self.held(lambda: self.finish(plan["save_id"])),
                f"finishing {final}",
                cure="the checkpoint was published, but may not survive a power failure",
            )
        return SavedCheckpoint(
            path=final,
            step=self.step,
            sequence=published["sequence"],
            num_bytes=published["num_bytes"],
            seconds=time.monotonic() - begin,
            removed=tuple(report["removed"]),
            warnings=tuple(plan["warnings"] + report["warnings"]),
        )

    def held(self, action: Callable[[], Json]) -> Json:
        """Run a part of the save; if it fails and the root was moved, raise the error of the lock.

        The error of the lock names the cause, where the original error names only a missing path.
        """
        try:
            return action()
        except (OSError, CheckpointError):
            if self.run_lock is not None:
                self.run_lock.check()
            raise

    def prepare(self, stack: ExitStack, shards: Sequence[TensorShard]) -> Json:
        """Check the arguments on each rank, and create the temporary directory on rank 0.

        Rank 0 also takes the lock for saves and removes files of killed saves.
        """
        self.on_site("save.begin")
        self._check_arguments(shards)
        if self.ranks.rank != 0:
            return None
        if self.run_lock is not None:
            # Check the lock before `mkdir`: if the root was moved, `mkdir` would create it again.
            self.run_lock.check()
        self.root.mkdir(parents=True, exist_ok=True)
        lock = RootLock(self.root)
        stack.callback(lock.close)
        warnings = [lock.warning] if lock.warning else []
        if lock.warning is None:
            remove_leftovers(self.root)
        sequences = [c.manifest.sequence for c in scan(self.root) if c.manifest is not None]
        try:
            hint = read_hint(self.root)
            sequences.append(hint["sequence"] if hint else 0)
        except CheckpointError as error:
            warnings.append(f"{error} (this save rewrites the file)")
        save_id = uuid.uuid4().hex[:12]
        temporary = self.root / temporary_name(step_name(self.step), save_id)
        temporary.mkdir()
        self.temporary = temporary
        self.on_site("save.directory_made")
        return {"save_id": save_id, "sequence": max(sequences, default=0) + 1, "warnings": warnings}

    def write(self, temporary: Path, save_id: str, shards: Sequence[TensorShard]) -> Json:
        """Write the file of this rank; return its record and the ranges of tensors in it."""
        rank, world_size = self.ranks.rank, self.ranks.world_size
        strings = header_metadata(
            run_id=self.run_id,
            save_id=save_id,
            step=self.step,
            rank=rank,
            world_size=world_size,
            config_hash=self.config_hash,
        )
        path = temporary / f"rank_{rank:05d}.safetensors"
        record = write_shard_file(path, rank, shards, strings, self.on_site, values=self.values)
        for name, text in self.attached.items() if rank == 0 else ():
            data = text.encode()
            write_durably(temporary / name, data, save_id, self.on_site, "attached")
        sync_path(temporary)
        self.on_site("shard.directory_synced")
        held: JsonFields = {}
        for shard in shards:
            entry = held.setdefault(
                shard.name,
                {
                    "shape": list(shard.global_shape),
                    "dtype": DTYPE_NAMES[shard.dtype],
                    "ranges": [],
                },
            )
            entry["ranges"].append(encode_extent(shard.extent))
        return {"file": record.to_json(), "tensors": held}

    def publish(self, temporary: Path, plan: Json, facts: Sequence[Json]) -> Json:
        """Write the manifest and rename the directory to a checkpoint's name, on rank 0."""
        self.on_site("save.gathered")
        files = [
            FileRecord(**{**f["file"], "block_checksums": tuple(f["file"]["block_checksums"])})
            for f in facts
        ]
        manifest = Manifest(
            run_id=self.run_id,
            save_id=plan["save_id"],
            step=self.step,
            sequence=plan["sequence"],
            world_size=self.ranks.world_size,
            config_hash=self.config_hash,
            metadata=self.metadata,
            files=tuple(files),
            tensors=merge_tensors([f["tensors"] for f in facts], temporary),
            attached=tuple(
                AttachedFile.from_bytes(name, text.encode()) for name, text in self.attached.items()
            ),
        )
        check_sizes(temporary, manifest, saves=True)
        write_durably(
            temporary / MANIFEST,
            encode_manifest(manifest),
            manifest.save_id,
            self.on_site,
            "manifest",
        )
        final = self.root / step_name(self.step)
        if self.run_lock is not None:
            self.run_lock.check()
        if os.path.lexists(final):
            os.rename(final, final.with_name(f"{final.name}.replaced-{manifest.save_id}"))
            self.on_site("save.old_moved")
        os.rename(temporary, final)
        self.temporary = None
        num_bytes = sum(record.size for record in manifest.all_files)
        return {"sequence": manifest.sequence, "num_bytes": num_bytes}

    def finish(self, save_id: str) -> Json:
        """Verify the published checkpoint, write ``latest`` and remove old checkpoints, on rank 0.

        If ``latest`` cannot be written or a checkpoint cannot be removed, add a warning.
        """
        self.on_site("save.published")
        sync_path(self.root)
        self.on_site("save.durable")
        final = self.root / step_name(self.step)
        warnings: list[str] = []
        removed: list[str] = []
        manifest = read_manifest(final)
        check_sizes(final, manifest, saves=True)
        self.on_site("save.verified")
        try:
            hint = encode_hint(final.name, manifest.sequence)
            write_durably(self.root / LATEST, hint, save_id, self.on_site, "latest")
        except OSError as error:
            warnings.append(
                f"{self.root / LATEST} was not updated ({error}); a load finds {final.name} by scanning the directory."
            )
        try:
            for path in superseded(
                self.root, self.run_id, self.keep_last, self.keep_every, self.keep_step
            ):
                remove_checkpoint(path, save_id)
                removed.append(path.name)
                self.on_site("save.old_removed")
        except OSError as error:
            warnings.append(f"an old checkpoint could not be removed: {error}.")
        return {"removed": removed, "warnings": warnings}

    def discard(self) -> None:
        """Remove the unpublished directory on rank 0, after all ranks have stopped writing."""
        if self.temporary is not None:
            shutil.rmtree(self.temporary, ignore_errors=True)

    def _check_arguments(self, shards: Sequence[TensorShard]) -> None:
        if type(self.step) is not int or not 0 <= self.step < 10**18:
            raise ValueError(f"step must be an integer from 0 to 10**18, not {self.step!r}.")
        if self.keep_last is not None and self.keep_last < 1:
            raise ValueError(
                f"keep_last must be None (keep all) or at least 1, not {self.keep_last}."
            )
        keys = [shard.key for shard in shards]
        if len(set(keys)) != len(keys):
            twice = next(key for key in keys if keys.count(key) > 1)
            raise ValueError(
                f"{twice} occurs twice in the shards of rank {self.ranks.rank}; pass each range once."
            )
        for name, attached in self.attached.items():
            num_bytes = len(attached.encode())
            if num_bytes > MAX_ATTACHED_BYTES:
                raise ValueError(
                    f"the file {name} has {num_bytes:,} bytes, and a checkpoint takes files of at most "
                    f"{MAX_ATTACHED_BYTES:,}."
                )
        try:
            text = json.dumps([self.metadata, self.run_id, self.config_hash], allow_nan=False)
            same = json.loads(text) == [self.metadata, self.run_id, self.config_hash]
        except (TypeError, ValueError) as error:
            raise ValueError(f"metadata cannot be written as JSON: {error}.") from None
        if not same or not isinstance(self.metadata, dict) or not isinstance(self.run_id, str):
            raise ValueError(
                "metadata, run_id or config_hash would change when written as JSON and read back. metadata must be a "
                "dict with str keys and without tuples; run_id and config_hash must be str."
            )
