"""Files of JSON lines, and of one JSON value."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def write_lines(path: Path, lines: Iterable[Any]) -> Path:
    """Write a JSON value a line, and return the path."""
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def write_texts(path: Path, texts: Iterable[str]) -> Path:
    """Write a document a line, and return the path."""
    return write_lines(path, ({"text": text} for text in texts))


def read_lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def read_json(path: Path) -> Any:
    return json.loads(path.read_text())
