"""The file ``latest``: name and sequence number of the newest checkpoint.

A load finds checkpoints by scanning the directory and does not need this file. It uses the file
``latest`` to detect that the newest checkpoint was lost: it warns if the number in the file is
higher than that of every checkpoint. A save gives its checkpoint a number above the one in the
file. If a lost checkpoint is restored later, its number is then lower than that of newer saves.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from megatron_packed.checkpoint.directory import LATEST, Candidate, is_checkpoint_name
from megatron_packed.checkpoint.errors import CheckpointError
from megatron_packed.checkpoint.sealed_json import JsonFields, read_small_file, seal, unseal
from megatron_packed.config.regular_files import StrPath


def encode_hint(name: str, sequence: int) -> bytes:
    return seal({"checkpoint": name, "sequence": sequence})


def read_hint(root: Path) -> JsonFields | None:
    """Return ``{"checkpoint": directory name, "sequence": int}``, or None without the file.

    Raises:
        CheckpointError: the file is damaged. Scanning still finds the checkpoints.
    """
    path = root / LATEST
    if not os.path.lexists(path):
        return None
    fields = unseal(read_small_file(path, 1 << 16), path)
    name, sequence = fields.get("checkpoint"), fields.get("sequence")
    if not isinstance(name, str) or not is_checkpoint_name(name) or type(sequence) is not int:
        raise CheckpointError(
            "the file does not name a checkpoint",
            path=path,
            expected="step_<8 digits> and a sequence number",
            found=repr(fields)[:200],
            cure="the next save rewrites the file",
        )
    return fields


def check_hint(root: StrPath, candidates: Sequence[Candidate]) -> str | None:
    """Return a warning if ``latest`` is damaged or names a newer checkpoint than the candidates.

    Otherwise return None.
    """
    try:
        return lost_checkpoint(root, candidates)
    except CheckpointError as error:
        return f"{error} (this file is ignored; checkpoints are found by scanning the directory)"


def lost_checkpoint(root: StrPath, candidates: Sequence[Candidate]) -> str | None:
    """Return a sentence if ``latest`` names a newer checkpoint than the candidates, else None.

    Raises:
        CheckpointError: the file is damaged.
    """
    hint = read_hint(Path(root))
    newest = max((c.manifest.sequence for c in candidates if c.manifest is not None), default=0)
    if hint is not None and hint["sequence"] > newest:
        return (
            f"{Path(root) / LATEST} names {hint['checkpoint']} (number {hint['sequence']}), but the newest "
            f"readable checkpoint is number {newest}: a newer checkpoint was lost"
        )
    return None
