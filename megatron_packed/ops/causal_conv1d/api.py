"""Depthwise causal convolution over packed documents, with the SiLU that follows it in Mamba.

    y[t, c] = act(bias[c] + sum_w weight[c, W - 1 - w] x[t - w, c])      over all w with t - w in the document of t

Letters: T tokens, C channels, W width of the filter.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_packed.ops.backend_dispatch import Backend, GPUBackend, Op, OpWork

OP = Op(
    "causal_conv1d",
    (
        GPUBackend("triton", "megatron_packed.ops.causal_conv1d.triton_kernels"),
        GPUBackend(
            "causal_conv1d",
            "megatron_packed.ops.causal_conv1d.library",
            on_meta=Backend("causal_conv1d", "megatron_packed.ops.causal_conv1d.on_meta:Library"),
        ),
        Backend("reference", "megatron_packed.ops.causal_conv1d.reference"),
    ),
    on_meta=Backend("on_meta", "megatron_packed.ops.causal_conv1d.on_meta"),
    work=lambda inputs: OpWork(per_token=2 * inputs.width * inputs.channels),
)

BLOCK_CHANNELS = 128
"""Channels of a program of our kernels."""
_SHORTEST_RUN = 32
"""Fewest tokens of a program. Each program reads some rows of its neighbours, too."""
_PROGRAMS = 2640
"""Most programs of a launch, twenty for each of 132 processors; longer packs have longer runs.

Registers allow one round of them in forward and two in backward. Each program has a partial sum of
`BLOCK_CHANNELS` filters and biases, so the sums of a launch take at most 7 MiB for filters of width 4.
"""


@dataclass(frozen=True, kw_only=True)
class CausalConvInputs:
    """Shapes, dtypes and options that determine the choice of a backend."""

    tokens: int
    channels: int
    width: int
    row_stride: int
    """Stride from one token to the next in x, in elements; x may be a view of a wider tensor."""
    dtype: torch.dtype
    weight_dtype: torch.dtype
    bias_dtype: torch.dtype | None
    device_type: str


def causal_conv1d(
    x_TC: Tensor,
    weight_CW: Tensor,
    bias_C: Tensor | None,
    seq_idx_1T: Tensor,
    *,
    activation: str | None = "silu",
    backend: str = "auto",
    halo_HC: Tensor | None = None,
) -> Tensor:
    """Convolve along each document, with zeros before its first token.

    Args:
        x_TC: ``(T, C)``; may be a strided view (a column slice of the input projection's output).
        weight_CW: ``(C, W)``.
        bias_C: ``(C,)`` or None.
        seq_idx_1T: ``(1, T)`` int32 document number of each token. With a halo ``(1, H + T)``.
        activation: ``"silu"`` or None.
        halo_HC: ``(H, C)``, the H rows of the pack before x, if x is a later part of a pack.
    Returns:
        ``(T, C)`` in x's dtype, contiguous.
    Raises:
        ValueError: the shapes do not fit together, or the activation is unknown.
        NoBackendError: the requested backend does not support these inputs.
    """
    if activation not in ("silu", None):
        raise ValueError(f"causal_conv1d: activation is {activation!r}; choose 'silu' or None.")
    if x_TC.dim() != 2 or weight_CW.dim() != 2 or weight_CW.shape[0] != x_TC.shape[1]:
        raise ValueError(
            f"causal_conv1d: x has shape {list(x_TC.shape)} and weight {list(weight_CW.shape)}; "
            "they must be (T, C) and (C, W)."
        )
    rows = x_TC.shape[0] + (0 if halo_HC is None else halo_HC.shape[0])
    if seq_idx_1T.shape != (1, rows):
        raise ValueError(
            f"causal_conv1d: seq_idx has shape {list(seq_idx_1T.shape)}; it must be (1, {rows}) for all rows."
        )
    inputs = CausalConvInputs(
        tokens=x_TC.shape[0],
        channels=x_TC.shape[1],
        width=weight_CW.shape[1],
        row_stride=x_TC.stride(0),
        dtype=x_TC.dtype,
        weight_dtype=weight_CW.dtype,
        bias_dtype=None if bias_C is None else bias_C.dtype,
        device_type=x_TC.device.type,
    )
    chosen = OP.chosen[backend, inputs].loaded
    parameters = (weight_CW, bias_C, seq_idx_1T)
    y_TC: Tensor
    if halo_HC is None:
        y_TC = chosen.run(x_TC, *parameters, activation=activation)
    elif getattr(chosen, "TAKES_HALO", False):
        y_TC = chosen.run(x_TC, *parameters, activation=activation, halo_HC=halo_HC)
    else:
        joined_TC = torch.cat([halo_HC, x_TC])
        y_TC = chosen.run(joined_TC, *parameters, activation=activation)[halo_HC.shape[0] :]
    return y_TC


def run_length(tokens: int, channels: int) -> int:
    """Return the number of tokens of a program of our kernels, a multiple of four."""
    runs = max(1, _PROGRAMS // math.ceil(channels / BLOCK_CHANNELS))
    # Four rows are one step of a program.
    return max(_SHORTEST_RUN, math.ceil(math.ceil(tokens / runs) / 4) * 4)
