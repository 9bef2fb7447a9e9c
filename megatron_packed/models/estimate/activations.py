"""Bytes that a rank's layers hold between forward and backward, and those that come on top while
one of them runs.

Read off what the layers and their GPU kernels save; `docs/memory.md` has the formulas in a table.
Sizes of a rank (heads, channels, experts, rows of a buffer) are asked of its modules, which may be
on the meta device, so no rule of sharing is written down twice.

Letters: T tokens of a pack that this rank works on inside a layer, R rows of the hidden state that
it has between layers (T, or T / tp_size with sequence parallelism), D hidden size, b bytes of an
element.

[Note: moments]
A layer's forward and backward pass are a few moments each. At a moment some of the saved tensors do
not exist, not yet or not any more, and other tensors exist beside the rest. Both passes of a layer
happen with all that the layers before it have saved in place, and nothing of those behind it. The
peak is the largest sum over all moments of all layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from torch import nn

from megatron_packed.config.layer_pattern import ATTENTION, MAMBA, MLP, MOE
from megatron_packed.layers.moe.dispatcher import (
    AllGatherDispatcher,
    AllToAllDispatcher,
    Dispatcher,
    PaddedAllToAllDispatcher,
)
from megatron_packed.models.hybrid_model import HybridModel
from megatron_packed.ops.cross_entropy.api import default_chunk_tokens

FP32 = 4
_ATTENTION_BLOCK = 128
"""Rows to which flash-attn rounds up the padded buffers of its backward pass, for each document."""
_GATED_NORM_PROGRAMS = 1024
_SCAN_SPLIT = 132
"""Multiprocessors among which the scan's backward kernels split the heads of a group: an H200's."""


class Purpose(Enum):
    """What bytes are for; the rows of the table."""

    ACTIVATIONS = "activations"
    """Saved by forward for backward, and hidden states."""
    STATES = "SSM states"
    """Chunk states of the scan, of one Mamba layer at a time: they are computed again in backward."""
    EXPERTS = "expert buffers"
    """Rows sorted by expert and what experts make of them, saved or not."""
    COMMUNICATION = "communication buffers"
    """What collectives inside the layers gather or receive, of one layer at a time."""
    GRADIENTS = "gradients of activations"
    """Of one layer at a time, with the kernels' workspaces."""
    LOSS = "logits and loss"


Amounts = dict[Purpose, int]


@dataclass(frozen=True)
class Moment:
    """See [Note: moments]."""

    name: str
    extra: Amounts
    """Bytes beside what is saved."""
    absent: frozenset[str] = frozenset()
    """Saved terms that do not exist."""


@dataclass(frozen=True)
class Term:
    """A saved tensor."""

    bytes: int
    kind: Purpose = Purpose.ACTIVATIONS


@dataclass(frozen=True)
class Footprint:
    """One layer's part of a micro-batch."""

    name: str
    symbol: str
    """Of the pattern; empty for what lies around the layers."""
    saved: Mapping[str, Term]
    moments: tuple[Moment, ...] = field(default=())

    @property
    def saved_bytes(self) -> int:
        return sum(term.bytes for term in self.saved.values())


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a rank's layers work on.

    Args:
        tokens: slots of a pack.
        documents: room for documents in it.
        element: bytes of an activation.
        even: rows of experts whose number follows the routing are those of balanced experts;
            otherwise the most.
    """

    tokens: int
    documents: int
    element: int
    even: bool = True


def footprints(model: HybridModel, work: Work) -> list[Footprint]:
    """One for each layer, in order."""
    makers = {ATTENTION: _attention, MAMBA: _mamba, MLP: _mlp, MOE: _moe}
    rank = RankSizes(model, work)
    return [
        makers[symbol](rank, f"layers.{number}", layer)
        for number, (symbol, layer) in enumerate(
            zip(model.config.layer_types, model.layers, strict=True)
        )
    ]


def ends(model: HybridModel, work: Work) -> Footprint:
    """Final norm, output projection and loss; the embedding's result is the first layer's saved
    input.
    """
    rank = RankSizes(model, work)
    rows, hidden, entered = rank.rows_bytes, rank.hidden, rank.inside_bytes
    vocabulary = model.output_weight.shape[0]
    logits = (
        min(default_chunk_tokens(rank.tokens, vocabulary), rank.tokens) * vocabulary * rank.element
    )
    loss = FP32 * 4 * rank.tokens  # labels, mask, losses
    gathered = entered if rank.sequence_parallel else 0
    saved = {
        "final_norm.input": Term(rows),
        "final_norm.statistics": Term(rank.statistics),
        "loss.hidden_gradient": Term(entered, Purpose.LOSS),
    }
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
            {Purpose.GRADIENTS: rows + FP32 * rank.tokens * hidden},  # added up in fp32
            frozenset(saved),
        ),
    )
    return Footprint("loss", "", saved, moments)


class RankSizes:
    """Sizes that all layers share."""

    def __init__(self, model: HybridModel, work: Work) -> None:
        tp, cp = model.tp, model.cp
        self.config, self.documents, self.element, self.even = (
            model.config,
            work.documents,
            work.element,
            work.even,
        )
        self.hidden, self.tp, self.cp = model.config.hidden_size, tp, cp
        self.sequence_parallel = tp.group is not None and tp.sequence_parallel
        self.pack = work.tokens
        self.tokens = work.tokens // cp.size
        self.rows = self.tokens // (tp.size if self.sequence_parallel else 1)
        self.rows_bytes = self.rows * self.hidden * self.element
        """Of the hidden state between layers."""
        self.inside_bytes = self.tokens * self.hidden * self.element
        """Of all tokens' hidden state, inside a layer."""
        self.statistics = FP32 * self.rows * (2 if model.config.normalization == "LayerNorm" else 1)
        self.rope = model.rotary is not None
        self.moved = self.inside_bytes if tp.group is not None else 0
        """What a collective of tensor-parallel ranks makes of a hidden state."""

    def norm(self) -> dict[str, Term]:
        return {"norm.input": Term(self.rows_bytes), "norm.statistics": Term(self.statistics)}

    def forward_end(self) -> Moment:
        """The mixer's result and its sum with the residual stream, before the former goes."""
        extra = {
            Purpose.GRADIENTS: 0,
            Purpose.ACTIVATIONS: 2 * self.rows_bytes,
            Purpose.COMMUNICATION: self.moved,
        }
        return Moment("forward", extra)

    def backward_start(self, **more: int) -> Amounts:
        """The gradient of the layer's output, which waits for the norm's, and others."""
        return {
            Purpose.GRADIENTS: self.rows_bytes + sum(more.values()),
            Purpose.COMMUNICATION: self.moved,
        }

    def norm_end(self, saved: Mapping[str, Term]) -> Moment:
        keeps = {"norm.input", "norm.statistics"}
        return Moment(
            "backward of the norm",
            {Purpose.GRADIENTS: 3 * self.rows_bytes},
            frozenset(set(saved) - keeps),
        )

    def dropped(self, saved: dict[str, Term]) -> dict[str, Term]:
        """With dropout a mask, one byte for each element of the result."""
        if self.config.hidden_dropout > 0:
            saved["dropout.mask"] = Term(self.rows * self.hidden)
        return saved


def _mlp(rank: RankSizes, name: str, layer: nn.Module) -> Footprint:
    mixer: Any = layer.mixer
    first, inner = _feed_forward_bytes(mixer, rank.tokens, rank.element)
    saved = rank.dropped(
        {
            **rank.norm(),
            "fc1.input": Term(rank.rows_bytes),
            "fc1.output": Term(first),
            "activation": Term(inner),
        }
    )
    done = frozenset({"activation"})
    moments = (
        rank.forward_end(),
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


def _feed_forward_bytes(mlp: Any, tokens: int, element: int) -> tuple[int, int]:
    """Of the first projection's result, and of the activation."""
    return tokens * mlp.fc1.weight.shape[0] * element, tokens * mlp.fc2.weight.shape[1] * element


def _attention(rank: RankSizes, name: str, layer: nn.Module) -> Footprint:
    mixer: Any = layer.mixer
    core: Any = mixer.core_attn
    b, tokens, width = rank.element, rank.tokens, core.head_dim
    heads, groups = core.num_heads, core.num_groups
    query, key = tokens * heads * width * b, tokens * groups * width * b
    whole = tokens * (heads + 2 * groups) * width * b
    by_heads = rank.cp.size > 1 and rank.cp.exchanges_heads
    if by_heads:  # all rows of a part of the heads; key-value heads may be on several ranks
        rows = tokens * rank.cp.size
        heads, groups = heads // rank.cp.size, max(groups // rank.cp.size, 1)
    else:
        rows = tokens
    attended, keys = rows * heads * width * b, rows * groups * width * b
    saved = {**rank.norm(), "qkv.input": Term(rank.rows_bytes)}
    if by_heads:
        saved["attention.qkv"] = Term(attended + 2 * keys)  # what was exchanged
        saved["proj.input"] = Term(query)
    else:
        saved["qkv.output"] = Term(whole)  # v is a view of it
        if rank.rope:
            saved["attention.qk"] = Term(query + key)
        elif 1 < groups < heads:
            saved["attention.q"] = Term(query)  # heads of one group lie apart
    saved["attention.output"] = Term(attended)
    saved["attention.lse"] = Term(FP32 * rows * heads)
    saved = rank.dropped(saved)

    padded = rows + (rank.documents + 2) * _ATTENTION_BLOCK
    rounded = -(-width // 32) * 32
    accumulated = padded * heads * (rounded + 2) * FP32  # dq, and two statistics for each query
    if heads > groups:
        accumulated += 2 * padded * groups * rounded * FP32  # dk and dv
    travelling = 0
    if (
        rank.cp.size > 1 and not by_heads
    ):  # keys and values of all ranks, or of this one and the next
        travelling = 2 * key * (rank.cp.size if rank.cp.comm_type == "all_gather" else 2)
    exchanged = query + 2 * key if by_heads else 0
    inside = rank.backward_start(output=attended, qkv=attended + 2 * keys, accumulated=accumulated)
    inside[Purpose.COMMUNICATION] += travelling
    # From rotated heads to the fused projection's gradient.
    joined = rank.backward_start(
        heads=query + 2 * key + (query + key if rank.rope else 0), qkv=whole
    )
    joined[Purpose.COMMUNICATION] += exchanged
    done = frozenset(key for key in saved if key.startswith("attention.") or key == "proj.input")
    rotating = rank.forward_end().extra | {
        Purpose.COMMUNICATION: rank.moved + max(exchanged, travelling)
    }
    moments = (
        Moment("forward", rotating),
        Moment("backward of attention", inside, done & {"proj.input"}),
        Moment("backward of queries, keys and values", joined, done),
        Moment(
            "backward of qkv",
            rank.backward_start(qkv=whole, x=rank.inside_bytes),
            done | {"qkv.output"} & set(saved),
        ),
        rank.norm_end(saved),
    )
    return Footprint(name, ATTENTION, saved, moments)


def _mamba(rank: RankSizes, name: str, layer: nn.Module) -> Footprint:
    mixer: Any = layer.mixer
    b, tokens, config = rank.element, rank.tokens, rank.config
    chunk, width, state = config.mamba_chunk_size, config.mamba_head_dim, config.mamba_state_dim
    inner = mixer.num_heads * width
    projected = tokens * mixer.in_proj.weight.shape[0] * b
    rows = tokens * rank.cp.size if rank.cp.group is not None else tokens
    heads, groups = mixer.xBC_shapes[0][0], mixer.xBC_shapes[1][0]
    channels = heads * width + 2 * groups * state
    scanned = -(-rows // chunk) * chunk
    convolved, y, normed = rows * channels * b, rows * heads * width * b, tokens * inner * b
    norm_groups = max(inner // mixer.norm.group_size, 1)
    saved = {
        **rank.norm(),
        "in_proj.input": Term(rank.rows_bytes),
        "in_proj.output": Term(projected),
    }
    if rank.cp.group is not None:
        saved["conv1d.input"] = Term(
            rows * (channels + heads) * b
        )  # what was exchanged, dt with it
    saved |= {
        "conv1d.output": Term(convolved),
        "scan.steps": Term(2 * FP32 * heads * scanned),
        "scan.output": Term(normed),
        "gated_norm.statistics": Term(FP32 * tokens * norm_groups),
        "out_proj.input": Term(normed),
    }
    saved = rank.dropped(saved)

    states = scanned // chunk * heads * width * state  # elements
    per_group = max(heads // groups, 1)
    splits = -(-per_group // max(min(-(-scanned // chunk * heads // _SCAN_SPLIT), per_group), 1))
    scores = FP32 * scanned * groups * chunk
    projections = 2 * FP32 * rows * groups * state
    in_parts = 1 if splits == 1 else splits + 1  # partial sums and their sum
    partial = FP32 * heads * scanned * (-(-width // 32) + 2 * -(-state // 32) + -(-chunk // 32))
    exchange = rows * (channels + heads) * b if rank.cp.group is not None else 0
    late = frozenset({"scan.output", "gated_norm.statistics", "out_proj.input"})
    scan = rank.backward_start(
        projected=projected,
        dy=y,
        convolved=convolved,
        scores=scores * (1 + in_parts),
        parts=projections * in_parts,
        partial=partial,
    )
    scan[Purpose.STATES] = states * (
        2 * FP32 + 2 * b
    )  # and their gradients, both in fp32 and in the kernels' dtype
    of_convolution = rank.backward_start(projected=projected, convolved=convolved)
    of_convolution[Purpose.COMMUNICATION] += 2 * exchange
    end = rank.forward_end().extra
    moments = (
        Moment(
            "forward of the scan",
            {
                Purpose.STATES: states * (FP32 + b),
                Purpose.GRADIENTS: scores,
                Purpose.COMMUNICATION: exchange,
            },
            late,
        ),
        Moment(
            "forward",
            {**end, Purpose.COMMUNICATION: end[Purpose.COMMUNICATION] + (y if exchange else 0)},
        ),
        Moment(
            "backward of the gated norm",
            rank.backward_start(
                normed=normed,
                y=normed,
                projected=projected,
                parts=FP32 * min(_GATED_NORM_PROGRAMS, tokens) * inner,
            ),
            frozenset({"out_proj.input"}),
        ),
        Moment("backward of the scan", scan, late),
        Moment("backward of the convolution", of_convolution, late | {"scan.steps"}),
        Moment(
            "backward of in_proj",
            rank.backward_start(projected=projected, x=rank.inside_bytes),
            frozenset(
                set(saved) - {"norm.input", "norm.statistics", "in_proj.input", "dropout.mask"}
            ),
        ),
        rank.norm_end(saved),
    )
    return Footprint(name, MAMBA, saved, moments)


def _moe(rank: RankSizes, name: str, layer: nn.Module) -> Footprint:
    mixer: Any = layer.mixer
    b, config, dispatcher = rank.element, rank.config, mixer.dispatcher
    routes, experts = config.moe_router_topk, mixer.router.num_experts
    entered = rank.tokens // (rank.tp.size if mixer.ep.whole_experts else 1)
    rows, returned = _expert_rows(dispatcher, entered, even=rank.even)
    first, inner = mixer.experts.fc1.shape[1], mixer.experts.fc2.shape[2]
    row = rank.hidden * b
    known = rank.tokens * (FP32 * experts)
    scores = int(bool(config.moe_aux_loss_coeff)) + int(bool(config.moe_z_loss_coeff))
    scores += 2 if config.moe_router_score_function == "sigmoid" else 0
    saved = {
        **rank.norm(),
        "router.input": Term(FP32 * entered * rank.hidden),
        "router.scores": Term(scores * known + rank.tokens * routes * (8 + 2 * FP32)),
        "experts.maps": Term(FP32 * (returned + 2 * rows + entered * routes), Purpose.EXPERTS),
        "experts.input": Term(rows * row, Purpose.EXPERTS),
        "experts.fc1": Term(rows * first * b, Purpose.EXPERTS),
        "experts.activation": Term(rows * inner * b, Purpose.EXPERTS),
        "experts.output": Term(returned * row, Purpose.EXPERTS),
    }
    shared = mixer.shared_expert
    shared_first = shared_inner = 0
    if shared is not None:
        shared_first, shared_inner = _feed_forward_bytes(shared, rank.tokens, b)
        gathered = not mixer.ep.whole_experts
        saved |= {
            "shared.input": Term(rank.inside_bytes if gathered else rank.rows_bytes),
            "shared.fc1": Term(shared_first),
            "shared.activation": Term(shared_inner),
        }
    saved = rank.dropped(saved)

    gathers = isinstance(dispatcher, AllGatherDispatcher)
    moved = (
        2 * entered * dispatcher.ep.size * row if gathers else 0
    )  # tokens of all ranks, and their results
    exchanged = 0
    if isinstance(dispatcher, AllToAllDispatcher | PaddedAllToAllDispatcher):
        exchanged = (
            returned + 2 * rows
        ) * row  # rows before they leave, as they come, and on their way back
    of_shared = {name for name in saved if name.startswith("shared.")}
    weights = [mixer.experts.fc2.numel() * b, mixer.experts.fc1.numel() * b]
    x = (
        entered * row if shared is not None else 0
    )  # the shared expert's gradient of the input waits

    def backward(what: str, rows_bytes: int, moving: int, *absent: str, more: int = 0) -> Moment:
        amounts = {
            Purpose.GRADIENTS: rank.rows_bytes + x + more,
            Purpose.EXPERTS: rows_bytes,
            Purpose.COMMUNICATION: moving + rank.moved,
        }
        return Moment(f"backward of {what}", amounts, frozenset({*of_shared, *absent}))

    of_exchange = (returned + rows) * row if exchanged else 0
    forward = rank.forward_end().extra
    moments = (
        Moment(
            "forward of the experts",
            {
                Purpose.ACTIVATIONS: rank.inside_bytes,
                Purpose.EXPERTS: exchanged,
                Purpose.COMMUNICATION: moved,
            },
            frozenset(of_shared),
        ),
        Moment("forward", forward),
        Moment(
            "backward of the shared expert", rank.backward_start(a=shared_inner, fc1=shared_first)
        ),
        backward("the combination", returned * row, of_exchange + moved // 2),
        backward(
            "the experts' fc2", rows * (row + inner * b), 0, "experts.output", more=weights[0]
        ),
        backward(
            "the experts' activation",
            rows * (first + inner) * b,
            0,
            "experts.output",
            "experts.activation",
        ),
        backward(
            "the experts' fc1",
            rows * (first * b + row),
            0,
            "experts.output",
            "experts.activation",
            "experts.fc1",
            more=weights[1],
        ),
        backward(
            "the dispatch",
            rows * row,
            of_exchange + moved // 2,
            *(key for key in saved if key.startswith("experts.")),
            more=entered * row,
        ),
        backward(
            "the router",
            0,
            0,
            *(key for key in saved if key.startswith("experts.")),
            more=(FP32 + b) * entered * rank.hidden,
        ),
        rank.norm_end(saved),
    )
    return Footprint(name, MOE, saved, moments)


def _expert_rows(dispatcher: Dispatcher, tokens: int, *, even: bool) -> tuple[int, int]:
    """Rows in front of this rank's experts, and rows or tokens' routes that the combination reads."""
    routes = tokens * dispatcher.config.moe_router_topk
    if isinstance(dispatcher, PaddedAllToAllDispatcher):
        return dispatcher.buffer_rows(tokens), dispatcher.num_experts * dispatcher.capacity(tokens)
    if isinstance(dispatcher, AllToAllDispatcher):
        return (
            min(routes, dispatcher.worst_rows(tokens)) if even else dispatcher.worst_rows(tokens)
        ), routes
    rows = dispatcher.buffer_rows(tokens)
    return rows, rows
