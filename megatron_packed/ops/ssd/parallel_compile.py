# mypy: disable-error-code="no-untyped-call"
"""Compilation of a Triton kernel's configurations on several cores, before a tuner times them."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any

import triton
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction

MOST_THREADS = 16
AVAILABLE = "ignore_errors" in inspect.signature(triton.AsyncCompileMode).parameters
"""False for versions of Triton that cannot go on after a configuration that does not compile."""


def compile_in_threads(tuner: Any) -> Any:
    """Let a tuner compile its configurations at the same time; return the tuner.

    A tuner compiles one configuration after the other, each for about 2 s on one core. Triton
    releases Python's lock while it compiles, so threads share the work. The tuner then finds
    compiled kernels, and times them as before. A configuration that cannot be compiled is left to
    the tuner.
    """
    if not AVAILABLE or "prune_configs" in vars(tuner):
        return tuner
    prune = tuner.prune_configs

    def compiled(options: Mapping[str, Any]) -> Any:
        # The tuner calls this function once for each new size, after it has set its arguments.
        configs = prune(options)
        if len(configs) > 1 and isinstance(tuner.fn, JITFunction):  # not by the interpreter
            _compile(tuner, configs, options)
        return configs

    tuner.prune_configs = compiled
    return tuner


def compile_module_in_threads(module: ModuleType) -> None:
    """Let all tuners of a module compile in threads."""
    for value in vars(module).values():
        if isinstance(value, Autotuner):
            compile_in_threads(value)


def _compile(tuner: Any, configs: Sequence[Any], options: Mapping[str, Any]) -> None:
    arguments = {**tuner.nargs, **options, "warmup": True}
    with (
        ThreadPoolExecutor(_threads()) as pool,
        triton.AsyncCompileMode(pool, ignore_errors=True),
    ):
        for config in configs:
            tuner.fn.run(**{**arguments, **config.all_kwargs()})


def _threads() -> int:
    """Return the number of threads: this process's share of the host's cores, at most 16."""
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return min(max(len(os.sched_getaffinity(0)) // processes, 1), MOST_THREADS)
