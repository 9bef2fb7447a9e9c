"""Models whose ranks must compute the results of one process, and mutations to detect."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from megatron_packed.distributed.collectives import all_gather_rows, own_rows
from megatron_packed.distributed.differentiable import linear_map
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.models.hybrid_model import HybridModel
from megatron_packed.packed.micro_batch import MicroBatch
from support import hybrid_cases as cases

QUESTIONS = ("_local_scalar_dense", "nonzero", "masked_select", "bincount", "_unique2", "tolist")
"""Parts of the names of operations that read device values on the host."""


def build(
    pattern: str,
    changes: Mapping[str, Any],
    groups: ParallelGroups | None,
    *,
    dtype: torch.dtype,
    max_positions: int = 64,
    **options: Any,
) -> HybridModel:
    """Build a tiny model in training mode; with float64, all its parameters are float64."""
    config = cases.tiny_config(pattern, **changes)
    model = HybridModel(
        config,
        vocab_size=cases.VOCAB,
        max_positions=max_positions,
        groups=groups,
        dtype=dtype,
        seed=7,
        **options,
    ).train()
    if config.moe_router_load_balancing_type == "seq_aux_loss":
        model.pack_tables.sample_shape = (4, 28)  # for at most 112 slots
    sharded = model.sharded_parameters()
    with torch.no_grad():
        for (
            name,
            parameter,
        ) in model.named_parameters():  # zeros and ones would hide which part a rank has
            if name.endswith("bias") or "norm" in name:
                shape = sharded[name].global_shape
                parameter.copy_(
                    sharded[name].shard.take(torch.linspace(0.5, 1.5, shape.numel()).view(shape))
                )
        for layer in model.moe_layers:
            layer.mixer.router.weight.mul_(4)  # rounding then changes no expert choice
    if dtype == torch.float64:
        for parameter in model.parameters():
            parameter.data = parameter.data.double()
    return model


def observe(model: HybridModel, batch: MicroBatch) -> dict[str, Tensor]:
    """Return losses of this rank's tokens, and gradients of its rows of the embedding's output."""
    inputs: list[Tensor] = []
    handle = model.embedding.register_forward_hook(
        lambda _module, _inputs, output: inputs.append(output)
    )
    output = model(batch)
    handle.remove()
    (gradient_TD,) = torch.autograd.grad(output.loss, inputs)
    return {"loss": output.per_token_loss_T.detach(), "input gradients": gradient_TD}


Patches = Mapping[str, tuple[Any, str, Callable[..., Any]]]
"""Name of a mutation -> owner, attribute, and the replacement of the attribute."""


@contextmanager
def mutated(patches: Patches, name: str | None) -> Iterator[None]:
    """Apply the mutation ``name`` inside a ``with`` block, if ``patches`` has it."""
    if name not in patches:
        yield
        return
    with mock.patch.object(*patches[name]):
        yield


def gathered_without_sum(x: Tensor, group: Any) -> Tensor:
    return linear_map(x, group, all_gather_rows, own_rows)


def only_own_rows(x: Tensor, group: Any) -> Tensor:
    return linear_map(x, group, own_rows, all_gather_rows)


def own_value(ranks: Any, x: Tensor) -> Tensor:
    return x
