"""Slices of parameters with random states, for tests of AdamW's one-pass kernel."""

from __future__ import annotations

from itertools import product

import torch
from torch import Tensor

from megatron_packed.optim.adamw import Control, Slices
from megatron_packed.optim.master_remainders import join_masters, split_masters
from megatron_packed.optim.stochastic_rounding import ElementNumbers
from support.optimizer_states import numbers_of_shards

BF16, F32 = torch.bfloat16, torch.float32
STATES = list(product((F32, BF16), (F32, BF16), (False, True), (False, True)))
"""Data types of both moments; whether masters are pairs, and moments are rounded stochastically."""


def slices_of(
    exp_avg: torch.dtype,
    exp_avg_sq: torch.dtype,
    remainders: bool,
    stochastic: bool,
    *,
    changes: bool,
    grad: torch.dtype = F32,
    device: str = "cpu",
) -> Slices:
    """Return random parameters, gradients and moments in one slice.

    Args:
        changes: the weight decay is a tensor.
    """
    numbers = numbers_of_shards()
    length = max(begin + count for begin, count, *_ in numbers.runs.tolist())
    generator = torch.Generator().manual_seed(3)

    def normal() -> Tensor:
        # Padding between parameters is zero in every buffer.
        values = torch.zeros(length)
        for begin, count, *_ in numbers.runs.tolist():
            values[begin : begin + count] = torch.randn(count, generator=generator)
        return values.to(device)

    masters = normal()
    weights, rest = split_masters(masters)
    return Slices(
        weight_decay=torch.tensor(0.1, device=device) if changes else 0.1,
        params=[weights if remainders else masters],
        remainders=[rest] if remainders else (),
        weights=() if remainders else [torch.zeros(length, dtype=BF16, device=device)],
        grads=[normal().to(grad)],
        exp_avgs=[normal().to(exp_avg)],
        exp_avg_sqs=[normal().square().to(exp_avg_sq)],
        numbers=[
            ElementNumbers(runs=numbers.runs.to(device), listed=numbers.listed.to(device)),
        ],
        stochastic=stochastic,
    )


def control(skip: float = 0.0, divisor: float | None = 2.5, device: str = "cpu") -> Control:
    """Return the values of the step, on the device of its slices."""
    return Control(
        lr=torch.tensor(1e-2, device=device),
        step=torch.tensor(5.0, device=device),
        skip=torch.tensor(skip, device=device),
        grad_divisor=None if divisor is None else torch.tensor(divisor, device=device),
        beta1=0.9,
        beta2=0.95,
        eps=1e-8,
    )


def masters_of(group: Slices) -> Tensor:
    """Return the float32 masters, of pairs or not."""
    return (
        join_masters(group.params[0], group.remainders[0]) if group.remainders else group.params[0]
    )
