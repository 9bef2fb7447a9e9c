"""The exit codes of a run; torchrun turns all but 0 into 1, so ``STATUS.json`` repeats them."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """Reason why a run ended."""

    DONE = 0
    """The last iteration, or ``--exit-interval``."""
    UNFORESEEN = 1
    """Anything that has no code of its own: a defect, with a traceback, or another process that is
    gone.
    """
    USAGE = 2
    """The configuration; nothing was started."""
    DATA = 3
    """The data cannot be used, or a block of it is damaged."""
    CHECKPOINT = 4
    """No checkpoint can be loaded or written."""
    NONFINITE = 20
    """A non-finite step under ``--on-nonfinite stop``, after saving the clean weights."""
    LEAK = 21
    """The isolation self-test refuses to train."""
    OUT_OF_MEMORY = 22
    """The memory of the GPU or of the host ran out."""
    FALLBACK = 23
    """``--cuda-graph-strict``: something would have run eagerly."""
    AUDIT = 24
    """``--cuda-graph-audit-interval``: a replay gave something else than the module itself. Or
    ranks hold other weights than those that should hold the same.
    """
    PREEMPTED = 75
    """Stopped by a signal or a time limit after saving; the same command goes on. EX_TEMPFAIL of
    sysexits.h.
    """
