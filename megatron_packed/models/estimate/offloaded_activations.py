"""Saved tensors of `activations.py` that are offloaded to the host, and their bytes in transfer.

[Note: bundles]
What one layer's input, or one part of a layer, puts away travels as a bundle, in a block of host
memory of its own. Counting the bundle of the part that runs, no more bundles are on the device than
there are buffers: in the forward pass those whose copies to the host are under way, in the backward
pass those that were loaded ahead. While a layer runs all of its own bundles are counted, and of the
layers before it as many as there are buffers left.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megatron_packed.config.sections.memory import (
    CORE_ATTENTION,
    EXPERT_ACTIVATION,
    OFFLOADED_IN,
    MemoryConfig,
)
from megatron_packed.models.estimate.footprint import FP32, Footprint, Term, Work
from megatron_packed.models.estimate.recomputed_activations import ResidentUnderRecompute
from megatron_packed.models.hybrid_model import HybridModel

_ALIGNMENT = 512
"""Bytes, of a tensor in a block."""
_SCAN = (
    "in_proj.output",
    "conv1d.input",
    "conv1d.output",
    "scan.steps",
    "scan.output",
    "gated_norm.statistics",
)
_NORM = ("norm.input", "norm.statistics")
TERMS: dict[str, tuple[str, ...]] = {
    "attn_norm": _NORM,
    "qkv_linear": ("qkv.input",),
    "attn_proj": ("proj.input",),
    CORE_ATTENTION: (
        "qkv.output",
        "attention.qkv",
        "attention.q",
        "attention.qk",
        "attention.output",
        "attention.lse",
    ),
    "mamba_norm": _NORM,
    "mamba_in_proj": ("in_proj.input",),
    "mamba_scan": _SCAN,
    "mamba_out_proj": ("out_proj.input",),
    "mlp_norm": _NORM,
    "mlp_fc1": ("fc1.input",),
    "mlp_act": ("fc1.output",),
    "mlp_fc2": ("activation",),
    "expert_fc1": ("experts.input",),
    EXPERT_ACTIVATION: ("experts.fc1",),
    "expert_fc2": ("experts.activation",),
}
"""What the parts of a layer save, by the names of `Footprint.saved`."""
_FP32 = {"norm.statistics", "attention.lse", "scan.steps", "gated_norm.statistics"}


class ResidentUnderOffload(ResidentUnderRecompute):
    """Activations that stay under ``--offload-layer-inputs``, ``--offload-modules`` and recompute.

    See [Note: resident activations] of `rank_memory`, [Note: bundles].

    Args:
        model: of this rank.
        work: what its layers work on.
        layers: its footprints.
    """

    def __init__(self, model: HybridModel, work: Work, layers: Sequence[Footprint]) -> None:
        super().__init__(model, work)
        self._count = model.memory.offload_buffers
        self._bundles = [list(self._of_layer(number, layer)) for number, layer in enumerate(layers)]

    def stays(self, layer: int, symbol: str, term: str) -> bool:
        moved = bool(symbol) and any(term in bundle for bundle in self._bundles[layer])
        if (
            term == "attention.output" and not self._by_heads
        ):  # the projection behind the kernel saves it, too
            moved = moved and self._memory.offloads_module("attn_proj", layer)
        return not moved and super().stays(layer, symbol, term)

    def in_flight_bytes(self, layer: int) -> int:
        if layer == len(self._bundles):  # behind the layers all that are held are theirs
            return self._bytes_before(layer, self._count)
        first = self.group_start(layer)
        return self._bytes_before(first, self._count - max(len(self._bundles[first]), 1))

    @property
    def host_bytes(self) -> int:
        moved = (
            term for bundles in self._bundles for bundle in bundles for term in bundle.values()
        )
        return sum(-(-term.bytes // _ALIGNMENT) * _ALIGNMENT for term in moved)

    def _bytes_before(self, layer: int, count: int) -> int:
        """Of the last ``count`` bundles of the layers before one."""
        before = [bundle for bundles in self._bundles[:layer] for bundle in bundles]
        last = before[max(len(before) - max(count, 0), 0) :]
        return sum(term.bytes for bundle in last for term in bundle.values())

    def _of_layer(self, number: int, layer: Footprint) -> Iterator[dict[str, Term]]:
        """Bundles of a layer in the order in which they are put away."""
        memory: MemoryConfig = self._memory
        if memory.offloads_input(number):
            yield from self._bundle(layer, ["norm.input"])
        for module in OFFLOADED_IN:
            if layer.symbol in OFFLOADED_IN[module] and memory.offloads_module(module, number):
                yield from self._bundle(layer, self._terms(number, layer, module))

    def _terms(self, number: int, layer: Footprint, module: str) -> list[str]:
        memory = self._memory
        names = [name for name in TERMS[module] if name in layer.saved]
        if (
            module == "attn_proj"
            and not names
            and not memory.offloads_module(CORE_ATTENTION, number)
        ):
            names = ["attention.output"]  # else it has left with what else the kernel saves
        return [
            name for name in names if ResidentUnderRecompute.stays(self, number, layer.symbol, name)
        ]

    def _bundle(self, layer: Footprint, names: Sequence[str]) -> Iterator[dict[str, Term]]:
        """Of what is large enough, if anything is."""
        elements = {
            name: layer.saved[name].bytes // (FP32 if name in _FP32 else self._work.element)
            for name in names
        }
        large = [name for name in names if elements[name] >= self._memory.min_offloaded_tensor_size]
        if large:
            yield {name: layer.saved[name] for name in large}


def resident_activations(
    model: HybridModel, work: Work, layers: Sequence[Footprint]
) -> ResidentUnderRecompute:
    """Return the rule that the model's options make."""
    return (
        ResidentUnderOffload(model, work, layers)
        if model.memory.offloads
        else ResidentUnderRecompute(model, work)
    )
