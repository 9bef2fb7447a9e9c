"""Mamba-2 mixer on packed documents.

Letters: T tokens, B documents, I inner size (N heads of P), G groups, S state size. Source: Dao and Gu,
arXiv:2405.21060; the operations have the same order as in Nemotron-H.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from megatron_packed.config.kinds.mamba import KIND
from megatron_packed.config.sections.model import ModelConfig
from megatron_packed.distributed.tensor_parallel_shards import Shard, SplitSegment, set_shard
from megatron_packed.layers.build import Build
from megatron_packed.layers.hybrid_layer import ProjectedLayer
from megatron_packed.layers.kinds.mixer_kind import (
    RECURRENT_STATE,
    IsolationCase,
    MegatronNames,
    MixerKind,
    RankCounts,
)
from megatron_packed.layers.parameters import no_weight_decay, ones
from megatron_packed.layers.recurrent_mixer import RECURRENT_FILLS, HeadInputs, RecurrentMixer
from megatron_packed.ops.gated_rms_norm.api import gated_rms_norm
from megatron_packed.ops.ssd.api import ssd
from megatron_packed.ops.ssd.step import final_states, scan_next
from megatron_packed.packed.params import PackedSeqParams

if TYPE_CHECKING:
    from megatron_packed.layers.state_passing import StatePassing

DT_RANGE = (1e-3, 1e-1)
DT_FLOOR = 1e-4


class GatedNorm(nn.Module):
    """RMSNorm of ``y * silu(z)`` within each of the G groups of inner channels.

    If there are fewer groups than tensor-parallel ranks, several ranks share a group. These ranks
    then sum their squares.

    Args:
        channels: this rank's shard of the inner channels.
        num_groups: G of the layer before it is split over ranks.
        eps: constant added to the mean square.
        build: arguments that all layers share.
    """

    def __init__(
        self,
        channels: Shard,
        num_groups: int,
        *,
        eps: float,
        build: Build,
    ) -> None:
        super().__init__()
        self.group_size = channels.length // num_groups
        self.num_groups = num_groups
        self.eps = eps
        self.backend = build.backends.gated_rms_norm
        self.tp = build.tp
        self.weight = no_weight_decay(build.new_parameter(channels.local_length))
        set_shard(self.weight, channels)

    def forward(self, y_TI: Tensor, z_TI: Tensor) -> Tensor:
        return gated_rms_norm(
            y_TI,
            z_TI,
            self.weight,
            self.eps,
            group_size=self.group_size,
            sum_over_ranks=self._sum_over_group if self.num_groups < self.tp.size else None,
            backend=self.backend,
        )

    def _sum_over_group(self, squares_T: Tensor) -> Tensor:
        """Sum the squares over the tensor-parallel ranks that share this rank's norm group.

        All tensor-parallel ranks take part in one all-reduce with one row per group, because there
        is no process group for each norm group.
        """
        group, last = self.tp.rank * self.num_groups // self.tp.size, self.num_groups - 1
        squares_GT = F.pad(squares_T.unsqueeze(0), (0, 0, group, last - group))
        return self.tp.sum_over_ranks(squares_GT)[group]


class MambaMixer(RecurrentMixer):
    """Mamba-2 mixer: `RecurrentMixer` with a state-space scan.

    The rows of ``in_proj.weight`` are ``[z | x | B | C | dt]``, of widths I, I, GS, GS, N. The
    channels of ``conv1d`` are ``[x | B | C]``. Each tensor-parallel rank also holds the groups of
    its heads.

    Args:
        config: sizes of the model.
        build: arguments that all layers share.
    """

    head_parameters = ("A_log", "D", "dt_bias")
    A_log: nn.Parameter
    D: nn.Parameter
    dt_bias: nn.Parameter

    def __init__(self, config: ModelConfig, build: Build) -> None:
        x = SplitSegment(
            noun="Mamba heads", count=config.mamba_num_heads, width=config.mamba_head_dim
        )
        B = SplitSegment(
            noun="Mamba groups",
            count=config.mamba_num_groups,
            width=config.mamba_state_dim,
            shareable=True,
        )
        norm = GatedNorm(
            build.tp.shard(x),
            config.gated_norm_groups,
            eps=config.mamba_norm_epsilon,
            build=build,
        )
        super().__init__(
            config.hidden_size,
            build,
            convolved=(x, B, B),
            z=x,
            z_first=True,
            values_per_head=1,
            width=config.mamba_d_conv,
            bias=config.mamba_conv_bias,
            norm=norm,
            passes_states=KIND.symbol in build.cp.state_passing,
        )
        self.chunk_size = config.mamba_chunk_size

    def scan_heads(self, inputs: HeadInputs, packed: PackedSeqParams) -> Tensor:
        """Run the state-space scan; see `ops.ssd.api.ssd`."""
        return ssd(
            *_scanned(inputs),
            packed.seq_idx,
            packed.cu_seqlens,
            chunk_size=self.chunk_size,
            backend=self.backends.ssd,
        )

    def scan_part(
        self, inputs: HeadInputs, packed: PackedSeqParams, passing: StatePassing
    ) -> Tensor:
        """Run the scan of this rank's part of the pack, with the state that enters it.

        Later parts get the state that leaves the part, and the part's decay (`ops.ssd.passed_states`).
        """
        from megatron_packed.ops.ssd.passed_states import ssd_of_part

        return ssd_of_part(
            *_scanned(inputs),
            passing.seq_idx(packed),
            passing.cu_seqlens(packed),
            part=passing.part(packed),
            entering=partial(passing.entering, packed=packed),
            chunk_size=self.chunk_size,
            backend=self.backends.ssd,
        )

    def numbers_of_states(self) -> int:
        """Return the numbers of a state ``(P, S)`` and a decay of each head."""
        (heads, head_dim), (_, state_dim), _ = self.conv_shapes
        return heads * (head_dim * state_dim + 1)

    def final_states(self, inputs: HeadInputs, lengths: list[int]) -> Tensor:
        """Return the states ``(B, N, P, S)`` of the scan."""
        x_TNP, dt_TN, A_log_N, B_TGS, _, _, dt_bias_N = _scanned(inputs)
        return final_states(x_TNP, dt_TN, A_log_N, B_TGS, dt_bias_N, lengths)

    def next_output(self, state_BN: Tensor, inputs: HeadInputs) -> tuple[Tensor, Tensor]:
        return scan_next(state_BN, *_scanned(inputs))


def _scanned(inputs: HeadInputs) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the tensors of the scan in the order of `ops.ssd.api.ssd`."""
    (x_TNP, B_TGS, C_TGS), (dt_TN,), (A_log_N, D_N, dt_bias_N) = inputs
    return x_TNP, dt_TN, A_log_N, B_TGS, C_TGS, D_N, dt_bias_N


def _dt_bias(value: Tensor, generator: Generator, config: ModelConfig) -> None:
    """Fill so that the step ``softplus(dt_bias)`` is log-uniform in [0.001, 0.1]."""
    low, high = (math.log(bound) for bound in DT_RANGE)
    dt = value.uniform_(low, high, generator=generator).exp().clamp_(min=DT_FLOOR)
    value.copy_(dt + torch.log(-torch.expm1(-dt)))  # inverse of softplus


def _convolution_bias(value: Tensor, generator: Generator, config: ModelConfig) -> None:
    """Fill as the weight of the convolution."""
    bound = 1 / math.sqrt(config.mamba_d_conv)
    value.uniform_(-bound, bound, generator=generator)


def _small_sizes(config: ModelConfig, ranks: RankCounts) -> dict[str, object]:
    groups = min(config.mamba_num_groups, 2 * ranks.heads)
    heads_per_group = min(
        config.mamba_num_heads // config.mamba_num_groups, 2 * max(ranks.heads // groups, 1)
    )
    heads = groups * heads_per_group
    changes: dict[str, object] = {"mamba_num_groups": groups, "mamba_num_heads": heads}
    if config.mamba_norm_groups is not None:
        channels = heads * config.mamba_head_dim
        changes["mamba_norm_groups"] = math.gcd(config.mamba_norm_groups, channels)
    return changes


def _sections(config: ModelConfig) -> dict[str, int]:
    inner = config.mamba_num_heads * config.mamba_head_dim
    groups = config.mamba_num_groups * config.mamba_state_dim
    return {"z": inner, "x": inner, "B": groups, "C": groups, "dt": config.mamba_num_heads}


MIXER = MixerKind(
    kind=KIND,
    build=lambda config, build, place: MambaMixer(config, build),
    layer=ProjectedLayer,
    state=RECURRENT_STATE,
    fills={
        **RECURRENT_FILLS,
        "conv1d.bias": _convolution_bias,
        "mixer.D": ones,
        "mixer.dt_bias": _dt_bias,
    },
    isolation=IsolationCase(changes=_small_sizes),
    megatron=MegatronNames(
        modules={"norm.": ("mixer.in_proj.layer_norm_", "norm."), "mixer.": ("mixer.",)},
        sections=_sections,
        convolved=("x", "B", "C"),
        without=("mamba_conv_bias", "mamba_norm_epsilon", "mamba_norm_groups"),
    ),
)
