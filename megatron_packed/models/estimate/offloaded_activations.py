"""Saved tensors of `activations.py` that are offloaded to the host, and their bytes in transfer.

[Note: bundles]
The offloaded tensors of a layer's input, or of one part of a layer, are a bundle. A bundle is
copied as a unit and has its own block of host memory. At most as many bundles are on the device as
there are buffers, including the bundle of the part that runs. In the forward pass these are bundles
that are being copied to the host; in the backward pass they are prefetched bundles. While a layer
runs, all its bundles are counted. Bundles of earlier layers are counted for the remaining buffers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megatron_packed.config.kinds.attention import CORE_ATTENTION
from megatron_packed.config.kinds.experts import EXPERT_ACTIVATION
from megatron_packed.config.sections.memory import (
    OFFLOADED_IN,
    MemoryConfig,
)
from megatron_packed.models.estimate.footprint import FP32, Footprint, Term, Work
from megatron_packed.models.estimate.recomputed_activations import ResidentUnderRecompute
from megatron_packed.models.hybrid_model import HybridModel

_ALIGNMENT = 512
"""Multiple to which a tensor's bytes are rounded up in a block of host memory."""
_SCAN = (
    "in_proj.output",
    "conv1d.input",
    "conv1d.output",
    "scan.steps",
    "scan.scores",
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
        "attention.norm_input",
        "attention.norm_statistics",
        "gate.input",
    ),
    "mamba_norm": _NORM,
    "mamba_in_proj": ("in_proj.input",),
    "mamba_scan": _SCAN,
    "mamba_out_proj": ("out_proj.input",),
    "gdn_norm": _NORM,
    "gdn_in_proj": ("in_proj.input",),
    "gdn_scan": _SCAN,
    "gdn_out_proj": ("out_proj.input",),
    "mlp_norm": _NORM,
    "mlp_fc1": ("fc1.input",),
    "mlp_act": ("fc1.output",),
    "mlp_fc2": ("activation",),
    "expert_fc1": ("experts.input",),
    EXPERT_ACTIVATION: ("experts.fc1",),
    "expert_fc2": ("experts.activation",),
}
"""Tensors that each part of a layer saves, by the names of `Footprint.saved`."""
_FP32 = {
    "norm.statistics",
    "attention.lse",
    "attention.norm_statistics",
    "scan.steps",
    "scan.scores",
    "gated_norm.statistics",
}


class ResidentUnderOffload(ResidentUnderRecompute):
    """Rule for activations that stay on the device with offload and recomputation.

    Follows ``--offload-layer-inputs``, ``--offload-modules`` and the options of recomputation. See
    [Note: resident activations] of `rank_memory` and [Note: bundles].

    Args:
        model: this rank's model.
        work: sizes of the packs that its layers process.
        layers: footprints of its layers.
    """

    def __init__(self, model: HybridModel, work: Work, layers: Sequence[Footprint]) -> None:
        super().__init__(model, work)
        self._count = model.memory.offload_buffers
        self._bundles = [list(self._of_layer(number, layer)) for number, layer in enumerate(layers)]

    def stays(self, layer: int, symbol: str, term: str) -> bool:
        moved = bool(symbol) and any(term in bundle for bundle in self._bundles[layer])
        # The projection after the kernel saves the kernel's output, too.
        if term == "attention.output" and not self._moved and not self._gated:
            moved = moved and self._memory.offloads_module("attn_proj", layer)
        return not moved and super().stays(layer, symbol, term)

    def in_flight_bytes(self, layer: int) -> int:
        if layer == len(self._bundles):  # during the loss, all buffers may hold bundles
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
        """Return the bytes of the last ``count`` bundles of the layers before ``layer``."""
        before = [bundle for bundles in self._bundles[:layer] for bundle in bundles]
        last = before[max(len(before) - max(count, 0), 0) :]
        return sum(term.bytes for bundle in last for term in bundle.values())

    def _of_layer(self, number: int, layer: Footprint) -> Iterator[dict[str, Term]]:
        """Yield the bundles of a layer in the order in which they are offloaded."""
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
            names = ["attention.output"]  # if core_attn is offloaded, its bundle has this tensor
        return [
            name for name in names if ResidentUnderRecompute.stays(self, number, layer.symbol, name)
        ]

    def _bundle(self, layer: Footprint, names: Sequence[str]) -> Iterator[dict[str, Term]]:
        """Yield a bundle of the tensors that are large enough to offload, if there are any."""
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
    """Return the rule for the model's options of recomputation and offload."""
    return (
        ResidentUnderOffload(model, work, layers)
        if model.memory.offloads
        else ResidentUnderRecompute(model, work)
    )
