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

import os
import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import torch.distributed as dist

from megatron_packed.checkpoint.directory import Candidate, examine, is_checkpoint_name, scan
from megatron_packed.checkpoint.errors import (
    CheckpointError,
    CheckpointMismatchError,
    NoCheckpointError,
)
from megatron_packed.checkpoint.latest_hint import check_hint
from megatron_packed.checkpoint.load_attempt import LoadAttempt, LoadedCheckpoint
from megatron_packed.checkpoint.manifest import MANIFEST, read_manifest
from megatron_packed.checkpoint.rank_agreement import Ranks, on_rank_0
from megatron_packed.checkpoint.sealed_json import Json
from megatron_packed.checkpoint.tensor_shard import TensorShard

_CURE = "start from another directory, or bring a good copy back"


def find_checkpoints(root: str | os.PathLike[str]) -> list[Candidate]:
    """Return the directories named like checkpoints under ``root``, the last published first;
    ``problem`` is set on bad ones.

    Reads manifests, not data, on this process alone. The hint ``latest`` has no say.
    """
    return scan(Path(root))


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
    on_read: Callable[[int, int], None] = lambda done, total: None,
) -> LoadedCheckpoint:
    """Fill ``wanted`` from the newest good checkpoint; a collective of all ranks, any number of
    them.

    Args:
        path: the directory of a run's checkpoints, or one checkpoint.
        wanted: ranges to fill in place (`whole_tensors`), of all names over all ranks.
        step: load this step or nothing; None falls back from a damaged checkpoint to older ones.
        allow_missing: prefixes of names that may be absent (``("",)`` allows all).
        allow_extra: prefixes of names that may be in the checkpoint though no rank wants them.
        check_finite: refuse checkpoints with NaN or infinities.
        accept: given the metadata on every rank before tensors are compared; returns a sentence to
            refuse the checkpoint.
        warn: given a line per rejected checkpoint on rank 0; None for standard error.
        on_read: given the bytes that this rank has read, and about how many it will read in all.
    Raises:
        NoCheckpointError: there is no checkpoint at all.
        CheckpointMismatchError: a sound checkpoint does not hold what is wanted, or was not
            accepted; nothing was written.
        CheckpointError: there are checkpoints, but none is sound. Every error is raised on all
            ranks.
    """
    ranks = Ranks(rank=rank, world_size=world_size, group=group)
    say = (warn or _print_to_stderr) if rank == 0 else _say_nothing
    names, problems = _agree_on_candidates(ranks, Path(path), step)
    for problem in problems:
        say(f"WARNING: {problem}")
    for name in names:
        attempt = LoadAttempt(
            ranks=ranks,
            directory=Path(name),
            wanted=wanted,
            check_finite=check_finite,
            on_read=on_read,
        )
        reason = attempt.run(allow_missing, allow_extra, accept)
        if reason is None:
            return attempt.loaded(tuple(problems))
        problems.append(reason)
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
    """Return metadata of the checkpoint that `load_checkpoint` tries first, None if there is none;
    a collective of all ranks.

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


def _print_to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _say_nothing(line: str) -> None:
    """Ranks other than 0 print no warnings."""


def _agree_on_candidates(ranks: Ranks, path: Path, step: int | None) -> tuple[list[str], list[str]]:
    """Return rank 0's paths to try, newest first, and its problems with the others, on all ranks.

    Raises:
        NoCheckpointError: there is nothing to try and nothing to complain about.
    """
    [listed, *_] = ranks.agree(
        on_rank_0(ranks.rank, lambda: _list_candidates(path, step)),
        f"looking for checkpoints in {path}",
        cure=_CURE,
    )
    if not listed["names"] and not listed["problems"]:
        at = "" if step is None else f" of step {step}"
        raise NoCheckpointError(
            f"no checkpoint{at}", path=path, expected="step_<number>/manifest.json", found="none"
        )
    return list(listed["names"]), list(listed["problems"])


def _list_candidates(path: Path, step: int | None) -> Json:
    """Return paths to try, newest first, and what is wrong with the others and with the hint."""
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
