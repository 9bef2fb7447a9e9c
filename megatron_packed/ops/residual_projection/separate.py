"""Product and addition as separate operations."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_packed.ops.residual_projection.api import AddedProduct, ResidualProjectionInputs

added_product: AddedProduct | None = None


def not_supported_reasons(inputs: ResidualProjectionInputs) -> list[str]:
    """Return no reason: these are operations of PyTorch."""
    return []
