"""Errors of the checkpoint package.

Each message is one sentence with the file, the expected value, the found value and a cure.
"""

from __future__ import annotations

from os import PathLike

from megatron_packed.config.errors import escaped


class CheckpointError(RuntimeError):
    """Error for a checkpoint that cannot be written, or whose files are missing or damaged."""

    def __init__(
        self,
        what: str,
        *,
        path: str | PathLike[str] | None = None,
        expected: object = None,
        found: object = None,
        cure: str | None = None,
    ) -> None:
        sentence = what if path is None else f"{path}: {what}"
        if expected is not None or found is not None:
            sentence += f": expected {expected}, found {found}"
        if cure is not None:
            sentence += f"; {cure}"
        super().__init__(printable_message(sentence))


class CheckpointMismatchError(CheckpointError):
    """Error for an intact checkpoint that does not fit the caller's request.

    The tensors differ in name, shape or dtype, a value is not finite, or the caller refused the
    metadata.
    """


class NoCheckpointError(CheckpointError):
    """Error for a directory without any checkpoint; the caller may start training from scratch."""


def printable_message(text: str, limit: int = 4000) -> str:
    """Escape control characters in ``text`` and cut its middle if it exceeds ``limit`` characters.

    Messages contain names that were read from files, so they may hold any character.
    """
    clean = escaped(text)
    if len(clean) <= limit:
        return clean
    return f"{clean[: limit // 2]} [... {len(clean) - limit} characters ...] {clean[-limit // 2 :]}"
