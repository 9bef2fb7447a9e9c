"""Where what a layer keeps for its backward pass waits: ``--offload-layer-inputs`` and
``--offload-modules``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from torch import nn

from megatron_packed.config.sections.memory import OFFLOADED_IN, MemoryConfig
from megatron_packed.memory.offload import Offload
from megatron_packed.memory.recompute import Keep, SavedByAutograd
from megatron_packed.memory.saved_scopes import SavedScopes

Output = TypeVar("Output")


@dataclass(frozen=True, kw_only=True)
class LayerOffload:
    """Of one layer."""

    keep_input: Keep = SavedByAutograd
    """Of the input from which the layer is recomputed, where it is."""
    modules: frozenset[str] = frozenset()
    """The parts whose saved tensors travel."""
    scopes: SavedScopes | None = None
    """Its own: what layers share (positions of a pack) travels with each of them. Else the backward
    pass of a later layer would fetch all that an earlier one put away with it, and a graph would
    read what another one has fetched.
    """

    @classmethod
    def of(cls, config: MemoryConfig, offload: Offload | None, number: int) -> LayerOffload:
        """Of layer ``number``, from 0. Inputs of groups of several layers are the model's business."""
        if offload is None:
            return STAYS
        return cls(
            keep_input=offload.keep if config.offloads_input(number) else SavedByAutograd,
            modules=frozenset(
                module for module in OFFLOADED_IN if config.offloads_module(module, number)
            ),
            scopes=SavedScopes(offload.keep, offload.min_elements),
        )

    def run(
        self, module: str, owner: nn.Module, function: Callable[..., Output], *args: object
    ) -> Output:
        """``function(*args)``, which is the part ``module`` of the layer.

        Args:
            module: a name of ``OFFLOADED_IN``.
            owner: has the parameters and buffers that the function saves.
        """
        if module not in self.modules or self.scopes is None:
            return function(*args)
        with self.scopes.scope(owner):
            return function(*args)


STAYS = LayerOffload()
"""On the device."""
