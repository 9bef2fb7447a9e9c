"""Partition of a pack's token slots over context-parallel ranks.

Every rank gets the same micro-batch, with the offsets, ``seq_idx`` and positions of the complete
pack. A tensor with one row per token is split over the c ranks, T / c rows each. There are two
partitions:

* **contiguous**: rank r has slots ``[r T / c, (r + 1) T / c)``. The border between ranks may be
  inside a document, and documents need no padding. This partition is for mixers that process
  complete sequences of a part of the heads, with equal work on all ranks. It is also for mixers that
  receive states, or keys and values, from earlier ranks.
* **zigzag**: every document is cut into 2c chunks of equal length, and rank r has chunks r and
  2c - 1 - r of each document, in the order of documents. So all ranks have the same number of pairs
  of query and visible key in causal attention. Lengths are multiples of 2c
  (``MicroBatch.build(alignment=...)`` pads documents at their end).

The order of a zigzag is computed from a pack's device tensors, by the same few operations for every
pack. All shapes depend only on T, and the host does not read the device.

Source of the zigzag: Llama 3, arXiv:2407.21783, section 3.3.2.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megatron_packed.config import flag_names as flags
from megatron_packed.packed.params import PackedSeqParams, RankOrder


@dataclass(frozen=True, kw_only=True)
class Partition:
    """Rows of a pack that belong to one context-parallel rank.

    Example:
        Documents of 8 and 4 tokens, 2 ranks. Contiguous: rank 0 has slots 0 to 5. Zigzag: rank 0
        has slots ``[0, 1, 6, 7, 8, 11]``.
    """

    size: int = 1
    """Number of context-parallel ranks, c."""
    rank: int = 0
    zigzag: bool = False

    @property
    def alignment(self) -> int:
        """Number of which every document's length must be a multiple; 1 without zigzag."""
        return 2 * self.size if self.zigzag and self.size > 1 else 1

    def check(self, packed: PackedSeqParams) -> None:
        """Check on the host that a pack can be divided over the ranks.

        Raises:
            ValueError: the number of slots of the pack is not divisible by ``size``, or with zigzag
                the number of slots of a document is not divisible by ``alignment``.
        """
        tokens = packed.total_tokens
        if tokens % self.size:
            raise ValueError(
                f"a pack has {tokens} token slots, which do not divide among cp_size = {self.size} ranks; choose "
                f"seq_length x micro_batch_size as a multiple of {max(self.size, self.alignment)}."
            )
        offsets = packed.cu_seqlens_cpu.numpy()
        misaligned = np.flatnonzero(np.diff(offsets) % self.alignment)
        if misaligned.size:
            number = int(misaligned[0])
            what = f"document {number}" if number < packed.num_seqs else "the tail of a pack"
            raise ValueError(
                f"{what} has {offsets[number + 1] - offsets[number]} token slots. A zigzag over cp_size = {self.size} "
                f"ranks cuts every document into {self.alignment} equal chunks, so lengths must be multiples of "
                f"{self.alignment}. Add {flags.PAD_PACKED_SEQ_ALIGNMENT} {self.alignment}, or use "
                f"{flags.CP_COMM_TYPE} a2a or {flags.CP_PARTITION_MODE} contiguous, which need no padding."
            )

    def order(self, packed: PackedSeqParams) -> RankOrder | None:
        """Compute the rank order of the slots on the device; None if slots keep their order."""
        if self.alignment == 1:
            return None
        position_T = packed.position_ids.long()
        slot_T = torch.arange(packed.total_tokens, device=position_T.device)
        lengths = packed.cu_seqlens.diff().long()
        chunk_T = lengths[packed.seq_idx[0].long()] // self.alignment
        number_T = position_T // chunk_T
        rank_T = torch.minimum(number_T, self.alignment - 1 - number_T)
        second_T = (number_T >= self.size).long()
        # A rank has 2 of the 2c chunks of every earlier document. So a document's offset on a rank
        # is its offset in the pack divided by c.
        begin_T = (slot_T - position_T) // self.size + second_T * chunk_T
        places_T = (
            rank_T * (packed.total_tokens // self.size) + begin_T + position_T - number_T * chunk_T
        )
        return RankOrder(torch.empty_like(slot_T).scatter_(0, places_T, slot_T), places_T)

    def own(self, x_T: Tensor, order: RankOrder | None) -> Tensor:
        """Select this rank's rows ``(T / c, ...)`` of a tensor with one row per slot.

        Args:
            x_T: ``(T, ...)`` tensor.
            order: result of `order` for the pack.
        """
        rows = x_T.shape[0] // self.size
        if order is None:
            return x_T.narrow(0, self.rank * rows, rows)
        return x_T.index_select(0, order.slots_T.narrow(0, self.rank * rows, rows))
