"""Reader of the tables in JSON files: packages, flags of a first run, and of other programs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def table_rows(name: str) -> Any:
    """Return the rows of a file, such as ``megatron/refused_flags.json``."""
    return json.loads((Path(__file__).parent / name).read_text("utf-8"))
