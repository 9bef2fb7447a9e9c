"""Tests that deterministic mode makes torch refuse operations without a deterministic kernel."""

import subprocess
from pathlib import Path


def test_torch_refuses(quick_programs: Path) -> None:
    code = """
import torch
from megatron_packed.distributed.determinism import configure_determinism
configure_determinism()
assert torch.are_deterministic_algorithms_enabled() and not torch.backends.cudnn.benchmark
assert not torch.utils.deterministic.fill_uninitialized_memory
try:
    torch.nn.functional.max_unpool1d(torch.ones(1, 1, 1), torch.zeros(1, 1, 1, dtype=torch.int64), 2)
except RuntimeError as error:
    print("refused" if "deterministic" in str(error) else error)
"""
    command = [str(quick_programs / "python"), "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "refused", done.stdout + done.stderr
