"""Mamba-2 mixer on packed documents.

Letters: T tokens, D hidden size, I inner size (N heads of P), C convolution channels, W convolution
width, G groups, S state size, O width of the input projection. Source: Dao and Gu,
arXiv:2405.21060; the operations have the same order as in Nemotron-H.

[Note: Mamba across context-parallel ranks]
Convolution and scan run along the tokens of the pack. They process each head independently, with
the group of B and C that the head uses. All other operations process each row independently. So
before the convolution each of c ranks exchanges T / c rows of all heads for T rows of N / c heads.
After the scan the ranks exchange back. Each direction is one all-to-all; the first transfers x, B,
C and dt together. The gate z and the gated norm stay in the context-parallel layout, where a rank
has all channels of each norm group. So they need no communication. A rank uses only its heads' part
of the convolution weights, A_log, D and dt_bias. The gradients of the other parts are zero on this
rank.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_packed.config.sections.model import ModelConfig
from megatron_packed.distributed.all_to_all import heads_to_rows, rows_to_columns
from megatron_packed.distributed.tensor_parallel_shards import Shard, SplitSegment, set_shard
from megatron_packed.layers.backends import Backends
from megatron_packed.layers.context_parallel import SINGLE as ALL_ROWS
from megatron_packed.layers.context_parallel import ContextParallel
from megatron_packed.layers.named_call import NamedCall
from megatron_packed.layers.parameters import keep_fp32, new_parameter, no_weight_decay
from megatron_packed.layers.short_convolution import CausalConv1d, take_part
from megatron_packed.layers.tensor_parallel import SINGLE, TensorParallel
from megatron_packed.layers.transformer_impl import implementation
from megatron_packed.ops.column_slices import split_columns
from megatron_packed.ops.gated_rms_norm.api import gated_rms_norm
from megatron_packed.ops.ssd.api import ssd
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


class MambaMixer(nn.Module):
    """Mamba-2 mixer: projection, short convolution, state-space scan, gated norm, projection.

    The rows of ``in_proj.weight`` are ``[z | x | B | C | dt]``, of widths I, I, GS, GS, N. The
    channels of ``conv1d`` are ``[x | B | C]``. Convolution and scan restart at every change of
    ``packed.seq_idx``.

    Heads are split over tensor-parallel ranks; each rank also holds the groups of its heads. So the
    rows and channels are split within each of these segments. Tokens are split over
    context-parallel ranks. For convolution and scan the heads are split over these ranks instead.

    Args:
        config: sizes of the model.
        backends: backend of each op.
        tp: tensor parallelism of this rank.
        cp: context parallelism of this rank.
        device: device of the parameters.
        dtype: dtype of the parameters.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        backends: Backends,
        tp: TensorParallel = SINGLE,
        cp: ContextParallel = ALL_ROWS,
        device: torch.device | str,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        x = SplitSegment(
            noun="Mamba heads", count=config.mamba_num_heads, width=config.mamba_head_dim
        )
        dt = SplitSegment(noun="Mamba heads", count=config.mamba_num_heads)
        B = SplitSegment(
            noun="Mamba groups",
            count=config.mamba_num_groups,
            width=config.mamba_state_dim,
            shareable=True,
        )
        self.tp = tp
        self.cp = cp
        self.per_head = tp.shard(dt)
        self.num_heads = tp.local_count(dt)
        self.chunk_size = config.mamba_chunk_size
        self.backends = backends
        own_x, own_B, own_dt = (tp.local_segment(segment) for segment in (x, B, dt))
        used_channels = cp.part(own_x, own_B, own_B)
        self.used_heads = None if cp.group is None else cp.part(own_dt)
        inner, channels = self.num_heads * x.width, tp.shard(x, B, B)
        # Shapes before (`row_shapes`) and after (`xBC_shapes`, `xBCdt_shapes`) the all-to-all
        # between context-parallel ranks. With one rank there is no all-to-all.
        group_states = (own_B.count, B.width)
        self.row_shapes = (
            (inner,),
            (self.num_heads, x.width),
            group_states,
            group_states,
            (self.num_heads, 1),
        )
        self.zxBCdt_shapes = ((inner,), (channels.local_length,), (self.num_heads,))
        group_states = (cp.local_count(own_B), B.width)
        self.xBC_shapes = ((cp.local_count(own_dt), x.width), group_states, group_states)
        self.xBCdt_shapes = ((used_channels.local_length,), (cp.local_count(own_dt),))
        options = {"device": device, "dtype": dtype}
        rows = tp.shard(x, x, B, B, dt)
        parts = implementation(backends.transformer_impl, device, dtype)
        self.in_proj = parts.column_parallel(config.hidden_size, rows, bias=False, tp=tp, **options)
        self.conv1d = CausalConv1d(
            channels,
            None if cp.group is None else used_channels,
            config.mamba_d_conv,
            bias=config.mamba_conv_bias,
            backend=backends.causal_conv1d,
            **options,
        )
        self.A_log = self._per_head(device)
        self.D = self._per_head(device)
        self.dt_bias = self._per_head(device)
        self.mamba_scan = NamedCall()
        self.norm = GatedNorm(
            tp.shard(x),
            config.gated_norm_groups,
            eps=config.mamba_norm_epsilon,
            backend=backends.gated_rms_norm,
            tp=tp,
            **options,
        )
        self.out_proj = parts.row_parallel(
            tp.shard(x, dim=1), config.hidden_size, bias=False, tp=tp, **options
        )

    def _per_head(self, device: torch.device | str) -> nn.Parameter:
        parameter = keep_fp32(
            no_weight_decay(new_parameter(self.num_heads, device=device, dtype=torch.float32))
        )
        return set_shard(parameter, self.per_head)

    def forward(self, u_TD: Tensor, packed: PackedSeqParams) -> Tensor:
        """Map the hidden state ``(T, D)`` to ``(T, D)``; a context-parallel rank has T / c rows."""
        zxBCdt_TO = self.in_proj(u_TD)
        y_TI = self.mamba_scan(self._scan, zxBCdt_TO, packed)
        y_TD: Tensor = self.out_proj(y_TI)
        return y_TD

    def _scan(self, zxBCdt_TO: Tensor, packed: PackedSeqParams) -> Tensor:
        """Run everything between the projections: ``(T, O)`` -> ``(T, I)``."""
        z_TI, xBC_TC, dt_TN = self._split(zxBCdt_TO, packed)
        x_TNP, B_TGS, C_TGS = split_columns(self.conv1d(xBC_TC, packed.seq_idx), *self.xBC_shapes)
        y_TNP = self.scan_heads(x_TNP, dt_TN, B_TGS, C_TGS, packed)
        if self.cp.group is not None:
            (y_TNP,) = heads_to_rows((self.cp.in_order_of_ranks(y_TNP, packed),), self.cp.group)
        normed_TI: Tensor = self.norm(y_TNP.flatten(1), z_TI)
        return normed_TI

    def scan_heads(
        self, x_TNP: Tensor, dt_TN: Tensor, B_TGS: Tensor, C_TGS: Tensor, packed: PackedSeqParams
    ) -> Tensor:
        """Run the state-space scan of this rank's heads; see `ops.ssd.api.ssd`."""
        return ssd(
            x_TNP,
            dt_TN,
            take_part(self.used_heads, self.A_log),
            B_TGS,
            C_TGS,
            take_part(self.used_heads, self.D),
            take_part(self.used_heads, self.dt_bias),
            packed.seq_idx,
            packed.cu_seqlens,
            chunk_size=self.chunk_size,
            backend=self.backends.ssd,
        )

    def _split(self, zxBCdt_TO: Tensor, packed: PackedSeqParams) -> tuple[Tensor, ...]:
        """Split the projection into z, xBC and dt, with xBC and dt in the head-parallel layout.

        See [Note: Mamba across context-parallel ranks].

        Returns:
            z ``(T / c, I)`` of this rank's rows; xBC ``(T, C)`` and dt ``(T, N / c)`` of all rows,
            for this rank's heads.
        """
        if self.cp.group is None:
            return split_columns(zxBCdt_TO, *self.zxBCdt_shapes)
        z_TI, *xBCdt = split_columns(zxBCdt_TO, *self.row_shapes)
        xBCdt_TW = self.cp.in_order_of_slots(rows_to_columns(xBCdt, self.cp.group), packed)
        return z_TI, *split_columns(xBCdt_TW, *self.xBCdt_shapes)
