"""`GlobalBalance`: the load-balance loss over all data-parallel ranks and the micro-batches of a step.

Letters: L mixture-of-experts layers, E experts, K experts per token.

For micro-batch m of a step, the loss of an E layer on a rank is ``coeff * E / (K N n) * sum_e C_e *
P_e``. Here n is the number of real tokens of all ranks in micro-batch m, and N is their number in the
micro-batches 1 to m. ``C_e`` is the number of assignments of these N tokens to expert e, so
``C_e / (K N)`` is the share of expert e. ``P_e`` is the sum of the expert's probability over the
tokens of this rank in micro-batch m, so ``P_e / n`` is their mean. Source: arXiv:2501.11873.

Like other auxiliary losses, the loss is averaged over the packs of the step. With R data-parallel
ranks, P has about n / R tokens, so a perfectly balanced load gives ``coeff / R``, as in Megatron.

Megatron's ``global_aux_loss`` has the mean of ``C_e`` over the micro-batches and ``n^2`` in place of
``N n``. Both agree if all micro-batches have the same number of tokens. Otherwise Megatron's loss is
N / (m n) times ours: 43 times for 2 tokens after two micro-batches of 128.

[Note: global balance is outside of layers]
An E layer returns its counts and its probabilities, and the model computes the loss of all layers
together. So one collective sums the counts of all layers, and a layer that is recomputed adds nothing
twice. The graph of a layer contains no collective between ranks that train on different packs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_packed.config.sections.model import ModelConfig
from megatron_packed.distributed.collectives import all_reduce_sum
from megatron_packed.distributed.groups import ParallelGroups


class Balance(NamedTuple):
    """Load of the experts of one E layer in one micro-batch, on this rank's rows."""

    probability_E: Tensor
    """``(E,)`` float32, differentiable: sum over real tokens of the expert's probability.

    Depths of multi-token prediction that share their experts have equal shares of it.
    """
    count_E: Tensor
    """``(E,)`` float32: assignments of real tokens by score."""


class GlobalBalance(nn.Module):
    """Loads of the step so far, and the loss that they give. See [Note: global balance is outside of
    layers].

    Args:
        config: coefficient, number of experts, K.
        layers: L.
        group: ranks with other rows of the same shard of the model: data-parallel and
            context-parallel ranks.
        device: device of the counts.
    """

    count_LE: Tensor
    """``(L, E)`` float64: assignments of all ranks in the micro-batches of the step so far."""

    def __init__(
        self,
        config: ModelConfig,
        layers: int,
        group: dist.ProcessGroup | None,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        assert config.num_experts is not None
        self.group = group
        self.topk = config.moe_router_topk
        self.factor = config.moe_aux_loss_coeff * config.num_experts / self.topk
        # A buffer, so that a capture of graphs restores it and watches its address. float64, because
        # all tokens of a large step may be more than float32 can count.
        zeros = torch.zeros(layers, config.num_experts, dtype=torch.float64, device=device)
        self.register_buffer("count_LE", zeros, persistent=False)

    @classmethod
    def from_config(
        cls,
        config: ModelConfig,
        layers: int,
        groups: ParallelGroups | None,
        device: torch.device | str,
    ) -> GlobalBalance | None:
        """Return the balance of a model; None if its load-balance loss is not that of all ranks."""
        if not config.balances_all_ranks:
            return None
        return cls(config, layers, groups.dp_cp.group if groups else None, device)

    def begin_step(self) -> None:
        """Forget the loads of the previous step."""
        self.count_LE.zero_()

    def forward(self, loads: Sequence[Balance]) -> Tensor:
        """Add the loads of a micro-batch to those of the step; return its loss over all layers.

        All ranks of the group call it together. It reduces ``(L, E)`` numbers over them.

        Args:
            loads: loads of the E layers, in the order of the model.
        Returns:
            0-d float32, differentiable: the term of this rank's rows.
        """
        with torch.no_grad():
            own_LE = torch.stack([load.count_E for load in loads]).double()
            of_all_LE = all_reduce_sum(own_LE, self.group)
            self.count_LE.add_(of_all_LE)
            # Each real token has K assignments. A micro-batch without tokens has loss 0, because its
            # probabilities are 0; the bounds only prevent a division by 0.
            tokens_L1 = of_all_LE.sum(dim=1, keepdim=True) / self.topk
            tokens_so_far_L1 = self.count_LE.sum(dim=1, keepdim=True) / self.topk
            product_L1 = tokens_so_far_L1.clamp(min=1) * tokens_L1.clamp(min=1)
            weight_LE = self.count_LE * (self.factor / product_L1)
        probability_LE = torch.stack([load.probability_E for load in loads])
        return (probability_LE * weight_LE.to(probability_LE.dtype)).sum()
