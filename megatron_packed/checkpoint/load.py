"""Loading of a checkpoint by all ranks together.

All bytes of a checkpoint are verified before any tensor is written, and all ranks take the same
decision.

[Note: load protocol]

 1. Rank 0 scans the directory. All ranks use its list of candidates, newest first. Rank 0 reports
    directories without a valid manifest, and a file ``latest`` that is damaged or names a
    checkpoint newer than all that it found.
 2. All ranks read the manifest of the candidate and compare its hash. Each rank then compares the
    tensors that it needs with those in the manifest. If the caller refuses the metadata, or a name,
    shape or dtype differs, an error is raised at once: older checkpoints would differ too.
 3. The files are divided among the ranks. Each rank reads its files and checks their size, header,
    block checksums and, unless this is disabled, that all values are finite.
 4. If all ranks succeed, each rank copies the ranges that it needs into its tensors, and checks the
    blocks again.

All ranks reject a candidate that has a bad manifest in step 2, or fails in step 3 or 4. Rank 0
prints a warning, and the ranks try the next candidate. Step 4 fails only if a file changed after
step 3. The next candidate fills the same tensors, so it overwrites all values that were copied. If
no candidate is left, the error says that the tensors must not be used.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch.distributed as dist

from megatron_packed.checkpoint.directory import (
    Candidate,
    is_checkpoint_name,
    read_candidate,
    scan,
    step_name,
)
from megatron_packed.checkpoint.errors import (
    CheckpointError,
    CheckpointMismatchError,
    NoCheckpointError,
)
from megatron_packed.checkpoint.latest_hint import check_hint, lost_checkpoint
from megatron_packed.checkpoint.load_attempt import LoadAttempt, LoadedCheckpoint, read_attached
from megatron_packed.checkpoint.manifest import MANIFEST, Manifest, read_manifest
from megatron_packed.checkpoint.rank_agreement import ONE_PROCESS, Ranks
from megatron_packed.checkpoint.run_metadata import BEST_STEP
from megatron_packed.checkpoint.sealed_json import Json, JsonFields
from megatron_packed.checkpoint.tensor_shard import TensorShard
from megatron_packed.config import flag_names as flags
from megatron_packed.files.regular_files import StrPath

BEST: Literal["best"] = "best"
"""Value of ``step`` for the step that the newest checkpoint names in `BEST_STEP`."""
Step = int | Literal["best"] | None
"""Step of the checkpoint to load; None for the newest one."""
ADAPTER_CONFIG = "adapter_config.json"
"""File of a folder of adapters that PEFT saved."""
_CURE = "load from another directory, or restore an intact copy"


def find_checkpoints(root: StrPath) -> list[Candidate]:
    """Return the directories under ``root`` that have a checkpoint's name, last published first.

    ``problem`` is set for directories without a valid manifest. Only this process reads, and it
    reads only the manifests. The file ``latest`` is not used.
    """
    return scan(Path(root))


def load_checkpoint(
    path: StrPath,
    wanted: Sequence[TensorShard],
    *,
    rank: int = 0,
    world_size: int = 1,
    group: dist.ProcessGroup | None = None,
    step: Step = None,
    allow_missing: Sequence[str] = (),
    allow_extra: Sequence[str] = (),
    check_finite: bool = True,
    accept: Callable[[JsonFields], str | None] | None = None,
    more_wanted: Callable[[Manifest], Sequence[TensorShard]] | None = None,
    warn: Callable[[str], None] | None = None,
    on_read: Callable[[int, int], None] = lambda done, total: None,
) -> LoadedCheckpoint:
    """Fill the tensors of ``wanted`` from the newest intact checkpoint.

    A collective of all ranks. Their number may differ from the number that wrote the checkpoint.

    Args:
        path: the directory of a run's checkpoints, or one checkpoint.
        wanted: ranges to fill in place (`whole_tensors`). Each tensor of the checkpoint must be
            wanted by some rank, except as ``allow_extra`` permits.
        step: load only this step, or `BEST`; None falls back from a damaged checkpoint to older ones.
        allow_missing: prefixes of wanted names that the checkpoint may lack (``("",)`` allows all).
        allow_extra: prefixes of names in the checkpoint that no rank needs.
        check_finite: refuse checkpoints with NaN or infinities.
        accept: called with the metadata on each rank before tensors are compared; returns a
            sentence to refuse the checkpoint, else None.
        more_wanted: called with the manifest of an accepted checkpoint on each rank; returns further
            ranges to fill, for tensors whose shapes only the checkpoint knows.
        warn: called on rank 0 with one line per problem; None prints to standard error.
        on_read: called with the bytes that this rank has read, and the approximate total that it
            will read.
    Raises:
        NoCheckpointError: the directory has no checkpoint.
        CheckpointMismatchError: an intact checkpoint does not hold the wanted tensors, or
            ``accept`` refused it; no tensor was written.
        CheckpointError: the directory has checkpoints, but none is intact. All ranks raise the
            same error.
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
        reason = attempt.run(allow_missing, allow_extra, accept, more_wanted)
        if reason is None:
            return attempt.loaded(tuple(problems))
        problems.append(reason)
        say(_rejection(name, reason))
    raise _none_is_intact(path, problems)


def newest_metadata(
    path: StrPath,
    keys: Collection[str],
    *,
    ranks: Ranks = ONE_PROCESS,
    step: Step = None,
    problem: Callable[[JsonFields], str | None] = lambda metadata: None,
) -> JsonFields | None:
    """Return metadata of the checkpoint that `load_checkpoint` tries first, or None without any.

    A collective of all ranks. Rank 0 reads only the manifest, not the tensor files.

    Args:
        keys: keys of the metadata to return.
        problem: returns a sentence to refuse the metadata, else None.
    Raises:
        CheckpointError: on all ranks: the metadata was refused, or the directory cannot be listed.
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

    what = f"reading the newest checkpoint in {path}"
    newest: dict[str, Any] | None = ranks.agree_with_rank_0(read, what, cure=_CURE)
    return newest


class Attachments(NamedTuple):
    """Attached files of a checkpoint."""

    path: Path
    """Directory of the checkpoint."""
    metadata: JsonFields
    texts: dict[str, str]
    """Text of each file by its name."""


def read_attachments(
    path: StrPath,
    *,
    ranks: Ranks = ONE_PROCESS,
    step: Step = None,
    warn: Callable[[str], None] | None = None,
) -> Attachments | None:
    """Return the attached files of the newest checkpoint whose manifest and attached files are intact.

    A collective of all ranks. Rank 0 chooses the checkpoint, and each rank reads its files.

    Args:
        path: the directory of a run's checkpoints, or one checkpoint.
        step: take only this step, or `BEST`.
        warn: called on rank 0 with a line for each rejected checkpoint; None prints to standard
            error.
    Returns:
        The files; None if there is no checkpoint.
    Raises:
        CheckpointError: on all ranks: there are checkpoints, and the attached files of none are
            intact; or the directory cannot be listed, or a rank cannot read the files.
    """
    say = warn or _print_to_stderr

    def choose() -> Json:
        rejected: dict[str, str] = {}
        for name in _list_candidates(Path(path), step)["names"]:
            try:
                _read_attachments(Path(name))
            except CheckpointError as error:
                rejected[name] = str(error)
                continue
            # If no checkpoint is intact, the error names the reasons.
            for other, reason in rejected.items():
                say(_rejection(other, reason))
            return [name, []]
        return [None, list(rejected.values())]

    name, problems = ranks.agree_with_rank_0(
        choose, f"reading the newest checkpoint in {path}", cure=_CURE
    )
    if problems:
        raise _none_is_intact(path, problems)
    if name is None:
        return None
    # Each rank reads: a gather of a file of 20 MiB over 1,000 ranks would need 20 GiB on each.
    attachments: list[Attachments] = []
    ranks.agree(
        lambda: attachments.append(_read_attachments(Path(name))),
        f"reading the files of {name}",
        cure=_CURE,
    )
    return attachments[0]


def _read_attachments(path: Path) -> Attachments:
    manifest = read_manifest(path)
    texts = {record.name: read_attached(path, record) for record in manifest.attached}
    return Attachments(path, manifest.metadata, texts)


def _rejection(name: str, reason: str) -> str:
    """Return the warning about a checkpoint in whose place the previous one is tried."""
    return f"WARNING: checkpoint {name} is rejected, trying the previous checkpoint: {reason}"


def _none_is_intact(path: StrPath, problems: Sequence[str]) -> CheckpointError:
    """Return the error that lists why each checkpoint in ``path`` is rejected."""
    reasons = "".join(f"\n  {line}" for line in problems)
    return CheckpointError(
        f"no checkpoint in {path} is intact, so the tensors must not be used; {_CURE}:{reasons}"
    )


def _print_to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _say_nothing(line: str) -> None:
    """Discard a warning: only rank 0 prints warnings."""


def _agree_on_candidates(ranks: Ranks, path: Path, step: Step) -> tuple[list[str], list[str]]:
    """Return on all ranks the paths to try, newest first, and the problems that rank 0 found.

    Raises:
        NoCheckpointError: there is no path to try, and no problem was found.
    """
    listed = ranks.agree_with_rank_0(
        lambda: _list_candidates(path, step), f"looking for checkpoints in {path}", cure=_CURE
    )
    if not listed["names"] and not listed["problems"]:
        raise no_checkpoint(path, step, listed["step"])
    return list(listed["names"]), list(listed["problems"])


def no_checkpoint(path: StrPath, step: Step, best_step: int | None) -> NoCheckpointError:
    """Return the error for a directory without the requested checkpoint.

    Args:
        best_step: the step number; None if ``step`` is None or no checkpoint names a best step.
    """
    if os.path.lexists(os.path.join(path, ADAPTER_CONFIG)):
        return NoCheckpointError(
            "is a folder of PEFT, and no checkpoint",
            path=path,
            cure=f"convert it with megatron-packed convert {flags.FROM_PEFT}, and name the result",
        )
    if step != BEST:
        at = "" if step is None else f" of step {step}"
        return NoCheckpointError(
            f"no checkpoint{at}",
            path=path,
            expected="step_<number>/manifest.json",
            found="none" if os.path.lexists(path) else "no such directory",
            cure="name a directory that a run saved checkpoints to"
            + f", or leave {flags.CKPT_STEP} out for the newest checkpoint" * bool(at),
        )
    what = "no checkpoint names a best validation"
    if best_step is not None:
        what = f"the lowest validation loss is of step {best_step}, whose checkpoint is not there"
    cure = f"train with {flags.SAVE_BEST}, or load the newest checkpoint"
    return NoCheckpointError(what, path=path, cure=cure)


def checkpoint_of_step(path: StrPath, step: Step) -> Path:
    """Return the directory of the checkpoint of one step under ``path``, without loading it.

    Raises:
        NoCheckpointError: there is no checkpoint of this step.
        CheckpointError: its manifest is damaged.
    """
    listed = _list_candidates(Path(path), step)
    if not listed["names"]:
        number = listed["step"]
        directory = Path(path) / step_name(number or 0)
        problem = read_candidate(directory).problem if os.path.lexists(directory) else None
        if problem is not None:
            raise CheckpointError(problem)
        raise no_checkpoint(path, step, number)
    return Path(listed["names"][0])


def newest_checkpoint(path: Path, step: Step = None) -> Path:
    """Return ``path`` if it is a checkpoint, else the newest checkpoint in it, without loading it.

    A damaged or lost newest checkpoint is an error; an older checkpoint never replaces it silently.

    Args:
        step: take the checkpoint of this step; see `Step`.
    Raises:
        NoCheckpointError: there is no checkpoint.
        CheckpointError: the manifest of the newest checkpoint is damaged, or it was lost.
    """
    if step is not None:
        return checkpoint_of_step(path, step)
    if os.path.lexists(path / MANIFEST):
        return path
    candidates = scan(path)
    if not candidates:
        raise no_checkpoint(path, None, None)
    damaged = [each for each in candidates if each.problem is not None]
    problem, newest = None, candidates[0]
    if damaged:
        # The order of publication stands in manifests, so for damaged ones the step must decide.
        last = max(damaged, key=lambda each: each.named_step)
        if newest.manifest is None or last.named_step > newest.named_step:
            problem = last.problem
    if problem is None:
        with suppress(CheckpointError):  # without the file, the scan decides
            problem = lost_checkpoint(path, candidates)
    if problem is not None:
        readable = f"{flags.LOAD} {newest.path} is the newest readable checkpoint"
        raise CheckpointError(problem, cure=readable if newest.manifest is not None else None)
    return newest.path


def _list_candidates(path: Path, step: Step) -> Json:
    """Return the paths to try, newest first, problems of other paths and of ``latest``, and the
    step number, which is None for any step.
    """
    if is_checkpoint_name(path.name) or os.path.lexists(path / MANIFEST):
        candidates = [read_candidate(path.resolve())]
        problems = []
    else:
        candidates = scan(path)
        hint_problem = check_hint(path, candidates)
        problems = [hint_problem] if hint_problem else []
    problems += [candidate.problem for candidate in candidates if candidate.problem is not None]
    number: int | None = None if step == BEST else step
    if step == BEST:
        manifests = (c.manifest for c in candidates if c.manifest is not None)
        number = next((manifest.metadata.get(BEST_STEP) for manifest in manifests), None)
    names = [
        str(c.path)
        for c in candidates
        if c.manifest is not None and (step is None or c.manifest.step == number)
    ]
    return {"names": names, "problems": problems, "step": number}
