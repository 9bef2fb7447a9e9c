"""Precision of the optimizer's state: dtypes of moments, storage of masters, and rounding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from megatron_packed.optim.adamw import AdamWInputs

if TYPE_CHECKING:
    from megatron_packed.config.run import RunConfig

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class StatePrecision:
    """Precision of the optimizer's state, and the rounding of bf16 moments."""

    exp_avg: torch.dtype = torch.float32
    exp_avg_sq: torch.dtype = torch.float32
    remainders: bool = False
    """True if masters of bf16 weights are the weight and a 16-bit remainder, not float32 copies. The
    weight is then the master rounded half up (``master_remainders.py``).
    """
    stochastic: bool = True
    """True if bf16 moments are rounded stochastically (``stochastic_rounding.py``), else to nearest."""
    seed: int = 0
    """Seed of stochastic rounding."""

    @classmethod
    def from_config(cls, config: RunConfig) -> StatePrecision:
        """Return the precision of a run's state."""
        optim = config.optim
        return cls(
            exp_avg=_DTYPES[optim.exp_avg_dtype],
            exp_avg_sq=_DTYPES[optim.exp_avg_sq_dtype],
            remainders=optim.use_precision_aware_optimizer and config.training.bf16,
            stochastic=optim.moment_rounding == "stochastic",
            seed=config.training.seed,
        )

    @property
    def draws(self) -> bool:
        """True if an update needs random numbers."""
        return self.stochastic and torch.bfloat16 in (self.exp_avg, self.exp_avg_sq)

    def inputs(self, device_type: str) -> AdamWInputs:
        """Return the inputs for which the implementation of the update is chosen."""
        return AdamWInputs(
            device_type=device_type,
            exp_avg_dtype=self.exp_avg,
            exp_avg_sq_dtype=self.exp_avg_sq,
            remainders=self.remainders,
        )


FLOAT32_STATE = StatePrecision()
