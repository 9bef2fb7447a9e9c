"""The file ``latest``: name and number of the newest checkpoint.

Two readers need it. A load finds checkpoints by scanning, so without it the loss of the newest one
would go unnoticed: the load reports a hint that is newer than every checkpoint. A save numbers its
checkpoint above the hint, so that a lost checkpoint that comes back is not taken for the newest.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from megatron_packed.checkpoint.directory import LATEST, Candidate, is_checkpoint_name
from megatron_packed.checkpoint.errors import CheckpointError
from megatron_packed.checkpoint.sealed_json import Json, read_small_file, seal, unseal


def encode_hint(name: str, sequence: int) -> bytes:
    return seal({"checkpoint": name, "sequence": sequence})


def read_hint(root: Path) -> dict[str, Json] | None:
    """Return ``{"checkpoint": directory name, "sequence": int}``, or None without a hint.

    Raises:
        CheckpointError: the hint is damaged (a checkpoint is still found by scanning).
    """
    path = root / LATEST
    if not os.path.lexists(path):
        return None
    fields = unseal(read_small_file(path, 1 << 16), path)
    name, sequence = fields.get("checkpoint"), fields.get("sequence")
    if not isinstance(name, str) or not is_checkpoint_name(name) or type(sequence) is not int:
        raise CheckpointError(
            "the hint names no checkpoint",
            path=path,
            expected="step_<8 digits> and a sequence number",
            found=repr(fields)[:200],
            cure="the next save rewrites it",
        )
    return fields


def check_hint(root: str | os.PathLike[str], candidates: Sequence[Candidate]) -> str | None:
    """Return a sentence if the hint is damaged or names a newer checkpoint than there is, else
    None.
    """
    try:
        hint = read_hint(Path(root))
    except CheckpointError as error:
        return f"{error} (ignored; checkpoints are found by scanning)"
    newest = max((c.manifest.sequence for c in candidates if c.manifest is not None), default=0)
    if hint is not None and hint["sequence"] > newest:
        return (
            f"{Path(root) / LATEST} names {hint['checkpoint']} (number {hint['sequence']}), but the newest "
            f"checkpoint that can be read is number {newest}: a newer one was lost"
        )
    return None
