"""Bytes that a context-parallel rank sends in a model whose Mamba layers pass states."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron_packed.config.run import RunConfig
from megatron_packed.explain.op_requests import op_requests
from megatron_packed.models.run_model import dtype_of
from megatron_packed.ops.context_parallel_attention.api import ContextParallelAttentionInputs
from megatron_packed.ops.ssd.api import SSDInputs


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
    if not config.parallel.passes_states:
        return None
    inputs = [request.inputs for request in op_requests(config, torch.device("cpu"))]
    scan = next((each for each in inputs if isinstance(each, SSDInputs)), None)
    if scan is None:
        return None
    cp = config.parallel.context_parallel_size
    rows, element = config.packing.tokens_per_pack // cp, dtype_of(config).itemsize
    inner = scan.heads * scan.head_dim
    channels = inner + 2 * scan.groups * scan.state_dim
    halo = min(config.model.mamba_d_conv - 1, rows) * channels * element
    attention = (each for each in inputs if isinstance(each, ContextParallelAttentionInputs))
    columns = sum(_reordered_columns(each, cp) for each in list(attention)[:1])
    return StateMessages(
        states=torch.float32.itemsize * (inner * scan.state_dim + scan.heads) * (cp - 1),
        halo=halo * (cp - 1),
        reordering=columns * (cp - 1) * rows * element,
    )


def _reordered_columns(attention: ContextParallelAttentionInputs, cp: int) -> int:
    """Return the columns of a layer's rows that a rank sends to one other rank."""
    queries = attention.num_heads * attention.head_dim
    keys = attention.num_kv_heads * attention.head_dim
    # Columns are padded to a multiple of c. Each move has two all-to-alls, which keep 1 / c.
    return 2 * sum(-(-columns // cp) for columns in (queries + 2 * keys, queries))
