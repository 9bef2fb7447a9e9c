"""Multi-token prediction: depth k predicts the token k + 1 tokens ahead of each token.

Depth k combines the hidden state of depth k - 1 (0 is the main model, after its final norm) with
the embedding of the token k tokens ahead. Its layers and a norm give the hidden state of depth k.
The embedding and the output projection are those of the main model. `packed.later_tokens` shifts
tokens, labels and masks inside their documents.

Letters: T tokens, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from typing import cast

import torch
from torch import Tensor, nn

from megatron_packed.config.kinds.layer_kind import KINDS
from megatron_packed.config.sections.model import ModelConfig
from megatron_packed.distributed.overlapped_collectives import Stage
from megatron_packed.layers.build import Build
from megatron_packed.layers.hybrid_layer import HybridLayers, build_norm
from megatron_packed.layers.linear import Linear
from megatron_packed.layers.moe.layer import MoEReport
from megatron_packed.packed.later_tokens import later, reached
from megatron_packed.packed.micro_batch import MicroBatch
from megatron_packed.packed.params import PackedSeqParams

LossSum = Callable[[Tensor, Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor]]


class DepthHead(nn.Module):
    """Modules of one depth around its layers: two norms and a projection before, a norm after.

    Parameter names: ``enorm``, ``hnorm``, ``eh_proj.weight`` ``(D, 2 D)`` and ``final_norm``. Each
    tensor-parallel rank holds all of the projection and applies it to its rows of the hidden state.
    """

    def __init__(self, config: ModelConfig, build: Build) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.enorm = build_norm(config, build)
        self.hnorm = build_norm(config, build)
        self.eh_proj = Linear(2 * hidden, hidden, bias=False, build=build)
        build.tp.use_on_rows(self.eh_proj.weight)
        self.final_norm = build_norm(config, build)

    def own_parameters(self) -> list[nn.Parameter]:
        """Return the parameters that `forward` uses: all but those of the final norm."""
        modules = (self.enorm, self.hnorm, self.eh_proj)
        return [parameter for module in modules for parameter in module.parameters()]

    def forward(self, hidden_TD: Tensor, embedded_TD: Tensor) -> Tensor:
        """Return the input of the first layer of the depth.

        Args:
            hidden_TD: hidden state of the previous depth, after its final norm.
            embedded_TD: embedding of the tokens of this depth.
        """
        both = torch.cat((self.enorm(embedded_TD), self.hnorm(hidden_TD)), dim=-1)
        projected_TD: Tensor = self.eh_proj(both)
        return projected_TD


class MultiTokenPrediction(nn.ModuleList):
    """A `DepthHead` for each depth. The layers between its modules are among those of the model.

    Args:
        config: the model.
        build: arguments that all layers share.
        layers: all layers of the model. With repeated layers, those of later depths get the
            parameters of the first depth.
    """

    def __init__(self, config: ModelConfig, build: Build, layers: HybridLayers) -> None:
        super().__init__(DepthHead(config, build) for _ in range(config.mtp_depths))
        self.config = config
        self.cp = build.cp
        # In a tuple, so that they are no submodules here.
        self._layers = (layers,)
        if config.mtp_use_repeated_layer:
            self._repeat_first_depth(layers)

    def __iter__(self) -> Iterator[DepthHead]:
        return cast("Iterator[DepthHead]", super().__iter__())

    def _repeat_first_depth(self, layers: HybridLayers) -> None:
        """Give the parameters of the first depth to the modules of the other depths."""
        for depth, head in list(enumerate(self, start=1))[1:]:
            share_weights(head, self[0])
            first = self.config.layers_of_depth(1)
            for number, source in zip(self.config.layers_of_depth(depth), first):
                share_weights(layers[number], layers[source])

    def stages(self, embedding: nn.Parameter, output: nn.Parameter) -> list[Stage]:
        """Return the stages of all depths, in order, with the tables that they use."""
        stages: list[Stage] = []
        (layers,) = self._layers
        for depth, head in enumerate(self, start=1):
            norm = list(head.final_norm.parameters())
            stages.append(Stage(head, [*head.own_parameters(), embedding]))
            for number in self.config.layers_of_depth(depth):
                stages.append(Stage(layers[number], list(layers[number].parameters())))
            stages.append(Stage(head.final_norm, [*norm, output]))
        return stages

    def scales(self, micro_batch: MicroBatch) -> Tensor:
        """Return the factor of each depth's summed loss in the loss: its weight over its targets."""
        weight = self.config.mtp_loss_scaling_factor / len(self)
        return micro_batch.depth_scales[: len(self)] * weight

    def joined_counts(
        self, biases: Sequence[Tensor], counts_LE: Tensor
    ) -> tuple[Sequence[Tensor], Tensor]:
        """Return each bias once, with the counts of all depths that use it.

        Args:
            biases: expert biases of all E layers.
            counts_LE: assignments of each of these layers.
        """
        once = sum(KINDS[symbol].has_experts for symbol in self.config.mtp_layers)
        if not once or not self.config.mtp_use_repeated_layer:
            return biases, counts_LE
        main = len(biases) - once * len(self)
        repeated = counts_LE[main:].double().view(len(self), once, -1).sum(dim=0)
        return biases[: main + once], torch.cat((counts_LE[:main].double(), repeated))

    def losses(
        self,
        hidden_TD: Tensor,
        rows_of_pack: Sequence[Tensor],
        packed: PackedSeqParams,
        embedding: nn.Module,
        loss_sum: LossSum,
        grad_scales: Tensor | None = None,
    ) -> tuple[Tensor, list[MoEReport]]:
        """Return the summed losses of the depths, and the reports of their E layers.

        Args:
            hidden_TD: hidden state of the main model, after its final norm.
            whole: tokens, labels and loss mask of the pack.
            packed: metadata of the pack, with its tables.
            embedding: embedding of the main model.
            loss_sum: function of hidden state, labels, loss mask and gradient scale that returns
                the summed loss first.
            grad_scales: one for each depth, as for `linear_cross_entropy`.
        """
        losses: list[Tensor] = []
        reports: list[MoEReport] = []
        (layers,) = self._layers
        # The backward pass of `stack` splits the upstream gradient into views of its memory, by
        # which the loss recognises its scale.
        scales: Sequence[Tensor | None]
        scales = [None] * len(self) if grad_scales is None else grad_scales.unbind()
        for depth, (head, grad_scale) in enumerate(zip(self, scales, strict=True), start=1):
            reaches_T = reached(packed, depth)
            # Shift in the whole pack, and split over context-parallel ranks after that.
            tokens_T, labels_T, loss_mask_T = (
                self.cp.own(later(x_T, depth, reaches_T), packed) for x_T in rows_of_pack
            )
            hidden_TD = head(hidden_TD, embedding(tokens_T))
            hidden_TD, depth_reports = layers(hidden_TD, packed, self.config.layers_of_depth(depth))
            hidden_TD = head.final_norm(hidden_TD)
            losses.append(loss_sum(hidden_TD, labels_T, loss_mask_T, grad_scale)[0])
            reports += depth_reports
        return torch.stack(losses), reports


def share_weights(modules: nn.Module, source: nn.Module) -> None:
    """Give the parameters and buffers of ``source`` to the submodules with the same names.

    Adapters, which a model gets after its layers, are added with modes of their own.
    """
    for name, module in list(modules.named_modules()):
        same = source.get_submodule(name)
        for key, child in same.named_children():
            if key.endswith("lora"):
                setattr(module, key, with_own_mode(child))
        tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        for key, _ in tensors:
            setattr(module, key, getattr(same, key))


def with_own_mode(module: nn.Module) -> nn.Module:
    """Return a module with the same parameters and buffers, whose mode is another one's."""
    twin = copy(module)
    twin._modules = {name: with_own_mode(child) for name, child in module.named_children()}
    return twin
