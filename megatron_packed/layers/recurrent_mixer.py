"""Mixer with a recurrence along the tokens of each document: the base of Mamba and gated delta nets.

Letters: T tokens, D hidden size, N heads of P channels, I = N P, C convolution channels, O width of
the input projection.

[Note: recurrent mixers across context-parallel ranks]
Convolution and recurrence run along the tokens of the pack. They process each head independently,
with the group of B and C or the key head that the head uses. All other operations process each row
independently. So before the convolution each of c ranks exchanges T / c rows of all heads for T
rows of N / c heads. After the recurrence the ranks exchange back. Each direction is one all-to-all,
or one for each part of the heads ([Note: exchange in parts]). The first transfers all columns
except z. The gate z and the gated norm stay in the context-parallel layout, where a rank has all
channels of each norm group. So they need no communication. A rank uses only its heads' part of the
convolution weights and of the parameters with one value per head. The gradients of the other parts
are zero on this rank.

A mixer that passes states (`state_passing`) exchanges no heads. Each rank runs convolution and
recurrence of all heads on its part of the pack.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor, nn

from megatron_packed.distributed.overlapped_exchange import compute_by_heads
from megatron_packed.distributed.tensor_parallel_shards import SplitSegment, set_shard
from megatron_packed.layers.build import Build
from megatron_packed.layers.context_parallel import SINGLE as ALL_ROWS
from megatron_packed.layers.context_parallel import take_in_parts
from megatron_packed.layers.joined import JoinedResidual, adds_residual
from megatron_packed.layers.named_call import NamedCall
from megatron_packed.layers.parameters import keep_fp32, new_parameter, no_weight_decay
from megatron_packed.layers.short_convolution import CausalConv1d
from megatron_packed.layers.state_passing import StatePassing
from megatron_packed.ops.column_slices import split_columns
from megatron_packed.packed.params import PackedSeqParams

Row = TypeVar("Row")


def _of_part(shapes: Sequence[tuple[int, ...]], parts: int) -> list[tuple[int, ...]]:
    """Return the shapes of one of several equal parts of the heads."""
    return [(count // parts, *width) for count, *width in shapes]


class RecurrentMixer(nn.Module):
    """Projection, short convolution, recurrence, gated norm, projection.

    A derived class has the recurrence and its parameters with one value per head. Convolution and
    recurrence restart at every change of ``packed.seq_idx``.

    Heads are split over tensor-parallel ranks, within each segment of the rows of ``in_proj``.
    Tokens are split over context-parallel ranks. For convolution and recurrence the heads are split
    over these ranks instead.

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
        passing: passing of states between context-parallel ranks; None exchanges heads instead.
    """

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
        passing: StatePassing | None = None,
    ) -> None:
        super().__init__()
        # With passed states the mixer has all heads, as with one rank.
        self.passing = passing
        self.cp = cp = build.cp if passing is None else ALL_ROWS
        self.backends = build.backends
        tp, device, dtype = build.tp, build.device, build.dtype
        self.z_first = z_first
        self.values_per_head = values_per_head
        head = replace(z, width=1)
        self.heads = tp.shard(head)
        own_z, own_head = tp.local_segment(z), tp.local_segment(head)
        own_channels = [tp.local_segment(segment) for segment in convolved]
        channels = tp.shard(*convolved)
        self.used_channels = cp.part(*own_channels)
        self.parts = cp.parts(own_head.count, *(segment.count for segment in own_channels))
        """Number of parts of the heads; parts are exchanged and computed one after the other."""
        self.used_heads = None if cp.group is None else cp.part(own_head)
        # Shapes before (`row_shapes`) and after (`used_shapes`, `conv_shapes`) the all-to-all
        # between context-parallel ranks. With one rank there is no all-to-all (`own_shapes`).
        inner = (own_z.count * own_z.width,)
        shapes = [(segment.count, segment.width) for segment in own_channels]
        self.row_shapes = self._rows(inner, shapes, (own_head.count, 1))
        self.own_shapes = self._rows(inner, [(channels.local_length,)], (own_head.count,))
        used_heads = (cp.local_count(own_head),)
        self.used_shapes = ((self.used_channels.local_length,), *[used_heads] * values_per_head)
        self.conv_shapes = tuple((cp.local_count(s), s.width) for s in own_channels)
        rows = tp.shard(*self._rows(z, convolved, head))
        self.in_proj = build.parts.column_parallel(
            hidden_size, rows, bias=False, tp=tp, device=device, dtype=dtype
        )
        self.conv1d = CausalConv1d(
            channels,
            width,
            bias=bias,
            backend=build.backends.causal_conv1d,
            device=device,
            dtype=dtype,
        )
        self.scan = NamedCall()
        self.norm = norm
        self.out_proj = build.parts.row_parallel(
            tp.shard(z, dim=1), hidden_size, bias=False, tp=tp, device=device, dtype=dtype
        )

    def _rows(self, z: Row, convolved: Sequence[Row], head: Row) -> tuple[Row, ...]:
        """Return what belongs to the rows of ``in_proj`` in the order of the rows."""
        heads = [head] * self.values_per_head
        return (z, *convolved, *heads) if self.z_first else (*convolved, z, *heads)

    def per_head(self, device: torch.device | str) -> nn.Parameter:
        """Create a float32 parameter with one value per head, without weight decay."""
        heads = self.heads.local_length
        parameter = new_parameter(heads, device=device, dtype=torch.float32)
        return set_shard(keep_fp32(no_weight_decay(parameter)), self.heads)

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
        if self.cp.group is not None:
            y_TNP = self._scan_by_heads(columns, packed)
        else:
            conv_TC, *per_head = columns
            if self.passing is not None:
                convolved_TC = self._convolve_part(self.passing, conv_TC, packed)
            else:
                convolved_TC = self.conv1d(conv_TC, packed.seq_idx)
            heads = split_columns(convolved_TC, *self.conv_shapes)
            y_TNP = self.scan_heads(heads, per_head, packed)
        normed_TI: Tensor = self.norm(y_TNP.flatten(1), z_TI)
        return normed_TI

    def _scan_by_heads(self, columns: Sequence[Tensor], packed: PackedSeqParams) -> Tensor:
        """Run convolution and recurrence of this rank's heads on all rows, part by part.

        See [Note: recurrent mixers across context-parallel ranks].
        """
        assert self.cp.exchange is not None and self.used_heads is not None
        weights = self.conv1d.in_parts(self.used_channels, self.parts)
        values = [take_in_parts(self.used_heads, x_N, self.parts) for x_N in self.head_parameters()]
        used_shapes = _of_part(self.used_shapes, self.parts)
        conv_shapes = _of_part(self.conv_shapes, self.parts)

        def scan(part: int, columns_TW: Tensor) -> Tensor:
            used_TW = self.cp.in_order_of_slots(columns_TW, packed)
            conv_TC, *per_head = split_columns(used_TW, *used_shapes)
            convolved_TC = self.conv1d(conv_TC, packed.seq_idx, weights[part])
            heads = split_columns(convolved_TC, *conv_shapes)
            parameters = [of_parts[part] for of_parts in values]
            y_TNP = self.scan_heads(heads, per_head, packed, parameters)
            return self.cp.in_order_of_ranks(y_TNP, packed)

        return compute_by_heads(columns, scan, self.cp.exchange, self.parts)

    def _convolve_part(
        self, passing: StatePassing, conv_TC: Tensor, packed: PackedSeqParams
    ) -> Tensor:
        """Convolve the rows of this rank's part of the pack."""
        seq_idx_1T = passing.seq_idx(packed, passing.halo)
        convolved_TC: Tensor = self.conv1d(conv_TC, seq_idx_1T, halo_HC=passing.halo_of(conv_TC))
        return convolved_TC

    def split(self, projected_TO: Tensor) -> list[Tensor]:
        """Split the projection into z and the columns of convolution and recurrence.

        Returns:
            z ``(T, I)``; then the input of the convolution ``(T, C)`` and each ``(T, N)`` with one
            value per head. With an exchange of heads, ``(T / c, count, width)`` of each segment
            instead.
        """
        shapes = self.own_shapes if self.cp.group is None else self.row_shapes
        columns = list(split_columns(projected_TO, *shapes))
        z_TI = columns.pop(0 if self.z_first else -1 - self.values_per_head)
        return [z_TI, *columns]

    def head_parameters(self) -> tuple[Tensor, ...]:
        """Return the parameters with one value per head that ``scan_heads`` takes."""
        raise NotImplementedError

    def scan_heads(
        self,
        heads: Sequence[Tensor],
        per_head: Sequence[Tensor],
        packed: PackedSeqParams,
        parameters: Sequence[Tensor] = (),
    ) -> Tensor:
        """Run the recurrence of some heads.

        Args:
            heads: the convolved segments, ``(T, count, width)`` each.
            per_head: values of each head, ``(T, N)`` each.
            packed: metadata of the pack.
            parameters: ``head_parameters`` of these heads, ``(N,)`` each; by default of all heads.
        Returns:
            ``(T, N, P)``.
        """
        raise NotImplementedError
