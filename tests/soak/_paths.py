"""Import paths of the helpers of other tests and of the benchmarks."""

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
TESTS = Path(__file__).parents[1]
for folder in (TESTS.parent, TESTS, TESTS.parent / "benchmarks"):
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
