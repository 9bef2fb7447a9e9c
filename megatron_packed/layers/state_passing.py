"""Passing of the state of a recurrent layer between context-parallel ranks.

[Note: passed states]
Rank r runs the layer on part r of the pack, slots ``[r T / c, (r + 1) T / c)``, with all its heads.
Two small messages connect the parts. The last W - 1 inputs of each part (the halo) go to the
convolution of the next one. The state that leaves each part goes to all later parts, because a
document may have tokens in several of them. With it goes what the part does to a state that enters it
(`RecurrentMixer.scan_part` of each kind). The sizes of all do not depend on T. So neither heads nor
groups need to divide among the ranks. On two H200, a step of Mamba and attention layers in graphs
takes 171.1 ms with passed states and 187.6 ms with exchanged heads (2026-11-29).

The halo is all-gathered. Kernels that pass states themselves send their message only to the parts that
need it: to later parts in forward, and to earlier ones in backward. The first rank does not wait in
forward, and the last one does not in backward. For other kernels both messages are all-gathers, whose
backward is a reduce-scatter.

The rows between the layers are therefore contiguous. Attention that needs a zigzag moves its rows
([Note: reordered rows]).

Letters: T tokens of the pack, c ranks, C channels, W convolution width, N heads of P channels, S
state.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import pad

from megatron_packed.distributed.collectives import start_row_from_others
from megatron_packed.distributed.differentiable import gather_rows
from megatron_packed.layers.context_parallel import ContextParallel
from megatron_packed.ops.column_slices import split_columns
from megatron_packed.ops.parts_of_pack import PartOfPack
from megatron_packed.ops.ssd.passed_states import entering_state
from megatron_packed.packed.params import PackedSeqParams

if TYPE_CHECKING:
    from megatron_packed.layers.recurrent_mixer import RecurrentMixer


def offsets_of_part(packed: PackedSeqParams, rank: int, size: int) -> Tensor:
    """Return the offsets of the documents in part ``rank`` of ``size``; others have length 0."""
    rows = packed.total_tokens // size
    return (packed.cu_seqlens - rank * rows).clamp(0, rows)


class StatePassing:
    """Convolution and recurrence of all heads on this rank's part of the pack.

    Args:
        cp: context parallelism of this rank, over more than one rank.
        width: W.
    """

    def __init__(self, cp: ContextParallel, width: int) -> None:
        self.cp = cp
        self.halo = width - 1

    def convolve_and_scan(
        self, mixer: RecurrentMixer, columns: Sequence[Tensor], packed: PackedSeqParams
    ) -> Tensor:
        """Run what `RecurrentMixer.convolve_and_scan` runs, on the rows of the part."""
        conv_TC, *per_head = columns
        seq_idx_1T = self.seq_idx(packed, self.halo)
        convolved_TC = mixer.conv1d(conv_TC, seq_idx_1T, halo_HC=self.halo_of(conv_TC))
        heads = split_columns(convolved_TC, *mixer.conv_shapes)
        return mixer.scan_part((heads, per_head, mixer.values_of_heads()), packed, self)

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
        return offsets_of_part(packed, self.cp.rank, self.cp.size)

    def part(self, packed: PackedSeqParams) -> PartOfPack:
        """Return this rank's part of the pack."""
        begin = self.cp.rank * (packed.total_tokens // self.cp.size)
        before_1 = packed.seq_idx[0, begin - 1 : begin] if begin else None
        assert self.cp.group is not None
        start = partial(start_row_from_others, group=self.cp.group)
        return PartOfPack(self.cp.rank, self.cp.size, before_1, start)

    def halo_of(self, x_TC: Tensor) -> Tensor:
        """Return ``(W - 1, C)``: the rows of the pack before this rank's part ``(T / c, C)``.

        Before the pack there are zeros. A part may have fewer rows than the halo.
        """
        sent_rows = min(self.halo, x_TC.shape[0])
        last_TC = gather_rows(x_TC[x_TC.shape[0] - sent_rows :], self.cp.group)
        start = self.cp.rank * sent_rows
        # Keep the rows of all ranks in the result's graph: every rank must take part in the
        # reduce-scatter of the backward pass.
        return pad(last_TC, (0, 0, self.halo, 0)).narrow(0, start, self.halo)

    def gather(self, message_1X: Tensor) -> Tensor:
        """Return ``(c, X)``: the messages of all parts. Backward sums their gradients."""
        return gather_rows(message_1X, self.cp.group)

    def entering(self, state_NPS: Tensor, log_N: Tensor, packed: PackedSeqParams) -> Tensor:
        """Return the state that enters this rank's part, ``(N, P, S)``.

        Args:
            state_NPS: state that leaves the part, from `leaving_state`.
            log_N: logarithm of the part's decay.
        """
        message_1X = torch.cat([state_NPS.flatten(), log_N])[None]
        gathered_cX = self.gather(message_1X)
        states_cX, logs_cN = torch.split(gathered_cX, [state_NPS.numel(), len(log_N)], dim=1)
        # (1, T) -> (c, T / c)
        documents = packed.seq_idx.view(self.cp.size, -1)
        return entering_state(
            states_cX.view(-1, *state_NPS.shape),
            logs_cN,
            documents[:, -1],
            self.cp.rank,
            documents[self.cp.rank, :1],
        )
