"""RMS normalisation on the meta device: shapes, and the statistics that the kernel saves."""

from __future__ import annotations

from torch import Tensor

from megatron_packed.ops.on_meta import PROCESSORS, Memory, kernel, workspace


def run(x_TD: Tensor, weight_D: Tensor, eps: float, zero_centered: bool = False) -> Tensor:
    """Return a tensor of the shape of x; see `api.rms_norm`."""
    [y_TD] = kernel([x_TD.shape], x_TD, weight_D, memory=_memory(x_TD))
    return y_TD


def run_with_residual(
    x_TD: Tensor, weight_D: Tensor, eps: float, zero_centered: bool = False
) -> tuple[Tensor, ...]:
    """Return a tensor of the shape of x, and x; see `api.rms_norm_with_residual`."""
    return kernel([x_TD.shape], x_TD, weight_D, memory=_memory(x_TD), passes_on=True)


def _memory(x_TD: Tensor) -> Memory:
    features = x_TD.shape[-1]
    rows = x_TD.numel() // features
    # Each program has its own sum of the weight's gradient: four programs for each processor.
    sums = workspace(min(4 * PROCESSORS, rows), features)
    return Memory(saved=[workspace(rows)], backward=[sums])
