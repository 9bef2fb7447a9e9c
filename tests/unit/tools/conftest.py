"""Make the scripts of long checks importable by name, as they import each other."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "tools"))
