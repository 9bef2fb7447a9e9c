"""Import paths of the helpers of tests and of the benchmarks, and parts of several long checks."""

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
REPOSITORY = Path(__file__).resolve().parents[2]
TESTS = REPOSITORY / "tests"
for folder in (REPOSITORY, TESTS, REPOSITORY / "benchmarks"):
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
