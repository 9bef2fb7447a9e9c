"""Short convolution of recurrent mixers on packed documents.

Letters: T tokens, C convolution channels, W convolution width.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn

from megatron_packed.distributed.tensor_parallel_shards import Shard, set_shard
from megatron_packed.layers.build import Build
from megatron_packed.layers.context_parallel import take_in_parts
from megatron_packed.layers.parameters import no_weight_decay
from megatron_packed.ops.causal_conv1d.api import causal_conv1d


class Weights(NamedTuple):
    """Weight and bias of C channels of a convolution."""

    weight_CW: Tensor
    bias_C: Tensor | None


class CausalConv1d(nn.Module):
    """Depthwise causal convolution with SiLU that restarts at every document.

    Args:
        channels: this tensor-parallel rank's shard of the channels.
        width: W.
        bias: adds a bias to each channel.
        build: arguments that all layers share.
    """

    def __init__(
        self,
        channels: Shard,
        width: int,
        *,
        bias: bool = True,
        build: Build,
    ) -> None:
        super().__init__()
        self.backend = build.backends.causal_conv1d
        self.weight = set_shard(build.new_parameter(channels.local_length, width), channels)
        self.bias: nn.Parameter | None = None
        if bias:
            values = build.new_parameter(channels.local_length)
            self.bias = set_shard(no_weight_decay(values), channels)

    def in_parts(self, used: Shard, parts: int) -> list[Weights]:
        """Return weight and bias of the channels ``used`` of a context-parallel rank, in parts."""
        weights = take_in_parts(used, self.weight, parts)
        if self.bias is None:
            return [Weights(weight_CW, None) for weight_CW in weights]
        return list(map(Weights, weights, take_in_parts(used, self.bias, parts)))

    def forward(
        self,
        x_TC: Tensor,
        seq_idx_1T: Tensor,
        weights: Weights | None = None,
        halo_HC: Tensor | None = None,
    ) -> Tensor:
        """Convolve ``(T, C)`` with all channels' weights, or with ``weights`` of C channels.

        For ``halo_HC`` see `ops.causal_conv1d.api.causal_conv1d`.
        """
        weight_CW, bias_C = Weights(self.weight, self.bias) if weights is None else weights
        return causal_conv1d(
            *(x_TC, weight_CW, bias_C, seq_idx_1T),
            activation="silu",
            backend=self.backend,
            halo_HC=halo_HC,
        )
