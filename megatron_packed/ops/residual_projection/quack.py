"""Product of quack (Hopper) that adds the residual to its fp32 sums, for bf16.

flash-attn 4 installs quack. The residual is read while other products run, so the addition costs no
pass over memory of its own. Kernels are compiled on first use, in a few seconds, and kept in
``QUACK_CACHE_DIR`` (`config.environment_variables`).

The tile depends on the widths, and one program owns a tile. So a row depends on itself only, and
equal inputs give equal bits.
"""

from __future__ import annotations

import torch
from quack import gemm as _quack
from torch import Tensor

from megatron_packed.ops.quack_tiles import (
    SCHEDULE,
    TOKEN_TILES,
    aligned,
    bound_plans,
    device_reasons,
    join_context,
    least_padded_tile,
    version_reasons,
)
from megatron_packed.ops.residual_projection.api import ResidualProjectionInputs
from megatron_packed.ops.residual_projection.on_meta import (
    not_supported_reasons as reasons_of_inputs,
)

_NEEDED = {"tile_M", "tile_N", *SCHEDULE}
_PLANS = _quack._gemm_plan_cache  # read at import, so that a quack without it is refused


def not_supported_reasons(inputs: ResidualProjectionInputs) -> list[str]:
    """Return the reasons why quack's product does not support these inputs; empty if it does."""
    of_machine = version_reasons(_quack.gemm, _NEEDED) + device_reasons(inputs.device_type)
    return of_machine + reasons_of_inputs(inputs)


def added_product(residual_TO: Tensor, x_TI: Tensor, weight_OI: Tensor) -> Tensor:
    """Return ``residual + x W^T``. See `api.AddedProduct`."""
    y_TO = torch.empty(residual_TO.shape, dtype=residual_TO.dtype, device=residual_TO.device)
    if y_TO.shape[0]:
        bound_plans(_PLANS)
        join_context(y_TO.device)
        tile_m, tile_n = least_padded_tile(y_TO.shape[1], tiles=TOKEN_TILES)
        operands = map(aligned, (x_TI, weight_OI))
        _quack.gemm(
            *operands, y_TO, aligned(residual_TO), None, tile_M=tile_m, tile_N=tile_n, **SCHEDULE
        )
    return y_TO
