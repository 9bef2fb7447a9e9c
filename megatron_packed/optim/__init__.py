"""Distributed optimizer, gradient clipping, schedules and detection of loss spikes."""

from typing import TYPE_CHECKING

from megatron_packed.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from megatron_packed.optim.lr_schedule import Schedule as Schedule
    from megatron_packed.optim.optimizer import Optimizer as Optimizer
    from megatron_packed.optim.spikes import SpikeDetector as SpikeDetector
    from megatron_packed.optim.weight_decay_schedule import (
        WeightDecaySchedule as WeightDecaySchedule,
    )
else:
    __all__, __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "lr_schedule": ["Schedule"],
            "optimizer": ["Optimizer"],
            "spikes": ["SpikeDetector"],
            "weight_decay_schedule": ["WeightDecaySchedule"],
        },
    )
