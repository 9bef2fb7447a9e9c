"""Tables that all layers of a model share, derived from the metadata of one pack."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_packed.config import flag_names as flags
from megatron_packed.config.sections.model import ModelConfig
from megatron_packed.layers.attention import Rotary
from megatron_packed.layers.build import Build
from megatron_packed.layers.kinds.registry import kinds_of
from megatron_packed.packed.later_tokens import reaches
from megatron_packed.packed.params import (
    DepthTables,
    KindTables,
    PackedSeqParams,
    RankOrder,
    Samples,
    SharedTables,
)


class PackTables:
    """Builder of `SharedTables`. It first checks what cannot be checked on the device.

    Args:
        config: the model; its layer pattern decides which tables exist.
        build: arguments that all layers share.
        rotary: position tables of the attention layers, or None.
        max_positions: length of the longest document, for the error message.
    """

    def __init__(
        self,
        config: ModelConfig,
        build: Build,
        *,
        rotary: Rotary | None,
        max_positions: int,
    ) -> None:
        self.cp = build.cp
        self.partition = build.cp.partition
        self.rotary = rotary
        self.max_positions = max_positions
        self.sample_shape: tuple[int, int] | None = None
        """Samples of a pack and slots of a sample, if experts are balanced in each sample."""
        self.has_experts = config.has_experts
        self.balances_documents = config.balances_documents and self.has_experts
        """True if experts are balanced in each document, so that ``sample_shape`` is not used."""
        self.depths = range(1, config.mtp_depths + 1)
        builders = (kind.tables(config, build) for kind in kinds_of(config.layer_types))
        self.of_kinds = [tables for tables in builders if tables is not None]
        """Functions that build the tables of one kind of layer."""

    def check(self, packed: PackedSeqParams) -> None:
        """Check one pack on the host; every pack must be checked.

        Raises:
            ValueError: a document is longer than the rotary tables, or context-parallel ranks
                cannot share the pack.
        """
        if self.cp.size > 1:
            self.cp.attention_partition.check(packed)
        if self.rotary is not None:
            longest = int(packed.document_lengths.max(initial=0))
            if longest > self.rotary.max_positions:
                raise ValueError(
                    f"a document has {longest} tokens, but the rotary tables hold max_position_embeddings = "
                    f"{self.max_positions} positions; raise {flags.MAX_POSITION_EMBEDDINGS} or truncate the document."
                )

    def derive(self, packed: PackedSeqParams) -> SharedTables:
        """Derive the tables from the tensors of ``packed``; a CUDA graph can capture this."""
        # The tail may be longer than any document; zero keeps its positions inside the rotary tables.
        positions_T = None if self.rotary is None else packed.position_ids * packed.valid
        rank_order = order = valid_T = None
        if self.cp.size > 1:
            rank_order = self.cp.attention_order(packed)
            # Between the layers, slots keep their order if the partition is contiguous.
            order = rank_order if self.partition.zigzag else None
            valid_T = self.partition.own(packed.valid, order)
            if positions_T is not None:
                positions_T = self.partition.own(positions_T, order)
        num_valid = None
        if self.has_experts:
            num_valid = packed.valid.sum(dtype=torch.float32).clamp(min=1)
        of_kinds: dict[type, KindTables] = {}
        for tables_of in self.of_kinds:
            tables = tables_of(packed)
            if tables is not None:
                of_kinds[type(tables)] = tables
        return SharedTables(
            rank_order=rank_order,
            rank_valid=valid_T,
            of_kinds=of_kinds,
            rope_position_ids=positions_T,
            num_valid=num_valid,
            samples=self._samples(packed, packed.valid, order)
            if self.balances_documents or self.sample_shape
            else None,
            depths=self._of_depths(packed, order) if self.depths else (),
        )

    def _of_depths(
        self, packed: PackedSeqParams, order: RankOrder | None
    ) -> tuple[DepthTables, ...]:
        return tuple(self._at_depth(packed, order, depth) for depth in self.depths)

    def _at_depth(
        self, packed: PackedSeqParams, order: RankOrder | None, depth: int
    ) -> DepthTables:
        """Return the tables of one depth of multi-token prediction."""
        reaches_T = reaches(packed, depth)
        count = reaches_T.sum(dtype=torch.float32).clamp(min=1) if self.has_experts else None
        samples = None
        if self.balances_documents or self.sample_shape:
            samples = self._samples(packed, reaches_T, order)
        return DepthTables(reaches_T, self.partition.own(reaches_T, order), count, samples)

    def _samples(
        self, packed: PackedSeqParams, valid_T: Tensor, order: RankOrder | None
    ) -> Samples:
        """Return the samples of the pack: its documents, or slots in ``sample_shape``.

        Args:
            packed: metadata of the pack.
            valid_T: slots that count.
            order: rank order of the slots.
        """
        if self.balances_documents:
            sample_T = packed.seq_idx.view(-1).long()
            # The number of documents is on the device, so there is a sample for each of the capacity
            # and for the tail. Sums of ones are exact in any order.
            num_valid_B = torch.zeros(packed.cu_seqlens.shape[0] - 1, device=valid_T.device)
            num_valid_B.index_add_(0, sample_T, valid_T.float())
            number = (num_valid_B > 0).sum().clamp(min=1).float()
        else:
            assert self.sample_shape is not None
            samples, slots = self.sample_shape
            # Real tokens before a token decide on its sample.
            before_T = valid_T.cumsum(0) - valid_T.long()
            sample_T = (before_T // slots).clamp(max=samples - 1)
            begin_B = slots * torch.arange(samples, device=sample_T.device)
            num_valid_B = (valid_T.sum() - begin_B).clamp(max=slots).float()
            number = torch.full((), float(samples), device=valid_T.device)
        own_T = self.partition.own(sample_T, order)
        return Samples(own_T, num_valid_B.clamp(min=1), number)
