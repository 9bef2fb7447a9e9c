"""Footprint of a layer: the tensors that it saves, and its moments.

[Note: moments]
The forward and backward pass of a layer are split into a few moments. At a moment some of the saved
tensors do not exist: not yet, or not any more. Other tensors exist in addition. During both passes
of a layer, everything that earlier layers have saved exists, and nothing of later layers exists.
The peak is the largest sum over all moments of all layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from megatron_packed.distributed.sequence_parallel_products import NO_OVERLAP
from megatron_packed.layers.hybrid_layer import ProjectedLayer
from megatron_packed.layers.joined import added_product
from megatron_packed.models.hybrid_model import HybridModel

FP32 = 4


class Purpose(Enum):
    """Purpose of memory; each member is a row of the table that ``plan`` prints."""

    ACTIVATIONS = "activations"
    """Tensors that forward saves for backward, and hidden states."""
    STATES = "SSM states"
    """Chunk states of the scan of one Mamba layer or gated delta net at a time, because backward
    recomputes them.
    """
    EXPERTS = "expert buffers"
    """Rows sorted by expert and the results of the experts, saved or not."""
    COMMUNICATION = "communication buffers"
    """Tensors that collectives inside one layer gather or receive."""
    GRADIENTS = "gradients of activations"
    """Gradients inside one layer, including the workspaces of the kernels."""
    LOSS = "logits and loss"


Amounts = dict[Purpose, int]


@dataclass(frozen=True)
class Moment:
    """Point in the forward or backward pass of a layer. See [Note: moments]."""

    name: str
    extra: Amounts
    """Bytes in addition to the saved tensors."""
    absent: frozenset[str] = frozenset()
    """Names of saved tensors that do not exist at this moment."""


@dataclass(frozen=True)
class Term:
    """Saved tensor: its bytes and its purpose."""

    bytes: int
    kind: Purpose = Purpose.ACTIVATIONS


@dataclass(frozen=True)
class Footprint:
    """Activation memory of one layer for a micro-batch."""

    name: str
    symbol: str
    """Symbol of the layer pattern; empty for final norm, output projection and loss."""
    saved: Mapping[str, Term]
    moments: tuple[Moment, ...] = field(default=())

    @property
    def saved_bytes(self) -> int:
        return sum(term.bytes for term in self.saved.values())


@dataclass(frozen=True, kw_only=True)
class Work:
    """Sizes of the packs that a rank's layers process.

    Args:
        tokens: slots of a pack.
        documents: capacity in documents of a pack.
        element: bytes of an activation element.
        even: True counts the rows of experts for balanced routing. False counts the largest
            possible number. It matters only if the number of rows depends on the routing.
    """

    tokens: int
    documents: int
    element: int
    even: bool = True


class RankSizes:
    """Sizes of this rank that are common to all layers."""

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
        """Bytes of this rank's hidden state between layers."""
        self.inside_bytes = self.tokens * self.hidden * self.element
        """Bytes of the hidden state of all tokens, inside a layer."""
        self.statistics = FP32 * self.rows * (2 if model.config.normalization == "LayerNorm" else 1)
        self.rope = model.rotary is not None
        self.moved = self.inside_bytes if tp.group is not None else 0
        """Bytes of a hidden state after a tensor-parallel collective; 0 without tensor parallelism.
        """
        overlap = NO_OVERLAP if tp.products is None else tp.products.overlap
        bulk = overlap.bulk_dgrad or overlap.bulk_wgrad
        self.moved_back = self.moved * (2 if bulk else 1)
        """The same for backward. In bulk the gathered rows and dX of all rows exist together."""

    def norm(self) -> dict[str, Term]:
        return {"norm.input": Term(self.rows_bytes), "norm.statistics": Term(self.statistics)}

    def forward_end(self, layer: Any) -> Moment:
        """Return the moment at which the mixer's result and the new residual stream both exist.

        If the mixer adds the residual, its result is the new residual stream.
        """
        results = 1 if self.joins_residual(layer) else 2
        extra = {
            Purpose.GRADIENTS: 0,
            Purpose.ACTIVATIONS: results * self.rows_bytes,
            Purpose.COMMUNICATION: self.moved,
        }
        return Moment("forward", extra)

    def backward_start(self, **more: int) -> Amounts:
        """Return the bytes at the start of the backward pass: the gradient of the layer's output,
        and ``more``.

        The gradient of the output is needed until the backward pass of the norm.
        """
        return {
            Purpose.GRADIENTS: self.rows_bytes + sum(more.values()),
            Purpose.COMMUNICATION: self.moved_back,
        }

    def norm_end(self, saved: Mapping[str, Term]) -> Moment:
        keeps = {"norm.input", "norm.statistics"}
        return Moment(
            "backward of the norm",
            {Purpose.GRADIENTS: 3 * self.rows_bytes},
            frozenset(set(saved) - keeps),
        )

    def joins(self, mlp: Any) -> bool:
        """Return whether a GPU of this machine joins products with the activation and its gradient."""
        return mlp.joined_products("cuda", mlp.fc1.weight.dtype) is not None

    def joins_residual(self, layer: Any) -> bool:
        """Return whether a GPU of this machine adds the residual in the mixer's last product."""
        dtype = layer.norm.weight.dtype
        if not isinstance(layer, ProjectedLayer):
            return False
        product = added_product(layer.mixer, dtype, "cuda", layer.backend, layer.reason_apart)
        return product is not None

    def dropped(self, saved: dict[str, Term]) -> dict[str, Term]:
        """Add the dropout mask to ``saved``: one byte for each element of the result."""
        if self.config.hidden_dropout > 0:
            saved["dropout.mask"] = Term(self.rows * self.hidden)
        return saved


def feed_forward_bytes(mlp: Any, tokens: int, element: int) -> tuple[int, int]:
    """Return the bytes of the first projection's result and of the activation's result."""
    return tokens * mlp.fc1.weight.shape[0] * element, tokens * mlp.fc2.weight.shape[1] * element
