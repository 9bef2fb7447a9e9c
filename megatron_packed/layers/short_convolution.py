"""Short convolution of recurrent mixers on packed documents.

Letters: T tokens, C convolution channels, W convolution width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatron_packed.distributed.tensor_parallel_shards import Shard, set_shard
from megatron_packed.layers.parameters import new_parameter, no_weight_decay
from megatron_packed.ops.causal_conv1d.api import causal_conv1d


class CausalConv1d(nn.Module):
    """Depthwise causal convolution with SiLU that restarts at every document.

    Args:
        channels: this tensor-parallel rank's shard of the channels.
        used: the C channels of this shard that this context-parallel rank convolves; None for all.
        width: W.
        bias: adds a bias to each channel.
        backend: backend of the op ``causal_conv1d``.
        device: device of the parameters.
        dtype: dtype of the parameters.
    """

    def __init__(
        self,
        channels: Shard,
        used: Shard | None,
        width: int,
        *,
        bias: bool = True,
        backend: str,
        device: torch.device | str,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.used = used
        self.backend = backend
        self.weight = set_shard(
            new_parameter(channels.local_length, width, device=device, dtype=dtype), channels
        )
        self.bias: nn.Parameter | None = None
        if bias:
            values = new_parameter(channels.local_length, device=device, dtype=dtype)
            self.bias = set_shard(no_weight_decay(values), channels)

    def forward(self, x_TC: Tensor, seq_idx_1T: Tensor) -> Tensor:
        weight_CW: Tensor = self.weight
        bias_C: Tensor | None = self.bias
        if self.used is not None:
            weight_CW = self.used.take(weight_CW)
            bias_C = None if bias_C is None else self.used.take(bias_C)
        return causal_conv1d(
            x_TC, weight_CW, bias_C, seq_idx_1T, activation="silu", backend=self.backend
        )
