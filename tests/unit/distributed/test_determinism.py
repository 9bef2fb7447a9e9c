"""Deterministic mode: the environment it sets and the contradictions it refuses."""

import subprocess
import sys

import pytest

from megatron_packed.distributed.determinism import DETERMINISTIC_ENVIRONMENT, set_deterministic_environment


def test_sets_what_is_unset_and_keeps_what_is_as_good() -> None:
    environment = {"NCCL_ALGO": "CollnetDirect,Ring", "CUBLAS_WORKSPACE_CONFIG": ":16:8", "HOME": "/x"}
    set_deterministic_environment(environment)
    assert environment["NCCL_ALGO"] == "CollnetDirect,Ring" and environment["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
    assert environment["MAMBA_DETERMINISTIC"] == "1" and environment["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] == "0"
    assert set(DETERMINISTIC_ENVIRONMENT) | {"HOME"} == set(environment)


def test_names_every_contradiction_and_sets_nothing() -> None:
    environment = {"NCCL_ALGO": "Ring,Tree", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "1"}
    before = dict(environment)
    with pytest.raises(
        ValueError, match=r"NVTE_ALLOW_NONDETERMINISTIC_ALGO is '1', needs '0'; NCCL_ALGO is 'Ring,Tree'"
    ):
        set_deterministic_environment(environment)
    assert environment == before


def test_torch_refuses_and_the_module_needs_no_torch() -> None:
    code = """
import sys
from megatron_packed.distributed.determinism import configure_determinism
assert "torch" not in sys.modules
configure_determinism()
import os, torch
assert torch.are_deterministic_algorithms_enabled() and not torch.backends.cudnn.benchmark
assert not torch.utils.deterministic.fill_uninitialized_memory and os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
try:
    torch.nn.functional.max_unpool1d(torch.ones(1, 1, 1), torch.zeros(1, 1, 1, dtype=torch.int64), 2)
except RuntimeError as error:
    print("refused" if "deterministic" in str(error) else error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "refused", done.stdout + done.stderr
