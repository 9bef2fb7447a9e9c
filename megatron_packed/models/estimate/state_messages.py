"""Bytes that a context-parallel rank sends in a model whose Mamba layers pass states."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron_packed.config.layer_pattern import ATTENTION, MAMBA
from megatron_packed.config.run import RunConfig


@dataclass(frozen=True, kw_only=True)
class StateMessages:
    """Most bytes that a rank sends in the forward pass of one layer; backward sends the same.

    See [Note: passed states] of `layers.state_passing`.
    """

    states: int
    """States and decays of an M layer, from the first rank to all others. They do not depend on the
    length of the pack.
    """
    halo: int
    """Last inputs of the convolution of an M layer, to all other ranks."""
    reordering: int
    """Rows that all-to-alls bring into the zigzag of a * layer and back; 0 without a zigzag."""


def state_messages(config: RunConfig) -> StateMessages | None:
    """Return the messages of a run's layers; None if no layer passes states."""
    model, parallel = config.model, config.parallel
    if not parallel.passes_states or MAMBA not in model.layer_types:
        return None
    tp, cp = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    heads, groups = model.mamba_num_heads // tp, max(model.mamba_num_groups // tp, 1)
    inner, element = (
        heads * model.mamba_head_dim,
        2 if config.training.bf16 else torch.float32.itemsize,
    )
    channels = inner + 2 * groups * model.mamba_state_dim
    rows = config.packing.tokens_per_pack // cp
    halo = min(model.mamba_d_conv - 1, rows) * channels * element
    return StateMessages(
        states=torch.float32.itemsize
        * heads
        * (model.mamba_head_dim * model.mamba_state_dim + 1)
        * (cp - 1),
        halo=halo * (cp - 1),
        reordering=_reordering(config, rows * element) if parallel.document_alignment > 1 else 0,
    )


def _reordering(config: RunConfig, column: int) -> int:
    """Return the bytes that reorder the rows of a * layer. A column has ``column`` bytes."""
    model, parallel = config.model, config.parallel
    if ATTENTION not in model.layer_types:
        return 0
    tp, cp = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    queries = model.num_attention_heads // tp * model.head_dim
    keys = max(model.num_query_groups // tp, 1) * model.head_dim
    # Columns are padded to a multiple of c. Each move has two all-to-alls, which keep 1 / c.
    parts = sum(-(-columns // cp) for columns in (queries + 2 * keys, queries))
    return 2 * parts * (cp - 1) * column
