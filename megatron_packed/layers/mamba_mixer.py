"""The Mamba-2 mixer on packed documents.

Letters: T tokens, D hidden size, I inner size (N heads of P), C convolution channels, W convolution width, G groups,
S state size. Source: Dao and Gu, arXiv:2405.21060; the arrangement is Nemotron-H's.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_packed.config.model import ModelConfig
from megatron_packed.distributed.sharding import Segment, Shard, set_shard
from megatron_packed.layers.backends import Backends
from megatron_packed.layers.linear import ColumnParallelLinear, RowParallelLinear
from megatron_packed.layers.parameters import keep_fp32, new_parameter, no_weight_decay
from megatron_packed.layers.tensor_parallel import SINGLE, TensorParallel
from megatron_packed.ops.causal_conv1d.api import causal_conv1d
from megatron_packed.ops.columns import split_columns
from megatron_packed.ops.gated_rms_norm.api import gated_rms_norm
from megatron_packed.ops.ssd.api import ssd
from megatron_packed.packed.params import PackedSeqParams

GATED_NORM_EPS = 1e-5
"""Megatron's constant for the norm inside the mixer, whatever the layers' own epsilon is."""


class CausalConv1d(nn.Module):
    """Depthwise causal convolution with SiLU, restarting at every document.

    Args:
        channels: this rank's part of the channels, C of them.
        width: W.
    """

    def __init__(
        self, channels: Shard, width: int, *, backend: str, device: torch.device | str, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.backend = backend
        self.weight = new_parameter(channels.local_length, width, device=device, dtype=dtype)
        self.bias = no_weight_decay(new_parameter(channels.local_length, device=device, dtype=dtype))
        for parameter in (self.weight, self.bias):
            set_shard(parameter, channels)

    def forward(self, x_TC: Tensor, seq_idx_1T: Tensor) -> Tensor:
        return causal_conv1d(x_TC, self.weight, self.bias, seq_idx_1T, activation="silu", backend=self.backend)


class GatedNorm(nn.Module):
    """RMSNorm of ``y * silu(z)`` within each of the G groups of heads.

    Where there are fewer groups than tensor-parallel ranks, the ranks that share a group sum its squares.

    Args:
        channels: this rank's part of the inner channels.
        num_groups: G, of the whole layer.
    """

    def __init__(
        self,
        channels: Shard,
        num_groups: int,
        *,
        backend: str,
        tp: TensorParallel = SINGLE,
        device: torch.device | str,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.group_size, self.backend = channels.length // num_groups, backend
        self.tp, self.num_groups = tp, num_groups
        self.weight = no_weight_decay(new_parameter(channels.local_length, device=device, dtype=dtype))
        set_shard(self.weight, channels)

    def forward(self, y_TI: Tensor, z_TI: Tensor) -> Tensor:
        return gated_rms_norm(
            y_TI,
            z_TI,
            self.weight,
            GATED_NORM_EPS,
            group_size=self.group_size,
            sum_over_ranks=self._sum_over_group if self.num_groups < self.tp.size else None,
            backend=self.backend,
        )

    def _sum_over_group(self, squares_T: Tensor) -> Tensor:
        """The sum over the ranks of this rank's group, by one collective of all ranks with a place for each group."""
        group, last = self.tp.rank * self.num_groups // self.tp.size, self.num_groups - 1
        squares_GT = F.pad(squares_T.unsqueeze(0), (0, 0, group, last - group))
        return self.tp.sum_over_ranks(squares_GT)[group]


class MambaMixer(nn.Module):
    """Projection, short convolution, state-space scan, gated norm, projection.

    Rows of ``in_proj.weight``: ``[z | x | B | C | dt]``, of widths I, I, GS, GS, N. Channels of ``conv1d``:
    ``[x | B | C]``. Convolution and scan both restart where ``packed.seq_idx`` changes.

    Tensor-parallel ranks share the heads, and each has the groups of its heads: rows and channels are split within each
    of these segments.

    Args:
        config: sizes.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        backends: Backends,
        tp: TensorParallel = SINGLE,
        device: torch.device | str,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        x = Segment(noun="Mamba heads", count=config.mamba_num_heads, width=config.mamba_head_dim)
        dt = Segment(noun="Mamba heads", count=config.mamba_num_heads)
        B = Segment(noun="Mamba groups", count=config.mamba_num_groups, width=config.mamba_state_dim, shareable=True)
        self.tp, self.per_head = tp, tp.shard(dt)
        self.num_heads, self.head_dim = tp.local_count(x), config.mamba_head_dim
        self.num_groups, self.state_dim = tp.local_count(B), config.mamba_state_dim
        self.chunk_size, self.backends = config.mamba_chunk_size, backends
        inner, channels = self.num_heads * self.head_dim, tp.shard(x, B, B)
        self.zxBCdt_shapes = ((inner,), (channels.local_length,), (self.num_heads,))
        group_states = (self.num_groups, self.state_dim)
        self.xBC_shapes = ((self.num_heads, self.head_dim), group_states, group_states)
        options = {"device": device, "dtype": dtype}
        rows = tp.shard(x, x, B, B, dt)
        self.in_proj = ColumnParallelLinear(config.hidden_size, rows, bias=False, tp=tp, **options)
        self.conv1d = CausalConv1d(channels, config.mamba_d_conv, backend=backends.causal_conv1d, **options)
        self.A_log = self._per_head(device)
        self.D = self._per_head(device)
        self.dt_bias = self._per_head(device)
        self.norm = GatedNorm(tp.shard(x), config.mamba_num_groups, backend=backends.gated_rms_norm, tp=tp, **options)
        self.out_proj = RowParallelLinear(tp.shard(x, dim=1), config.hidden_size, bias=False, tp=tp, **options)

    def _per_head(self, device: torch.device | str) -> nn.Parameter:
        parameter = keep_fp32(no_weight_decay(new_parameter(self.num_heads, device=device, dtype=torch.float32)))
        return set_shard(parameter, self.per_head)

    def forward(self, u_TD: Tensor, packed: PackedSeqParams) -> Tensor:
        """``(T, D)`` -> ``(T, D)``."""
        z_TI, xBC_TC, dt_TN = split_columns(self.in_proj(u_TD), *self.zxBCdt_shapes)
        x_TNP, B_TGS, C_TGS = split_columns(self.conv1d(xBC_TC, packed.seq_idx), *self.xBC_shapes)
        y_TNP = ssd(
            x_TNP,
            dt_TN,
            self.A_log,
            B_TGS,
            C_TGS,
            self.D,
            self.dt_bias,
            packed.seq_idx,
            packed.cu_seqlens,
            chunk_size=self.chunk_size,
            backend=self.backends.ssd,
        )
        return self.out_proj(self.norm(y_TNP.flatten(1), z_TI))
