"""Selection of the older checkpoints that a save removes."""

from __future__ import annotations

from pathlib import Path

from megatron_packed.checkpoint.directory import Candidate, check_sizes, scan, step_name
from megatron_packed.checkpoint.errors import CheckpointError


def superseded(
    root: Path,
    run_id: str,
    keep_last: int | None,
    keep_every: int | None,
    keep_step: int | None = None,
) -> list[Path]:
    """Return the checkpoints to remove.

    These are old checkpoints of a step that was saved again, if the new checkpoint is complete.
    They also include the checkpoints of this run beyond the newest ``keep_last``, except
    ``keep_step`` and steps that are a multiple of ``keep_every``. A damaged checkpoint does not
    count toward ``keep_last``.
    """
    candidates = scan(root)
    complete = {candidate.path.name for candidate in candidates if _is_complete(candidate)}
    doomed: list[Path] = []
    num_kept = 0
    for candidate in candidates:
        manifest = candidate.manifest
        if manifest is None:
            continue
        name = candidate.path.name
        own_name = step_name(manifest.step)
        if own_name != name and own_name in complete:
            doomed.append(candidate.path)
        elif manifest.run_id == run_id:
            if keep_last is not None and num_kept >= keep_last:
                spared = keep_every is not None and manifest.step % keep_every == 0
                if not spared and manifest.step != keep_step:
                    doomed.append(candidate.path)
            elif name in complete:
                num_kept += 1
    return doomed


def _is_complete(candidate: Candidate) -> bool:
    """Return whether a checkpoint has a valid manifest and all files with the recorded sizes."""
    if candidate.manifest is None:
        return False
    try:
        check_sizes(candidate.path, candidate.manifest)
    except CheckpointError:
        return False
    return True
