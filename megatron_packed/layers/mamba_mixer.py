"""The Mamba-2 mixer on packed documents.

Letters: T tokens, D hidden size, I inner size (N heads of P), C convolution channels, W convolution
width, G groups, S state size, O width of the input projection. Source: Dao and Gu,
arXiv:2405.21060; the arrangement is Nemotron-H's.

[Note: Mamba across context-parallel ranks]
Convolution and scan run along the pack and treat every head by itself (with the group of B and C
that it reads); all else treats every row by itself. So of c ranks each exchanges T / c rows of all
heads for T rows of N / c heads in front of the convolution, and back behind the scan: one exchange
each way, for x, B, C and dt together. The gate z and the gated norm stay with the rows, where all
channels of a norm's group are: nothing of them is sent, and nothing is summed. A rank uses its
heads' part of the convolution's weights, A, D and dt's bias; the others' gradients are zeros there.
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
from megatron_packed.layers.tensor_parallel import SINGLE, TensorParallel
from megatron_packed.layers.transformer_impl import implementation
from megatron_packed.ops.causal_conv1d.api import causal_conv1d
from megatron_packed.ops.column_slices import split_columns
from megatron_packed.ops.gated_rms_norm.api import gated_rms_norm
from megatron_packed.ops.ssd.api import ssd
from megatron_packed.packed.params import PackedSeqParams

GATED_NORM_EPS = 1e-5
"""Megatron's constant for the norm inside the mixer, whatever the layers' own epsilon is."""


class CausalConv1d(nn.Module):
    """Depthwise causal convolution with SiLU, restarting at every document.

    Args:
        channels: this rank's part of the channels.
        used: of these, the C that it convolves, as the other context-parallel ranks convolve the
            others; None for all.
        width: W.
    """

    def __init__(
        self,
        channels: Shard,
        used: Shard | None,
        width: int,
        *,
        backend: str,
        device: torch.device | str,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.used = used
        self.backend = backend
        self.weight = new_parameter(channels.local_length, width, device=device, dtype=dtype)
        self.bias = no_weight_decay(
            new_parameter(channels.local_length, device=device, dtype=dtype)
        )
        for parameter in (self.weight, self.bias):
            set_shard(parameter, channels)

    def forward(self, x_TC: Tensor, seq_idx_1T: Tensor) -> Tensor:
        return causal_conv1d(
            x_TC,
            _take(self.used, self.weight),
            _take(self.used, self.bias),
            seq_idx_1T,
            activation="silu",
            backend=self.backend,
        )


class GatedNorm(nn.Module):
    """RMSNorm of ``y * silu(z)`` within each of the G groups of heads.

    Where there are fewer groups than tensor-parallel ranks, the ranks that share a group sum its
    squares.

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
        self.group_size = channels.length // num_groups
        self.num_groups = num_groups
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
            GATED_NORM_EPS,
            group_size=self.group_size,
            sum_over_ranks=self._sum_over_group if self.num_groups < self.tp.size else None,
            backend=self.backend,
        )

    def _sum_over_group(self, squares_T: Tensor) -> Tensor:
        """The sum over the ranks of this rank's group, by one collective of all ranks with a place
        for each group.
        """
        group, last = self.tp.rank * self.num_groups // self.tp.size, self.num_groups - 1
        squares_GT = F.pad(squares_T.unsqueeze(0), (0, 0, group, last - group))
        return self.tp.sum_over_ranks(squares_GT)[group]


class MambaMixer(nn.Module):
    """Projection, short convolution, state-space scan, gated norm, projection.

    Rows of ``in_proj.weight``: ``[z | x | B | C | dt]``, of widths I, I, GS, GS, N. Channels of ``conv1d``:
    ``[x | B | C]``. Convolution and scan both restart where ``packed.seq_idx`` changes.

    Tensor-parallel ranks share the heads, and each has the groups of its heads: rows and channels
    are split within each of these segments. Context-parallel ranks share the rows, and the heads
    again while they need whole documents.

    Args:
        config: sizes.
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
        # In front of the exchange between context-parallel ranks, and behind it; the same where
        # there is none.
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
            backend=backends.causal_conv1d,
            **options,
        )
        self.A_log = self._per_head(device)
        self.D = self._per_head(device)
        self.dt_bias = self._per_head(device)
        self.mamba_scan = NamedCall()
        self.norm = GatedNorm(
            tp.shard(x), config.mamba_num_groups, backend=backends.gated_rms_norm, tp=tp, **options
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
        """``(T, D)`` -> ``(T, D)``; of a context-parallel rank, its rows."""
        zxBCdt_TO = self.in_proj(u_TD)
        y_TI = self.mamba_scan(self._scan, zxBCdt_TO, packed)
        y_TD: Tensor = self.out_proj(y_TI)
        return y_TD

    def _scan(self, zxBCdt_TO: Tensor, packed: PackedSeqParams) -> Tensor:
        """Run everything between the projections: ``(T, O)`` -> ``(T, I)``."""
        z_TI, xBC_TC, dt_TN = self._split(zxBCdt_TO, packed)
        x_TNP, B_TGS, C_TGS = split_columns(self.conv1d(xBC_TC, packed.seq_idx), *self.xBC_shapes)
        y_TNP = ssd(
            x_TNP,
            dt_TN,
            _take(self.used_heads, self.A_log),
            B_TGS,
            C_TGS,
            _take(self.used_heads, self.D),
            _take(self.used_heads, self.dt_bias),
            packed.seq_idx,
            packed.cu_seqlens,
            chunk_size=self.chunk_size,
            backend=self.backends.ssd,
        )
        if self.cp.group is not None:
            (y_TNP,) = heads_to_rows((self.cp.in_order_of_ranks(y_TNP, packed),), self.cp.group)
        normed_TI: Tensor = self.norm(y_TNP.flatten(1), z_TI)
        return normed_TI

    def _split(self, zxBCdt_TO: Tensor, packed: PackedSeqParams) -> tuple[Tensor, ...]:
        """z ``(T / c, I)``, of this rank's rows; xBC ``(T, C)`` and dt ``(T, N / c)``, of all rows
        for its heads.

        See [Note: Mamba across context-parallel ranks].
        """
        if self.cp.group is None:
            return split_columns(zxBCdt_TO, *self.zxBCdt_shapes)
        z_TI, *xBCdt = split_columns(zxBCdt_TO, *self.row_shapes)
        xBCdt_TW = self.cp.in_order_of_slots(rows_to_columns(xBCdt, self.cp.group), packed)
        return z_TI, *split_columns(xBCdt_TW, *self.xBCdt_shapes)


def _take(part: Shard | None, parameter: Tensor) -> Tensor:
    """Return a part of a parameter, differentiable; for None the parameter itself."""
    return parameter if part is None else part.take(parameter)
