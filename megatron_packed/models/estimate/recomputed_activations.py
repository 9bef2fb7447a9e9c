"""Saved tensors of `activations.py` that stay on the device with activation recomputation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_packed.config.kinds.attention import CORE_ATTENTION
from megatron_packed.config.kinds.experts import EXPERT_ACTIVATION
from megatron_packed.config.layer_pattern import ATTENTION, MOE
from megatron_packed.config.sections.memory import (
    LAYER_NORM,
    MIXERS,
    MemoryConfig,
)
from megatron_packed.models.estimate.footprint import Footprint, Work
from megatron_packed.models.hybrid_model import HybridModel

_AROUND_MIXERS = {"norm.input", "norm.statistics", "dropout.mask"}
_NORM_OUTPUTS = {"in_proj.input", "qkv.input", "fc1.input"}
_CORE = {
    "attention.q",
    "attention.qk",
    "attention.qkv",
    "attention.lse",
    "attention.norm_input",
    "attention.norm_statistics",
    "gate.input",
}


class ResidentUnderRecompute:
    """Rule for activations that stay on the device with ``--recompute-granularity``.

    See [Note: resident activations] of `rank_memory`.

    Args:
        model: this rank's model.
        work: sizes of the packs that its layers process.
    """

    def __init__(self, model: HybridModel, work: Work) -> None:
        self._memory: MemoryConfig = model.memory
        self._modules = set(self._memory.modules)
        self._model = model
        self._work = work
        self._mixers = {MIXERS[module] for module in self._modules if module in MIXERS}
        by_heads = model.cp.size > 1 and model.cp.exchanges_heads
        self._moved = by_heads or model.cp.reorders_attention
        self._gated = model.config.attention_output_gate
        gathered = (
            model.tp.group is not None and model.tp.sequence_parallel and not model.ep.splits_tokens
        )
        # The router and the shared expert read the norm's output directly, unless its rows are
        # gathered.
        of_experts = set() if gathered else {"router.input", "shared.input"}
        self._norm_outputs = _NORM_OUTPUTS | of_experts

    def stays(self, layer: int, symbol: str, term: str) -> bool:
        if not symbol:
            return True
        if self._memory.recomputes_layer(layer):
            return term == "norm.input" and self.group_start(layer) == layer
        norm_is_first = not self._model.config.norms_output(layer)
        if LAYER_NORM in self._modules and term in self._norm_outputs and norm_is_first:
            return False
        if symbol in self._mixers:
            return term in _AROUND_MIXERS or (symbol != MOE and term in _NORM_OUTPUTS)
        if CORE_ATTENTION in self._modules and symbol == ATTENTION:
            # Without a gate, the kernel's output is the input of the projection, which keeps it.
            repeated = self._moved or self._gated
            return term not in _CORE and not (repeated and term == "attention.output")
        return EXPERT_ACTIVATION not in self._modules or term != "experts.activation"

    def group_start(self, layer: int) -> int:
        # The units of each depth of multi-token prediction begin with its first layer.
        return layer - self._model.config.number_in_part(layer) % self._memory.layers_per_unit

    def replacement_bytes(self, layers: Sequence[Footprint]) -> int:
        """Return the bytes that recomputed modules hold in place of their saved tensors.

        These are the outputs of the norms before expert layers, and the fused projections whose
        rows or heads were exchanged between ranks.
        """
        total = 0
        for footprint, layer in zip(layers, self._model.layers, strict=True):
            if footprint.symbol == MOE and MOE in self._mixers and LAYER_NORM not in self._modules:
                total += footprint.saved["norm.input"].bytes
            moved = self._moved and "qkv.output" not in footprint.saved
            if footprint.symbol == ATTENTION and CORE_ATTENTION in self._modules and moved:
                mixer: Any = layer.mixer
                width = mixer.qkv.weight.shape[0]
                total += self._work.tokens // self._model.cp.size * width * self._work.element
        return total

    def in_flight_bytes(self, layer: int) -> int:
        """Return 0: recomputation transfers nothing."""
        return 0

    @property
    def host_bytes(self) -> int:
        return 0
