"""Fixtures of GPU tests: quick tuning of kernels, and shared processes with a GPU each."""

from __future__ import annotations

import importlib
import os
import pkgutil
from collections.abc import Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest
import torch

from megatron_packed.config.environment_variables import assembler_variables

if TYPE_CHECKING:
    from megatron_packed.distributed.groups import ParallelGroups
    from support.process_pools import WorkerPools

# Otherwise each process compiles flash-attn 4 again, which takes a minute in tests of two processes.
# flash-attn 4 reads this when it is imported, and TransformerEngine imports it.
os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")

# TransformerEngine takes the cuDNN of the system. It cannot be loaded after another cuDNN, which torch
# loads with its first convolution or attention; a run that needs it imports it before.
if torch.cuda.is_available() and find_spec("transformer_engine"):
    importlib.import_module("transformer_engine.pytorch")

# Kernels are compiled as in a run.
for name, value in assembler_variables().items():
    os.environ.setdefault(name, value)


@pytest.fixture(scope="session", autouse=True)
def two_tilings_per_kernel():
    """Limit tuning to two configurations: mamba-ssm compiles up to a dozen for each kernel and
    size.

    Each compilation takes a second. Tests need correct results, not the fastest tiles.
    """
    if find_spec("mamba_ssm") is None or not torch.cuda.is_available():
        yield
        return
    package = importlib.import_module("mamba_ssm.ops.triton")
    names = [
        module.name
        for module in pkgutil.iter_modules(package.__path__)
        if module.name.startswith("ssd_")
    ]
    modules = [importlib.import_module(f"{package.__name__}.{name}") for name in names]
    kernels = {
        id(value): value
        for module in modules
        for value in vars(module).values()
        if hasattr(value, "configs")
    }
    kept = [(kernel, kernel.configs) for kernel in kernels.values()]
    for kernel, configs in kept:
        kernel.configs = [configs[0], configs[-1]] if len(configs) > 2 else configs
    yield
    for kernel, configs in kept:
        kernel.configs = configs


@pytest.fixture(scope="module")
def groups() -> Iterator[ParallelGroups]:
    """Yield groups of one process on the first GPU, with deterministic algorithms."""
    from megatron_packed.distributed.determinism import configure_determinism
    from megatron_packed.distributed.groups import ParallelGroups

    configure_determinism()
    yield ParallelGroups.single(torch.device("cuda", 0))
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="module")
def one_gpu() -> Iterator[WorkerPools]:
    """Yield processes that share a GPU; NCCL does not accept them."""
    from support.fork_server import fork_server
    from support.process_pools import WorkerPools

    fork_server()
    with WorkerPools(collective_timeout=120) as started:
        yield started


@pytest.fixture(scope="module")
def nccl_pools() -> Iterator[WorkerPools]:
    """Yield processes with a GPU each, which the tests of a file share."""
    from support.process_pools import WorkerPools

    with WorkerPools(backend="nccl", collective_timeout=300) as started:
        yield started
