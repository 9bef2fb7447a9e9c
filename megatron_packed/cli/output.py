"""Output of a command."""

from __future__ import annotations

import sys

from megatron_packed.config.errors import escaped


def show(text: str) -> None:
    """Print text on standard output. Control characters, for example of file names, are escaped."""
    print(escaped(text))


def show_aside(text: str) -> None:
    """Print text on standard error, as `show`, without waiting for more."""
    print(escaped(text), file=sys.stderr, flush=True)
