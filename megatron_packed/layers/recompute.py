"""What of a layer the backward pass computes again: ``--recompute-granularity`` and its friends.

Random numbers are drawn by the layers alone (dropout of what a mixer adds to the hidden state), so
whole layers rewind them; so does the core of attention, whose kernels move the generator without
need.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor, nn

from megatron_packed.config.sections.memory import (
    CORE_ATTENTION,
    EXPERT_ACTIVATION,
    LAYER_NORM,
    MIXERS,
    MemoryConfig,
)
from megatron_packed.layers.norm import Norm
from megatron_packed.layers.offload import LayerOffload
from megatron_packed.memory.recompute import Keep, SavedByAutograd, checkpoint, regenerated
from megatron_packed.packed.params import PackedSeqParams

Output = TypeVar("Output")


@dataclass(frozen=True, kw_only=True)
class Recompute:
    """Of one layer."""

    layer: bool = False
    """All of it, its input is kept."""
    mixer: bool = False
    """What follows the norm; its input is kept."""
    norm_output: bool = False
    """The norm's output, from its input, which is the hidden state between layers."""
    core_attention: bool = False
    """What lies between the projections of attention; the first one's output is kept."""
    expert_activation: bool = False
    """The output of the experts' activation, from its input."""

    @classmethod
    def of(cls, config: MemoryConfig, symbol: str, number: int) -> Recompute:
        """Of layer ``number``, from 0, which is a ``symbol`` of the pattern.

        Layers that are recomputed in groups of several are the model's business.
        """
        modules = config.modules
        return cls(
            layer=config.layers_per_group == 1 and config.recomputes_layer(number),
            mixer=any(MIXERS.get(module) == symbol for module in modules),
            norm_output=LAYER_NORM in modules,
            core_attention=CORE_ATTENTION in modules,
            expert_activation=EXPERT_ACTIVATION in modules and "moe" not in modules,
        )

    def run_layer(
        self,
        layer: Callable[[Tensor, PackedSeqParams], Output],
        hidden_TD: Tensor,
        packed: PackedSeqParams,
        *,
        draws: bool,
        keep: Keep = SavedByAutograd,
    ) -> Output:
        """``layer(hidden, packed)``, which draws random numbers or does not.

        Args:
            keep: puts away what the layer is recomputed from.
        """
        if not self.layer:
            return layer(hidden_TD, packed)
        return checkpoint(layer, hidden_TD, packed, rewind=draws, keep=keep)

    def run_mixer(
        self,
        mixer: Callable[[Tensor, PackedSeqParams], Output],
        x_TD: Tensor,
        packed: PackedSeqParams,
    ) -> Output:
        """``mixer(x, packed)``."""
        return checkpoint(mixer, x_TD, packed) if self.mixer else mixer(x_TD, packed)

    def without_norm_output(
        self, norm: Norm, normed_TD: Tensor, hidden_TD: Tensor
    ) -> AbstractContextManager[None]:
        """Where the norm's output is used."""
        if not self.norm_output:
            return nullcontext()
        return regenerated(normed_TD, lambda x_TD: norm.with_residual(x_TD)[0], hidden_TD)


NOTHING = Recompute()
"""All is kept."""


def mixed(
    recompute: Recompute,
    offload: LayerOffload,
    norm_name: str,
    norm: Norm,
    mixer: Callable[[Tensor, PackedSeqParams], Output],
    hidden_TD: Tensor,
    packed: PackedSeqParams,
) -> tuple[Output, Tensor]:
    """``mixer(norm(hidden), packed)``, and the hidden state for the residual connection.

    Args:
        norm_name: of the norm among the parts that are offloaded.
    """
    normed_TD, residual_TD = offload.run(norm_name, norm, norm.with_residual, hidden_TD)
    with recompute.without_norm_output(norm, normed_TD, hidden_TD):
        return recompute.run_mixer(mixer, normed_TD, packed), residual_TD


def draws_random_numbers(layer: nn.Module) -> bool:
    """Whether a forward pass of a layer does, now."""
    return layer.training and float(getattr(layer, "dropout", 0.0)) > 0
