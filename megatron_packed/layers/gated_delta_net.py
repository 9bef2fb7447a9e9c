"""Gated delta net on packed documents.

Letters: T tokens, D hidden size, G key heads of K channels, N value heads of V channels. C
convolution channels, I = N V gate channels, O width of the input projection. Source: Yang, Kautz and
Hatamizadeh, arXiv:2412.06464; the operations have the same order as in Qwen3-Next.

[Note: gated delta nets across context-parallel ranks]
The heads are exchanged as in `mamba_mixer`. Before the convolution each of c ranks exchanges T / c
rows of all heads for T rows of G / c key heads and their N / c value heads. One all-to-all transfers
q, k, v, b and a together, and a second one transfers the heads' output back. The gate z and the
gated norm stay in the context-parallel layout, because the norm of a head needs no other head. A
rank uses only its heads' part of the convolution weights, A_log and dt_bias.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatron_packed.config.sections.model import ModelConfig
from megatron_packed.distributed.all_to_all import heads_to_rows, rows_to_columns
from megatron_packed.distributed.tensor_parallel_shards import SplitSegment, set_shard
from megatron_packed.layers.backends import Backends
from megatron_packed.layers.context_parallel import SINGLE as ALL_ROWS
from megatron_packed.layers.context_parallel import ContextParallel
from megatron_packed.layers.named_call import NamedCall
from megatron_packed.layers.parameters import keep_fp32, new_parameter, no_weight_decay
from megatron_packed.layers.short_convolution import CausalConv1d, take_part
from megatron_packed.layers.tensor_parallel import SINGLE, TensorParallel
from megatron_packed.layers.transformer_impl import implementation
from megatron_packed.ops.column_slices import split_columns
from megatron_packed.ops.gated_delta_rule.api import gated_delta_rule
from megatron_packed.ops.gated_rms_norm.api import gated_rms_norm
from megatron_packed.packed.params import PackedSeqParams


class GatedHeadNorm(nn.Module):
    """RMSNorm of each value head, multiplied by ``silu(z)``; all heads share the weight ``(V,)``.

    Args:
        head_dim: V.
        eps: constant added to the mean square.
        backend: backend of the op ``gated_rms_norm``.
        tp: tensor parallelism of this rank.
        device: device of the weight.
        dtype: dtype of the weight.
    """

    def __init__(
        self,
        head_dim: int,
        eps: float,
        *,
        backend: str,
        tp: TensorParallel = SINGLE,
        device: torch.device | str,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.backend = backend
        weight = no_weight_decay(new_parameter(head_dim, device=device, dtype=dtype))
        # Each tensor-parallel rank normalises its own heads, so their gradients are summed.
        self.weight = tp.use_inside(weight)

    def forward(self, o_TNV: Tensor, z_TI: Tensor) -> Tensor:
        return gated_rms_norm(
            o_TNV.flatten(1),
            z_TI,
            self.weight,
            self.eps,
            group_size=o_TNV.shape[2],
            norm_before_gate=True,
            backend=self.backend,
        )


class GatedDeltaNet(nn.Module):
    """Gated delta net: projection, short convolution, gated delta rule, gated norm, projection.

    The rows of ``in_proj.weight`` are ``[q | k | v | z | b | a]``, of widths GK, GK, NV, NV, N, N.
    The channels of ``conv1d`` are ``[q | k | v]``; it has no bias. Convolution and rule restart at
    every change of ``packed.seq_idx``.

    Key heads are split over tensor-parallel ranks, each with its N / G value heads, within each of
    these segments. Tokens are split over context-parallel ranks. For convolution and rule the heads
    are split over these ranks instead. Ranks never share a head.

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
        noun, heads = "key heads of a gated delta net", config.linear_num_key_heads
        q = SplitSegment(noun=noun, count=heads, width=config.linear_key_head_dim)
        noun, heads = "value heads of a gated delta net", config.linear_num_value_heads
        v = SplitSegment(noun=noun, count=heads, width=config.linear_value_head_dim)
        gate = SplitSegment(noun=noun, count=heads)
        self.cp = cp
        self.backends = backends
        self.allow_neg_eigval = config.linear_allow_neg_eigval
        self.per_head = tp.shard(gate)
        own_q, own_v, own_gate = (tp.local_segment(segment) for segment in (q, v, gate))
        used_channels = cp.part(own_q, own_q, own_v)
        self.used_heads = None if cp.group is None else cp.part(own_gate)
        channels = tp.shard(q, q, v)
        # Shapes before (`row_shapes`) and after (`qkvba_shapes`, `qkv_shapes`) the all-to-all
        # between context-parallel ranks. With one rank there is no all-to-all.
        key_heads, inner = (own_q.count, q.width), own_v.count * v.width
        value_heads, per_head = (own_v.count, v.width), (own_v.count, 1)
        self.row_shapes = (key_heads, key_heads, value_heads, (inner,), per_head, per_head)
        self.qkvzba_shapes = ((channels.local_length,), (inner,), (own_v.count,), (own_v.count,))
        key_heads = (cp.local_count(own_q), q.width)
        value_heads = (cp.local_count(own_v), v.width)
        self.qkv_shapes = (key_heads, key_heads, value_heads)
        self.qkvba_shapes = ((used_channels.local_length,), value_heads[:1], value_heads[:1])
        options = {"device": device, "dtype": dtype}
        parts = implementation(backends.transformer_impl, device, dtype)
        rows = tp.shard(q, q, v, v, gate, gate)
        self.in_proj = parts.column_parallel(config.hidden_size, rows, bias=False, tp=tp, **options)
        self.conv1d = CausalConv1d(
            channels,
            None if cp.group is None else used_channels,
            config.linear_conv_kernel_dim,
            bias=False,
            backend=backends.causal_conv1d,
            **options,
        )
        self.A_log = self._per_head(device)
        self.dt_bias = self._per_head(device)
        self.gdn_scan = NamedCall()
        self.norm = GatedHeadNorm(
            v.width,
            config.linear_norm_epsilon or config.norm_epsilon,
            backend=backends.gated_rms_norm,
            tp=tp,
            **options,
        )
        self.out_proj = parts.row_parallel(
            tp.shard(v, dim=1), config.hidden_size, bias=False, tp=tp, **options
        )

    def _per_head(self, device: torch.device | str) -> nn.Parameter:
        heads = self.per_head.local_length
        parameter = new_parameter(heads, device=device, dtype=torch.float32)
        return set_shard(keep_fp32(no_weight_decay(parameter)), self.per_head)

    def forward(self, u_TD: Tensor, packed: PackedSeqParams) -> Tensor:
        """Map the hidden state ``(T, D)`` to ``(T, D)``; a context-parallel rank has T / c rows."""
        qkvzba_TO = self.in_proj(u_TD)
        y_TI = self.gdn_scan(self._scan, qkvzba_TO, packed)
        y_TD: Tensor = self.out_proj(y_TI)
        return y_TD

    def _scan(self, qkvzba_TO: Tensor, packed: PackedSeqParams) -> Tensor:
        """Run everything between the projections: ``(T, O)`` -> ``(T, I)``."""
        z_TI, qkv_TC, b_TN, a_TN = self._split(qkvzba_TO, packed)
        qkv_TC = self.conv1d(qkv_TC, packed.seq_idx)
        o_TNV = self.scan_heads(*split_columns(qkv_TC, *self.qkv_shapes), b_TN, a_TN, packed)
        if self.cp.group is not None:
            (o_TNV,) = heads_to_rows((self.cp.in_order_of_ranks(o_TNV, packed),), self.cp.group)
        normed_TI: Tensor = self.norm(o_TNV, z_TI)
        return normed_TI

    def scan_heads(
        self,
        q_TGK: Tensor,
        k_TGK: Tensor,
        v_TNV: Tensor,
        b_TN: Tensor,
        a_TN: Tensor,
        packed: PackedSeqParams,
    ) -> Tensor:
        """Run the rule of this rank's heads; see `ops.gated_delta_rule.api.gated_delta_rule`."""
        return gated_delta_rule(
            q_TGK,
            k_TGK,
            v_TNV,
            a_TN,
            b_TN,
            take_part(self.used_heads, self.A_log),
            take_part(self.used_heads, self.dt_bias),
            packed.seq_idx,
            packed.cu_seqlens,
            allow_neg_eigval=self.allow_neg_eigval,
            tables=packed.tables.delta_rule,
            deterministic=self.backends.deterministic,
            backend=self.backends.gated_delta_rule,
        )

    def _split(self, qkvzba_TO: Tensor, packed: PackedSeqParams) -> tuple[Tensor, ...]:
        """Split the projection; qkv, b and a are in the head-parallel layout.

        See [Note: gated delta nets across context-parallel ranks].

        Returns:
            z ``(T / c, I)`` of this rank's rows; qkv ``(T, C)``, b and a ``(T, N / c)`` of all rows,
            for this rank's heads.
        """
        if self.cp.group is None:
            qkv_TC, z_TI, b_TN, a_TN = split_columns(qkvzba_TO, *self.qkvzba_shapes)
            return z_TI, qkv_TC, b_TN, a_TN
        q, k, v, z_TI, b, a = split_columns(qkvzba_TO, *self.row_shapes)
        qkvba_TW = self.cp.in_order_of_slots(
            rows_to_columns((q, k, v, b, a), self.cp.group), packed
        )
        return z_TI, *split_columns(qkvba_TW, *self.qkvba_shapes)
