"""Bytes that a context-parallel rank sends in a model whose layers pass states."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from megatron_packed.config.run import RunConfig
from megatron_packed.config.sections.parallel import fewest_processes
from megatron_packed.explain.op_requests import UNKNOWN_VOCABULARY
from megatron_packed.layers.attention import CoreAttention
from megatron_packed.layers.recurrent_mixer import RecurrentMixer
from megatron_packed.models.hybrid_model import HybridModel
from megatron_packed.models.trace import Imagined


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
    vocab_size = config.model.vocab_size or UNKNOWN_VOCABULARY
    model = Imagined.from_config(config, fewest_processes(parallel), vocab_size).model
    layers = dict(zip(config.model.layer_types, model.layers))
    rows = config.packing.tokens_per_pack // model.cp.size
    attention = [each for each in model.modules() if isinstance(each, CoreAttention)]
    columns = _reordered_columns(attention[0]) if attention and model.cp.reorders_attention else 0
    return StateMessages(
        layers={kind.symbol: _messages(layers[kind.symbol].mixer, model, rows) for kind in kinds},
        reordering=columns * (model.cp.size - 1) * rows * model.dtype.itemsize,
    )


def _messages(mixer: nn.Module, model: HybridModel, rows: int) -> LayerMessages:
    """Return the messages of fp32 states, and of the halo of a convolution over ``rows``."""
    assert isinstance(mixer, RecurrentMixer), "only a recurrence passes states"
    channels, width = mixer.conv1d.weight.shape
    others = model.cp.size - 1
    return LayerMessages(
        states=torch.float32.itemsize * mixer.numbers_of_states() * others,
        halo=min(width - 1, rows) * channels * model.dtype.itemsize * others,
    )


def _reordered_columns(attention: CoreAttention) -> int:
    """Return the columns of a layer's rows that a rank sends to one other rank."""
    queries = attention.num_heads * attention.head_dim
    keys = attention.num_groups * attention.head_dim
    # Columns are padded to a multiple of c. Each move has two all-to-alls, which keep 1 / c.
    return 2 * sum(-(-columns // attention.cp.size) for columns in (queries + 2 * keys, queries))
