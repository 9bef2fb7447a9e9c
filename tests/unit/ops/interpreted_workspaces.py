"""Memory of the Triton kernels in the interpreter, against their stand-ins on the meta device.

Both run forward and backward under `LiveMemory`. They must save the same bytes, and need the same
memory at their worst moments.
"""

import gc
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_packed.models.estimate.live_memory import LiveMemory
from megatron_packed.ops.activation.api import activation, sigmoid_gate
from megatron_packed.ops.backend_dispatch import planned
from megatron_packed.ops.causal_conv1d.api import causal_conv1d
from megatron_packed.ops.gated_delta_rule.api import gated_delta_rule
from megatron_packed.ops.gated_rms_norm.api import gated_rms_norm
from megatron_packed.ops.parts_of_pack import PartOfPack
from megatron_packed.ops.rope.api import apply_rope
from megatron_packed.ops.router_logits.api import router_logits
from megatron_packed.ops.ssd.api import ssd

T, BF16 = 128, torch.bfloat16


def weight(*shape: int, device: str, dtype: torch.dtype = BF16) -> Tensor:
    """Return a parameter with a buffer for its gradient."""
    parameter = torch.zeros(*shape, device=device, dtype=dtype, requires_grad=True)
    parameter.main_grad = torch.zeros(*shape, device=device)  # type: ignore[attr-defined]
    return parameter


def rows(*shape: int, device: str) -> Tensor:
    return torch.zeros(T, *shape, device=device, dtype=BF16, requires_grad=True)


def inputs_of(op: str, device: str) -> tuple[Any, ...]:
    """Return the inputs of an op, a function that calls it, and tables that are not counted."""
    seq_idx_1T = torch.zeros(1, T, dtype=torch.int32, device=device)
    cu_seqlens = torch.tensor([0, T], dtype=torch.int32).to(device)
    positions_T = torch.zeros(T, dtype=torch.int32, device=device)
    if op == "squared_relu":
        return [rows(64, device=device)], lambda x: activation(x, "squared_relu", backend=backend)
    if op == "swiglu":
        return [rows(64, device=device)], lambda x: activation(x, "swiglu", backend=backend)
    if op == "gate":
        pair = [rows(2, 32, device=device), rows(2, 32, device=device)]
        return pair, lambda x, gate: sigmoid_gate(x, gate, backend=backend)
    if op == "gated_rms_norm":
        tensors = [rows(64, device=device), rows(64, device=device), weight(64, device=device)]
        return tensors, lambda x, z, w: gated_rms_norm(
            x, z, w, 1e-5, group_size=32, backend=backend
        )
    if op == "causal_conv1d":
        tensors = [
            rows(128, device=device),
            weight(128, 4, device=device),
            weight(128, device=device),
        ]
        return tensors, lambda x, w, b: causal_conv1d(x, w, b, seq_idx_1T, backend=backend)
    if op == "rope":
        tables = [torch.zeros(T, 16, device=device) for _ in range(2)]
        pair = [rows(4, 32, device=device), rows(2, 32, device=device)]
        return (
            pair,
            lambda q, k: torch.cat(apply_rope(q, k, positions_T, *tables, backend=backend), dim=1),
            positions_T,
            *tables,
        )
    if op == "router_logits":
        tensors = [rows(64, device=device), weight(16, 64, device=device, dtype=torch.float32)]
        return tensors, lambda x, w: router_logits(x, w, backend=backend)
    per_head = [weight(4, device=device, dtype=torch.float32) for _ in range(3)]
    if op == "ssd":
        heads = [rows(4, 64, device=device), rows(4, device=device)]
        groups = [rows(1, 64, device=device), rows(1, 64, device=device)]
        return [*heads, per_head[0], *groups, *per_head[1:]], lambda *tensors: ssd(
            *tensors, seq_idx_1T, cu_seqlens, chunk_size=64, backend=backend
        )
    assert op.startswith("gated_delta_rule"), op
    heads = [rows(2, 32, device=device), rows(2, 32, device=device), rows(4, 32, device=device)]
    gates = [rows(4, device=device), rows(4, device=device)]
    part = one_of_three(device) if op.endswith("in parts") else None
    return [*heads, *gates, *per_head[:2]], lambda *tensors: gated_delta_rule(
        *tensors, seq_idx_1T, cu_seqlens, backend=backend, part=part
    )


def one_of_three(device: str) -> PartOfPack:
    """Return a part that receives zeros from two others in both directions, the most of any part."""

    def start(message_1X: Tensor, *, back: bool = False) -> Any:
        rows_2X = message_1X.new_zeros(2, message_1X.shape[1])
        return SimpleNamespace(wait=lambda: rows_2X)

    return PartOfPack(1, 3, torch.zeros(1, dtype=torch.int32, device=device), start)


backend = "triton"
OPS = (
    "squared_relu",
    "swiglu",
    "gate",
    "gated_rms_norm",
    "causal_conv1d",
    "rope",
    "router_logits",
    "ssd",
    "gated_delta_rule",
    "gated_delta_rule in parts",
)


def memory_of(op: str, device: str) -> tuple[int, int, int]:
    """Return the saved bytes, and the most bytes of forward and backward."""
    inputs, run, *shared = inputs_of(op, device)
    ignored = [*inputs, *(x.main_grad for x in inputs if hasattr(x, "main_grad")), *shared]
    live = LiveMemory(ignored)
    with live:
        y = run(*inputs)
        gc.collect()  # the interpreter has cycles of references
        forward, saved = live.peak().bytes, live.amounts().total()
        gradient = torch.zeros_like(y)
        live.forget_peaks()
        live.note()
        y.backward(gradient)
    return saved, forward, live.peak().bytes


@pytest.mark.parametrize("op", OPS)
def test_stand_ins_need_the_memory_of_the_kernels(op: str) -> None:
    kernels = memory_of(op, "cpu")
    with planned(torch.device("cuda")):
        stand_ins = memory_of(op, "meta")
    # The tables of a pack, and sums with one value per head or program, are not counted.
    assert stand_ins == pytest.approx(kernels, rel=0.02, abs=4096)
