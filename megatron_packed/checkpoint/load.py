"""Loading: every byte is verified before any tensor is written, and all ranks take the same
decision.

[Note: load protocol]
 1. rank 0 scans; its list of candidates, newest first, is everybody's. Directories without a valid
    manifest, and a hint that does not fit, are reported
 2. all ranks read the manifest and compare its hash, then what they want with what it holds.
    Metadata that the caller refuses and a difference in names, shapes or dtypes are errors at once:
    an older checkpoint would differ, too
 3. the files are shared out; each rank reads and checks its share: size, header, every block,
   finite values
 4. only if all ranks are content, each copies the ranges it wants into its tensors, checking the
   blocks again
A candidate that fails in 2 (a bad manifest), 3 or 4 is rejected by all with a loud line, and the
next is tried. Step 4 fails only if a file changed since step 3; the next candidate then overwrites
what was copied, since it fills the same tensors, and if there is none the error says that the
tensors are not to be used.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_packed.checkpoint.directory import (
    Candidate,
    check_sizes,
    examine,
    is_checkpoint_name,
    read_hint,
    scan,
)
from megatron_packed.checkpoint.errors import (
    CheckpointError,
    CheckpointMismatchError,
    NoCheckpointError,
)
from megatron_packed.checkpoint.manifest import (
    MANIFEST,
    MAX_MANIFEST_BYTES,
    Manifest,
    decode_manifest,
    read_manifest,
)
from megatron_packed.checkpoint.rank_agreement import Outcome, Ranks, on_rank_0
from megatron_packed.checkpoint.sealed_json import Json, read_small_file
from megatron_packed.checkpoint.shard_file import FileSegment, ShardReader, check_values
from megatron_packed.checkpoint.tensor_extent import Extent, Overlap, overlaps
from megatron_packed.checkpoint.tensor_shard import DTYPE_NAMES, TensorShard, byte_view, shard_key

_CURE = "start from another directory, or bring a good copy back"


@dataclass(frozen=True, kw_only=True)
class LoadedCheckpoint:
    """What was loaded, besides the tensors."""

    path: Path
    step: int
    run_id: str
    sequence: int
    config_hash: str
    world_size: int
    """Ranks that wrote it."""
    metadata: dict[str, Json]
    missing: tuple[str, ...]
    """Wanted by this rank, allowed to be missing, and missing: these tensors were left as they
    were.
    """
    unused: tuple[str, ...]
    """In the checkpoint, allowed to be extra, and wanted by no rank."""
    problems: tuple[str, ...]
    """Why newer checkpoints were not loaded, and what is wrong with the hint."""


def find_checkpoints(root: str | os.PathLike[str]) -> list[Candidate]:
    """Directories named like checkpoints under ``root``, the last published first; ``problem`` is
    set on bad ones.

    Reads manifests, not data, on this process alone. The hint ``latest`` has no say.
    """
    return scan(Path(root))


def check_hint(root: str | os.PathLike[str], candidates: Sequence[Candidate]) -> str | None:
    """What is wrong with the hint ``latest``: damaged, or naming a newer checkpoint than there is;
    ``None`` if fine.
    """
    try:
        hint = read_hint(Path(root))
    except CheckpointError as error:
        return f"{error} (ignored; checkpoints are found by scanning)"
    newest = max((c.manifest.sequence for c in candidates if c.manifest is not None), default=0)
    if hint is not None and hint["sequence"] > newest:
        return (
            f"{Path(root) / 'latest'} names {hint['checkpoint']} (number {hint['sequence']}), but the newest "
            f"checkpoint that can be read is number {newest}: a newer one was lost"
        )
    return None


def load_checkpoint(
    path: str | os.PathLike[str],
    wanted: Sequence[TensorShard],
    *,
    rank: int = 0,
    world_size: int = 1,
    group: dist.ProcessGroup | None = None,
    step: int | None = None,
    allow_missing: Sequence[str] = (),
    allow_extra: Sequence[str] = (),
    check_finite: bool = True,
    accept: Callable[[dict[str, Json]], str | None] | None = None,
    warn: Callable[[str], None] | None = None,
    told: Callable[[int, int], None] = lambda done, total: None,
) -> LoadedCheckpoint:
    """Fill ``wanted`` from the newest good checkpoint; a collective of all ranks, any number of
    them.

    Args:
        path: the directory of a run's checkpoints, or one checkpoint.
        wanted: ranges to fill in place (`whole_tensors`); ranks may want different ones, together
        all names there are.
        step: load this step or nothing; ``None`` falls back to older checkpoints when the newest is
        damaged.
        allow_missing: prefixes of names that may be absent (``("",)`` allows all).
        allow_extra: prefixes of names that may be in the checkpoint though no rank wants them.
        check_finite: refuse checkpoints with NaN or infinities.
        accept: asked on every rank with the metadata, before tensors are compared; a sentence
        refuses the checkpoint.
        warn: receives a line per rejected checkpoint, on rank 0; standard error if ``None``.
        told: learns now and then how many bytes this rank has read, of how many, about.
    Raises:
        NoCheckpointError: there is no checkpoint at all.
        CheckpointMismatchError: a sound checkpoint does not hold what is wanted, or was not
            accepted; nothing was written.
        CheckpointError: there are checkpoints, but none is sound. All errors are raised on all
            ranks.
    """
    ranks = Ranks(rank=rank, world_size=world_size, group=group)
    say = _default_warning if warn is None else warn
    [listed, *_] = ranks.agree(
        on_rank_0(rank, lambda: _list_candidates(Path(path), step)),
        f"looking for checkpoints in {path}",
        cure=_CURE,
    )
    problems: list[str] = list(listed["problems"])
    for problem in problems if rank == 0 else ():
        say(f"WARNING: {problem}")
    if not listed["names"] and not problems:
        at = "" if step is None else f" of step {step}"
        raise NoCheckpointError(
            f"no checkpoint{at}", path=path, expected="step_<number>/manifest.json", found="none"
        )
    for name in listed["names"]:
        load = LoadAttempt(
            ranks=ranks, directory=Path(name), wanted=wanted, check_finite=check_finite, told=told
        )
        reason = load.run(allow_missing, allow_extra, accept)
        if reason is None:
            return load.loaded(tuple(problems))
        problems.append(reason)
        if rank == 0:
            say(f"WARNING: checkpoint {name} is rejected, trying the one before it: {reason}")
    reasons = "".join(f"\n  {line}" for line in problems)
    raise CheckpointError(
        f"no checkpoint in {path} is sound, the tensors are not to be used; {_CURE}:{reasons}"
    )


def newest_metadata(
    path: str | os.PathLike[str],
    keys: Collection[str],
    *,
    rank: int = 0,
    world_size: int = 1,
    group: dist.ProcessGroup | None = None,
    step: int | None = None,
    problem: Callable[[dict[str, Json]], str | None] = lambda metadata: None,
) -> dict[str, Json] | None:
    """Metadata of the checkpoint that `load_checkpoint` tries first, None if there is none; a
    collective of all ranks.

    Rank 0 reads the manifest. The files are not looked at.

    Args:
        keys: what of the metadata is wanted.
        problem: why the metadata is refused, or None.
    Raises:
        CheckpointError: on all ranks: it was refused, or the directory cannot be listed.
    """

    def read() -> Json:
        names = _list_candidates(Path(path), step)["names"]
        if not names:
            return None
        metadata = read_manifest(Path(names[0])).metadata
        refusal = problem(metadata)
        if refusal is not None:
            raise CheckpointMismatchError(refusal, path=names[0])
        return {key: metadata[key] for key in keys if key in metadata}

    ranks = Ranks(rank=rank, world_size=world_size, group=group)
    [found, *_] = ranks.agree(
        on_rank_0(rank, read), f"reading the newest checkpoint in {path}", cure=_CURE
    )
    return found


def read_tensor(
    path: str | os.PathLike[str], name: str, manifest: Manifest | None = None
) -> Tensor:
    """One whole tensor of one checkpoint directory, on the CPU, verified; no process group (for
    tools).

    Args:
        manifest: the directory's, where it has been read already.
    Raises:
        CheckpointError: no such tensor, or damage.
    """
    directory = Path(path)
    manifest = manifest or read_manifest(directory)
    record = manifest.tensors.get(name)
    if record is None:
        some = ", ".join(list(manifest.tensors)[:8])
        raise CheckpointMismatchError(
            f"no tensor {name!r}",
            path=directory,
            expected=f"one of {len(manifest.tensors)} names: {some}, ...",
            found="none",
            cure="read_manifest(path).tensors lists them",
        )
    check_sizes(directory, manifest)
    tensor = torch.empty(record.shape, dtype=record.dtype)
    _fill(directory, manifest, [TensorShard.whole(name, tensor)])
    return tensor


def _default_warning(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _list_candidates(path: Path, step: int | None) -> Json:
    """Paths to try, newest first, and what is wrong with the others and with the hint."""
    if is_checkpoint_name(path.name) or os.path.lexists(path / MANIFEST):
        candidates = [examine(path.resolve())]
        problems = []
    else:
        candidates = scan(path)
        hint_problem = check_hint(path, candidates)
        problems = [hint_problem] if hint_problem else []
    problems += [candidate.problem for candidate in candidates if candidate.problem is not None]
    names = [
        str(c.path)
        for c in candidates
        if c.manifest is not None and step in (None, c.manifest.step)
    ]
    return {"names": names, "problems": problems}


@dataclass(kw_only=True)
class LoadAttempt:
    """One attempt at one checkpoint. See [Note: load protocol]."""

    ranks: Ranks
    directory: Path
    wanted: Sequence[TensorShard]
    check_finite: bool
    told: Callable[[int, int], None]
    manifest: Manifest | None = None
    missing: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    done: int = 0
    total: int = 0
    """Bytes that this rank has read, and reads in all, about."""

    def run(
        self,
        allow_missing: Sequence[str],
        allow_extra: Sequence[str],
        accept: Callable[[dict[str, Json]], str | None] | None = None,
    ) -> str | None:
        """Fill the wanted tensors, or say what is wrong with this checkpoint; raises where the wish
        is wrong.
        """
        problem = _first_problem(self.ranks.try_all(self._read_manifest), same=True)
        if problem is not None:
            return problem
        refusal = accept(self._manifest.metadata) if accept is not None else None
        if refusal is not None:  # of the same manifest on all ranks, so all are here
            raise CheckpointMismatchError(refusal, path=self.directory)
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
        candidate = examine(self.directory)
        if candidate.problem is not None:
            raise CheckpointError(candidate.problem)
        path = self.directory / MANIFEST
        data = read_small_file(path, MAX_MANIFEST_BYTES)
        self.manifest = decode_manifest(data, path)
        return hashlib.sha256(data).hexdigest()

    def _match(self, allow_missing: Sequence[str], allow_extra: Sequence[str]) -> None:
        """Compare what is wanted with what is there, on all ranks."""
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
                f"{name} is extra (no rank wants it)" for name in extra if name not in self.unused
            ]
            for shard in {shard.name: shard for shard in self.wanted}.values():
                record = manifest.tensors.get(shard.name)
                if record and (record.shape, record.dtype) != (shard.global_shape, shard.dtype):
                    problems.append(
                        f"{shard.name} is {DTYPE_NAMES[record.dtype]} {list(record.shape)}, wanted is "
                        f"{DTYPE_NAMES[shard.dtype]} {list(shard.global_shape)}"
                    )
            if problems:
                more = f" and {len(problems) - 20} more" if len(problems) > 20 else ""
                raise CheckpointMismatchError("; ".join(problems[:20]) + more)

        self.ranks.agree(
            compare,
            f"matching the tensors of {self.directory}",
            cure="nothing was loaded; use the configuration that wrote it, or allow these names",
        )

    def _verify(self) -> None:
        """Read and check this rank's share of the files, all of their bytes (the ranges in a file
        fill it).
        """
        manifest = self._manifest
        mine = _share(manifest, self.ranks.rank, self.ranks.world_size)
        self.total = sum(manifest.files[i].data_bytes for i in mine) + sum(
            shard.tensor.nbytes for shard in self.wanted
        )
        for index in mine:
            pieces: list[_Piece] = [
                (name, extent, None, None) for name, _, extent in manifest.held[index]
            ]
            with _open(self.directory, manifest, index) as reader:
                for segment, data in reader.scan(_locate(reader, pieces)):
                    check_values(segment, data, reader.path, finite=self.check_finite)
                    self._tell(data.nbytes)

    def _apply(self) -> None:
        wanted = [shard for shard in self.wanted if shard.name in self._manifest.tensors]
        _fill(self.directory, self._manifest, wanted, self._tell)

    def _tell(self, more: int) -> None:
        self.done = min(self.done + more, self.total)
        self.told(self.done, self.total)


def _first_problem(outcomes: Sequence[Outcome], *, same: bool = False) -> str | None:
    """The problem of the lowest rank that has one; with ``same``, values that differ are a problem."""
    for rank, outcome in enumerate(outcomes):
        if outcome.problem is not None:
            return outcome.problem if len(outcomes) == 1 else f"rank {rank}: {outcome.problem}"
        if same and outcome.value != outcomes[0].value:
            return f"rank {rank} reads another manifest than rank 0 (sha256 {outcome.value}, {outcomes[0].value})"
    return None


def _share(manifest: Manifest, rank: int, world_size: int) -> list[int]:
    """Indices of the files that ``rank`` verifies: largest first, each to the rank with the least
    so far.
    """
    loads = [0] * world_size
    mine = []
    for index in sorted(range(len(manifest.files)), key=lambda i: -manifest.files[i].size):
        owner = loads.index(min(loads))
        loads[owner] += manifest.files[index].size
        if owner == rank:
            mine.append(index)
    return mine


_Piece = tuple[str, Extent, Overlap | None, Tensor | None]
"""(tensor name, a stored range, what is wanted of it, uint8 view of what wants it); None twice for
all of it.
"""


def _pieces_by_file(manifest: Manifest, wanted: Sequence[TensorShard]) -> list[list[_Piece]]:
    """For each file, its stored ranges of which something is wanted."""
    by_file: list[list[_Piece]] = [[] for _ in manifest.files]
    for shard in wanted:
        data = byte_view(shard.tensor)
        for extent, index in manifest.tensors[shard.name].ranges:
            for overlap in overlaps(extent, shard.extent):
                by_file[index].append((shard.name, extent, overlap, data))
    return by_file


def _open(directory: Path, manifest: Manifest, index: int) -> ShardReader:
    """Open a file, check its header against the manifest: same save, same rank, exactly the
    recorded ranges.

    Raises:
        CheckpointError: they differ.
    """
    record = manifest.files[index]
    reader = ShardReader(directory / record.name, record)
    expected = {
        shard_key(name, extent): (dtype, (extent.numel,))
        for name, dtype, extent in manifest.held[index]
    }
    found = {entry.key: (entry.dtype, entry.shape) for entry in reader.header.entries}
    strings = manifest.header_metadata(record.rank)
    if reader.header.metadata == strings and found == expected:
        return reader
    reader.__exit__()
    if reader.header.metadata != strings:
        raise CheckpointError(
            "the file belongs to another save",
            path=reader.path,
            expected=strings,
            found=reader.header.metadata,
            cure="do not mix files of several checkpoints",
        )
    wrong = sorted(
        key for key in expected.keys() | found.keys() if expected.get(key) != found.get(key)
    )[:5]
    raise CheckpointError(
        "the file holds other ranges than the manifest says",
        path=reader.path,
        expected={key: expected.get(key) for key in wrong},
        found={key: found.get(key) for key in wrong},
        cure="do not mix files of several checkpoints",
    )


def _locate(reader: ShardReader, pieces: Sequence[_Piece]) -> list[FileSegment]:
    """Where in the file's data section the pieces lie."""
    entries = {entry.key: entry for entry in reader.header.entries}
    segments = []
    for name, extent, overlap, data in pieces:
        entry = entries[shard_key(name, extent)]
        segment = FileSegment(begin=entry.begin, end=entry.end, key=entry.key, dtype=entry.dtype)
        if overlap is not None and data is not None:
            here, there, length, *more = (number * entry.dtype.itemsize for number in overlap)
            rows, pitch, target_pitch = overlap.rows, more[1], more[2]
            segment = replace(
                segment,
                begin=entry.begin + here,
                end=entry.begin + here + (rows - 1) * pitch + length,
                target=data[there : there + (rows - 1) * target_pitch + length],
                rows=rows,
                pitch=pitch,
                target_pitch=target_pitch,
            )
        segments.append(segment)
    return sorted(segments, key=lambda segment: segment.begin)


def _fill(
    directory: Path,
    manifest: Manifest,
    wanted: Sequence[TensorShard],
    tell: Callable[[int], None] = lambda more: None,
) -> None:
    """Copy the wanted ranges into their tensors, checking every block that is read.

    Raises:
        CheckpointError: damage; some tensors may have been written.
    """
    for index, pieces in enumerate(_pieces_by_file(manifest, wanted)):
        if pieces:
            with _open(directory, manifest, index) as reader:
                for _, data in reader.scan(_locate(reader, pieces)):
                    tell(data.nbytes)
