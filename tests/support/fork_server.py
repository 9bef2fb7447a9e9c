"""Fork server of the tests: its processes start with everything imported that a run imports.

A fresh process spends one to three seconds on imports. A process that is forked from a server with
torch alone still spends 0.1 to 0.5 s. The server itself needs 3 s to start, so the workers of
pytest-xdist use the server of the process that started them.
"""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).parents[1]
PACKAGE = TESTS.parent / "megatron_packed"
ALWAYS = [
    "torch.distributed.device_mesh",
    "torch.fx.experimental.symbolic_shapes",  # with sympy, imported by the first backward pass
    "torch.nn.attention.flex_attention",
    "torch.profiler._cupti_monitor",
    "numpy.random",
    "triton",
    "megatron_packed.training.pretrain",
]
KEPT_MEMORY = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_")
"""Variables with which processes keep the memory of freed tensors.

Otherwise each tensor of more than 128 KiB gets new pages, which took a tenth of the time.
"""
CHARTS = ("matplotlib.figure", "matplotlib.backends.backend_svg")
MORE = [
    "torch._dynamo",  # imported by the tests that record operations
    *CHARTS,
    "support.runs",
    "support.one_gloo_loop",
    "support.frozen_imports",
]


_others: list[str] = []
"""Address of the fork server of another process, if this process uses it."""


def modules() -> list[str]:
    """Return the names of the modules to import; some need packages that may be missing.

    The whole package is imported only on a machine without a GPU. A kernel library might use the
    GPU at its import, and a forked process cannot use a GPU that its parent has used.
    """
    if torch.cuda.is_available():
        return ALWAYS
    files = sorted(path.relative_to(PACKAGE.parent) for path in PACKAGE.rglob("*.py"))
    return ALWAYS + [
        ".".join(path.with_suffix("").parts)
        for path in files
        if path.stem not in ("__init__", "__main__")
    ]


def fork_server() -> ForkServerContext:
    """Return the context of the fork server, and start the server at the first call.

    A running server stays, whatever list of modules a later caller sets.
    """
    context = multiprocessing.get_context("forkserver")
    if _others:
        return context
    context.set_forkserver_preload([*modules(), *MORE])
    # Python 3.11 does not pass `sys.path` to the server.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(TESTS), prepend=os.pathsep)
        for name in KEPT_MEMORY:
            patch.setenv(name, str(1 << 30))
        forkserver.ensure_running()
    return context


def address() -> str:
    """Start the server if there is none, and return its address for `use`."""
    fork_server()
    return forkserver._forkserver._forkserver_address


def use(address: str) -> None:
    """Use the server of another process, which must live longer than this process."""
    _others.append(address)
    client = forkserver._forkserver
    client._forkserver_address = address
    client._forkserver_alive_fd = os.open(
        os.devnull, os.O_RDONLY
    )  # the other process keeps it alive
    client.ensure_running = resource_tracker.ensure_running
