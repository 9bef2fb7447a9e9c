"""Exit codes of a run. Torchrun turns all but 0 into 1, so ``STATUS.json`` repeats the code."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """Reason for the end of a run."""

    DONE = 0
    """The last iteration or an iteration of ``--exit-interval`` is complete."""
    UNFORESEEN = 1
    """An error without another code: a defect, with a traceback, or the loss of another process."""
    USAGE = 2
    """The configuration is wrong; nothing was started."""
    DATA = 3
    """The data cannot be used, or a block of it is damaged."""
    CHECKPOINT = 4
    """No checkpoint can be loaded or written."""
    NONFINITE = 20
    """A step was non-finite under ``--on-nonfinite stop``; the weights before it were saved."""
    LEAK = 21
    """The isolation self-test found that documents of a pack influence each other."""
    OUT_OF_MEMORY = 22
    """The memory of the GPU or of the host ran out."""
    FALLBACK = 23
    """A module or micro-batch would have run eagerly under ``--cuda-graph-strict``."""
    AUDIT = 24
    """A check failed: a replay and the eager module differ, or replicas hold different weights."""
    PREEMPTED = 75
    """A signal or a time limit stopped the run after a save; the same command resumes it.

    The number is EX_TEMPFAIL of sysexits.h.
    """
