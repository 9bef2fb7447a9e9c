"""Bytes that a context-parallel rank sends in a model whose layers pass states."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from megatron_packed.config.run import RunConfig
from megatron_packed.explain.op_requests import op_requests
from megatron_packed.models.run_model import dtype_of
from megatron_packed.ops.context_parallel_attention.api import ContextParallelAttentionInputs
from megatron_packed.ops.gated_delta_rule.api import GatedDeltaRuleInputs
from megatron_packed.ops.ssd.api import SSDInputs


@dataclass(frozen=True, kw_only=True)
class LayerMessages:
    """Most bytes that a rank sends in the forward pass of one layer; backward sends the same."""

    states: int
    """States and their decays or matrices, from the first rank to all others. They do not depend on the
    length of the pack.
    """
    halo: int
    """Last inputs of the convolution, to all other ranks."""


@dataclass(frozen=True, kw_only=True)
class StateMessages:
    """Messages of the layers of a model that pass states.

    See [Note: passed states] of `layers.state_passing`.
    """

    layers: Mapping[str, LayerMessages]
    """Messages of one layer of each kind that passes states: symbol -> messages."""
    reordering: int
    """Rows that all-to-alls bring into the zigzag of a * layer and back; 0 without a zigzag."""


def state_messages(config: RunConfig) -> StateMessages | None:
    """Return the messages of a run's layers; None if no layer passes states."""
    parallel = config.parallel
    kinds = [kind for kind in config.model.kinds if kind.exchanges(parallel) == "states"]
    if not kinds:
        return None
    requests = op_requests(config, torch.device("cpu"))
    layers = {
        kind.symbol: _of_recurrence(config, request.inputs)
        for kind in kinds
        for request in requests
        if request.op.name in kind.backends
        and isinstance(request.inputs, SSDInputs | GatedDeltaRuleInputs)
    }
    cp, element = parallel.context_parallel_size, dtype_of(config).itemsize
    rows = config.packing.tokens_per_pack // cp
    inputs = [request.inputs for request in requests]
    attention = [each for each in inputs if isinstance(each, ContextParallelAttentionInputs)]
    columns = sum(_reordered_columns(each, cp) for each in attention[:1])
    return StateMessages(layers=layers, reordering=columns * (cp - 1) * rows * element)


def _of_recurrence(
    config: RunConfig, recurrence: SSDInputs | GatedDeltaRuleInputs
) -> LayerMessages:
    if isinstance(recurrence, SSDInputs):
        return _of_scan(config, recurrence)
    return _of_delta_rule(config, recurrence)


def _of_scan(config: RunConfig, scan: SSDInputs) -> LayerMessages:
    inner = scan.heads * scan.head_dim
    return _messages(
        config,
        numbers=inner * scan.state_dim + scan.heads,
        channels=inner + 2 * scan.groups * scan.state_dim,
        width=config.model.mamba_d_conv,
    )


def _of_delta_rule(config: RunConfig, rule: GatedDeltaRuleInputs) -> LayerMessages:
    """Return the messages of states (K, V) and matrices (K, K) of each value head."""
    return _messages(
        config,
        numbers=rule.value_heads * (rule.value_dim + rule.key_dim) * rule.key_dim,
        channels=2 * rule.key_heads * rule.key_dim + rule.value_heads * rule.value_dim,
        width=config.model.linear_conv_kernel_dim,
    )


def _messages(config: RunConfig, *, numbers: int, channels: int, width: int) -> LayerMessages:
    """Return the messages of fp32 ``numbers``, and of the halo of a convolution of ``channels``."""
    cp = config.parallel.context_parallel_size
    rows = min(width - 1, config.packing.tokens_per_pack // cp)
    return LayerMessages(
        states=torch.float32.itemsize * numbers * (cp - 1),
        halo=rows * channels * dtype_of(config).itemsize * (cp - 1),
    )


def _reordered_columns(attention: ContextParallelAttentionInputs, cp: int) -> int:
    """Return the columns of a layer's rows that a rank sends to one other rank."""
    queries = attention.num_heads * attention.head_dim
    keys = attention.num_kv_heads * attention.head_dim
    # Columns are padded to a multiple of c. Each move has two all-to-alls, which keep 1 / c.
    return 2 * sum(-(-columns // cp) for columns in (queries + 2 * keys, queries))
