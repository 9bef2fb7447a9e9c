"""Commands of ``megatron-packed`` in this process, and what they print."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from megatron_packed.cli.main import main

if TYPE_CHECKING:
    import pytest


def exit_code(*words: object) -> Any:
    """Return the exit code of a command, also if a parser ends the process."""
    try:
        return main([str(word) for word in words])
    except SystemExit as ended:
        return ended.code


def report(capsys: pytest.CaptureFixture[str], *words: object) -> Any:
    """Return the report in JSON of a command that succeeds."""
    assert exit_code(*words, "--json") == 0
    return json.loads(capsys.readouterr().out)


def refusal(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[Any, str]:
    """Return the exit code of a command and its standard error."""
    return exit_code(*words), capsys.readouterr().err
