"""A model on the meta device: its parameters and the calls of its ops, for estimates and plans.

The modules of the model have all sizes, and each of them asks its ops itself. So a new kind of layer
needs no entry here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from megatron_packed.config.run import RunConfig
from megatron_packed.config.sections.model import ModelConfig
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.layers.embedding import Embedding
from megatron_packed.layers.recurrent_mixer import CausalConv1d
from megatron_packed.models.hybrid_model import HybridModel
from megatron_packed.models.lm_head_and_loss import Output
from megatron_packed.models.run_model import build_model
from megatron_packed.ops.backend_dispatch import Request, planned
from megatron_packed.packed.micro_batch import MicroBatch
from megatron_packed.torch_private import compiler_not_imported

_COUNTED_ELSEWHERE = (Embedding, Output, CausalConv1d)
"""Modules whose weights are looked up, or whose products count as those of the output or of an op."""


class Imagined(NamedTuple):
    """Model (on the meta device) and process groups that rank 0 of a planned run would have."""

    model: HybridModel
    groups: ParallelGroups

    @classmethod
    def from_config(cls, config: RunConfig, world_size: int, vocab_size: int) -> Imagined:
        """Build the model of rank 0 of ``world_size`` processes."""
        groups = ParallelGroups.unjoined(config.layout(world_size))
        return cls.in_groups(config, groups, vocab_size)

    @classmethod
    def in_groups(cls, config: RunConfig, groups: ParallelGroups, vocab_size: int) -> Imagined:
        """Build the model of a rank of these groups."""
        with compiler_not_imported():
            return cls(build_model(config, vocab_size, "meta", groups).train(), groups)


@lru_cache(maxsize=16)
def complete_model(config: ModelConfig, vocab_size: int) -> HybridModel:
    """Return the model of a single process, on the meta device.

    Args:
        config: the model.
        vocab_size: entries of the tokenizer.
    """
    with compiler_not_imported():
        return HybridModel(
            config, vocab_size=vocab_size, max_positions=_longer_than_windows(config), device="meta"
        )


def uses_in_layers(model: HybridModel) -> Counter[nn.Parameter]:
    """Return weight of products in layers -> number of modules in which a token uses it.

    A weight is used several times if depths of multi-token prediction share it.
    """
    return Counter(
        parameter
        for module in model.modules()
        if not isinstance(module, _COUNTED_ELSEWHERE)
        for parameter in module.parameters(recurse=False)
        if parameter.dim() > 1
    )


@lru_cache(maxsize=16)
def calls_of_ops(config: ModelConfig, vocab_size: int) -> Mapping[Request, int]:
    """Return request to an op -> number of its calls in the forward pass of `complete_model`."""
    document = np.zeros(_longer_than_windows(config), dtype=np.int64), None
    pack = MicroBatch.build([document], len(document[0]))
    return calls_of_pass(complete_model(config, vocab_size), pack, torch.device("cpu"))


def calls_of_pass(model: HybridModel, pack: MicroBatch, device: torch.device) -> Counter[Request]:
    """Return request to an op -> number of its calls in the forward pass over a pack.

    The requests are in the order of the first of equal ones.

    Args:
        model: the model of a rank, on the meta device.
        pack: the pack, on any device.
        device: device for which the model asks its ops.
    """
    with compiler_not_imported(), planned(device) as calls:
        model(pack.to("meta"))
    return calls


def _longer_than_windows(config: ModelConfig) -> int:
    """Return a number of tokens of which no attention layer with a window sees all."""
    return 2 + max((window or 0 for window in config.attention_windows), default=0)
