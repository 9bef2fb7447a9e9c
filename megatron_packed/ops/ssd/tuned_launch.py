# mypy: disable-error-code="no-untyped-call"
"""Launches of mamba-ssm's kernels by the names of their arguments, tuned once for each size."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from copy import copy
from typing import Any

import triton
from torch import Tensor

_tuned: dict[tuple[Any, Hashable], Any] = {}
"""Configuration that the tuner chose, by kernel and size."""


def launch(
    kernel: Any, grid: Callable[[Any], tuple[int, ...]], size: Hashable, **arguments: Any
) -> dict[str, int]:
    """Run a kernel, by the names of its arguments; return the block sizes it ran with.

    The first call for a size tunes the kernel; later ones leave the tuner out, which saves the host
    its bookkeeping.
    """
    key = (kernel, size)
    config = _tuned.get(key)
    if config is None:
        tuner = without_hooks(kernel)
        tuner[grid](**arguments)
        config = _tuned[key] = tuner.best_config
    else:
        kernel.fn[grid](**arguments, **config.all_kwargs())
    blocks: dict[str, int] = config.kwargs
    return blocks


def without_hooks(kernel: Any) -> Any:
    """Return the kernel's tuner over configurations that clear nothing before a launch.

    The storing variants need no cleared workspace, and Triton keeps a tuning result on disk, as
    ``TRITON_CACHE_AUTOTUNING`` asks, only of configurations without a hook.
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
    """Return the kernel arguments of the strides of a tensor that is not there."""
    return {f"stride_{name}_{dim}": 0 for dim in dims}


def most_tiles(kernel: Any, size: int, block: str = "BLOCK_SIZE_N") -> int:
    """Return the number of tiles if the tuner takes the smallest block."""
    smallest: int = min(config.kwargs[block] for config in kernel.configs)
    return -(-size // smallest)


def block_of(size: int) -> int:
    """Return the block that holds ``size`` elements, at least 16."""
    block: int = max(triton.next_power_of_2(size), 16)
    return block
