"""Activation memory of a rank's layers.

The memory consists of bytes saved from forward to backward, and of extra bytes while a layer runs.
The formulas follow the tensors that the layers and their GPU kernels save; `docs/memory.md` lists
them in a table. Sizes of a rank (heads, channels, experts, rows of a buffer) are read from its
modules, which may be on the meta device. So the sharding rules are not repeated here.

Letters: T tokens of a pack that this rank processes inside a layer, D hidden size, b bytes of an
element. R is the number of rows of the hidden state that this rank has between layers: T, or
T / tp_size with sequence parallelism.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from megatron_packed.config.layer_pattern import ATTENTION, GATED_DELTA_NET, MAMBA, MLP, MOE
from megatron_packed.models.estimate.attention_activations import attention_footprint
from megatron_packed.models.estimate.footprint import (
    FP32,
    Footprint,
    Moment,
    Purpose,
    RankSizes,
    Term,
    Work,
    feed_forward_bytes,
)
from megatron_packed.models.estimate.gated_delta_net_activations import gated_delta_net_footprint
from megatron_packed.models.estimate.mamba_activations import mamba_footprint
from megatron_packed.models.estimate.moe_activations import moe_footprint
from megatron_packed.models.hybrid_model import HybridModel
from megatron_packed.ops.cross_entropy.api import default_chunk_tokens


def footprints(model: HybridModel, work: Work) -> list[Footprint]:
    """Return the footprint of each layer, in order."""
    makers = {
        ATTENTION: attention_footprint,
        MAMBA: mamba_footprint,
        GATED_DELTA_NET: gated_delta_net_footprint,
        MLP: mlp_footprint,
        MOE: moe_footprint,
    }
    rank = RankSizes(model, work)
    return [
        makers[symbol](rank, f"layers.{number}", layer)
        for number, (symbol, layer) in enumerate(
            zip(model.config.layer_types, model.layers, strict=True)
        )
    ]


def ends(model: HybridModel, work: Work) -> Footprint:
    """Return the footprint of final norm, output projection and loss.

    The embedding's result is the first layer's saved input.
    """
    rank = RankSizes(model, work)
    rows, hidden, entered = rank.rows_bytes, rank.hidden, rank.inside_bytes
    vocabulary = model.output_weight.shape[0]
    logits = (
        min(default_chunk_tokens(rank.tokens, vocabulary), rank.tokens) * vocabulary * rank.element
    )
    loss = FP32 * 4 * rank.tokens  # labels, mask and losses take 16 bytes per token
    gathered = entered if rank.sequence_parallel else 0
    saved = {
        "final_norm.input": Term(rows),
        "final_norm.statistics": Term(rank.statistics),
        "loss.hidden_gradient": Term(entered, Purpose.LOSS),
    }
    for depth in range(1, model.config.mtp_depths + 1):
        saved |= _saved_at_depth(rank, f"mtp.{depth}", entered)
    moments = (
        Moment(
            "loss",
            {
                Purpose.ACTIVATIONS: rows,
                Purpose.COMMUNICATION: gathered,
                Purpose.LOSS: logits + loss,
            },
        ),
        Moment("backward of the loss", {Purpose.COMMUNICATION: gathered, Purpose.LOSS: loss}),
        Moment(
            "backward of the final norm",
            {Purpose.GRADIENTS: 2 * rows},
            frozenset({"loss.hidden_gradient"}),
        ),
        Moment(
            "backward of the embedding",
            {Purpose.GRADIENTS: rows + FP32 * rank.tokens * hidden},  # the sum is in fp32
            frozenset(saved),
        ),
    )
    return Footprint("loss", "", saved, moments)


def _saved_at_depth(rank: RankSizes, name: str, entered: int) -> dict[str, Term]:
    """Return the tensors that the head of a depth of multi-token prediction saves.

    The input of its first norm is the embedding, and that of the second is the hidden state of the
    previous depth. They are normalised into one tensor.
    """
    rows = rank.rows_bytes
    return {
        f"{name}.embedding": Term(rows),
        f"{name}.hidden": Term(rows),
        f"{name}.eh_proj.input": Term(2 * rows),
        f"{name}.final_norm.input": Term(rows),
        f"{name}.statistics": Term(3 * rank.statistics),
        f"{name}.loss.hidden_gradient": Term(entered, Purpose.LOSS),
    }


def mlp_footprint(rank: RankSizes, name: str, layer: nn.Module) -> Footprint:
    mixer: Any = layer.mixer
    first, inner = feed_forward_bytes(mixer, rank.tokens, rank.element)
    saved = rank.dropped(
        {
            **rank.norm(),
            "fc1.input": Term(rank.rows_bytes),
            "fc1.output": Term(first),
            "activation": Term(inner),
        }
    )
    if rank.joins(mixer):
        return _joined_mlp_footprint(rank, name, layer, saved)
    done = frozenset({"activation"})
    moments = (
        rank.forward_end(layer),
        Moment("backward of fc2", rank.backward_start(activation=inner)),
        Moment(
            "backward of the activation", rank.backward_start(activation=inner, fc1=first), done
        ),
        Moment(
            "backward of fc1",
            rank.backward_start(fc1=first, x=rank.inside_bytes),
            done | {"fc1.output"},
        ),
        rank.norm_end(saved),
    )
    return Footprint(name, MLP, saved, moments)


def _joined_mlp_footprint(
    rank: RankSizes, name: str, layer: nn.Module, saved: dict[str, Term]
) -> Footprint:
    """Return the footprint of an MLP whose backward computes the activation again."""
    inner = saved.pop("activation").bytes
    forward = {Purpose.ACTIVATIONS: inner + rank.rows_bytes}
    moments = (
        Moment("forward of fc2", forward),
        rank.forward_end(layer),
        Moment("backward of fc2", rank.backward_start(activation=inner, fc1=inner)),
        Moment("backward of fc1", rank.backward_start(fc1=inner, x=rank.inside_bytes)),
        rank.norm_end(saved),
    )
    return Footprint(name, MLP, saved, moments)
