"""Trace of one step after warm-up: calls into other files, and the call stack of attention."""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path
from types import FrameType
from typing import Any

SIZES: dict[str, Any] = {
    "hybrid_layer_pattern": "M*-E",
    "hidden_size": 32,
    "ffn_hidden_size": 48,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "mamba_head_dim": 8,
    "mamba_state_dim": 16,
    "mamba_num_groups": 2,
    "mamba_chunk_size": 8,
    "num_experts": 5,
    "moe_ffn_hidden_size": 16,
    "add_bias_linear": False,
    "normalization": "RMSNorm",
    "squared_relu": True,
}
"""Sizes of a model with a layer of every kind, and with all default options."""


class Tracer:
    """Profile function that counts calls into other files and records the call stack of a kernel.

    It profiles the code inside ``with tracer:``, in this thread.

    Args:
        package: folder whose functions count.
        start, end: code objects of the first and the last function of the recorded call stack.
    """

    def __init__(self, package: Path, start: Any, end: Any) -> None:
        self.package = f"{package}{os.sep}"
        self.start = start
        self.end = end
        self.last_file = ""
        self.switches: list[str] = []
        self.road: list[str] = []

    def __enter__(self) -> None:
        self.previous = sys.getprofile()
        sys.setprofile(self)

    def __exit__(self, *_: object) -> None:
        sys.setprofile(self.previous)

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        file = frame.f_code.co_filename
        if event != "call" or not file.startswith(self.package):
            return
        if file != self.last_file:
            self.switches.append(self.place_of(frame))
        self.last_file = file
        if frame.f_code is self.end:
            self.road = max(self.road, self.road_to(frame), key=len)

    def road_to(self, frame: FrameType | None) -> list[str]:
        """Return the package's frames from ``start`` to ``frame``, or no frames without ``start``."""
        road: list[str] = []
        while frame is not None:
            if frame.f_code.co_filename.startswith(self.package):
                road.insert(0, self.place_of(frame))
            if frame.f_code is self.start:
                return road
            frame = frame.f_back
        return []

    def place_of(self, frame: FrameType) -> str:
        code = frame.f_code
        return f"{code.co_filename.removeprefix(self.package)}:{code.co_firstlineno} {code.co_name}"


def trace(package: Path) -> Tracer:
    """Trace the third step of a tiny model with two micro-batches on the CPU.

    All options have their defaults. A switch is a call of a function of the package whose file
    differs from that of the package's previous call. The road is the longest call stack from
    `HybridModel.forward` to `varlen_attention`.
    """
    from megatron_packed.models.hybrid_model import HybridModel
    from megatron_packed.ops.varlen_attention.api import varlen_attention

    step, packs = tiny_step()
    for _ in range(2):
        step(packs, 1e-2)
    tracer = Tracer(package, HybridModel.forward.__code__, varlen_attention.__code__)
    gc.collect()
    gc.disable()  # Finalizers of objects from other tests would count.
    try:
        with tracer:
            step(packs, 1e-2)
    finally:
        gc.enable()
    return tracer


def tiny_step() -> tuple[Any, list[Any]]:
    """Return a training step of a model ``M*-E``, and two packs for it."""
    import numpy as np

    from megatron_packed.config.sections.model import ModelConfig
    from megatron_packed.distributed.flat_buffers import FlatBuffers
    from megatron_packed.distributed.groups import ParallelGroups
    from megatron_packed.models.hybrid_model import HybridModel
    from megatron_packed.models.metrics_layout import MetricsLayout
    from megatron_packed.optim.optimizer import Optimizer
    from megatron_packed.packed.micro_batch import MicroBatch
    from megatron_packed.training.train_step import TrainStep

    config = ModelConfig(**SIZES)
    groups = ParallelGroups.single()
    model = HybridModel(config, vocab_size=61, max_positions=48, seed=1).train()
    layout = MetricsLayout.from_model(model, groups)
    buffers = FlatBuffers(model, extras=layout.extras, counters=layout.counters)
    documents = [[(np.arange(length) % 61, None) for length in pack] for pack in ([20, 9, 3], [41])]
    packs = [MicroBatch.build(pack, 48, scales=(1 / 69, 0.5)) for pack in documents]
    return TrainStep(model, buffers, Optimizer(buffers), groups), packs
