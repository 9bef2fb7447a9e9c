"""torch settings for ``--deterministic-mode``.

``config/environment_variables.py`` sets the environment variables of the other libraries.
"""

from __future__ import annotations

import torch


def configure_determinism() -> None:
    """Make torch use deterministic kernels only, and select no kernel by timing.

    After this call torch raises a RuntimeError with the operation's name when an operation without
    a deterministic implementation is called.
    """
    torch.use_deterministic_algorithms(True)
    # torch would otherwise fill every new tensor with NaN. That debugging aid finds reads of
    # unwritten memory, but writes each tensor once more.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    # `use_deterministic_algorithms` does not cover cuDNN. Its benchmark mode selects algorithms by
    # timing, so the next run or another rank could use a different algorithm.
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
