"""Passing of a Mamba layer's state between context-parallel ranks.

[Note: passed states]
Rank r runs the layer on part r of the pack, slots ``[r T / c, (r + 1) T / c)``, with all its heads.
Two small messages connect the parts. The last W - 1 inputs of each part (the halo) go to the
convolution of the next one. The state that leaves each part goes to all later parts, because a
document may have tokens in several of them (`ops.ssd.passed_states`). Both are all-gathers whose
size does not depend on T. So neither heads nor groups need to divide among the ranks.

With a zigzag of attention the rows of a rank are no part of the pack. `to_part` then moves the
columns of convolution and scan to the order of slots, and `from_part` moves the outputs back. The
number of rows that a rank owes another one depends on the documents, but CUDA graphs need fixed
sizes. So each move is two all-to-alls of equal parts: rows are exchanged for columns, reordered
locally, and exchanged back. The gate z and the gated norm keep the rows of the rank.

Letters: T tokens of the pack, c ranks, C channels, W convolution width, N heads of P channels, S
state.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from megatron_packed.distributed.all_to_all import heads_to_rows, rows_to_columns
from megatron_packed.distributed.differentiable import gather_rows
from megatron_packed.layers.context_parallel import ContextParallel
from megatron_packed.ops.ssd.passed_states import entering_state
from megatron_packed.packed.params import PackedSeqParams


class StatePassing:
    """Parts of a pack, and the messages between them.

    Args:
        cp: context parallelism of this rank, over more than one rank.
        width: W.
    """

    def __init__(self, cp: ContextParallel, width: int) -> None:
        self.cp = cp
        self.halo = width - 1

    def to_part(self, columns: Sequence[Tensor], packed: PackedSeqParams) -> list[Tensor]:
        """Move ``(T / c, ...)`` tensors from the rows of this rank to its part of the pack."""
        if self.cp.exchanges_heads:
            return list(columns)
        moved_TC = self._moved(torch.cat(list(columns), dim=1), packed, to_part=True)
        return list(moved_TC.split([x_TC.shape[1] for x_TC in columns], dim=1))

    def from_part(self, y_TI: Tensor, packed: PackedSeqParams) -> Tensor:
        """Move a ``(T / c, I)`` tensor back to the rows of this rank: the inverse of `to_part`."""
        return y_TI if self.cp.exchanges_heads else self._moved(y_TI, packed, to_part=False)

    def _moved(self, x_TC: Tensor, packed: PackedSeqParams, *, to_part: bool) -> Tensor:
        """Reorder the rows of all ranks, by two all-to-alls of equal parts.

        See [Note: passed states].
        """
        channels = x_TC.shape[1]
        # (T / c, C) -> (T, C / c)
        padded_TC = pad(x_TC, (0, -channels % self.cp.size))
        columns_TC = rows_to_columns((padded_TC,), self.cp.group)
        reorder = self.cp.in_order_of_slots if to_part else self.cp.in_order_of_ranks
        # (T, C / c) -> (T / c, C)
        (moved_TC,) = heads_to_rows((reorder(columns_TC, packed),), self.cp.group)
        return moved_TC[:, :channels]

    def seq_idx(self, packed: PackedSeqParams, halo: int = 0) -> Tensor:
        """Return the document of each slot of this rank's part, ``(1, halo + T / c)``.

        The first entries are the documents of ``halo`` slots before the part, and -1 for slots
        before the pack.
        """
        rows = packed.total_tokens // self.cp.size
        begin = self.cp.rank * rows - halo
        own_1T = packed.seq_idx.narrow(1, max(begin, 0), rows + halo + min(begin, 0))
        return own_1T if begin >= 0 else pad(own_1T, (-begin, 0), value=-1)

    def cu_seqlens(self, packed: PackedSeqParams) -> Tensor:
        """Return the offsets of the documents in this rank's part; others have length 0."""
        rows = packed.total_tokens // self.cp.size
        return (packed.cu_seqlens - self.cp.rank * rows).clamp(0, rows)

    def with_halo(self, x_TC: Tensor) -> Tensor:
        """Return ``(W - 1 + T / c, C)``: the rows of the part after the W - 1 rows before it.

        Before the pack there are zeros. A part may have fewer rows than the halo.
        """
        kept = min(self.halo, x_TC.shape[0])
        last_TC = gather_rows(x_TC[x_TC.shape[0] - kept :], self.cp.group)
        before = self.cp.rank * kept
        # Keep the rows of all ranks in the result's graph: every rank must take part in the
        # reduce-scatter of the backward pass.
        halo_TC = pad(last_TC, (0, 0, self.halo, 0)).narrow(0, before, self.halo)
        return torch.cat([halo_TC, x_TC])

    def entering(self, state_NPS: Tensor, log_N: Tensor, packed: PackedSeqParams) -> Tensor:
        """Return the state that enters this rank's part, ``(N, P, S)``.

        Args:
            state_NPS: state that leaves the part, from `leaving_state`.
            log_N: logarithm of the part's decay.
        """
        message_1X = torch.cat([state_NPS.flatten(), log_N])[None]
        states_cX, logs_cN = gather_rows(message_1X, self.cp.group).split(
            [state_NPS.numel(), len(log_N)], dim=1
        )
        # (1, T) -> (c, T / c)
        documents = packed.seq_idx.view(self.cp.size, -1)
        return entering_state(
            states_cX.view(-1, *state_NPS.shape),
            logs_cN,
            documents[:, -1],
            self.cp.rank,
            documents[self.cp.rank, :1],
        )
