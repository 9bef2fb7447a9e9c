"""Dense MLPs whose products and activation are separate operations in backward, as in forward."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_packed.ops.dense_mlp.api import DenseMLPInputs, JoinedGradient

gradient: JoinedGradient | None = None


def not_supported_reasons(inputs: DenseMLPInputs) -> list[str]:
    """Return no reason: autograd differentiates any operations."""
    return []
