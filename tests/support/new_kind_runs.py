"""Runs of a model with the kind ``S`` of ``tests/data/new_kind``, in a package that has its files.

``python -m support.new_kind_runs`` prints the results of one process and of two tensor-parallel
ranks.
"""

from __future__ import annotations

import json
from typing import NamedTuple
from unittest import mock

import torch
from torch import Tensor

from megatron_packed.config.sections.memory import MemoryConfig
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.distributed.tensor_parallel_shards import Shard
from megatron_packed.distributed.testing import run_distributed
from megatron_packed.layers import short_convolution
from megatron_packed.models.convert.megatron.names import unknown_layers
from megatron_packed.models.generate import generate
from megatron_packed.models.hybrid_model import HybridModel
from megatron_packed.models.isolation import check_isolation
from megatron_packed.packed.params import PackedSeqParams
from support import hybrid_cases as cases
from support import new_kind_runs, rank_models

PATTERN = "S*S-"
CHANGES = {"short_conv_channels": 12}
PROMPTS = [[5, 9, 2], [7], list(range(10, 27))]
NEW_TOKENS = 4
DOCUMENTS = [9, 1, 20, 2]


MEMORY = {
    "mixer and norm": MemoryConfig(
        recompute_granularity="selective", recompute_modules=("short_conv", "layernorm")
    ),
    "layers": MemoryConfig(
        recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1
    ),
    "offloaded": MemoryConfig(
        fine_grained_activation_offloading=True,
        offload_modules=("short_conv_scan", "short_conv_norm"),
    ),
}


def model_of(
    groups: ParallelGroups | None = None, memory: MemoryConfig | None = None
) -> HybridModel:
    return rank_models.build(PATTERN, CHANGES, groups, dtype=torch.float64, memory=memory)


def gradients_of(model: HybridModel) -> tuple[float, dict[str, Tensor]]:
    """Return the loss and the complete gradients."""
    model(cases.make_pack(cases.make_documents(DOCUMENTS), tail=4, spare=1)).loss.backward()
    model.shared_gradients().sum()
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    with torch.no_grad():
        output = model(cases.make_pack(cases.make_documents(DOCUMENTS), tail=4, spare=1))
    return output.loss.item(), found


def other_bits() -> list[str]:
    """Return the modes of memory with gradients of other bits than those without."""
    _, want = gradients_of(model_of())
    found = {name: gradients_of(model_of(memory=memory))[1] for name, memory in MEMORY.items()}
    return [
        mode
        for mode, gradients in found.items()
        if not all(torch.equal(gradients[name], value) for name, value in want.items())
    ]


def leaks(groups: ParallelGroups | None = None) -> list[str]:
    """Return the symbols of the failed checks of isolation."""
    config = cases.tiny_config(PATTERN, **CHANGES)
    results = check_isolation(config, "cpu", torch.float32, groups=groups)
    assert {result.symbol for result in results} == {*PATTERN}
    return sorted({result.symbol for result in results if not result.passed})


def leaks_without_boundaries() -> list[str]:
    """Return the same for a convolution that reads across documents."""
    convolve = short_convolution.causal_conv1d

    def leaking(x_TC: Tensor, weight: Tensor, bias: None, seq_idx: Tensor, **options: object):
        return convolve(x_TC, weight, bias, torch.zeros_like(seq_idx), **options)

    with mock.patch.object(short_convolution, "causal_conv1d", leaking):
        return leaks()


def greedy(model: HybridModel, prompt: list[int]) -> list[int]:
    """Return the answer without states: the complete text is processed for each token."""
    tokens = list(prompt)
    for _ in range(NEW_TOKENS):
        packed = PackedSeqParams.from_lengths([len(tokens)], len(tokens))
        with torch.no_grad():
            tokens.append(int(model.logits(torch.tensor(tokens), packed)[-1].argmax()))
    return tokens[len(prompt) :]


class Rank(NamedTuple):
    """Results of one rank."""

    loss: float
    gradients: dict[str, tuple[Shard, Tensor]]
    leaks: list[str]
    answers: list[list[int]]


def of_rank(groups: ParallelGroups) -> Rank:
    model = model_of(groups)
    answers = generate(model, PROMPTS, NEW_TOKENS, group=groups.world_group)
    loss, found = gradients_of(model)
    sharded = model.sharded_parameters()
    own = {name: (sharded[name].shard, gradient) for name, gradient in found.items()}
    return Rank(loss, own, leaks(groups), answers)


def falling_losses(steps: int = 3) -> list[float]:
    """Return the losses of steps of gradient descent."""
    model, losses = model_of(), []
    for _ in range(steps):
        model.zero_grad()
        losses.append(gradients_of(model)[0])
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.05 * parameter.grad
    return losses


def worst_difference(ranks: list[Rank]) -> float:
    """Return the largest relative difference of losses and gradients from those of one process."""
    loss, gradients = gradients_of(model_of())
    return max(
        *(abs(rank.loss / loss - 1) for rank in ranks),
        *(
            cases.relative_error(gradient, shard.take(gradients[name]))
            for rank in ranks
            for name, (shard, gradient) in rank.gradients.items()
        ),
    )


if __name__ == "__main__":
    # The function of this module by its name, which other processes import.
    ranks = run_distributed(new_kind_runs.of_rank, 2, layout={"tp_size": 2})
    model = model_of().eval()
    print(
        json.dumps(
            {
                "losses": falling_losses(),
                "other bits": other_bits(),
                "not in Megatron": unknown_layers(model.config),
                "leaks": leaks(),
                "leaks without boundaries": leaks_without_boundaries(),
                "answers": generate(model, PROMPTS, NEW_TOKENS),
                "answers without states": [greedy(model, prompt) for prompt in PROMPTS],
                "worst difference of ranks": worst_difference(ranks),
                "leaks of ranks": [rank.leaks for rank in ranks],
                "answers of ranks": [rank.answers for rank in ranks],
            }
        )
    )
