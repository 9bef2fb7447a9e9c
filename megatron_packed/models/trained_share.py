"""Parameters that a run with adapters trains, by part of the model."""

from __future__ import annotations

import re
from collections import Counter

from megatron_packed.config.sections.model import ModelConfig
from megatron_packed.models.hybrid_model import HybridModel
from megatron_packed.models.lora_targets import projection_of

WHOLE = "whole weights"
"""Name of the parameters of ``--lora-modules-to-save``."""
DEPTHS, OTHERS = "multi-token prediction", "other projections"
_FACTOR = re.compile(r"[._]lora\.[AB]$")
"""End of the name of a factor of an adapter."""


def trained_by_part(model: HybridModel) -> dict[str, int]:
    """Return part of the model -> number of its trained parameters on all ranks.

    The parts are those of ``--lora-target-modules``.

    Example:
        ``{"attention": 12_288, "experts": 98_304, "whole weights": 4_096}``.
    """
    counts: Counter[str] = Counter()
    for name, sharded in model.sharded_parameters().items():
        if sharded.parameter.requires_grad:
            counts[_part(name, model.config)] += sharded.stored_shape.numel()
    return dict(counts)


def _part(name: str, config: ModelConfig) -> str:
    weight, factors = _FACTOR.subn("", name)
    if not factors:
        return WHOLE
    record = projection_of(weight, config)
    if record is not None:
        return record.part
    return DEPTHS if name.startswith("mtp.") else OTHERS


def adapter_line(model: HybridModel) -> str:
    """Return the line about trained parameters at the start of a run; empty without adapters."""
    config, parts = model.config, trained_by_part(model)
    if not config.has_adapters:
        return ""
    every = sum(each.stored_shape.numel() for each in model.sharded_parameters().values())
    trained = sum(parts.values())
    named = ", ".join(f"{part} {count:,}" for part, count in parts.items())
    return (
        f"adapters of rank {config.lora_rank} (scale {config.lora_scale:g}): {trained:,} of {every:,} "
        f"parameters are trained, {100 * trained / every:.2g} %: {named}"
    )
