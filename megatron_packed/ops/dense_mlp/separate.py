"""Dense MLPs whose products and activation are separate operations in forward and backward."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_packed.ops.dense_mlp.api import DenseMLPInputs

JOINS = False


def not_supported_reasons(inputs: DenseMLPInputs) -> list[str]:
    """Return no reason: autograd differentiates any operations."""
    return []
