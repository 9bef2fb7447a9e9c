"""The hybrid Mamba-Transformer-MoE language model on packed documents.

Letters: T tokens, D hidden size, V entries of the vocabulary, P positions, L mixture-of-experts
layers, E experts.

Forward and backward never read a device value on the host, and no shape depends on the documents of
a pack. A CUDA graph can therefore capture them and replay them for another pack of the same T and
the same capacity.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from megatron_packed.config.sections.memory import MemoryConfig
from megatron_packed.config.sections.model import ModelConfig
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.distributed.sequence_parallel_products import NO_OVERLAP, TensorOverlap
from megatron_packed.distributed.tensor_parallel_gradients import SharedGradients
from megatron_packed.distributed.tensor_parallel_shards import (
    ShardedParameter,
    sharded_parameters,
)
from megatron_packed.layers.attention import Rotary
from megatron_packed.layers.backends import Backends
from megatron_packed.layers.build import Build
from megatron_packed.layers.build_layers import build_layers
from megatron_packed.layers.context_parallel import ContextParallel
from megatron_packed.layers.embedding import Embedding
from megatron_packed.layers.hybrid_layer import HybridLayers, HybridMoELayer, build_norm
from megatron_packed.layers.moe.dispatcher import ExpertBuffer
from megatron_packed.layers.moe.expert_room import ROWS_OF_LARGE_TILES, ExpertRoom, Load
from megatron_packed.layers.moe.global_balance import GlobalBalance
from megatron_packed.layers.moe.layer import MoEReport
from megatron_packed.layers.moe.parallel import ExpertParallel
from megatron_packed.layers.moe.router import update_expert_bias
from megatron_packed.layers.tensor_parallel import TensorParallel
from megatron_packed.models.init import initialize
from megatron_packed.models.lm_head_and_loss import (
    HybridOutput,
    Output,
    cross_entropy_of,
    loss_shard,
    scaled_logits,
    whole_logits,
)
from megatron_packed.models.pack_tables import PackTables
from megatron_packed.packed.micro_batch import MicroBatch
from megatron_packed.packed.params import NO_TABLES, PackedSeqParams

if TYPE_CHECKING:
    from megatron_packed.config.kinds.layer_kind import LayerKind
    from megatron_packed.distributed.overlapped_collectives import Stage
    from megatron_packed.memory.activation_offload import Offload
    from megatron_packed.models.multi_token_prediction import MultiTokenPrediction


def _offloader(
    memory: MemoryConfig, offload: Offload | None, device: torch.device | str
) -> Offload | None:
    """Return the given offloader of activations or a new one; None if nothing is offloaded."""
    if not memory.offloads:
        return None
    from megatron_packed.memory.activation_offload import Offload

    return offload or Offload.from_config(memory, device)


def _multi_token_prediction(
    config: ModelConfig, build: Build, layers: HybridLayers
) -> MultiTokenPrediction | None:
    """Return the modules of multi-token prediction; None for a model without it."""
    if not config.mtp_depths:
        return None
    from megatron_packed.models.multi_token_prediction import MultiTokenPrediction

    return MultiTokenPrediction(config, build, layers)


class ExpertTotals(NamedTuple):
    """Totals of all E layers."""

    aux_loss: Tensor
    counts: tuple[Tensor, Tensor, Tensor, Tensor]
    """Fields of `HybridOutput` from ``tokens_per_expert`` to ``expert_rows``."""


def _shared_room(
    layers: Sequence[HybridMoELayer],
    config: ModelConfig,
    ep: ExpertParallel,
    device: torch.device | str,
) -> ExpertRoom:
    """Return the bounds of expert buffers, the same object for all E layers."""
    factor = None if ep.group is None else config.moe_expert_rank_capacity_factor
    room = ExpertRoom.from_factor(factor)
    if torch.device(device).type == "cuda":
        room.rows_per_expert = ROWS_OF_LARGE_TILES
    for layer in layers:
        layer.mixer.dispatcher.room = room
    return room


class HybridModel(nn.Module):
    """Embedding, one layer for each symbol of the pattern, final norm, output projection.

    Parameter names: ``embedding.weight``, ``layers.N.norm.weight``, ``layers.N.mixer.*``,
    ``final_norm.weight``, and ``output.weight`` if the output projection is not tied. Layers of
    multi-token prediction follow those of the main model; ``mtp.K.*`` are the other parameters of
    depth K + 1. With repeated layers the modules of all depths have the parameters of the first.

    Args:
        config: the model; its layer pattern decides which layers are built.
        vocab_size: entries of the tokenizer. The embedding and output tables have
            ``config.padded_vocab_size(vocab_size, tp_size)`` rows; rows beyond ``vocab_size`` take
            no part in the loss.
        max_positions: length of the longest document, P; only rotary positions need it.
        groups: process groups of this rank. Tensor- and context-parallel ranks get the same
            micro-batch. Tensor-parallel ranks shard every matrix, and context-parallel ranks split
            the tokens. The initial values do not depend on the layout.
        cp_comm_type: context-parallel attention: ``a2a``, ``all_gather`` (also spelt ``allgather``)
            or ``p2p``.
        cp_partition_mode: rows of a rank in attention with ``all_gather`` and ``p2p``:
            ``contiguous``, or ``zigzag``, which needs packs in which every document is padded to a
            multiple of 2 cp_size.
        mamba_cp_comm_type: context-parallel Mamba layers: ``heads`` or ``state``.
        linear_cp_mode: context-parallel gated delta nets: ``headwise`` or ``chunkwise``.
        cp_comm_overlap_parts: largest number of parts in which heads are exchanged between
            context-parallel ranks; a part travels while another one is computed.
        kinds: kinds of layers whose communication decides the rows of a context-parallel rank between
            the layers; by default those of the pattern. The isolation self-test builds one layer
            with the rows that it has in a model with other layers.
        sequence_parallel: between the layers, each tensor-parallel rank has only its rows of the
            hidden state.
        tp_overlap: collectives of sequence parallelism that run under matrix products.
        device: device of the parameters.
        dtype: dtype of parameters and activations, except parameters that stay float32 (A_log, D,
            dt_bias, router).
        seed: seed of the initial values.
        backends: backend of each op, by op name; other ops use the fastest backend that fits.
        memory: which activations are recomputed and which are offloaded to the host; by default
            none.
        offload: offloader of the activations; by default one is built from ``memory``.
    Raises:
        ValueError: the parallel layout is not supported.
    """

    _no_rows: Tensor
    _no_counts: Tensor

    def __init__(
        self,
        config: ModelConfig,
        *,
        vocab_size: int,
        max_positions: int,
        groups: ParallelGroups | None = None,
        cp_comm_type: str = "a2a",
        cp_partition_mode: str = "zigzag",
        mamba_cp_comm_type: str = "state",
        linear_cp_mode: str = "chunkwise",
        cp_comm_overlap_parts: int = 1,
        kinds: Iterable[LayerKind] | None = None,
        sequence_parallel: bool = False,
        tp_overlap: TensorOverlap = NO_OVERLAP,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        seed: int = 1234,
        backends: Backends | Mapping[str, str | bool] | None = None,
        memory: MemoryConfig | None = None,
        offload: Offload | None = None,
    ) -> None:
        super().__init__()
        self.memory = memory or MemoryConfig()
        self.offload = _offloader(self.memory, offload, device)
        """Offloader of activations, if any; call its `Offload.end_step` after every optimizer step."""
        self.tp = TensorParallel.from_groups(
            groups, sequence_parallel=sequence_parallel, overlap=tp_overlap
        )
        self.cp = ContextParallel.from_groups(
            groups,
            cp_comm_type=cp_comm_type,
            cp_partition_mode=cp_partition_mode,
            mamba_cp_comm_type=mamba_cp_comm_type,
            linear_cp_mode=linear_cp_mode,
            cp_comm_overlap_parts=cp_comm_overlap_parts,
            kinds=config.kinds if kinds is None else kinds,
        )
        self.ep = ExpertParallel.from_groups(groups, self.tp)
        self.config = config
        self.vocab_size = vocab_size
        self.max_positions = max_positions
        self.dtype = dtype
        self.backends = Backends.from_mapping(backends)
        num_rows = config.padded_vocab_size(vocab_size, self.tp.size)
        stored_rows = config.padded_vocab_size(vocab_size)
        build = Build(
            backends=self.backends, tp=self.tp, cp=self.cp, ep=self.ep, device=device, dtype=dtype
        )
        self.embedding = Embedding(
            num_rows,
            config.hidden_size,
            stored_rows=stored_rows,
            multiplier=config.embedding_multiplier,
            build=build,
        )
        # Positions of a document's padding continue after its last token.
        positions = max_positions + -max_positions % self.cp.attention_partition.alignment
        self.rotary = Rotary.from_config(
            config, positions, backend=self.backends.rope, device=device
        )
        self.layers = build_layers(config, build, self.rotary)
        self._main_layers = config.layers_of_depth(0)
        self.final_norm = build_norm(config, build)
        self.mtp = _multi_token_prediction(config, build, self.layers)
        self.output: Output | None = None
        if config.untie_embeddings_and_output_weights:
            self.output = Output(num_rows, config.hidden_size, stored_rows=stored_rows, build=build)
        self.pack_tables = PackTables(
            config, build, rotary=self.rotary, max_positions=max_positions
        )
        self._join_experts(groups, device)
        for name, shape in (("_no_rows", (2,)), ("_no_counts", (0, 0))):
            self.register_buffer(name, torch.zeros(shape, device=device), persistent=False)
        shard = loss_shard(self.embedding, num_rows, self.tp)
        self._cross_entropy = cross_entropy_of(config, vocab_size, shard, self.backends)
        if config.has_adapters:
            from megatron_packed.models.lora import add_adapters

            add_adapters(self, build)
        initialize(self, config, seed, tp_rank=self.tp.rank, tp_size=self.tp.size)
        if config.freeze_params:
            from megatron_packed.models.freeze import freeze_parameters

            freeze_parameters(self, config.freeze_params)
        if self.memory.changes_layers:
            from megatron_packed.memory.apply import apply_memory

            apply_memory(self.layers, config.layer_types, self.memory, self.offload)

    def sharded_parameters(self) -> dict[str, ShardedParameter]:
        """Return every parameter by name, with its full shape and this rank's part of it."""
        return sharded_parameters(self, self.tp.rank, self.tp.size)

    def shared_gradients(self) -> SharedGradients:
        """Return the reduction of gradients of parameters that several tensor-parallel ranks hold.

        Call its ``sum()`` after the last backward pass of a step and before the reduction over
        data-parallel ranks.
        """
        return SharedGradients(
            self.parameters(), self.tp.group, tp_rank=self.tp.rank, tp_size=self.tp.size
        )

    @property
    def stages(self) -> list[Stage]:
        """Modules that the hidden state passes through, in order, each with the parameters it uses.

        The final norms also have the output projection.
        """
        from megatron_packed.distributed.overlapped_collectives import Stage

        main = [self.layers[number] for number in self._main_layers]
        return [
            *(Stage(module, list(module.parameters())) for module in (self.embedding, *main)),
            Stage(self.final_norm, [*self.final_norm.parameters(), self.output_weight]),
            *(self.mtp.stages(self.embedding.weight, self.output_weight) if self.mtp else ()),
        ]

    @property
    def _no_totals(self) -> ExpertTotals:
        """Totals of a model without E layers."""
        none, no_rows = self._no_counts, self._no_rows
        return ExpertTotals(no_rows[0], (none, none.view(-1), no_rows[0], no_rows))

    @property
    def num_parameters(self) -> int:
        """Number of values of all parameters on this rank; tied weights count once."""
        return sum(parameter.numel() for parameter in self.parameters())

    @property
    def output_weight(self) -> nn.Parameter:
        """Weight of the output projection: this rank's rows of ``(padded vocabulary, D)``."""
        return self.embedding.weight if self.output is None else self.output.weight

    def prepare(self, packed: PackedSeqParams) -> PackedSeqParams:
        """Return ``packed`` with the tables that all layers share, derived once per micro-batch.

        A pack that already has tables is returned unchanged.

        Raises:
            ValueError: a document is longer than the rotary tables, or context-parallel ranks
                cannot share the pack.
        """
        if packed.tables is not NO_TABLES:
            return packed
        self.pack_tables.check(packed)
        return replace(packed, tables=self.pack_tables.derive(packed))

    def own_rows(self, x_T: Tensor, packed: PackedSeqParams) -> Tensor:
        """Return the entries of ``x_T`` for the rows of the hidden state that this rank has.

        Args:
            x_T: tensor with one entry for each of the T slots of the pack.
        """
        own_T = self.cp.own(x_T, packed)
        if not self.tp.sequence_parallel:
            return own_T
        rows = own_T.shape[0] // self.tp.size
        return own_T.narrow(0, self.tp.rank * rows, rows)

    def hidden_states(
        self, tokens_T: Tensor, packed: PackedSeqParams
    ) -> tuple[Tensor, list[MoEReport]]:
        """Return ``(T, D)`` after the final norm, and the report of every E layer.

        With sequence parallelism the result has only this rank's rows, ``(T / tp_size, D)``.

        Args:
            tokens_T: ``(T,)``. With context parallelism T is the number of this rank's tokens, here
                and in the result.
        """
        hidden_TD = self.embedding(tokens_T)
        hidden_TD, reports = self.layers(hidden_TD, packed, self._main_layers)
        return self.final_norm(hidden_TD), reports

    def _loss_sum(
        self, hidden_TD: Tensor, labels_T: Tensor, loss_mask_T: Tensor, grad_scale: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the summed cross-entropy, and that of each token. See `linear_cross_entropy`."""
        if self.tp.group is not None:
            hidden_TD = self.tp.enter(hidden_TD)
        return self._cross_entropy(
            hidden_TD, self.output_weight, labels_T, loss_mask_T, grad_scale=grad_scale
        )

    def forward(
        self,
        micro_batch: MicroBatch,
        *,
        grad_scale: Tensor | None = None,
        depth_grad_scales: Tensor | None = None,
    ) -> HybridOutput:
        """Return the losses of one pack.

        ``loss``, ``loss_sum`` and ``aux_loss`` may be scaled, summed and combined before
        ``backward()``. Without a backward pass there are no gradients. To differentiate ``loss``
        itself, `forward_backward` computes the same bits in less time.

        Args:
            grad_scale: gradient that ``loss_sum`` will receive from upstream in the backward pass;
                see `linear_cross_entropy`.
            depth_grad_scales: the same for ``depth_loss_sums``.
        """
        packed = self.prepare(micro_batch.packed)
        rows_of_pack = (micro_batch.tokens, micro_batch.labels, micro_batch.loss_mask)
        tokens_T, labels_T, loss_mask_T = rows_of_pack
        if self.cp.size > 1:
            tokens_T, labels_T, loss_mask_T = (self.cp.own(x_T, packed) for x_T in rows_of_pack)
        hidden_TD, reports = self.hidden_states(tokens_T, packed)
        loss_sum, per_token_loss_T = self._loss_sum(hidden_TD, labels_T, loss_mask_T, grad_scale)
        loss_scale, aux_scale = micro_batch.scales.unbind()
        loss, depth_losses = loss_sum * loss_scale, self._no_counts.view(-1)
        if self.mtp and self.training:
            depth_losses, depth_reports = self.mtp.losses(
                hidden_TD, rows_of_pack, packed, self.embedding, self._loss_sum, depth_grad_scales
            )
            reports += depth_reports
            loss = loss + (depth_losses * self.mtp.scales(micro_batch)).sum()
        totals = self.totals_of(reports) if reports else self._no_totals
        if reports and self.training:
            loss = loss + totals.aux_loss * aux_scale
        results = (loss, loss_sum, totals.aux_loss, per_token_loss_T)
        return HybridOutput(*results, *totals.counts, depth_losses)

    def forward_backward(self, micro_batch: MicroBatch) -> HybridOutput:
        """Run forward and backward of one pack, and add the gradients of ``loss``.

        The gradients equal those of ``model(micro_batch).loss.backward()`` bit for bit. The logits
        are computed once here, and twice there.

        Returns:
            The losses, detached.
        """
        # Give the scales the dtype of the losses. Otherwise autograd would convert the upstream
        # gradient and pass on another tensor than ``grad_scale``.
        dtype = torch.promote_types(self.dtype, torch.float32)
        loss_scale, aux_scale = micro_batch.scales.to(dtype).unbind()
        depth_scales = None
        if self.mtp and self.training:
            depth_scales = self.mtp.scales(micro_batch).to(dtype)
        with record_function("forward"):
            output: HybridOutput = self(
                micro_batch, grad_scale=loss_scale, depth_grad_scales=depth_scales
            )
        with record_function("backward"):
            losses, scales = [output.loss_sum], [loss_scale]
            if depth_scales is not None:
                losses.append(output.depth_loss_sums)
                scales.append(depth_scales)
            if output.aux_loss.requires_grad:
                losses.append(output.aux_loss)
                scales.append(aux_scale)
            torch.autograd.backward(losses, scales)
        return HybridOutput(*map(Tensor.detach, output))

    def logits(self, tokens_T: Tensor, packed: PackedSeqParams) -> Tensor:
        """Return ``(T, V)`` float32 logits of all tokens, for evaluation and other losses.

        They are differentiable. The loss of `forward` never holds all logits at once.

        Raises:
            ValueError: the context-parallel size is above 1, so no rank has all tokens.
        """
        if self.cp.size > 1:
            raise ValueError(
                f"cp_size is {self.cp.size}, so no rank has the logits of a complete pack; use cp_size 1 to generate "
                "text and to evaluate logits (a checkpoint loads into any layout)."
            )
        hidden_TD, _ = self.hidden_states(tokens_T, self.prepare(packed))
        logits_TV = whole_logits(hidden_TD, self.output_weight, self.tp, self.vocab_size)
        return scaled_logits(logits_TV, self.config)

    # ---------------------------------------------------------------------------------------------
    # all E layers together: their reports, the bounds of their buffers, their biases

    def _join_experts(self, groups: ParallelGroups | None, device: torch.device | str) -> None:
        """Set the attributes that all E layers share; call it after the layers are built."""
        self.moe_layers = [layer for layer in self.layers if isinstance(layer, HybridMoELayer)]
        self.num_moe_layers = len(self.moe_layers)
        self.expert_room = _shared_room(self.moe_layers, self.config, self.ep, device)
        self.global_balance = GlobalBalance.from_config(
            self.config, self.num_moe_layers, groups, device
        )

    def totals_of(self, reports: Sequence[MoEReport]) -> ExpertTotals:
        """Combine the reports of at least one E layer."""
        overflow = torch.stack([report.overflow for report in reports]).amax()
        rows_2 = reports[0].rows_2
        if self.expert_room.bounds is not None:
            rows_2 = torch.stack([report.rows_2 for report in reports]).amax(dim=0)
            agreed_3 = self.ep.agree(torch.cat([overflow.view(1), rows_2]))
            overflow, rows_2 = agreed_3[0], agreed_3[1:]
        aux_loss = torch.stack([report.aux_loss for report in reports]).sum()
        if not self.training:
            # Replays of graphs, which are captured in training mode, report losses of evaluations.
            aux_loss = torch.zeros_like(aux_loss)
        elif self.global_balance is not None:
            aux_loss = aux_loss + self.global_balance([report.balance for report in reports])
        counts_LE = torch.stack([report.tokens_per_expert_E for report in reports])
        dropped_L = torch.stack([report.dropped for report in reports])
        return ExpertTotals(aux_loss, (counts_LE, dropped_L, overflow, rows_2))

    def expert_buffer(self, total_tokens: int) -> ExpertBuffer | None:
        """Return the sizes of the static buffer for rows of experts; None without such a buffer.

        Args:
            total_tokens: number of slots of a pack.
        """
        if not self.moe_layers or not self.moe_layers[0].mixer.dispatcher.static:
            return None
        row = self.config.routed_width * self.dtype.itemsize
        return self.moe_layers[0].mixer.dispatcher.buffer(self._dispatched(total_tokens), row)

    def even_expert_rows(self, total_tokens: int) -> Load:
        """Return the rows of the even shares of a pack. See [Note: bounds of expert buffers]."""
        tokens = self._dispatched(total_tokens)
        rows = tokens * self.config.moe_router_topk
        peer = [layer.mixer.dispatcher.even_part(tokens) for layer in self.moe_layers[:1]]
        return Load(rows, *(peer or [rows / self.ep.size]))

    def _dispatched(self, total_tokens: int) -> int:
        """Return the number of token slots of a pack that this rank dispatches."""
        return total_tokens // (self.cp.size * self.ep.token_parts)

    @property
    def bounds_expert_buffers(self) -> bool:
        """True if a pack can need more rows of experts than the expert buffers have."""
        return bool(self.moe_layers) and self.expert_room.bounds is not None

    @contextmanager
    def full_expert_buffers(self) -> Iterator[None]:
        """Give every bounded expert buffer the size that it needs inside a ``with`` block.

        ``expert_overflow`` is then 0, but the host waits for the device in each E layer. Use it for a
        micro-batch that overflowed: discard its results and run it again inside, on all ranks.
        """
        self.expert_room.exact = True
        try:
            yield
        finally:
            self.expert_room.exact = False

    def update_expert_bias(self, tokens_per_expert: Tensor, *, skip: Tensor | None = None) -> None:
        """Adjust the expert biases of all E layers after an optimizer step, if there are any.

        Args:
            tokens_per_expert: ``(L, E)`` or flat: assignments of the global batch, summed over
                ranks and micro-batches.
            skip: 0-d bool on the device. True leaves the biases unchanged, because the optimizer
                step was not taken either.
        """
        all_biases = [layer.mixer.router.expert_bias for layer in self.moe_layers]
        biases: Sequence[Tensor] = [bias for bias in all_biases if bias is not None]
        if biases:
            counts_LE = tokens_per_expert.view(len(biases), -1)
            if self.mtp is not None and self.config.mtp_use_repeated_layer:
                biases, counts_LE = self.mtp.joined_counts(biases, counts_LE)
            update_expert_bias(biases, counts_LE, self.config.moe_router_bias_update_rate, skip)
