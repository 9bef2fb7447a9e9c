"""Requests of a rank to its ops, found by running its model on the meta device.

The model itself makes the requests, so they have the sizes, options and reasons of its layers. The
rules of the choice are in the ops only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache

import numpy as np
import torch

from megatron_packed.config.kinds.experts import EXPERT_ACTIVATION
from megatron_packed.config.optional_packages import is_installed
from megatron_packed.config.run import RunConfig
from megatron_packed.config.sections.parallel import fewest_processes
from megatron_packed.models.trace import Imagined, calls_of_pass
from megatron_packed.ops.activation import api as activation
from megatron_packed.ops.backend_dispatch import NoBackendError, Request
from megatron_packed.ops.dense_mlp import api as dense_mlp
from megatron_packed.ops.grouped_mlp import api as grouped_mlp
from megatron_packed.ops.quack_tiles import device_reasons
from megatron_packed.optim import adamw
from megatron_packed.optim.state_precision import StatePrecision
from megatron_packed.packed.micro_batch import MicroBatch

UNKNOWN_VOCABULARY = 32_768
"""Number of vocabulary entries assumed for the choice of the loss kernel before a tokenizer is read."""


def op_requests(
    config: RunConfig, device: torch.device, documents: int | None = None
) -> Mapping[Request, int]:
    """Return every request of a rank to an op -> number of its calls, in the order of a step.

    Args:
        config: configuration of the run.
        device: device of the rank.
        documents: largest number of documents in a pack; by default, the capacity of the largest
            capture size, or 1 without graphs.
    """
    return traced_requests(config, device, documents or (config.cuda_graph.capacities or (1,))[-1])


@lru_cache(maxsize=16)
def traced_requests(
    config: RunConfig, device: torch.device, capacity: int
) -> Mapping[Request, int]:
    """Return the requests of `op_requests` for packs of at most ``capacity`` documents."""
    vocab_size = config.model.vocab_size or UNKNOWN_VOCABULARY
    model = Imagined.from_config(config, fewest_processes(config.parallel), vocab_size).model
    document = np.zeros(config.document_alignment, dtype=np.int64), None
    pack = MicroBatch.build([document], config.packing.tokens_per_pack, capacity=capacity)
    inputs = StatePrecision.from_config(config).inputs(device.type)
    optimizer = Request(adamw.OP, config.optim.optimizer_backend, inputs)
    # The backward pass makes no other requests.
    return {**calls_of_pass(model, pack, device), optimizer: 1}


def served_by(request: Request, requests: Mapping[Request, int]) -> str:
    """Return the backend that serves a request: a name, or ``auto``.

    The reference of the grouped product runs the reference of the activation, whatever is fastest.
    So its activations are those of the reference if all activations run inside experts.
    """
    if not isinstance(request.inputs, activation.ActivationInputs):
        return request.backend
    kind = request.inputs.kind
    experts = [each for each in requests if getattr(each.inputs, "activation", None) == kind]
    activations = [each for each in requests if getattr(each.inputs, "kind", None) == kind]
    if sum(map(requests.__getitem__, activations)) > sum(map(requests.__getitem__, experts)):
        return request.backend
    reference = grouped_mlp.OP.backends[-1].name
    for op, backend, inputs in experts:
        try:
            if op.select(inputs, backend).name == reference:
                return reference
        except NoBackendError:  # The request of the product is refused.
            return request.backend
    return request.backend


def useless_recomputation(config: RunConfig, device: torch.device) -> str:
    """Return why ``--recompute-modules moe_act`` saves no memory; empty if it is not given or does.

    A recomputed activation is a call of its own. If all experts would join it with their products
    without this option, it is not saved in either case.
    """
    if EXPERT_ACTIVATION not in config.memory.modules:
        return ""
    without = replace(config, memory=replace(config.memory, recompute_granularity=None))
    joined = grouped_mlp.JOINED
    if not any(inputs.apart for inputs in _experts(config, device)):
        return ""
    if any(joined.reasons(inputs) for inputs in _experts(without, device)):
        return ""
    return (
        f"{EXPERT_ACTIVATION} saves no memory: without it the experts run {joined.name}, which does "
        "not save the activation either and takes less time"
    )


def _experts(config: RunConfig, device: torch.device) -> list[grouped_mlp.GroupedMLPInputs]:
    """Return the inputs of the products of experts."""
    inputs = (each.inputs for each in op_requests(config, device))
    return [each for each in inputs if isinstance(each, grouped_mlp.GroupedMLPInputs)]


def lacks_joined_kernels(config: RunConfig) -> bool:
    """Return whether layers might save fewer activations with kernels that this machine lacks."""
    if not device_reasons("cuda") and is_installed("quack.gemm"):
        return False
    return may_join_products(config)


def may_join_products(config: RunConfig) -> bool:
    """Return whether a GPU may join products of the run with their activations."""
    gpu = torch.device("cuda")
    return config.training.bf16 and any(_may_join(each.inputs) for each in op_requests(config, gpu))


def _may_join(inputs: object) -> bool:
    """Return whether a GPU may join the products of these inputs with their activation."""
    if isinstance(inputs, dense_mlp.DenseMLPInputs):
        return not inputs.apart
    if isinstance(inputs, grouped_mlp.GroupedMLPInputs):
        joins = (inputs.activation, inputs.device_type) in grouped_mlp.WITH_JOINED
        return joins and not inputs.apart
    return False
