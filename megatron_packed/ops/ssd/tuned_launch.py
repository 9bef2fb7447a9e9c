# mypy: disable-error-code="no-untyped-call"
"""Launch of mamba-ssm's kernels with named arguments and one tuning per size."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from copy import copy
from typing import Any

import triton
from torch import Tensor

from megatron_packed.ops.ssd.parallel_compile import compile_in_threads

_tuned: dict[tuple[Any, Hashable], Any] = {}
"""Configurations that the tuner chose, by kernel and size."""


def launch(
    kernel: Any, grid: Callable[[Any], tuple[int, ...]], size: Hashable, **arguments: Any
) -> dict[str, int]:
    """Run a kernel with named arguments, and return the block sizes of the run.

    The first call for a size tunes the kernel. Later calls bypass the tuner to save host time.
    """
    key = (kernel, size)
    config = _tuned.get(key)
    if config is None:
        tuner = compile_in_threads(without_hooks(kernel))
        tuner[grid](**arguments)
        config = _tuned[key] = tuner.best_config
    else:
        kernel.fn[grid](**arguments, **config.all_kwargs())
    blocks: dict[str, int] = config.kwargs
    return blocks


def without_hooks(kernel: Any) -> Any:
    """Return a tuner of the kernel over its configurations without their pre-launch hooks.

    The hooks clear workspaces for atomic sums, which this package does not use. Also, with
    ``TRITON_CACHE_AUTOTUNING`` Triton stores a tuning result on disk only if no configuration has a
    hook.
    """
    configs = [copy(config) for config in kernel.configs]
    for config in configs:
        config.pre_hook = None
    return triton.autotune(configs=configs, key=kernel.keys)(kernel.fn)


def strides(name: str, tensor: Tensor, *dims: str) -> dict[str, int]:
    """Return the kernel arguments that hold the strides of ``tensor``."""
    return {
        f"stride_{name}_{dim}": stride for dim, stride in zip(dims, tensor.stride(), strict=True)
    }


def no_strides(name: str, *dims: str) -> dict[str, int]:
    """Return zeros for the kernel arguments that hold the strides of an absent tensor."""
    return {f"stride_{name}_{dim}": 0 for dim in dims}


def most_tiles(kernel: Any, size: int, block: str = "BLOCK_SIZE_N") -> int:
    """Return the largest possible number of tiles, that of the smallest block of the tuner."""
    smallest: int = min(config.kwargs[block] for config in kernel.configs)
    return -(-size // smallest)


def block_of(size: int) -> int:
    """Return the smallest power of 2 that is at least ``size`` and at least 16."""
    block: int = max(triton.next_power_of_2(size), 16)
    return block
