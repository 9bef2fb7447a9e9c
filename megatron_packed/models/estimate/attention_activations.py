"""Activations of an attention layer."""

from __future__ import annotations

from typing import Any

from torch import nn

from megatron_packed.config.layer_pattern import ATTENTION
from megatron_packed.models.estimate.footprint import (
    FP32,
    Footprint,
    Moment,
    Purpose,
    RankSizes,
    Term,
)

_ATTENTION_BLOCK = 128
"""Multiple of rows to which flash-attn's backward buffers pad each document."""


class _AttentionSizes:
    """Bytes of one attention layer's tensors on this rank.

    With an exchange of heads, the kernel processes all rows of a part of the heads.
    """

    def __init__(self, rank: RankSizes, mixer: Any) -> None:
        core: Any = mixer.core_attn
        b, tokens, cp = rank.element, rank.tokens, rank.cp
        self.width: int = core.head_dim
        self.query = tokens * core.num_heads * self.width * b
        self.key = tokens * core.num_groups * self.width * b
        self.whole = tokens * mixer.qkv.weight.shape[0] * b
        self.gated = rank.config.attention_output_gate
        self.gate = self.query if self.gated else 0
        self.normed = core.norm is not None
        self.by_heads = cp.size > 1 and cp.exchanges_heads
        split = cp.size if self.by_heads else 1
        self.rows = tokens * split
        self.heads = core.num_heads // split
        # Several ranks may hold the same key-value head.
        self.groups = max(core.num_groups // split, 1) if self.by_heads else core.num_groups
        self.attended = self.rows * self.heads * self.width * b
        self.keys = self.rows * self.groups * self.width * b
        self.moved = self.by_heads or cp.reorders_attention
        """True if the kernel has other rows or heads than the projections."""
        self.exchanged = self.query + 2 * self.key if self.moved else 0
        self.travelling = 0
        if cp.size > 1 and not self.by_heads:
            # all_gather receives keys and values of all ranks; p2p holds those of two ranks.
            self.travelling = 2 * self.key * (cp.size if cp.comm_type == "all_gather" else 2)

    def accumulated(self, documents: int) -> int:
        """Return the bytes of fp32 gradients that the kernel accumulates in its backward pass."""
        padded = self.rows + (documents + 2) * _ATTENTION_BLOCK
        rounded = -(-self.width // 32) * 32
        # The buffer holds dq and two statistics for each query.
        accumulated: int = padded * self.heads * (rounded + 2) * FP32
        if self.heads > self.groups:
            accumulated += 2 * padded * self.groups * rounded * FP32  # gradients dk and dv
        return accumulated


def attention_footprint(rank: RankSizes, name: str, layer: nn.Module) -> Footprint:
    """Return the saved tensors and the moments of an attention layer."""
    sizes = _AttentionSizes(rank, layer.mixer)
    saved = _saved(rank, sizes)
    return Footprint(name, ATTENTION, saved, _moments(rank, sizes, layer, saved))


def _saved(rank: RankSizes, sizes: _AttentionSizes) -> dict[str, Term]:
    saved = {**rank.norm(), "qkv.input": Term(rank.rows_bytes), **_norm_terms(rank, sizes)}
    if sizes.moved:
        if sizes.gated or sizes.normed:
            saved["qkv.output"] = Term(sizes.whole)  # the gate and the norms read it
        saved["attention.qkv"] = Term(
            sizes.attended + 2 * sizes.keys
        )  # q, k and v after the exchange
        saved["proj.input"] = Term(sizes.query)
    else:
        saved["qkv.output"] = Term(sizes.whole)  # v is a view of this tensor
        if rank.rope or sizes.normed:
            saved["attention.qk"] = Term(sizes.query + sizes.key)
        elif 1 < sizes.groups < sizes.heads:
            saved["attention.q"] = Term(sizes.query)  # a copy: its heads are not adjacent
        if sizes.gated:
            saved["proj.input"] = Term(sizes.query)
    saved["attention.output"] = Term(sizes.attended)
    if sizes.gated and sizes.moved:
        saved["gate.input"] = Term(sizes.query)  # the output after the exchange
    saved["attention.lse"] = Term(FP32 * sizes.rows * sizes.heads)
    return rank.dropped(saved)


def _norm_terms(rank: RankSizes, sizes: _AttentionSizes) -> dict[str, Term]:
    """Return what the norms of queries and keys save in addition to the fused projection."""
    if not sizes.normed:
        return {}
    config, heads = rank.config, (sizes.query + sizes.key) // rank.element
    wide = heads * FP32
    if config.qk_layernorm_scope == "all_heads":
        if rank.tp.group is not None:
            # The sums of squares of all ranks are added between operations of plain PyTorch.
            return {"attention.norm_input": Term(2 * wide)}
        return {
            "attention.norm_input": Term(sizes.query + sizes.key),  # copies: heads become one row
            "attention.norm_statistics": Term(2 * FP32 * rank.tokens),
        }
    rows = heads // sizes.width
    if config.normalization == "RMSNorm":
        return {"attention.norm_statistics": Term(FP32 * rows)}
    copies = wide if config.apply_layernorm_1p else sizes.query + sizes.key
    return {
        "attention.norm_input": Term(copies),
        "attention.norm_statistics": Term(2 * FP32 * rows),
    }


def _moments(
    rank: RankSizes, sizes: _AttentionSizes, layer: nn.Module, saved: dict[str, Term]
) -> tuple[Moment, ...]:
    inside = rank.backward_start(
        output=sizes.attended,
        qkv=sizes.attended + 2 * sizes.keys,
        gate=sizes.gate,
        accumulated=sizes.accumulated(rank.documents),
    )
    inside[Purpose.COMMUNICATION] += sizes.travelling
    # At this moment the gradients of the heads, before and after the rotation, are copied into the
    # gradient of the fused projection.
    rotated = (sizes.query + sizes.key) * (rank.rope + sizes.normed)
    joined = rank.backward_start(
        heads=sizes.query + 2 * sizes.key + sizes.gate + rotated, qkv=sizes.whole
    )
    joined[Purpose.COMMUNICATION] += sizes.exchanged
    done = frozenset(
        key for key in saved if key.startswith("attention.") or key in ("proj.input", "gate.input")
    )
    moving = max(sizes.exchanged, sizes.travelling)
    rotating = rank.forward_end(layer).extra | {Purpose.COMMUNICATION: rank.moved + moving}
    return (
        Moment("forward", rotating),
        Moment("backward of attention", inside, done & {"proj.input"}),
        Moment("backward of queries, keys and values", joined, done),
        Moment(
            "backward of qkv",
            rank.backward_start(qkv=sizes.whole, x=rank.inside_bytes),
            done | {"qkv.output"} & set(saved),
        ),
        rank.norm_end(saved),
    )
