"""Activations of a layer with a mixture of experts."""

from __future__ import annotations

from typing import Any

from torch import nn

from megatron_packed.config.layer_pattern import MOE
from megatron_packed.layers.moe.bounded_all_to_all import BoundedAllToAllDispatcher
from megatron_packed.layers.moe.dispatcher import (
    AllGatherDispatcher,
    AllToAllDispatcher,
    Dispatcher,
    PaddedAllToAllDispatcher,
)
from megatron_packed.models.estimate.footprint import (
    FP32,
    Footprint,
    Moment,
    Purpose,
    RankSizes,
    Term,
    feed_forward_bytes,
)
from megatron_packed.ops.router_logits.api import partial_sums


class _MoESizes:
    """Sizes of one expert layer on this rank, in bytes unless stated otherwise."""

    def __init__(self, rank: RankSizes, mixer: Any) -> None:
        dispatcher, b = mixer.dispatcher, rank.element
        self.routes = rank.config.moe_router_topk
        self.experts = mixer.router.num_experts
        self.routed = rank.tokens // (rank.tp.size if mixer.ep.splits_tokens else 1)
        self.entered = rank.tokens // mixer.ep.token_parts
        """``routed`` and ``entered`` are numbers of tokens: those whose logits this rank computes, and
        those that it dispatches.
        """
        self.rows, self.returned = _expert_rows(dispatcher, self.entered, even=rank.even)
        """Numbers of rows that the experts of this rank process and that the combination reads."""
        bounded = isinstance(dispatcher, BoundedAllToAllDispatcher)
        self.received = self.returned if bounded else self.rows
        """Number of rows that this rank receives from other ranks, unused rows included."""
        self.row = rank.config.routed_width * b
        self.first = mixer.experts.fc1.shape[1] * b
        self.inner = mixer.experts.fc2.shape[2] * b
        """``row``, ``first`` and ``inner`` are bytes of one row."""
        self.joined = mixer.experts.joins("cuda")
        """True if the experts compute their activation again in backward."""
        self.latent = rank.config.moe_latent_size is not None
        self.has_shared = mixer.shared_expert is not None
        self.shared_gate = mixer.shared_expert_gate is not None
        self.shared_beside = mixer.overlaps_shared_expert
        """True if the shared expert runs beside the dispatch: first in forward, last in backward."""
        self.router_input = self.routed * rank.hidden * b
        """Bytes of the rows that the router saves; 0 if they are the shared expert's saved rows."""
        if self.has_shared and (not mixer.ep.splits_tokens or rank.tp.sequence_parallel):
            self.router_input = 0
        self.shared_rows = rank.rows_bytes if mixer.ep.splits_tokens else rank.inside_bytes
        """Bytes of the rows that the shared expert processes."""
        self.shared_first = self.shared_inner = 0
        if self.has_shared:
            self.shared_first, self.shared_inner = feed_forward_bytes(
                mixer.shared_expert, rank.tokens, b
            )
        self.shared_joined = self.has_shared and rank.joins(mixer.shared_expert)
        """True if the shared expert computes its activation again in backward."""
        self.moved = 0
        """Bytes of the gathered tokens of all ranks and of their results."""
        if isinstance(dispatcher, AllGatherDispatcher):
            self.moved = 2 * self.entered * dispatcher.ep.size * self.row
        self.exchanges = isinstance(dispatcher, AllToAllDispatcher | PaddedAllToAllDispatcher)


def moe_footprint(rank: RankSizes, name: str, layer: nn.Module) -> Footprint:
    """Return the saved tensors and the moments of an expert layer."""
    sizes = _MoESizes(rank, layer.mixer)
    saved = _saved(rank, sizes)
    moments = (
        *_forward(rank, sizes, layer, saved),
        *_backward(rank, sizes, saved),
        rank.norm_end(saved),
    )
    return Footprint(name, MOE, saved, moments)


def _saved(rank: RankSizes, sizes: _MoESizes) -> dict[str, Term]:
    config, rows = rank.config, sizes.rows
    scores = int(bool(config.moe_aux_loss_coeff)) + int(bool(config.moe_z_loss_coeff))
    scores += 2 if config.moe_router_score_function == "sigmoid" else 0
    scores += int(config.balances_documents)  # the weight of each probability
    # The softmax over the selected experts is the weights themselves, unless they are scaled.
    scaled = bool(config.moe_router_topk_scaling_factor)
    weights = 2 if scaled or config.moe_router_score_function == "sigmoid" else 1
    scored = scores * rank.tokens * FP32 * sizes.experts
    maps = FP32 * (sizes.returned + 2 * rows + sizes.entered * sizes.routes)
    saved = {
        **rank.norm(),
        "router.input": Term(sizes.router_input),
        "router.scores": Term(scored + rank.tokens * sizes.routes * (8 + weights * FP32)),
        "experts.maps": Term(maps, Purpose.EXPERTS),
        "experts.input": Term(rows * sizes.row, Purpose.EXPERTS),
        "experts.fc1": Term(rows * sizes.first, Purpose.EXPERTS),
        "experts.activation": Term(0 if sizes.joined else rows * sizes.inner, Purpose.EXPERTS),
        "experts.output": Term(sizes.returned * sizes.row, Purpose.EXPERTS),
    }
    if sizes.has_shared:
        saved |= {
            "shared.input": Term(sizes.shared_rows),
            "shared.fc1": Term(sizes.shared_first),
            "shared.activation": Term(0 if sizes.shared_joined else sizes.shared_inner),
        }
    if sizes.latent:
        # The first projection saves the same rows as the router.
        saved["latent.output"] = Term(sizes.routed * sizes.row)
    if sizes.shared_gate:
        saved["shared.output"] = Term(sizes.shared_rows)
    return rank.dropped(saved)


def _of_shared(saved: dict[str, Term]) -> frozenset[str]:
    return frozenset(name for name in saved if name.startswith("shared."))


def _forward(
    rank: RankSizes, sizes: _MoESizes, layer: nn.Module, saved: dict[str, Term]
) -> tuple[Moment, ...]:
    # The exchange holds rows as sent, rows as received, and rows on their way back.
    exchanged = (sizes.returned + 2 * sizes.received) * sizes.row if sizes.exchanges else 0
    beside = sizes.shared_beside * sizes.shared_rows  # output of the shared expert
    experts = {
        Purpose.ACTIVATIONS: rank.inside_bytes + sizes.latent * sizes.entered * sizes.row + beside,
        Purpose.EXPERTS: exchanged,
        Purpose.COMMUNICATION: sizes.moved,
    }
    absent = frozenset() if sizes.shared_beside else _of_shared(saved)
    moments = [
        Moment("forward of the experts", experts, absent),
        Moment("forward", rank.forward_end(layer).extra),
    ]
    if sizes.joined:
        # The activation exists until the second product ends.
        rows_bytes = {**experts, Purpose.EXPERTS: sizes.rows * sizes.inner}
        moments.insert(0, Moment("forward of the experts' fc2", rows_bytes, absent))
    if sizes.shared_joined:
        activation = sizes.shared_inner + sizes.shared_rows + rank.inside_bytes
        amounts = {Purpose.ACTIVATIONS: activation}
        moments.insert(0, Moment("forward of the shared expert", amounts))
    return tuple(moments)


def _backward(rank: RankSizes, sizes: _MoESizes, saved: dict[str, Term]) -> tuple[Moment, ...]:
    of_shared, rows = _of_shared(saved), sizes.rows
    released = frozenset[str]() if sizes.shared_beside else of_shared
    # The input gradient of the shared expert is held until the layer's backward pass ends. If the
    # shared expert comes last, its output gradient is held instead.
    x = sizes.entered * rank.hidden * rank.element if sizes.has_shared else 0
    latent = sizes.latent * sizes.entered * sizes.row  # gradient of the combined rows

    def moment(what: str, rows_bytes: int, moving: int, *absent: str, more: int = 0) -> Moment:
        amounts = {
            Purpose.GRADIENTS: rank.rows_bytes + x + more,
            Purpose.EXPERTS: rows_bytes,
            Purpose.COMMUNICATION: moving + rank.moved,
        }
        return Moment(f"backward of {what}", amounts, released | {*absent})

    moving = (sizes.returned + sizes.received) * sizes.row if sizes.exchanges else 0
    moving += sizes.moved // 2
    output, activation = "experts.output", "experts.activation"
    everything = [key for key in saved if key.startswith("experts.")]
    row, first, inner = rows * sizes.row, rows * sizes.first, rows * sizes.inner
    # The products add the weights' gradients to the buffer, without a second gradient.
    products: tuple[Moment, ...]
    if sizes.joined:
        # One function: the gradient of its output and its saved tensors are held until it returns.
        products = (
            moment("the experts' activation", row + first + inner, 0, output),
            moment("the experts' fc1", 2 * row + first, 0, output),
        )
    else:
        products = (
            moment("the experts' fc2", row + inner, 0, output),
            moment("the experts' activation", first + inner, 0, output, activation),
            moment("the experts' fc1", first + row, 0, output, activation, "experts.fc1"),
        )
    return (
        Moment(
            "backward of the shared expert",
            rank.backward_start(
                a=sizes.shared_inner, fc1=sizes.shared_first, gated=sizes.shared_gate * x
            ),
            frozenset(everything) if sizes.shared_beside else frozenset(),
        ),
        moment("the combination", sizes.returned * sizes.row, moving, more=latent),
        *products,
        moment("the dispatch", row, moving, *everything, more=sizes.entered * sizes.row),
        moment(
            "the router",
            0,
            0,
            *everything,
            more=sizes.routed * rank.hidden * rank.element
            + FP32 * partial_sums(sizes.routed) * sizes.experts * rank.hidden,
        ),
    )


def _expert_rows(dispatcher: Dispatcher, tokens: int, *, even: bool) -> tuple[int, int]:
    """Return the rows that this rank's experts process, and the rows that the combination reads."""
    routes = tokens * dispatcher.config.moe_router_topk
    if isinstance(dispatcher, PaddedAllToAllDispatcher):
        return dispatcher.buffer_rows(tokens), dispatcher.num_experts * dispatcher.capacity(tokens)
    if isinstance(dispatcher, BoundedAllToAllDispatcher):
        return dispatcher.buffer_rows(tokens), dispatcher.ep.size * dispatcher.part_rows(tokens)
    if isinstance(dispatcher, AllToAllDispatcher):
        return (
            min(routes, dispatcher.worst_rows(tokens)) if even else dispatcher.worst_rows(tokens)
        ), routes
    rows = dispatcher.buffer_rows(tokens)
    return rows, rows
