"""Records of the backends that a training step calls, for tests of the kernels that a run lists."""

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from inspect import isfunction
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_packed.config.parser.parse import parse
from megatron_packed.config.run import RunConfig
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.explain.op_requests import op_requests
from megatron_packed.packed.micro_batch import MicroBatch
from megatron_packed.training.build_job import build_job
from support.code_prints import Module

FLAGS = [
    "--hidden-size",
    "128",
    "--num-attention-heads",
    "2",
    "--kv-channels",
    "64",
    "--mamba-num-heads",
    "4",
    "--mamba-head-dim",
    "64",
    "--mamba-num-groups",
    "1",
    "--mamba-state-dim",
    "64",
    "--linear-num-key-heads",
    "2",
    "--linear-num-value-heads",
    "4",
    "--linear-key-head-dim",
    "64",
    "--linear-value-head-dim",
    "64",
    "--disable-bias-linear",
    "--seq-length",
    "128",
    "--train-iters",
    "1",
    "--lr",
    "1e-3",
    "--train-data-path",
    str(Path(__file__)),
    "--tokenizer-type",
    "ByteTokenizer",
    "--device",
    "cpu",
]
ACROSS = (
    *("--context-parallel-size", "2", "--global-batch-size", "1", "--cp-comm-type", "p2p"),
    *("--cp-partition-mode", "zigzag"),
)


def config_of(pattern: str = "M*-E", flags: tuple[str, ...] = (), **training: Any) -> RunConfig:
    """Return a small run, on a CPU unless ``training`` changes its device."""
    words = [*FLAGS, "--hybrid-layer-pattern", pattern, *flags]
    words += ["--num-experts", "4"] if "E" in pattern else []
    words += [] if "--swiglu" in flags else ["--squared-relu"]
    words += [] if "--normalization" in flags else ["--normalization", "RMSNorm"]
    words += [] if "--position-embedding-type" in flags else ["--position-embedding-type", "rope"]
    config = parse(words, world_size=2 if flags == ACROSS else 1)
    return replace(config, training=replace(config.training, **training))


def bf16_run(pattern: str, device: str = "auto", **sections: dict[str, Any]) -> RunConfig:
    """Return a small run in bf16, with changed options by section."""
    config = config_of(pattern, bf16=True, device=device)
    changes = {name: replace(getattr(config, name), **more) for name, more in sections.items()}
    return replace(config, **changes)


def called_in_a_step(
    monkeypatch: pytest.MonkeyPatch, config: RunConfig, device: torch.device
) -> dict[str, set[str]]:
    """Return the backends of each op that forward, backward and update of the real model call.

    Functions that a backend imports are not its own, unless it binds them to another name. A
    ``functools.partial`` has no module, so each one in a backend counts as its own. Calls on the
    meta device compute nothing and do not count.
    """
    called: dict[str, set[str]] = {}
    for op, _, _ in op_requests(config, device):
        for backend in op.backends:
            try:
                module = backend.load()
            except Exception:  # an optional package that is not installed cannot be called
                continue
            for name in list(vars(module)):
                function = getattr(module, name)
                here = backend.module.partition(":")[0]
                bound = Module(Path(sys.modules[here].__file__ or "")).definitions
                own = isinstance(function, partial) or (
                    isfunction(function) and (function.__module__ == here or name in bound)
                )
                if (
                    own
                    and name not in ("not_supported_reasons", "tune")
                    and not name.startswith("_")
                ):
                    monkeypatch.setattr(
                        module, name, _noting(called, op.name, backend.name, function)
                    )
    step = build_job(config, ParallelGroups.single(device), 256).step
    documents = [(torch.arange(length).numpy(), None) for length in (100, 28)]
    step([MicroBatch.build(documents, 128, scales=(0.01, 1)).to(device)], 1e-3)
    return called


def _noting(
    called: dict[str, set[str]], op: str, backend: str, function: Callable[..., Any]
) -> Callable[..., Any]:
    def run(*arguments: Any, **options: Any) -> Any:
        given = (*arguments, *options.values())
        if not any(isinstance(one, torch.Tensor) and one.is_meta for one in given):
            called.setdefault(op, set()).add(backend)
        return function(*arguments, **options)

    return run
