"""Mamba-2 mixer on packed documents.

Letters: T tokens, I inner size (N heads of P), G groups, S state size. Source: Dao and Gu,
arXiv:2405.21060; the operations have the same order as in Nemotron-H.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_packed.config.sections.model import ModelConfig
from megatron_packed.distributed.tensor_parallel_shards import Shard, SplitSegment, set_shard
from megatron_packed.layers.build import Build
from megatron_packed.layers.parameters import new_parameter, no_weight_decay
from megatron_packed.layers.recurrent_mixer import RecurrentMixer
from megatron_packed.layers.state_passing import StatePassing
from megatron_packed.layers.tensor_parallel import SINGLE, TensorParallel
from megatron_packed.ops.gated_rms_norm.api import gated_rms_norm
from megatron_packed.ops.ssd.api import ssd
from megatron_packed.ops.ssd.passed_states import ssd_of_part
from megatron_packed.packed.params import PackedSeqParams


class GatedNorm(nn.Module):
    """RMSNorm of ``y * silu(z)`` within each of the G groups of inner channels.

    If there are fewer groups than tensor-parallel ranks, several ranks share a group. These ranks
    then sum their squares.

    Args:
        channels: this rank's shard of the inner channels.
        num_groups: G of the layer before it is split over ranks.
        eps: constant added to the mean square.
        backend: backend of the op ``gated_rms_norm``.
        tp: tensor parallelism of this rank.
        device: device of the parameters.
        dtype: dtype of the parameters.
    """

    def __init__(
        self,
        channels: Shard,
        num_groups: int,
        *,
        eps: float,
        backend: str,
        tp: TensorParallel = SINGLE,
        device: torch.device | str,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.group_size = channels.length // num_groups
        self.num_groups = num_groups
        self.eps = eps
        self.backend = backend
        self.tp = tp
        self.weight = no_weight_decay(
            new_parameter(channels.local_length, device=device, dtype=dtype)
        )
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

    def __init__(
        self,
        config: ModelConfig,
        build: Build,
    ) -> None:
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
            backend=build.backends.gated_rms_norm,
            tp=build.tp,
            device=build.device,
            dtype=build.dtype,
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
            passing=StatePassing(build.cp, config.mamba_d_conv) if build.cp.passes_states else None,
        )
        self.chunk_size = config.mamba_chunk_size
        self.A_log = self.per_head(build.device)
        self.D = self.per_head(build.device)
        self.dt_bias = self.per_head(build.device)

    def head_parameters(self) -> tuple[Tensor, ...]:
        return self.A_log, self.D, self.dt_bias

    def scan_heads(
        self,
        heads: Sequence[Tensor],
        per_head: Sequence[Tensor],
        packed: PackedSeqParams,
        parameters: Sequence[Tensor] = (),
    ) -> Tensor:
        """Run the state-space scan; see `ops.ssd.api.ssd` and [Note: passed states]."""
        x_TNP, B_TGS, C_TGS = heads
        (dt_TN,) = per_head
        A_log_N, D_N, dt_bias_N = parameters or self.head_parameters()
        scanned = (x_TNP, dt_TN, A_log_N, B_TGS, C_TGS, D_N, dt_bias_N)
        backend = self.backends.ssd
        if self.passing is None:
            return ssd(
                *scanned,
                packed.seq_idx,
                packed.cu_seqlens,
                chunk_size=self.chunk_size,
                backend=backend,
            )
        return ssd_of_part(
            *scanned,
            self.passing.seq_idx(packed),
            self.passing.cu_seqlens(packed),
            part=self.passing.part(packed),
            entering=partial(self.passing.entering, packed=packed),
            chunk_size=self.chunk_size,
            backend=backend,
        )
