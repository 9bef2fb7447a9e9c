"""Attempt to load one checkpoint: compare the tensors, verify the files, then copy."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from megatron_packed.checkpoint.directory import read_candidate
from megatron_packed.checkpoint.errors import CheckpointError, CheckpointMismatchError
from megatron_packed.checkpoint.manifest import (
    MANIFEST,
    MAX_MANIFEST_BYTES,
    AttachedFile,
    Manifest,
    decode_manifest,
)
from megatron_packed.checkpoint.rank_agreement import Outcome, Ranks
from megatron_packed.checkpoint.read_tensors import StoredRange, fill, locate, open_file
from megatron_packed.checkpoint.sealed_json import (
    Json,
    JsonFields,
    open_plain_file,
    read_small_file,
)
from megatron_packed.checkpoint.shard_reader import check_tensor_bytes
from megatron_packed.checkpoint.tensor_shard import DTYPE_NAMES, TensorShard
from megatron_packed.config import flag_names as flags

_ATTACHED_CURE = "restore the file, or use another checkpoint"


@dataclass(frozen=True, kw_only=True)
class LoadedCheckpoint:
    """Description of a loaded checkpoint: its origin, its metadata and the warnings of the load."""

    path: Path
    step: int
    run_id: str
    sequence: int
    config_hash: str
    world_size: int
    """Number of ranks that wrote the checkpoint."""
    metadata: JsonFields
    missing: tuple[str, ...]
    """Names of tensors that this rank wanted and the checkpoint lacks; the tensors are unchanged."""
    unused: tuple[str, ...]
    """Names of tensors in the checkpoint that no rank wanted."""
    problems: tuple[str, ...]
    """Reasons why newer checkpoints were not loaded, and problems of the file ``latest``."""


@dataclass(kw_only=True)
class LoadAttempt:
    """Attempt of one rank to load one checkpoint. See [Note: load protocol]."""

    ranks: Ranks
    directory: Path
    wanted: Sequence[TensorShard]
    check_finite: bool
    on_read: Callable[[int, int], None]
    manifest: Manifest | None = None
    missing: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    done: int = 0
    """Bytes that this rank has read."""
    total: int = 0
    """Approximate number of bytes that this rank reads in the verification and the copy."""

    def run(
        self,
        allow_missing: Sequence[str],
        allow_extra: Sequence[str],
        accept: Callable[[JsonFields], str | None] | None = None,
        more_wanted: Callable[[Manifest], Sequence[TensorShard]] | None = None,
    ) -> str | None:
        """Fill the wanted tensors and return None, or return why this checkpoint is rejected.

        Raises:
            CheckpointMismatchError: an intact checkpoint does not fit the caller's request, so
                older checkpoints are not tried.
        """
        problem = _first_problem(self.ranks.try_all(self._read_manifest), same=True)
        if problem is not None:
            return problem
        refusal = accept(self._manifest.metadata) if accept is not None else None
        if refusal is not None:  # All ranks hold the same manifest, so all ranks raise.
            raise CheckpointMismatchError(refusal, path=self.directory)
        if more_wanted is not None:
            self.wanted = [*self.wanted, *more_wanted(self._manifest)]
        self._match(allow_missing, allow_extra)
        outcomes = self.ranks.try_all(self._verify)
        problem = _first_problem(outcomes)
        if problem is not None:
            if all(outcome.mismatch for outcome in outcomes if outcome.problem is not None):
                raise CheckpointMismatchError(problem)
            return problem
        return _first_problem(self.ranks.try_all(self._apply))

    def loaded(self, problems: tuple[str, ...]) -> LoadedCheckpoint:
        manifest = self._manifest
        return LoadedCheckpoint(
            path=self.directory,
            step=manifest.step,
            run_id=manifest.run_id,
            sequence=manifest.sequence,
            config_hash=manifest.config_hash,
            world_size=manifest.world_size,
            metadata=manifest.metadata,
            missing=self.missing,
            unused=self.unused,
            problems=problems,
        )

    @property
    def _manifest(self) -> Manifest:
        assert self.manifest is not None
        return self.manifest

    def _read_manifest(self) -> Json:
        candidate = read_candidate(self.directory)
        if candidate.problem is not None:
            raise CheckpointError(candidate.problem)
        path = self.directory / MANIFEST
        data = read_small_file(path, MAX_MANIFEST_BYTES)
        self.manifest = decode_manifest(data, path)
        return hashlib.sha256(data).hexdigest()

    def _match(self, allow_missing: Sequence[str], allow_extra: Sequence[str]) -> None:
        """Compare the wanted tensors of all ranks with the tensors of the manifest."""
        manifest = self._manifest
        names = sorted({shard.name for shard in self.wanted})
        everyone = {name for part in self.ranks.gather(names) for name in part}
        extra = sorted(set(manifest.tensors) - everyone)
        self.unused = tuple(name for name in extra if name.startswith(tuple(allow_extra)))
        missing = [name for name in names if name not in manifest.tensors]
        self.missing = tuple(name for name in missing if name.startswith(tuple(allow_missing)))

        def compare() -> None:
            problems = [f"{name} is missing" for name in missing if name not in self.missing]
            problems += [
                f"{name} is extra (no rank needs it)" for name in extra if name not in self.unused
            ]
            for shard in {shard.name: shard for shard in self.wanted}.values():
                record = manifest.tensors.get(shard.name)
                if record and (record.shape, record.dtype) != (shard.global_shape, shard.dtype):
                    problems.append(
                        f"{shard.name} is {DTYPE_NAMES[record.dtype]} {list(record.shape)}, but this run needs "
                        f"{DTYPE_NAMES[shard.dtype]} {list(shard.global_shape)}"
                    )
            if problems:
                suffix = f" and {len(problems) - 20} more" if len(problems) > 20 else ""
                raise CheckpointMismatchError("; ".join(problems[:20]) + suffix)

        self.ranks.agree(
            compare,
            f"matching the tensors of {self.directory}",
            cure="no tensor was loaded; use the configuration that wrote the checkpoint, or allow "
            f"missing and extra tensors by {flags.DIST_CKPT_STRICTNESS} log_all",
        )

    def _verify(self) -> None:
        """Read and check all bytes of this rank's share of the files; rank 0 also the attached files.

        The ranges of a file fill its data section, so reading all ranges reads all blocks.
        """
        manifest = self._manifest
        mine = _share(manifest, self.ranks.rank, self.ranks.world_size)
        self.total = sum(manifest.files[i].data_bytes for i in mine) + sum(
            shard.tensor.nbytes for shard in self.wanted
        )
        for record in manifest.attached if self.ranks.rank == 0 else ():
            read_attached(self.directory, record)
        for index in mine:
            ranges: list[StoredRange] = [
                (name, extent, None, None) for name, _, extent in manifest.held[index]
            ]
            with open_file(self.directory, manifest, index) as reader:
                for segment, data in reader.scan(locate(reader, ranges)):
                    check_tensor_bytes(segment, data, reader.path, finite=self.check_finite)
                    self._report(data.nbytes)

    def _apply(self) -> None:
        wanted = [shard for shard in self.wanted if shard.name in self._manifest.tensors]
        fill(self.directory, self._manifest, wanted, self._report)

    def _report(self, num_bytes: int) -> None:
        self.done = min(self.done + num_bytes, self.total)
        self.on_read(self.done, self.total)


def _first_problem(outcomes: Sequence[Outcome], *, same: bool = False) -> str | None:
    """Return the problem of the lowest rank that has one, or None.

    With ``same``, a rank whose value differs from rank 0's also has a problem.
    """
    for rank, outcome in enumerate(outcomes):
        if outcome.problem is not None:
            return outcome.problem if len(outcomes) == 1 else f"rank {rank}: {outcome.problem}"
        if same and outcome.value != outcomes[0].value:
            return f"rank {rank} and rank 0 read different manifests (sha256 {outcome.value}, {outcomes[0].value})"
    return None


def _share(manifest: Manifest, rank: int, world_size: int) -> list[int]:
    """Return the indices of the files that ``rank`` verifies.

    Files are assigned from the largest to the smallest, each to the rank with the fewest bytes.
    """
    loads = [0] * world_size
    mine = []
    for index in sorted(range(len(manifest.files)), key=lambda i: -manifest.files[i].size):
        owner = loads.index(min(loads))
        loads[owner] += manifest.files[index].size
        if owner == rank:
            mine.append(index)
    return mine


def read_attached(directory: Path, record: AttachedFile) -> str:
    """Read an attached file of a checkpoint, and compare it with the manifest.

    Raises:
        CheckpointError: the file is missing, is no regular file, or differs from the manifest.
    """
    path = directory / record.name
    fault = partial(CheckpointError, path=path, cure=_ATTACHED_CURE)
    descriptor = open_plain_file(path)
    with os.fdopen(descriptor, "rb") as file:
        size = os.fstat(descriptor).st_size
        try:
            data = file.read(record.size) if size == record.size else b""
        except OSError as error:
            raise fault("the file cannot be read", found=str(error)) from None
    if size != record.size:
        raise fault(
            "the file has another size than in the manifest",
            expected=f"{record.size} bytes",
            found=f"{size} bytes",
        )
    sha256 = AttachedFile.from_bytes(record.name, data).sha256
    if sha256 != record.sha256:
        raise fault(
            "the content does not match its checksum",
            expected=f"sha256 {record.sha256}",
            found=sha256,
        )
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise fault("the file is not UTF-8 text", found=str(error)) from None
