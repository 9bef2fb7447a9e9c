"""The Mamba-2 mixer on packed documents.

Letters: T tokens, D hidden size, I inner size (N heads of P), C convolution channels, W convolution width, G groups,
S state size. Source: Dao and Gu, arXiv:2405.21060; the arrangement is Nemotron-H's.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatron_packed.config.model import ModelConfig
from megatron_packed.layers.backends import Backends
from megatron_packed.layers.linear import Linear
from megatron_packed.layers.parameters import keep_fp32, new_parameter, no_weight_decay
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
        channels: C.
        width: W.
    """

    def __init__(
        self, channels: int, width: int, *, backend: str, device: torch.device | str, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.backend = backend
        self.weight = new_parameter(channels, width, device=device, dtype=dtype)
        self.bias = no_weight_decay(new_parameter(channels, device=device, dtype=dtype))

    def forward(self, x_TC: Tensor, seq_idx_1T: Tensor) -> Tensor:
        return causal_conv1d(x_TC, self.weight, self.bias, seq_idx_1T, activation="silu", backend=self.backend)


class GatedNorm(nn.Module):
    """RMSNorm of ``y * silu(z)`` within each of the G groups of heads."""

    def __init__(
        self, inner_size: int, group_size: int, *, backend: str, device: torch.device | str, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.group_size, self.backend = group_size, backend
        self.weight = no_weight_decay(new_parameter(inner_size, device=device, dtype=dtype))

    def forward(self, y_TI: Tensor, z_TI: Tensor) -> Tensor:
        return gated_rms_norm(y_TI, z_TI, self.weight, GATED_NORM_EPS, group_size=self.group_size, backend=self.backend)


class MambaMixer(nn.Module):
    """Projection, short convolution, state-space scan, gated norm, projection.

    Rows of ``in_proj.weight``: ``[z | x | B | C | dt]``, of widths I, I, GS, GS, N. Channels of ``conv1d``:
    ``[x | B | C]``. Convolution and scan both restart where ``packed.seq_idx`` changes.

    Args:
        config: sizes.
    """

    def __init__(
        self, config: ModelConfig, *, backends: Backends, device: torch.device | str, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.num_heads, self.head_dim = config.mamba_num_heads, config.mamba_head_dim
        self.num_groups, self.state_dim = config.mamba_num_groups, config.mamba_state_dim
        self.chunk_size, self.backends = config.mamba_chunk_size, backends
        inner, states = config.d_inner, config.mamba_num_groups * config.mamba_state_dim
        channels = inner + 2 * states
        self.zxBCdt_shapes = ((inner,), (channels,), (self.num_heads,))
        group_states = (self.num_groups, self.state_dim)
        self.xBC_shapes = ((self.num_heads, self.head_dim), group_states, group_states)
        options = {"device": device, "dtype": dtype}
        self.in_proj = Linear(config.hidden_size, inner + channels + self.num_heads, bias=False, **options)
        self.conv1d = CausalConv1d(channels, config.mamba_d_conv, backend=backends.causal_conv1d, **options)
        self.A_log = self._per_head(device)
        self.D = self._per_head(device)
        self.dt_bias = self._per_head(device)
        self.norm = GatedNorm(inner, inner // self.num_groups, backend=backends.gated_rms_norm, **options)
        self.out_proj = Linear(inner, config.hidden_size, bias=False, device=device, dtype=dtype)

    def _per_head(self, device: torch.device | str) -> nn.Parameter:
        return keep_fp32(no_weight_decay(new_parameter(self.num_heads, device=device, dtype=torch.float32)))

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
