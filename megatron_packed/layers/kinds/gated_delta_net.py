"""Gated delta net on packed documents.

Letters: T tokens, B documents, G key heads of K channels, N value heads of V channels, I = N V. Source: Yang,
Kautz and Hatamizadeh, arXiv:2412.06464; the operations have the same order as in Qwen3-Next.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from megatron_packed.config.kinds.gated_delta_net import KIND, GatedDeltaNetOptions
from megatron_packed.distributed.tensor_parallel_shards import SplitSegment
from megatron_packed.layers.build import Build
from megatron_packed.layers.hybrid_layer import ProjectedLayer
from megatron_packed.layers.kinds.mixer_kind import (
    RECURRENT_STATE,
    IsolationCase,
    MegatronNames,
    MixerKind,
    RankCounts,
    TableBuilder,
)
from megatron_packed.layers.parameters import no_weight_decay, ones
from megatron_packed.layers.recurrent_mixer import RECURRENT_FILLS, HeadInputs, RecurrentMixer
from megatron_packed.ops.gated_delta_rule.api import gated_delta_rule
from megatron_packed.ops.gated_delta_rule.step import final_states, update_next
from megatron_packed.ops.gated_delta_rule.tables import (
    DeltaRuleTables,
    build_tables,
    segment_tokens,
)
from megatron_packed.ops.gated_rms_norm.api import gated_rms_norm
from megatron_packed.packed.params import PackedSeqParams

if TYPE_CHECKING:
    from megatron_packed.layers.state_passing import StatePassing

SLOW_RATE = 1 / 32
"""Rate A of the decay in the isolation self-test: a state halves in about 17 tokens."""


class GatedHeadNorm(nn.Module):
    """RMSNorm of each value head, multiplied by ``silu(z)``; all heads share the weight ``(V,)``.

    Args:
        head_dim: V.
        eps: constant added to the mean square.
        build: arguments that all layers share.
    """

    def __init__(
        self,
        head_dim: int,
        eps: float,
        build: Build,
    ) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.eps = eps
        self.backend = build.backends.gated_rms_norm
        weight = no_weight_decay(build.new_parameter(head_dim))
        # Each tensor-parallel rank normalises its own heads, so their gradients are summed.
        self.weight = build.tp.use_inside(weight)

    def forward(self, o_TI: Tensor, z_TI: Tensor) -> Tensor:
        return gated_rms_norm(
            o_TI,
            z_TI,
            self.weight,
            self.eps,
            group_size=self.head_dim,
            norm_before_gate=True,
            backend=self.backend,
        )


class GatedDeltaNet(RecurrentMixer):
    """Gated delta net: `RecurrentMixer` with the gated delta rule.

    The rows of ``in_proj.weight`` are ``[q | k | v | z | b | a]``, of widths GK, GK, NV, NV, N, N.
    The channels of ``conv1d`` are ``[q | k | v]``; it has no bias. Each rank has the N / G value
    heads of each of its key heads. Ranks never share a head.

    Args:
        config: sizes of the model.
        build: arguments that all layers share.
    """

    head_parameters = ("A_log", "dt_bias")
    A_log: nn.Parameter
    dt_bias: nn.Parameter

    def __init__(self, config: GatedDeltaNetOptions, build: Build) -> None:
        q = SplitSegment(
            noun="key heads of a gated delta net",
            count=config.linear_num_key_heads,
            width=config.linear_key_head_dim,
        )
        v = SplitSegment(
            noun="value heads of a gated delta net",
            count=config.linear_num_value_heads,
            width=config.linear_value_head_dim,
        )
        norm = GatedHeadNorm(
            v.width,
            config.linear_norm_epsilon or config.norm_epsilon,
            build,
        )
        super().__init__(
            config.hidden_size,
            build,
            convolved=(q, q, v),
            z=v,
            z_first=False,
            values_per_head=2,
            width=config.linear_conv_kernel_dim,
            bias=False,
            norm=norm,
            passes_states=KIND.symbol in build.cp.state_passing,
        )
        self.allow_neg_eigval = config.linear_allow_neg_eigval

    def scan_heads(self, inputs: HeadInputs, packed: PackedSeqParams) -> Tensor:
        """Run the gated delta rule; see `ops.gated_delta_rule.api.gated_delta_rule`."""
        return self._delta_rule(inputs, packed, packed.seq_idx, packed.cu_seqlens)

    def scan_part(
        self, inputs: HeadInputs, packed: PackedSeqParams, passing: StatePassing
    ) -> Tensor:
        """Run the rule on this rank's part of the pack, with the state that enters it.

        Later parts get the state that leaves the part, and the matrix by which the part multiplies a
        state (`ops.gated_delta_rule.passed_states`).
        """
        boundaries = passing.seq_idx(packed), passing.cu_seqlens(packed)
        part = passing.part(packed)
        return self._delta_rule(inputs, packed, *boundaries, part=part, gather=passing.gather)

    def _delta_rule(
        self,
        inputs: HeadInputs,
        packed: PackedSeqParams,
        seq_idx_1T: Tensor,
        cu_seqlens: Tensor,
        **of_part: Any,
    ) -> Tensor:
        (q_TGK, k_TGK, v_TNV), (b_TN, a_TN), (A_log_N, dt_bias_N) = inputs
        chunks = packed.tables.find(DocumentChunks)
        return gated_delta_rule(
            q_TGK,
            k_TGK,
            v_TNV,
            a_TN,
            b_TN,
            A_log_N,
            dt_bias_N,
            seq_idx_1T,
            cu_seqlens,
            allow_neg_eigval=self.allow_neg_eigval,
            tables=None if chunks is None else chunks.delta_rule,
            deterministic=self.backends.deterministic,
            backend=self.backends.gated_delta_rule,
            **of_part,
        )

    def numbers_of_states(self) -> int:
        """Return the numbers of a state ``(K, V)`` and a matrix ``(K, K)`` of each value head."""
        _, (_, key_dim), (heads, value_dim) = self.conv_shapes
        return heads * key_dim * (value_dim + key_dim)

    def final_states(self, inputs: HeadInputs, lengths: list[int]) -> Tensor:
        """Return the states ``(B, N, K, V)`` of the gated delta rule."""
        (_, k_TGK, v_TNV), (b_TN, a_TN), (A_log_N, dt_bias_N) = inputs
        return final_states(
            k_TGK,
            v_TNV,
            a_TN,
            b_TN,
            A_log_N,
            dt_bias_N,
            lengths,
            allow_neg_eigval=self.allow_neg_eigval,
        )

    def next_output(self, state_BN: Tensor, inputs: HeadInputs) -> tuple[Tensor, Tensor]:
        (q_BGK, k_BGK, v_BNV), (b_BN, a_BN), (A_log_N, dt_bias_N) = inputs
        return update_next(
            state_BN,
            q_BGK,
            k_BGK,
            v_BNV,
            a_BN,
            b_BN,
            A_log_N,
            dt_bias_N,
            allow_neg_eigval=self.allow_neg_eigval,
        )


class DocumentChunks(NamedTuple):
    """Chunks of a pack's documents, for the kernels of the gated delta rule."""

    delta_rule: DeltaRuleTables
    """Chunks of the slots that the rule sees: those of this rank's part if it passes states, else all."""

    def tensors(self) -> tuple[Tensor, ...]:
        return self.delta_rule


def _chunks(packed: PackedSeqParams, *, segment: int) -> DocumentChunks:
    return DocumentChunks(build_tables(packed.cu_seqlens, packed.total_tokens, segment=segment))


def _chunks_of_part(
    packed: PackedSeqParams, *, rank: int, size: int, segment: int
) -> DocumentChunks:
    from megatron_packed.layers.state_passing import offsets_of_part

    offsets = offsets_of_part(packed, rank, size)
    tokens = packed.total_tokens // size
    return DocumentChunks(build_tables(offsets, tokens, segment=segment, of_part=True))


def _tables(config: GatedDeltaNetOptions, build: Build) -> TableBuilder:
    """Return the builder of the chunks of all slots, or of this rank's part if it passes states."""
    if KIND.symbol not in build.cp.state_passing:
        # Ranks that pass no states share the heads.
        heads = config.linear_num_value_heads // (build.tp.size * build.cp.size)
        return partial(_chunks, segment=segment_tokens(heads))
    segment = segment_tokens(config.linear_num_value_heads // build.tp.size)
    return partial(_chunks_of_part, rank=build.cp.rank, size=build.cp.size, segment=segment)


def _small_sizes(config: GatedDeltaNetOptions, ranks: RankCounts) -> dict[str, object]:
    heads_per_key = config.linear_num_value_heads // config.linear_num_key_heads
    keys = min(config.linear_num_key_heads, 2 * ranks.heads)
    return {"linear_num_key_heads": keys, "linear_num_value_heads": keys * heads_per_key}


@torch.no_grad()
def _slow_decay(model: nn.Module) -> None:
    """Make the states pass over many tokens.

    With initial values a state decays within a few tokens. A leak of the state would then be smaller
    than the rounding of bf16.
    """
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):
            parameter.fill_(math.log(SLOW_RATE))


def _sections(config: GatedDeltaNetOptions) -> dict[str, int]:
    keys, values = config.linear_key_dim, config.linear_value_dim
    heads = config.linear_num_value_heads
    return {
        "query": keys,
        "key": keys,
        "value": values,
        "z": values,
        "beta": heads,
        "alpha": heads,
    }


MIXER = MixerKind(
    kind=KIND,
    build=lambda config, build, place: GatedDeltaNet(config, build),
    layer=ProjectedLayer,
    state=RECURRENT_STATE,
    # As in Megatron, A is uniform in [1, 16] and dt_bias is 1.
    fills={**RECURRENT_FILLS, "mixer.dt_bias": ones},
    isolation=IsolationCase(changes=_small_sizes, prepare=_slow_decay),
    tables=_tables,
    megatron=MegatronNames(
        modules={
            "norm.": ("self_attention.in_proj.layer_norm_", "input_layernorm."),
            "mixer.norm.": ("self_attention.out_norm.",),
            "mixer.": ("self_attention.",),
        },
        sections=_sections,
        convolved=("query", "key", "value"),
        without=("linear_allow_neg_eigval", "linear_norm_epsilon"),
    ),
)
