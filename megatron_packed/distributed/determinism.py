"""Switches of torch for ``--deterministic-mode``; ``config/environment_variables.py`` sets the
libraries' environment.
"""

from __future__ import annotations

import torch


def configure_determinism() -> None:
    """Make torch refuse operations without a deterministic implementation, and pick no kernel by
    timing.

    From then on torch raises RuntimeError, naming the operation, when one is called that has none.
    """
    torch.use_deterministic_algorithms(True)
    # Filling every new tensor with NaN finds reads of unwritten memory: a debugging aid that costs
    # a pass over memory.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    # cuDNN is not covered by the switch above; its benchmark picks an algorithm by timing, so another
    # one on the next run or the next rank.
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
