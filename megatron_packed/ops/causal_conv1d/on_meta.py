"""Short convolution on the meta device: shapes, and the inputs that the kernels save."""

from __future__ import annotations

from torch import Tensor

from megatron_packed.ops.causal_conv1d.api import run_length
from megatron_packed.ops.on_meta import Memory, of_shape, workspace

TAKES_HALO = True
"""`run` accepts the rows before the first token."""


def run(
    x_TC: Tensor,
    weight_CW: Tensor,
    bias_C: Tensor | None,
    seq_idx_1T: Tensor,
    *,
    activation: str | None,
    halo_HC: Tensor | None = None,
) -> Tensor:
    """Return a tensor of the shape of x; see `api.causal_conv1d`."""
    tokens, channels = x_TC.shape
    runs = -(-tokens // run_length(tokens, channels))
    memory = Memory(backward=[workspace(runs, *weight_CW.shape)])  # sums of each run
    return of_shape(x_TC.shape, x_TC, weight_CW, bias_C, halo_HC, seq_idx_1T, memory=memory)


class Library:
    """Convolution of the library: it takes no halo beside its input."""

    @staticmethod
    def run(
        x_TC: Tensor,
        weight_CW: Tensor,
        bias_C: Tensor | None,
        seq_idx_1T: Tensor,
        *,
        activation: str | None,
    ) -> Tensor:
        """Return a tensor of the shape of x; see `api.causal_conv1d`."""
        return of_shape(x_TC.shape, x_TC, weight_CW, bias_C, seq_idx_1T)
