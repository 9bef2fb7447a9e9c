"""The hybrid Mamba-Transformer-MoE language model on packed documents.

Letters: T tokens, D hidden size, V entries of the vocabulary, P positions, L mixture-of-experts
layers, E experts.

Nothing in here asks the device a question, and no shape depends on the documents of a pack: forward
and backward can be captured in a CUDA graph and replayed over another pack of the same T and
capacity.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import record_function

from megatron_packed.config.sections.memory import MemoryConfig
from megatron_packed.config.sections.model import ModelConfig
from megatron_packed.distributed.differentiable import gather_last
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.distributed.overlapped_collectives import Stage
from megatron_packed.distributed.tensor_parallel_gradients import SharedGradients
from megatron_packed.distributed.tensor_parallel_shards import (
    ShardedParameter,
    sharded_parameters,
)
from megatron_packed.layers.attention import Rotary
from megatron_packed.layers.backends import Backends
from megatron_packed.layers.context_parallel import ContextParallel
from megatron_packed.layers.embedding import Embedding
from megatron_packed.layers.hybrid_layer import (
    HybridLayer,
    HybridLayers,
    HybridMoELayer,
    build_layer,
    build_norm,
)
from megatron_packed.layers.moe.dispatcher import ExpertBuffer
from megatron_packed.layers.moe.layer import MoEReport
from megatron_packed.layers.moe.parallel import ExpertParallel
from megatron_packed.layers.moe.router import update_expert_bias
from megatron_packed.layers.tensor_parallel import TensorParallel
from megatron_packed.memory.activation_offload import Offload
from megatron_packed.memory.apply import apply_memory
from megatron_packed.models.init import initialize
from megatron_packed.models.lm_head_and_loss import HybridOutput, Output, loss_shard
from megatron_packed.models.pack_tables import PackTables
from megatron_packed.ops.cross_entropy.api import linear_cross_entropy
from megatron_packed.packed.micro_batch import MicroBatch
from megatron_packed.packed.params import PackedSeqParams
from megatron_packed.packed.shared_tables import NO_TABLES


class HybridModel(nn.Module):
    """Embedding, one layer for each symbol of the pattern, final norm, output projection.

    Parameter names: ``embedding.weight``, ``layers.N.norm.weight``, ``layers.N.mixer.*``,
    ``final_norm.weight``, and ``output.weight`` where it is not tied to the embedding.

    Args:
        config: the model; its layer pattern decides what is built.
        vocab_size: entries of the tokenizer. The tables have ``config.padded_vocab_size(vocab_size,
            tp_size)`` rows; rows beyond ``vocab_size`` take no part in the loss.
        max_positions: longest document, P; only rotary positions need it.
        groups: of this rank. Tensor- and context-parallel ranks get the same micro-batch: the
            former share every matrix (parameters are those of one process, cut), the latter its
            tokens.
        cp_comm_type: how context-parallel ranks see whole documents in attention: ``a2a``,
            ``all_gather`` (also spelt ``allgather``) or ``p2p``. With the latter two documents lie
            in packs padded to multiples of 2 cp_size.
        sequence_parallel: between the layers, each tensor-parallel rank has its rows of the hidden
        state only.
        device: where parameters live.
        dtype: of parameters and activations, except those that stay float32 (A_log, D, dt_bias,
        router).
        seed: of the initial values.
        backends: which implementation of each op, by op name; the fastest that fits where not
        named.
        memory: what the backward pass computes again, and what waits for it on the host; by default
        nothing.
        offload: moves what waits on the host; by default one as ``memory`` says.
    Raises:
        ValueError: a layout that is not built.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        vocab_size: int,
        max_positions: int,
        groups: ParallelGroups | None = None,
        cp_comm_type: str = "a2a",
        sequence_parallel: bool = False,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        seed: int = 1234,
        backends: Backends | Mapping[str, str] | None = None,
        memory: MemoryConfig | None = None,
        offload: Offload | None = None,
    ) -> None:
        super().__init__()
        self.memory = memory or MemoryConfig()
        self.offload = (
            (offload or Offload.from_config(self.memory, device)) if self.memory.offloads else None
        )
        """Moves what waits on the host; None where nothing does. It is told of every step
        (`Offload.end_step`).
        """
        self.tp = TensorParallel.of(groups, sequence_parallel=sequence_parallel)
        self.cp = ContextParallel.of(groups, cp_comm_type)
        self.ep = ExpertParallel.of(groups, self.tp)
        self.config = config
        self.vocab_size = vocab_size
        self.max_positions = max_positions
        self.dtype = dtype
        self.backends = Backends.of(backends)
        num_rows = config.padded_vocab_size(vocab_size, self.tp.size)
        options = {
            "stored_rows": config.padded_vocab_size(vocab_size),
            "tp": self.tp,
            "device": device,
            "dtype": dtype,
        }
        self.embedding = Embedding(num_rows, config.hidden_size, **options)
        # A document's padding counts on from its last token.
        positions = _round_up(max_positions, self.cp.partition.alignment)
        self.rotary = Rotary.of(config, positions, backend=self.backends.rope, device=device)
        self.layers = HybridLayers(self._build_layers(device))
        self.final_norm = build_norm(config, self.backends, device, dtype, self.tp)
        self.output: Output | None = None
        if config.untie_embeddings_and_output_weights:
            self.output = Output(num_rows, config.hidden_size, **options)
        self.pack_tables = PackTables(
            config,
            tp=self.tp,
            cp=self.cp,
            backends=self.backends,
            rotary=self.rotary,
            max_positions=max_positions,
            dtype=dtype,
        )
        self.moe_layers = [layer for layer in self.layers if isinstance(layer, HybridMoELayer)]
        self.register_buffer("_no_aux_loss", torch.zeros((), device=device), persistent=False)
        self.register_buffer("_no_overflow", torch.zeros((), device=device), persistent=False)
        self.register_buffer("_no_counts", torch.zeros(0, 0, device=device), persistent=False)
        self.vocab_shard = loss_shard(self.embedding, num_rows, self.tp)
        initialize(self, config, seed, tp_rank=self.tp.rank, tp_size=self.tp.size)
        apply_memory(self.layers, config.layer_types, self.memory, self.offload)

    def _build_layers(self, device: torch.device | str) -> Iterator[HybridLayer]:
        for symbol in self.config.layer_types:
            yield build_layer(
                symbol,
                self.config,
                rotary=self.rotary,
                backends=self.backends,
                tp=self.tp,
                cp=self.cp,
                ep=self.ep,
                device=device,
                dtype=self.dtype,
            )

    def sharded_parameters(self) -> dict[str, ShardedParameter]:
        """Every parameter by its name: the shape of the whole, and which part of it this rank
        holds.
        """
        return sharded_parameters(self, self.tp.rank, self.tp.size)

    def shared_gradients(self) -> SharedGradients:
        """Sums over tensor-parallel ranks what each found of the gradients of parameters they hold
        together.

        Its ``sum()`` belongs behind the last backward pass of a step and before the sum over
        data-parallel ranks.
        """
        return SharedGradients(
            self.parameters(), self.tp.group, tp_rank=self.tp.rank, tp_size=self.tp.size
        )

    @property
    def stages(self) -> list[Stage]:
        """The modules that the hidden state goes through, and the parameters that are used from
        each on to the next.
        """
        return [
            *(
                Stage(module, list(module.parameters()))
                for module in (self.embedding, *self.layers)
            ),
            Stage(self.final_norm, [*self.final_norm.parameters(), self.output_weight]),
        ]

    @property
    def num_moe_layers(self) -> int:
        return len(self.moe_layers)

    @property
    def num_parameters(self) -> int:
        """Trainable numbers that this rank holds; tied weights count once."""
        return sum(parameter.numel() for parameter in self.parameters())

    @property
    def output_weight(self) -> nn.Parameter:
        """``(padded vocabulary, D)``; this rank's rows of it."""
        return self.embedding.weight if self.output is None else self.output.weight

    def prepare(self, packed: PackedSeqParams) -> PackedSeqParams:
        """Return ``packed`` with the tables that all layers share; itself if it has them.

        They are derived once per micro-batch.

        Raises:
            ValueError: a document is longer than the rotary tables, or the pack cannot be shared
                out.
        """
        if packed.tables is not NO_TABLES:
            return packed
        self.pack_tables.check(packed)
        return packed.with_tables(self.pack_tables.derive(packed))

    def own_rows(self, x_T: Tensor, packed: PackedSeqParams) -> Tensor:
        """Of what has one entry for each of T slots, those of the rows that this rank's hidden
        state has.
        """
        own_T = self.cp.own(x_T, packed)
        if not self.tp.sequence_parallel:
            return own_T
        rows = own_T.shape[0] // self.tp.size
        return own_T.narrow(0, self.tp.rank * rows, rows)

    def hidden_states(
        self, tokens_T: Tensor, packed: PackedSeqParams
    ) -> tuple[Tensor, list[MoEReport]]:
        """``(T, D)`` after the final norm, and what every E layer reported.

        With sequence parallelism the rows of this rank, ``(T / size, D)``.

        Args:
            tokens_T: ``(T,)``; with context parallelism those of this rank, ``(T / size,)``, and so
                everything else.
        """
        hidden_TD = self.embedding(tokens_T)
        hidden_TD, reports = self.layers(hidden_TD, packed)
        return self.final_norm(hidden_TD), reports

    def forward(self, micro_batch: MicroBatch, *, grad_scale: Tensor | None = None) -> HybridOutput:
        """Return the losses of one pack.

        ``loss``, ``loss_sum`` and ``aux_loss`` may be scaled, added to and combined before
        ``backward()``. Gradients come from there alone: a forward pass without it leaves none.
        Where ``loss`` itself is differentiated, `forward_backward` gives the same bits in less
        time.

        Args:
            grad_scale: the upstream gradient that ``loss_sum`` will get; see
                `linear_cross_entropy`.
        """
        packed = self.prepare(micro_batch.packed)
        tokens_T, labels_T = micro_batch.tokens, micro_batch.labels
        loss_mask_T = micro_batch.loss_mask
        if self.cp.size > 1:
            tokens_T, labels_T, loss_mask_T = (
                self.cp.own(x_T, packed) for x_T in (tokens_T, labels_T, loss_mask_T)
            )
        hidden_TD, reports = self.hidden_states(tokens_T, packed)
        loss_sum, per_token_loss_T = linear_cross_entropy(
            self.tp.enter(hidden_TD),
            self.output_weight,
            labels_T,
            loss_mask_T,
            vocab_size=self.vocab_size,
            grad_scale=grad_scale,
            shard=self.vocab_shard,
            backend=self.backends.cross_entropy,
        )
        loss_scale, aux_scale = micro_batch.scales.unbind()
        loss, aux_loss, counts = loss_sum * loss_scale, self._no_aux_loss, self._no_counts
        dropped, overflow = self._no_counts.view(-1), self._no_overflow
        if reports:
            counts = torch.stack([report.tokens_per_expert_E for report in reports])
            dropped = torch.stack([report.dropped for report in reports])
            overflow = torch.stack([report.overflow for report in reports]).amax()
            if self.config.moe_expert_rank_capacity_factor is not None:
                overflow = self.ep.agree(overflow)
        if reports and self.training:
            aux_loss = torch.stack([report.aux_loss for report in reports]).sum()
            loss = loss + aux_loss * aux_scale
        return HybridOutput(loss, loss_sum, aux_loss, per_token_loss_T, counts, dropped, overflow)

    def forward_backward(self, micro_batch: MicroBatch) -> HybridOutput:
        """Add the gradients of one pack's ``loss``, bit for bit those of
        ``model(micro_batch).loss.backward()``.

        It forms the logits once, where ``backward()`` forms them again.

        Returns:
            The losses, detached.
        """
        # The loss's dtype, or autograd would convert the upstream gradient to it and pass on
        # another tensor.
        loss_scale, aux_scale = micro_batch.scales.to(
            torch.promote_types(self.dtype, torch.float32)
        ).unbind()
        with record_function("forward"):
            output: HybridOutput = self(micro_batch, grad_scale=loss_scale)
        with record_function("backward"):
            losses, scales = [output.loss_sum], [loss_scale]
            if output.aux_loss.requires_grad:
                losses.append(output.aux_loss)
                scales.append(aux_scale)
            torch.autograd.backward(losses, scales)
        return HybridOutput(*(value.detach() for value in output))

    def logits(self, tokens_T: Tensor, packed: PackedSeqParams) -> Tensor:
        """``(T, V)`` float32 logits of all tokens, for evaluation and tests; training never forms
        them at once.

        Raises:
            ValueError: context-parallel ranks have their own tokens only.
        """
        if self.cp.size > 1:
            raise ValueError(
                f"cp_size is {self.cp.size}, so no rank has the logits of a pack; generate and evaluate logits with "
                "cp_size 1 (a checkpoint loads into any layout)."
            )
        hidden_TD, _ = self.hidden_states(tokens_T, self.prepare(packed))
        if self.tp.group is None:
            return F.linear(hidden_TD, self.output_weight[: self.vocab_size]).float()
        logits_TV = gather_last(
            F.linear(self.tp.enter(hidden_TD), self.output_weight), self.tp.group
        )
        return logits_TV[:, : self.vocab_size].float()

    def expert_buffer(self, total_tokens: int) -> ExpertBuffer | None:
        """Sizes of the static buffer in front of the experts of an E layer; None without one.

        Args:
            total_tokens: slots of a pack.
        """
        if not self.moe_layers or not self.moe_layers[0].mixer.dispatcher.static:
            return None
        dispatcher = self.moe_layers[0].mixer.dispatcher
        tokens = total_tokens // (self.cp.size * (self.tp.size if self.ep.whole_experts else 1))
        return ExpertBuffer(
            rows=dispatcher.buffer_rows(tokens),
            worst_rows=dispatcher.worst_rows(tokens),
            bytes_per_row=self.config.hidden_size * self.dtype.itemsize,
        )

    @property
    def bounds_expert_buffers(self) -> bool:
        """Whether a pack may need more room for the rows of experts than there is."""
        bounded = self.config.moe_expert_rank_capacity_factor is not None
        return bool(self.moe_layers) and bounded and self.ep.group is not None

    @contextmanager
    def full_expert_buffers(self) -> Iterator[None]:
        """Inside, every expert buffer has its worst size, so that ``expert_overflow`` is always 0;
        eager passes only.

        For micro-batches that overflowed: discard what they gave, and run them again in here, on
        all ranks.
        """
        dispatchers = [layer.mixer.dispatcher for layer in self.moe_layers]
        for dispatcher in dispatchers:
            dispatcher.full_buffer = True
        try:
            yield
        finally:
            for dispatcher in dispatchers:
                dispatcher.full_buffer = False

    def update_expert_bias(self, tokens_per_expert: Tensor, *, skip: Tensor | None = None) -> None:
        """Nudge the expert biases of all E layers after an optimizer step; nothing without them.

        Args:
            tokens_per_expert: ``(L, E)`` or flat, assignments over the whole global batch (ranks
            and micro-batches).
            skip: 0-d bool on the device; True leaves them as they are (the step was not taken
                either).
        """
        biases = [layer.mixer.router.expert_bias for layer in self.moe_layers]
        if biases and biases[0] is not None:
            counts_LE = tokens_per_expert.view(len(biases), -1)
            update_expert_bias(biases, counts_LE, self.config.moe_router_bias_update_rate, skip)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
