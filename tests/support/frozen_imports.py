"""Last import of a server that forks: processes share the pages of all that was imported.

Without it the garbage collector writes to the head of every object, and each process copies these
pages. The variables that were set for the server are removed, so that no process inherits them.
"""

import atexit
import gc
import os
from pathlib import Path

TESTS = str(Path(__file__).parents[1])
paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path != TESTS]
if any(paths):
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
else:
    os.environ.pop("PYTHONPATH", None)
for name in ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"):
    os.environ.pop(name, None)
gc.collect()
gc.freeze()
gc.set_threshold(20_000, 20, 20)  # processes of tests are short, and their cycles are few
atexit.register(gc.unfreeze)  # else libraries report their objects as leaked
