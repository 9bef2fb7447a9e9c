"""Exchange of heads around the recurrence of a mixer, over context-parallel ranks.

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

Letters: T tokens, c ranks, N heads of P channels, C convolution channels, W columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from megatron_packed.distributed.all_to_all import compute_by_heads
from megatron_packed.distributed.tensor_parallel_shards import SplitSegment
from megatron_packed.layers.context_parallel import ContextParallel, take_in_parts
from megatron_packed.ops.column_slices import split_columns
from megatron_packed.packed.params import PackedSeqParams

if TYPE_CHECKING:
    from megatron_packed.layers.recurrent_mixer import RecurrentMixer


class HeadParallel:
    """Convolution and recurrence of this rank's heads on all rows, part by part.

    Args:
        cp: context parallelism of this rank, over more than one rank.
        convolved: segments of the convolution's channels of a tensor-parallel rank.
        head: segment of the heads of a tensor-parallel rank.
        values_per_head: number of the columns with one value for each head.
    Raises:
        ValueError: the items of a segment cannot be split evenly over the ranks.
    """

    def __init__(
        self,
        cp: ContextParallel,
        convolved: Sequence[SplitSegment],
        head: SplitSegment,
        values_per_head: int,
    ) -> None:
        self.cp = cp
        self.channels = cp.part(*convolved)
        self.parts = cp.parts(head.count, *(segment.count for segment in convolved))
        """Number of parts of the heads; parts are exchanged and computed one after the other."""
        self.heads = cp.part(head)
        channels, heads = self.channels.local_length, cp.local_count(head)
        self.used_shapes = ((channels,), *[(heads,)] * values_per_head)
        """Columns of this rank's heads: those of the convolution, and one value per head."""
        self.conv_shapes = tuple((cp.local_count(s), s.width) for s in convolved)
        """As `RecurrentMixer.conv_shapes`, of this rank's heads."""

    def convolve_and_scan(
        self, mixer: RecurrentMixer, columns: Sequence[Tensor], packed: PackedSeqParams
    ) -> Tensor:
        """Run what `RecurrentMixer.convolve_and_scan` runs, on exchanged heads.

        The columns are ``(T / c, count, width)`` of each segment.

        See [Note: recurrent mixers across context-parallel ranks].
        """
        assert self.cp.exchange is not None
        weights = mixer.conv1d.in_parts(self.channels, self.parts)
        values = [take_in_parts(self.heads, x_N, self.parts) for x_N in mixer.values_of_heads()]
        used_shapes = _of_part(self.used_shapes, self.parts)
        conv_shapes = _of_part(self.conv_shapes, self.parts)

        def scan(part: int, columns_TW: Tensor) -> Tensor:
            used_TW = self.cp.in_order_of_slots(columns_TW, packed)
            conv_TC, *per_head = split_columns(used_TW, *used_shapes)
            convolved_TC = mixer.conv1d(conv_TC, packed.seq_idx, weights[part])
            heads = split_columns(convolved_TC, *conv_shapes)
            parameters = [of_parts[part] for of_parts in values]
            y_TNP = mixer.scan_heads((heads, per_head, parameters), packed)
            return self.cp.in_order_of_ranks(y_TNP, packed)

        return compute_by_heads(columns, scan, self.cp.exchange, self.parts)


def _of_part(shapes: Sequence[tuple[int, ...]], parts: int) -> list[tuple[int, ...]]:
    """Return the shapes of one of several equal parts of the heads."""
    return [(count // parts, *width) for count, *width in shapes]
