"""Precision in which gradients are accumulated and summed over data-parallel ranks."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from megatron_packed.config.sections.parallel import ParallelConfig

_SUMMED_IN_FP32 = ("*.router.weight", "*.conv1d.weight")
"""Matrices whose gradients stay in float32: they are small, and their kernels add in float32."""
_EVERY = "all"
"""Pattern that matches every parameter, as in Megatron."""


@dataclass(frozen=True)
class GradientPrecision:
    """Rule for the dtype of each gradient; by default all are float32.

    Args:
        low: sum the gradients of bf16 matrices in bf16. Vectors, routers and convolutions are small
            and keep float32.
        exact: patterns (``*``, ``?`` and ``[...]``) of the names of parameters that keep float32.
        rounds_once: over ranks, add bf16 gradients in float32 and round the sum once. Otherwise the
            collective rounds after every addition.
    """

    low: bool = False
    exact: tuple[str, ...] = ()
    rounds_once: bool = True

    @classmethod
    def from_config(cls, config: ParallelConfig) -> GradientPrecision:
        return cls(
            low=config.sums_gradients_in_bf16,
            exact=config.ddp_param_name_patterns_for_fp32_local_accumulation,
            rounds_once=config.ddp_reduce_scatter_with_fp32_accumulation,
        )

    def is_low(self, name: str, parameter: Tensor) -> bool:
        """Return whether the gradients of a parameter are in bf16."""
        return (
            self.low
            and parameter.dtype == torch.bfloat16
            and parameter.dim() > 1
            and not any(
                pattern == _EVERY or fnmatchcase(name, pattern)
                for pattern in (*_SUMMED_IN_FP32, *self.exact)
            )
        )


FULL_PRECISION = GradientPrecision()
