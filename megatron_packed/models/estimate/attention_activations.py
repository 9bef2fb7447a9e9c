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
        self.whole = tokens * (core.num_heads + 2 * core.num_groups) * self.width * b
        self.by_heads = cp.size > 1 and cp.exchanges_heads
        split = cp.size if self.by_heads else 1
        self.rows = tokens * split
        self.heads = core.num_heads // split
        # Several ranks may hold the same key-value head.
        self.groups = max(core.num_groups // split, 1) if self.by_heads else core.num_groups
        self.attended = self.rows * self.heads * self.width * b
        self.keys = self.rows * self.groups * self.width * b
        self.exchanged = self.query + 2 * self.key if self.by_heads else 0
        self.travelling = 0
        if cp.size > 1 and not self.by_heads:
            # all_gather receives keys and values of all ranks; p2p holds those of two ranks.
            self.travelling = 2 * self.key * (cp.size if cp.comm_type == "all_gather" else 2)

    def accumulated(self, documents: int) -> int:
        """Return the bytes of fp32 gradients that the kernel accumulates in its backward pass."""
        padded = self.rows + (documents + 2) * _ATTENTION_BLOCK
        rounded = -(-self.width // 32) * 32
        # The buffer holds dq and two statistics for each query.
        accumulated = padded * self.heads * (rounded + 2) * FP32
        if self.heads > self.groups:
            accumulated += 2 * padded * self.groups * rounded * FP32  # gradients dk and dv
        return accumulated


def attention_footprint(rank: RankSizes, name: str, layer: nn.Module) -> Footprint:
    """Return the saved tensors and the moments of an attention layer."""
    sizes = _AttentionSizes(rank, layer.mixer)
    saved = _saved(rank, sizes)
    return Footprint(name, ATTENTION, saved, _moments(rank, sizes, saved))


def _saved(rank: RankSizes, sizes: _AttentionSizes) -> dict[str, Term]:
    saved = {**rank.norm(), "qkv.input": Term(rank.rows_bytes)}
    if sizes.by_heads:
        saved["attention.qkv"] = Term(
            sizes.attended + 2 * sizes.keys
        )  # q, k and v after the exchange
        saved["proj.input"] = Term(sizes.query)
    else:
        saved["qkv.output"] = Term(sizes.whole)  # v is a view of this tensor
        if rank.rope:
            saved["attention.qk"] = Term(sizes.query + sizes.key)
        elif 1 < sizes.groups < sizes.heads:
            saved["attention.q"] = Term(sizes.query)  # a copy: its heads are not adjacent
    saved["attention.output"] = Term(sizes.attended)
    saved["attention.lse"] = Term(FP32 * sizes.rows * sizes.heads)
    return rank.dropped(saved)


def _moments(rank: RankSizes, sizes: _AttentionSizes, saved: dict[str, Term]) -> tuple[Moment, ...]:
    inside = rank.backward_start(
        output=sizes.attended,
        qkv=sizes.attended + 2 * sizes.keys,
        accumulated=sizes.accumulated(rank.documents),
    )
    inside[Purpose.COMMUNICATION] += sizes.travelling
    # At this moment the gradients of the heads, before and after the rotation, are copied into the
    # gradient of the fused projection.
    rotated = sizes.query + sizes.key if rank.rope else 0
    joined = rank.backward_start(heads=sizes.query + 2 * sizes.key + rotated, qkv=sizes.whole)
    joined[Purpose.COMMUNICATION] += sizes.exchanged
    done = frozenset(key for key in saved if key.startswith("attention.") or key == "proj.input")
    moving = max(sizes.exchanged, sizes.travelling)
    rotating = rank.forward_end().extra | {Purpose.COMMUNICATION: rank.moved + moving}
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
