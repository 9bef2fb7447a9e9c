"""Gated delta net on packed documents.

Letters: T tokens, G key heads of K channels, N value heads of V channels, I = N V. Source: Yang,
Kautz and Hatamizadeh, arXiv:2412.06464; the operations have the same order as in Qwen3-Next.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from megatron_packed.config.sections.model import ModelConfig
from megatron_packed.distributed.tensor_parallel_shards import SplitSegment
from megatron_packed.layers.build import Build
from megatron_packed.layers.parameters import new_parameter, no_weight_decay
from megatron_packed.layers.recurrent_mixer import RecurrentMixer
from megatron_packed.layers.tensor_parallel import SINGLE, TensorParallel
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
        self.head_dim = head_dim
        self.eps = eps
        self.backend = backend
        weight = no_weight_decay(new_parameter(head_dim, device=device, dtype=dtype))
        # Each tensor-parallel rank normalises its own heads, so their gradients are summed.
        self.weight = tp.use_inside(weight)

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

    def __init__(
        self,
        config: ModelConfig,
        build: Build,
    ) -> None:
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
            backend=build.backends.gated_rms_norm,
            tp=build.tp,
            device=build.device,
            dtype=build.dtype,
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
        )
        self.allow_neg_eigval = config.linear_allow_neg_eigval
        self.A_log = self.per_head(build.device)
        self.dt_bias = self.per_head(build.device)

    def head_parameters(self) -> tuple[Tensor, ...]:
        return self.A_log, self.dt_bias

    def scan_heads(
        self,
        heads: Sequence[Tensor],
        per_head: Sequence[Tensor],
        packed: PackedSeqParams,
        parameters: Sequence[Tensor] = (),
    ) -> Tensor:
        """Run the gated delta rule; see `ops.gated_delta_rule.api.gated_delta_rule`."""
        q_TGK, k_TGK, v_TNV = heads
        b_TN, a_TN = per_head
        A_log_N, dt_bias_N = parameters or self.head_parameters()
        return gated_delta_rule(
            q_TGK,
            k_TGK,
            v_TNV,
            a_TN,
            b_TN,
            A_log_N,
            dt_bias_N,
            packed.seq_idx,
            packed.cu_seqlens,
            allow_neg_eigval=self.allow_neg_eigval,
            tables=packed.tables.delta_rule,
            deterministic=self.backends.deterministic,
            backend=self.backends.gated_delta_rule,
        )
