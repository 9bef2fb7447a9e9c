"""Footprint of a layer: the tensors that it saves, and the moments at which others exist beside them.

[Note: moments]
A layer's forward and backward pass are a few moments each. At a moment some of the saved tensors do
not exist, not yet or not any more, and other tensors exist beside the rest. Both passes of a layer
happen with all that the layers before it have saved in place, and nothing of those after it. The
peak is the largest sum over all moments of all layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from megatron_packed.models.hybrid_model import HybridModel

FP32 = 4


class Purpose(Enum):
    """Purpose of bytes; the rows of the table."""

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
    """Sizes of the packs that a rank's layers work on.

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


class RankSizes:
    """Sizes that all layers share."""

    def __init__(self, model: HybridModel, work: Work) -> None:
        tp, cp = model.tp, model.cp
        self.config = model.config
        self.documents = work.documents
        self.element = work.element
        self.even = work.even
        self.hidden = model.config.hidden_size
        self.tp = tp
        self.cp = cp
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


def feed_forward_bytes(mlp: Any, tokens: int, element: int) -> tuple[int, int]:
    """Return the bytes of the first projection's result, and of the activation."""
    return tokens * mlp.fc1.weight.shape[0] * element, tokens * mlp.fc2.weight.shape[1] * element
