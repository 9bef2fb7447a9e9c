"""`MixerKind`: all that code with torch has to know of one kind of layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from megatron_packed.config.kinds.layer_kind import LayerKind, OptionsOfKind
from megatron_packed.config.sections.model import ModelConfig
from megatron_packed.layers.attention import Rotary
from megatron_packed.layers.backends import Backends
from megatron_packed.layers.build import Build
from megatron_packed.layers.hybrid_layer import HybridLayer
from megatron_packed.layers.parameters import Fill
from megatron_packed.lazy_exports import lazy_function
from megatron_packed.packed.params import KindTables, PackedSeqParams

if TYPE_CHECKING:
    from megatron_packed.layers.decoding.state import MixerState

HIDDEN = 64
"""Hidden size of the small models of the isolation self-test."""


class Place(NamedTuple):
    """Place of a layer in the model."""

    number: int = 0
    """Number of the layer in the pattern, from 0."""
    depth: int = 0
    """Depth of multi-token prediction, 0 in the main model."""
    rotary: Rotary | None = None
    """Tables of the rotary embedding, which all layers share; None without it."""


FIRST = Place()
"""Place of the first layer of a model without a rotary embedding."""


class RankCounts(NamedTuple):
    """Numbers of ranks that share a small model."""

    heads: int = 1
    """Ranks, times parts in which heads are exchanged; each of them needs heads."""
    experts: int = 1
    """Ranks of an expert-parallel group."""


def same_bits(quantity: str, device: torch.device, backends: Backends) -> int:
    """Accept no difference."""
    return 0


@dataclass(frozen=True, kw_only=True)
class IsolationCase:
    """Small model of one kind for the isolation self-test, `models.isolation`."""

    changes: Callable[[OptionsOfKind, RankCounts], Mapping[str, object]] = lambda config, ranks: {}
    """Function that returns the options of the small model that differ from those of the model.

    Sizes that decide which kernels run must not change.
    """
    absent: Mapping[str, object] = field(default_factory=dict)
    """Options of this kind in the small models of the other kinds."""
    variants: Callable[[OptionsOfKind], Sequence[Mapping[str, object]]] = lambda config: [{}]
    """Function that returns further changes; each variant has a small model of its own."""
    prepare: Callable[[nn.Module], None] | None = None
    """Function that changes parameters of the small model, so that a leak is visible."""
    allowed_ulps: Callable[[str, torch.device, Backends], int] = same_bits
    """Function that returns the allowed difference of a quantity, in units of the last place of the
    largest value. Rounding may change other documents although no kernel reads across documents.
    """
    coupled: Callable[[OptionsOfKind], list[str]] = lambda config: []
    """Function that returns the options that make documents of a pack affect each other by design."""


@dataclass(frozen=True, kw_only=True)
class MegatronNames:
    """Names of a kind's parameters in checkpoints of megatron-core."""

    modules: Mapping[str, tuple[str, ...]]
    """Beginning of a name inside a layer here -> possible beginnings there; the longest counts."""
    sections: Callable[[OptionsOfKind], Mapping[str, int]] | None = None
    """Function that returns the rows of each section of ``in_proj``, in order.

    megatron-core stores each section as a tensor of its own. None if it stores whole tensors.
    """
    convolved: tuple[str, ...] = ()
    """Sections that are the channels of ``conv1d``, in order."""
    without: tuple[str, ...] = ()
    """Options of the kind that Megatron does not have; only their defaults can be exported."""

    def possible(self, inside: str) -> list[str]:
        """Return the possible names in a layer there of the parameter ``inside`` of a layer here."""
        beginning = max((module for module in self.modules if inside.startswith(module)), key=len)
        return [their + inside.removeprefix(beginning) for their in self.modules[beginning]]


def hybrid_layer_name(config: ModelConfig, layer: int) -> str:
    """Return the beginning of a layer's names in hybrid checkpoints of megatron-core."""
    depth, place = config.depth_of_layer(layer), config.number_in_part(layer)
    if depth:
        return f"mtp.layers.{depth - 1}.mtp_model_layer.layers.{place}"
    return f"decoder.layers.{place}"


NO_STATE = lazy_function("megatron_packed.layers.decoding.state", "NoState")
"""State of a mixer that processes each token independently."""
RECURRENT_STATE = lazy_function("megatron_packed.layers.decoding.recurrent_state", "RecurrentState")
"""State of a `RecurrentMixer`."""
TableBuilder = Callable[[PackedSeqParams], KindTables | None]
"""Function that builds the tables of a pack. A model holds it, so it must be possible to pickle it."""


def no_tables(config: OptionsOfKind, build: Build) -> TableBuilder | None:
    """Build no tables: the layers read only the tables that all kinds share."""
    return None


@dataclass(frozen=True, kw_only=True)
class MixerKind:
    """Kind of layer: its mixer, and what the rest of the package has to know of it."""

    kind: LayerKind
    """Symbol, name and properties that need no torch."""
    build: Callable[[OptionsOfKind, Build, Place], nn.Module]
    """Function that builds the mixer."""
    layer: type[HybridLayer] = HybridLayer
    """Class of the layer around the mixer."""
    state: Callable[[Any], MixerState]
    """Function that creates the mixer's state for generation, with `lazy_function`: only generation
    imports states."""
    fills: Mapping[str, Fill]
    """End of a parameter's name (its last two or three parts) -> initial values."""
    isolation: IsolationCase = IsolationCase()
    """Case of the isolation self-test."""
    tables: Callable[[OptionsOfKind, Build], TableBuilder | None] = no_tables
    """Function that returns the builder of tables that only this kind reads; None without any."""
    megatron: MegatronNames | None = None
    """Names in checkpoints of megatron-core; None if it has no such layer."""
