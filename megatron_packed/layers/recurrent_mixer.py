"""Mixer with a short convolution and a recurrence: the base of Mamba and gated delta nets.

Both run along the tokens of each document. Letters: T tokens, D hidden size, N heads of P channels,
I = N P, C convolution channels, W convolution width, O width of the input projection.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from megatron_packed.distributed.tensor_parallel_shards import Shard, SplitSegment, set_shard
from megatron_packed.layers.build import Build
from megatron_packed.layers.context_parallel import take_in_parts
from megatron_packed.layers.joined import NamedCall, adds_residual
from megatron_packed.layers.linear import JoinedResidual
from megatron_packed.layers.parameters import (
    Fill,
    a_log,
    convolution,
    keep_fp32,
    no_weight_decay,
    normal,
    ones,
    residual_normal,
)
from megatron_packed.ops.causal_conv1d.api import causal_conv1d
from megatron_packed.ops.column_slices import split_columns
from megatron_packed.packed.params import PackedSeqParams

if TYPE_CHECKING:
    from megatron_packed.layers.head_parallel import HeadParallel
    from megatron_packed.layers.state_passing import StatePassing

Row = TypeVar("Row")

RECURRENT_FILLS: dict[str, Fill] = {
    "in_proj.weight": normal,
    "out_proj.weight": residual_normal,
    "conv1d.weight": convolution,
    "mixer.norm.weight": ones,
    "mixer.A_log": a_log,
}
"""Initial values that recurrent mixers have in common, for the record of a kind."""
HeadInputs = tuple[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]]
"""Inputs of the recurrence of some heads: the convolved segments, ``(T, count, width)`` each; the
values of each head and token, ``(T, N)`` each; `RecurrentMixer.values_of_heads` of these heads.
"""


class Weights(NamedTuple):
    """Weight and bias of C channels of a convolution."""

    weight_CW: Tensor
    bias_C: Tensor | None


class CausalConv1d(nn.Module):
    """Depthwise causal convolution with SiLU that restarts at every document.

    Args:
        channels: this tensor-parallel rank's shard of the channels.
        width: W.
        bias: adds a bias to each channel.
        build: arguments that all layers share.
    """

    def __init__(
        self,
        channels: Shard,
        width: int,
        *,
        bias: bool = True,
        build: Build,
    ) -> None:
        super().__init__()
        self.backend = build.backends.causal_conv1d
        self.weight = set_shard(build.new_parameter(channels.local_length, width), channels)
        self.bias: nn.Parameter | None = None
        if bias:
            values = build.new_parameter(channels.local_length)
            self.bias = set_shard(no_weight_decay(values), channels)

    def in_parts(self, used: Shard, parts: int) -> list[Weights]:
        """Return weight and bias of the channels ``used`` of a context-parallel rank, in parts."""
        weights = take_in_parts(used, self.weight, parts)
        if self.bias is None:
            return [Weights(weight_CW, None) for weight_CW in weights]
        return list(map(Weights, weights, take_in_parts(used, self.bias, parts)))

    def forward(
        self,
        x_TC: Tensor,
        seq_idx_1T: Tensor,
        weights: Weights | None = None,
        halo_HC: Tensor | None = None,
    ) -> Tensor:
        """Convolve ``(T, C)`` with all channels' weights, or with ``weights`` of C channels.

        For ``halo_HC`` see `ops.causal_conv1d.api.causal_conv1d`.
        """
        weight_CW, bias_C = Weights(self.weight, self.bias) if weights is None else weights
        return causal_conv1d(
            *(x_TC, weight_CW, bias_C, seq_idx_1T),
            activation="silu",
            backend=self.backend,
            halo_HC=halo_HC,
        )


class RecurrentMixer(nn.Module):
    """Projection; short convolution and recurrence; gated norm and projection.

    A derived class has the recurrence and the names of its parameters with one value per head.
    Convolution and recurrence restart at every change of ``packed.seq_idx``.

    Heads are split over tensor-parallel ranks, within each segment of the rows of ``in_proj``. This
    class computes on one context-parallel rank. Over several of them, `HeadParallel` exchanges
    heads, or `StatePassing` passes states.

    Args:
        hidden_size: D.
        build: arguments that all layers share.
        convolved: segments of the rows of ``in_proj`` that are the channels of ``conv1d``.
        z: segment of the rows for the gate z of the norm; the output has the same channels.
        z_first: z comes before the convolved rows; otherwise it comes after them.
        values_per_head: number of the last rows of ``in_proj``, for each head of the output.
        width: convolution width.
        bias: adds a bias to each convolution channel.
        norm: gated norm of the output.
        passes_states: over several context-parallel ranks, pass states by ``scan_part``.
    """

    head_parameters: ClassVar[tuple[str, ...]] = ()
    """Names of the parameters with one value per head, in the order of `values_of_heads`."""

    def __init__(
        self,
        hidden_size: int,
        build: Build,
        *,
        convolved: Sequence[SplitSegment],
        z: SplitSegment,
        z_first: bool,
        values_per_head: int,
        width: int,
        bias: bool,
        norm: nn.Module,
        passes_states: bool = False,
    ) -> None:
        super().__init__()
        self.backends = build.backends
        tp = build.tp
        self.z_first = z_first
        self.values_per_head = values_per_head
        head = replace(z, width=1)
        own_z, own_head = tp.local_segment(z), tp.local_segment(head)
        own_channels = [tp.local_segment(segment) for segment in convolved]
        channels = tp.shard(*convolved)
        self.conv_shapes = tuple((segment.count, segment.width) for segment in own_channels)
        """Heads and channels per head of each convolved segment."""
        self.over_ranks: HeadParallel | StatePassing | None = None
        """Convolution and recurrence over several context-parallel ranks; None on one rank."""
        inner: tuple[int, ...] = (own_z.count * own_z.width,)
        self.shapes: tuple[tuple[int, ...], ...]
        self.shapes = self._rows(inner, [(channels.local_length,)], (own_head.count,))
        """Columns of the projection as `split` returns them."""
        if passes_states:
            from megatron_packed.layers.state_passing import StatePassing

            self.over_ranks = StatePassing(build.cp, width)
        elif build.cp.size > 1:
            from megatron_packed.layers.head_parallel import HeadParallel

            self.over_ranks = HeadParallel(build.cp, own_channels, own_head, values_per_head)
            self.shapes = self._rows(inner, self.conv_shapes, (own_head.count, 1))
        self.in_proj = build.parts.column_parallel(
            hidden_size,
            tp.shard(*self._rows(z, convolved, head)),
            bias=False,
            build=build,
        )
        self.conv1d = CausalConv1d(channels, width, bias=bias, build=build)
        self.scan = NamedCall()
        self.norm = norm
        self.out_proj = build.parts.row_parallel(
            tp.shard(z, dim=1), hidden_size, bias=False, build=build
        )
        for name in self.head_parameters:
            setattr(self, name, self._per_head(tp.shard(head), build))

    @staticmethod
    def _per_head(heads: Shard, build: Build) -> nn.Parameter:
        """Create a float32 parameter with one value per head, without weight decay."""
        parameter = build.new_parameter(heads.local_length, dtype=torch.float32)
        return set_shard(keep_fp32(no_weight_decay(parameter)), heads)

    def _rows(self, z: Row, convolved: Sequence[Row], head: Row) -> tuple[Row, ...]:
        """Return what belongs to the rows of ``in_proj`` in the order of the rows."""
        heads = [head] * self.values_per_head
        return (z, *convolved, *heads) if self.z_first else (*convolved, z, *heads)

    @property
    def output_projection(self) -> nn.Module:
        return self.out_proj

    @adds_residual
    def forward(
        self, u_TD: Tensor, packed: PackedSeqParams, joined: JoinedResidual | None = None
    ) -> Tensor:
        """Map the hidden state ``(T, D)`` to ``(T, D)``; a context-parallel rank has T / c rows."""
        y_TI = self.scan(self._scan, self.in_proj(u_TD), packed)
        y_TD: Tensor = self.out_proj(y_TI) if joined is None else self.out_proj(y_TI, joined)
        return y_TD

    def _scan(self, projected_TO: Tensor, packed: PackedSeqParams) -> Tensor:
        """Run everything between the projections: ``(T, O)`` -> ``(T, I)``."""
        z_TI, *columns = self.split(projected_TO)
        if self.over_ranks is None:
            y_TNP = self.convolve_and_scan(columns, packed)
        else:
            y_TNP = self.over_ranks.convolve_and_scan(self, columns, packed)
        normed_TI: Tensor = self.norm(y_TNP.flatten(1), z_TI)
        return normed_TI

    def split(self, projected_TO: Tensor) -> list[Tensor]:
        """Split the projection into z and the columns of convolution and recurrence.

        Returns:
            z ``(T, I)``; then the input of the convolution ``(T, C)`` and each ``(T, N)`` with one
            value per head. With an exchange of heads, ``(T / c, count, width)`` of each segment
            instead.
        """
        columns = list(split_columns(projected_TO, *self.shapes))
        z_TI = columns.pop(0 if self.z_first else -1 - self.values_per_head)
        return [z_TI, *columns]

    def convolve_and_scan(self, columns: Sequence[Tensor], packed: PackedSeqParams) -> Tensor:
        """Run convolution and recurrence of all documents and heads; return ``(T, N, P)``.

        Args:
            columns: results of `split` without z.
            packed: metadata of the pack.
        """
        conv_TC, *per_head = columns
        parameters = self.values_of_heads()
        heads = split_columns(self.conv1d(conv_TC, packed.seq_idx), *self.conv_shapes)
        return self.scan_heads((heads, per_head, parameters), packed)

    def values_of_heads(self) -> list[Tensor]:
        """Return the parameters with one value per head, ``(N,)`` each."""
        return [getattr(self, name) for name in self.head_parameters]

    def scan_heads(self, inputs: HeadInputs, packed: PackedSeqParams) -> Tensor:
        """Run the recurrence of some heads; return ``(T, N, P)``."""
        raise NotImplementedError

    def scan_part(
        self, inputs: HeadInputs, packed: PackedSeqParams, passing: StatePassing
    ) -> Tensor:
        """Run the recurrence on this rank's part of the pack. See [Note: passed states].

        Inputs and result have the rows of the part.
        """
        raise NotImplementedError

    def numbers_of_states(self) -> int:
        """Return how many fp32 numbers a part of the pack sends to a later one in `scan_part`."""
        raise NotImplementedError

    def final_states(self, inputs: HeadInputs, lengths: list[int]) -> Tensor:
        """Return the state ``(B, N, ...)`` of each document after its last token, for generation.

        Args:
            inputs: as for `scan_heads`.
            lengths: number of tokens of each document.
        """
        raise NotImplementedError

    def next_output(self, state_BN: Tensor, inputs: HeadInputs) -> tuple[Tensor, Tensor]:
        """Return the output ``(B, N, P)`` of one more token of each document, and the new state."""
        raise NotImplementedError
