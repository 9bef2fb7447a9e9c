"""Errors of the checkpoint package: one sentence that names the file, what was expected, what was
found, and a cure.
"""

from __future__ import annotations

from os import PathLike


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, or what lies on disk is not what was written."""

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
        super().__init__(printable(sentence))


class CheckpointMismatchError(CheckpointError):
    """The checkpoint is sound, but holds other tensors than the caller wants (names, shapes,
    dtypes, finiteness).
    """


class NoCheckpointError(CheckpointError):
    """There is nothing that looks like a checkpoint: a caller may start from scratch."""


def printable(text: str, limit: int = 4000) -> str:
    """``text`` with control characters escaped (names come from files) and its middle cut beyond
    ``limit``.
    """
    clean = "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)
    if len(clean) <= limit:
        return clean
    return f"{clean[: limit // 2]} [... {len(clean) - limit} characters ...] {clean[-limit // 2 :]}"
