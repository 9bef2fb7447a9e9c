"""What a command cannot do, for a person to read."""

from __future__ import annotations

EXIT_USAGE, EXIT_DATA, EXIT_CHECKPOINT = 2, 3, 4
"""As of ``pretrain_hybrid.py``."""


class UsageError(Exception):
    """A sentence for standard error, and the exit code that goes with it."""

    def __init__(self, text: str, exit_code: int = EXIT_USAGE) -> None:
        self.exit_code = exit_code
        super().__init__(text)
