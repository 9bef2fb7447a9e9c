"""Environment variables of runs, deterministic and not."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_packed.config import environment_variables
from megatron_packed.config.environment_variables import (
    apply_environment,
    environment,
    environment_problems,
)
from megatron_packed.config.errors import ConfigError
from megatron_packed.config.sections.training import TrainingConfig


@pytest.fixture(autouse=True)
def usual_assembler(monkeypatch):
    """Leave Triton's ptxas out, which depends on the machine."""
    monkeypatch.setattr(environment_variables, "assembler_variables", dict)


ON = TrainingConfig(train_iters=1, deterministic_mode=True)
OFF = TrainingConfig(train_iters=1)


def test_the_variables_of_both_kinds_of_run() -> None:
    assert environment(OFF) == {
        "CUBLAS_WORKSPACE_CONFIG": ":0:0",
        "TRITON_CACHE_AUTOTUNING": "1",
        "NCCL_GRAPH_REGISTER": "0",
        "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
        "NVTE_FLASH_ATTN_V4": "0",
        "QUACK_CACHE_DIR": str(Path.home() / ".cache/quack"),
    }
    assert environment(ON) == {
        "MAMBA_DETERMINISTIC": "1",
        "CAUSAL_CONV1D_DETERMINISTIC": "1",
        "TRITON_CACHE_AUTOTUNING": "1",
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "NCCL_ALGO": "Ring",
        "NCCL_GRAPH_REGISTER": "0",
        "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
        "NVTE_FLASH_ATTN_V4": "0",
        "QUACK_CACHE_DIR": str(Path.home() / ".cache/quack"),
    }


def test_what_is_set_and_deterministic_stays(monkeypatch) -> None:
    monkeypatch.delitem(sys.modules, "torch")
    environ = {
        "CUBLAS_WORKSPACE_CONFIG": ":16:8",
        "NCCL_ALGO": "Ring,CollnetDirect",
        "MAMBA_DETERMINISTIC": "",
    }
    assert set(apply_environment(ON, environ)) == set(environment(ON)) - {
        "CUBLAS_WORKSPACE_CONFIG",
        "NCCL_ALGO",
    }
    assert environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
    assert environ["MAMBA_DETERMINISTIC"] == "1"


def test_what_contradicts_is_a_problem(monkeypatch) -> None:
    environ = {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "1", "NCCL_ALGO": "Tree"}
    assert [problem.option for problem in environment_problems(ON, environ)] == sorted(
        environ, reverse=True
    )
    assert environment_problems(OFF, environ) == []
    monkeypatch.delitem(sys.modules, "torch")
    with pytest.raises(ConfigError, match="NCCL_ALGO Tree"):
        apply_environment(ON, environ)
    assert "MAMBA_DETERMINISTIC" not in environ


def test_too_late_once_torch_is_imported() -> None:
    import torch  # noqa: F401

    with pytest.raises(RuntimeError, match="before importing torch"):
        apply_environment(ON, {})
    assert apply_environment(OFF, environ := {}) == environ == environment(OFF)
    given = {name: value for name, value in environment(ON).items() if name != "QUACK_CACHE_DIR"}
    assert list(apply_environment(ON, given)) == ["QUACK_CACHE_DIR"], "not read at the import"


def test_what_the_user_set_stays_without_deterministic_mode() -> None:
    given = {
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "TRITON_CACHE_AUTOTUNING": "0",
        "NCCL_GRAPH_REGISTER": "1",
        "TORCH_SYMM_MEM_DISABLE_MULTICAST": "0",
        "NVTE_FLASH_ATTN_V4": "1",
        "QUACK_CACHE_DIR": "/fast/quack",
    }
    assert apply_environment(OFF, environ := dict(given)) == {}
    assert environ == given


def test_it_reaches_the_process_environment() -> None:
    code = (
        "import os; from megatron_packed.config.environment_variables import *\n"
        "from megatron_packed.config.sections.training import *\n"
        "apply_environment(TrainingConfig(train_iters=1, deterministic_mode=True)); print(os.environ['NCCL_ALGO'])"
    )
    # Leave out variables that commands in other tests have set in this process.
    given = {name: value for name, value in os.environ.items() if name not in environment(ON)}
    run = subprocess.run(
        [sys.executable, "-c", code], env=given, capture_output=True, text=True, check=True
    )
    assert run.stdout == "Ring\n"
