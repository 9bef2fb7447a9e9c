"""Triton kernels against their references on a CPU.

Triton reads at import whether it interprets kernels. So the cases (interpreted_*.py) run in separate
processes, each with a third of the files.
"""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

PROCESSES = 3


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize("first", range(PROCESSES))
def test_kernels_equal_their_references_in_the_interpreter(first):
    files = sorted(str(path) for path in Path(__file__).parent.glob("interpreted_*.py"))
    cases = files[first::PROCESSES]
    assert cases
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *cases]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]
