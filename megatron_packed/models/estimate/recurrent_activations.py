"""Activations that Mamba layers and gated delta nets have in common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from megatron_packed.layers.head_parallel import HeadParallel
from megatron_packed.layers.state_passing import PassedStates
from megatron_packed.models.estimate.footprint import (
    FP32,
    Amounts,
    Footprint,
    Moment,
    Purpose,
    RankSizes,
    Term,
)

_GATED_NORM_PROGRAMS = 1024
_LATE = frozenset({"scan.output", "gated_norm.statistics", "out_proj.input"})
"""Saved tensors that the layer creates after the recurrence."""


class RecurrentSizes:
    """Sizes of one recurrent mixer on this rank; attributes named after tensors are in bytes."""

    def __init__(self, rank: RankSizes, mixer: Any) -> None:
        b, tokens = rank.element, rank.tokens
        over = mixer.over_ranks
        self.passes = passes = isinstance(over, PassedStates)
        """True if context-parallel ranks pass states."""
        shared = isinstance(over, HeadParallel)
        self.conv_shapes = over.conv_shapes if shared else mixer.conv_shapes
        """Heads and channels per head of each convolved segment in the kernels of this rank."""
        self.rows = tokens * rank.cp.size if shared else tokens
        self.inner = mixer.out_proj.weight.shape[1]
        channels = sum(count * width for count, width in self.conv_shapes)
        self.heads = over.heads.local_length if shared else mixer.A_log.shape[0]
        self.projected = tokens * mixer.in_proj.weight.shape[0] * b
        self.convolved = self.rows * channels * b
        self.y = tokens * self.inner * b
        """Output before and after the norm, which has as many elements in both layouts."""
        exchanged = self.rows * (channels + mixer.values_per_head * self.heads) * b
        self.exchange = exchanged if shared else 0
        """Bytes of the rows that context-parallel ranks exchange."""
        # Our kernels read the halo beside the input. For others both are copied into one tensor.
        copies_halo = passes and mixer.backends.causal_conv1d not in ("auto", "triton")
        self.copied = self.convolved if copies_halo else self.exchange


@dataclass(frozen=True, kw_only=True)
class Recurrence:
    """Memory of one kind of recurrence.

    Args:
        noun: name in moments.
        norm_groups: groups of the gated norm on this rank.
        saved: tensors that the forward pass saves, without inputs and output.
        forward: additional bytes of the forward pass, without exchanged rows.
        backward: additional bytes of the backward pass.
    """

    noun: str
    norm_groups: int
    saved: dict[str, Term]
    forward: Amounts
    backward: Amounts


def recurrent_footprint(
    rank: RankSizes,
    name: str,
    symbol: str,
    layer: nn.Module,
    sizes: RecurrentSizes,
    recurrence: Recurrence,
) -> Footprint:
    """Return the saved tensors and the moments of a layer with a recurrent mixer."""
    exchanged = {"conv1d.input": Term(sizes.copied)} if sizes.copied else {}
    saved = rank.dropped(
        {
            **rank.norm(),
            "in_proj.input": Term(rank.rows_bytes),
            "in_proj.output": Term(sizes.projected),
            **exchanged,
            "conv1d.output": Term(sizes.convolved),
            **recurrence.saved,
            "scan.output": Term(sizes.y),
            "gated_norm.statistics": Term(FP32 * rank.tokens * recurrence.norm_groups),
            "out_proj.input": Term(sizes.y),
        }
    )
    moments = (
        *_forward(rank, layer, sizes, recurrence),
        *_backward(rank, sizes, recurrence, saved),
    )
    return Footprint(name, symbol, saved, moments)


def _forward(
    rank: RankSizes, layer: nn.Module, sizes: RecurrentSizes, recurrence: Recurrence
) -> tuple[Moment, ...]:
    end = rank.forward_end(layer).extra
    end[Purpose.COMMUNICATION] += sizes.y if sizes.exchange else 0
    inside = {**recurrence.forward, Purpose.COMMUNICATION: sizes.exchange}
    return Moment(f"forward of the {recurrence.noun}", inside, _LATE), Moment("forward", end)


def _backward(
    rank: RankSizes, sizes: RecurrentSizes, recurrence: Recurrence, saved: dict[str, Term]
) -> tuple[Moment, ...]:
    convolution = rank.backward_start(projected=sizes.projected, convolved=sizes.convolved)
    convolution[Purpose.COMMUNICATION] += 2 * sizes.exchange
    stays = {"norm.input", "norm.statistics", "in_proj.input", "dropout.mask"}
    return (
        Moment(
            "backward of the gated norm",
            rank.backward_start(
                normed=sizes.y,
                y=sizes.y,
                projected=sizes.projected,
                parts=FP32 * min(_GATED_NORM_PROGRAMS, rank.tokens) * sizes.inner,
            ),
            frozenset({"out_proj.input"}),
        ),
        Moment(f"backward of the {recurrence.noun}", recurrence.backward, _LATE),
        Moment("backward of the convolution", convolution, _LATE | set(recurrence.saved)),
        Moment(
            "backward of in_proj",
            rank.backward_start(projected=sizes.projected, x=rank.inside_bytes),
            frozenset(set(saved) - stays),
        ),
        rank.norm_end(saved),
    )
