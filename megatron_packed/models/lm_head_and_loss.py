"""Output projection of the model, its vocabulary shard for the loss, and the result of a forward.

Letters: T tokens, L mixture-of-experts layers, E experts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from megatron_packed.config.sections.model import ModelConfig
from megatron_packed.distributed.collectives import all_reduce_max, all_reduce_sum
from megatron_packed.distributed.tensor_parallel_shards import set_shard
from megatron_packed.layers.backends import Backends
from megatron_packed.layers.build import Build
from megatron_packed.layers.embedding import Embedding, vocab_shard
from megatron_packed.layers.tensor_parallel import TensorParallel
from megatron_packed.ops.cross_entropy.api import VocabShard, linear_cross_entropy


class HybridOutput(NamedTuple):
    """Losses and counts of one micro-batch, all on the device.

    Each context-parallel rank has T / cp_size tokens of the pack. Its losses and counts are those
    of its tokens; the sum over the ranks is the value of the pack.
    """

    loss: Tensor
    """0-d float32, differentiable: ``loss_sum * scales[0] + aux_loss * scales[1]``, and the weighted
    loss of each depth. It is this pack's share of the loss of the step.
    """
    loss_sum: Tensor
    """0-d float32, differentiable: cross-entropy in nats, summed over the target tokens."""
    aux_loss: Tensor
    """0-d float32, differentiable: balance and z-losses of all E layers, coefficients applied."""
    per_token_loss_T: Tensor
    """``(T,)`` float32, detached; 0 for tokens without a target."""
    tokens_per_expert: Tensor
    """``(L, E)`` float32: assignments of real tokens, one row for each E layer. ``(0, 0)`` without
    E layers.
    """
    dropped_assignments: Tensor
    """``(L,)`` float32: assignments that were dropped because the expert's capacity was full.
    ``(0,)`` without E layers.
    """
    expert_overflow: Tensor
    """0-d float32: above 0 if an expert buffer was too small, which makes all other results wrong.
    The same on all ranks that share experts or the pack. See `HybridModel.full_expert_buffers`.
    """
    expert_rows: Tensor
    """``(2,)`` float32: most rows of a rank and of a peer that any E layer needs, for the bounds of
    expert buffers. 0 without bounds.
    """
    depth_loss_sums: Tensor
    """``(K,)`` float32 for K depths of multi-token prediction, differentiable: cross-entropy, summed
    over the targets of each depth. ``(0,)`` outside training.
    """


class Output(nn.Module):
    """Weight of an untied output projection; `ops.cross_entropy` computes the product with it."""

    def __init__(
        self,
        num_rows: int,
        hidden_size: int,
        *,
        stored_rows: int,
        build: Build,
    ) -> None:
        super().__init__()
        rows = vocab_shard(num_rows, build.tp, stored_rows)
        self.weight = set_shard(build.new_parameter(rows.local_length, hidden_size), rows)


def whole_logits(hidden_TD: Tensor, weight: Tensor, tp: TensorParallel, vocab_size: int) -> Tensor:
    """Return ``(T, V)`` float32 logits of the complete vocabulary, on all tensor-parallel ranks."""
    if tp.group is None:
        logits_TV = F.linear(hidden_TD, weight[:vocab_size])
    else:
        from megatron_packed.distributed.differentiable import gather_last

        logits_TV = gather_last(F.linear(tp.enter(hidden_TD), weight), tp.group)
    return logits_TV[:, :vocab_size].float()


def scaled_logits(logits_TV: Tensor, config: ModelConfig) -> Tensor:
    """Return the logits divided by ``logits_scaling``, or unchanged without it."""
    return logits_TV if config.logits_scaling is None else logits_TV / config.logits_scaling


def cross_entropy_of(
    config: ModelConfig, vocab_size: int, shard: VocabShard | None, backends: Backends
) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return `linear_cross_entropy` with the options that are the same for all losses of a model."""
    return partial(
        linear_cross_entropy,
        vocab_size=vocab_size,
        logits_scaling=config.logits_scaling,
        shard=shard,
        backend=backends.cross_entropy,
    )


def loss_shard(embedding: Embedding, num_rows: int, tp: TensorParallel) -> VocabShard | None:
    """Return this rank's part of the vocabulary for the loss; None if each rank has all of it."""
    group = tp.group
    if group is None:
        return None
    return VocabShard(
        first_row=embedding.first_row,
        total_rows=num_rows,
        sum_over_ranks=lambda x: all_reduce_sum(x, group),
        max_over_ranks=lambda x: all_reduce_max(x, group),
    )
