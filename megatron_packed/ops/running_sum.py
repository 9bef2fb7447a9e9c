"""Running sums as matrix products, which are deterministic on every device.

``torch.cumsum`` of CUDA tensors is refused in deterministic mode.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import pad

_BLOCK = 128


def running_sum(values: Tensor) -> Tensor:
    """Return the running sum along the last dimension, in the dtype of ``values``.

    The values are only added, never subtracted, so there is no cancellation. Values are summed
    inside blocks of 128, and the sums of earlier blocks are added.

    Args:
        values: ``(..., L)`` floating-point tensor, L at least 1.
    """
    *leading_shape, length = values.shape
    # (..., L) -> (..., Q, block)
    blocks = pad(values, (0, -length % _BLOCK)).reshape(*leading_shape, -1, _BLOCK)
    inside = blocks @ values.new_ones(_BLOCK, _BLOCK).triu()
    count = blocks.shape[-2]
    # (..., Q) @ (Q, Q): the sum of all blocks before each block
    earlier_blocks = blocks.sum(dim=-1) @ values.new_ones(count, count).triu(1)
    return (inside + earlier_blocks[..., None]).view(*leading_shape, -1)[..., :length].contiguous()
