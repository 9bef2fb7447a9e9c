"""Initial values of all parameters, as Megatron draws them.

Weights are normal with standard deviation ``init_method_std``. Projections that write into the
residual stream divide it by ``sqrt(L)`` with L layers, so that the variance of the stream does not
grow with depth. A layer of a hybrid pattern adds to the stream once, so Megatron
divides by ``sqrt(L)``. A classical Transformer block is two of these layers and adds to the stream
twice; the ``sqrt(2 L)`` of GPT-2 is therefore the same number. Biases are 0 and norms are 1,
stored as 0 with ``--apply-layernorm-1p``. The rules of a mixer are in the file of its kind.

Every parameter has its own random generator on the CPU, seeded by (seed, name). A value therefore
depends neither on the device, nor on the other parameters, nor on the parallel layout.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b

import torch
from torch import Tensor, nn

from megatron_packed.config.sections.model import ModelConfig
from megatron_packed.distributed.tensor_parallel_shards import ShardedParameter, sharded_parameters
from megatron_packed.layers.kinds.registry import MIXERS
from megatron_packed.layers.moe.router import Router
from megatron_packed.layers.parameters import Fill, lora_input, norm_scale, normal, zeros

MOST_THREADS = 8

RULES: dict[str, Fill] = {
    "embedding.weight": normal,
    "output.weight": normal,
    "final_norm.weight": norm_scale,
    "final_norm.bias": zeros,
    "norm.weight": norm_scale,
    "norm.bias": zeros,
    "eh_proj.weight": normal,
    "enorm.weight": norm_scale,
    "enorm.bias": zeros,
    "hnorm.weight": norm_scale,
    "hnorm.bias": zeros,
    "lora.A": lora_input,
    "lora.B": zeros,
    "fc1_lora.A": lora_input,
    "fc1_lora.B": zeros,
    "fc2_lora.A": lora_input,
    "fc2_lora.B": zeros,
}
"""Rule for each parameter outside of a mixer, by the last two components of its name."""


def seed_of(seed: int, name: str) -> int:
    """Return a 63-bit seed for one parameter, equal on all machines, unlike Python's ``hash``."""
    digest = blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def initial_value(name: str, shape: torch.Size, config: ModelConfig, seed: int) -> Tensor:
    """Return the complete tensor of one parameter, float32 on the CPU.

    Example:
        ``initial_value("layers.0.mixer.D", torch.Size([4]), config, 1234)`` is four ones.
    Raises:
        ValueError: no rule fits the name.
    """
    value = torch.empty(shape, dtype=torch.float32)
    parts, rules = name.split("."), _rules(name, config)
    rule = rules.get(".".join(parts[-3:])) or rules.get(".".join(parts[-2:]))
    if rule is None:
        raise ValueError(
            f"no rule says which initial values {name} has; add {'.'.join(parts[-2:])!r} to `fills` in "
            "the record of its kind of layer."
        )
    rule(value, torch.Generator().manual_seed(seed_of(seed, name)), config)
    return value


def _rules(name: str, config: ModelConfig) -> dict[str, Fill]:
    """Return the rules of the layer that has the parameter ``name``."""
    place = name.split(".")
    if place[0] != "layers":
        return RULES
    return {**RULES, **MIXERS[config.layer_types[int(place[1])]].fills}


def initialize(
    model: nn.Module, config: ModelConfig, seed: int, *, tp_rank: int = 0, tp_size: int = 1
) -> None:
    """Fill every parameter of ``model`` in place with this rank's part of the complete tensor.

    Several threads draw one tensor each at the same time: a generator cannot be shared, and drawing
    billions of values in sequence takes minutes. At most 8 complete tensors exist at a time. On the
    meta device, which has no values, no parameter is filled. Routers get their seed.
    """
    for name, module in model.named_modules():
        if isinstance(module, Router):
            module.routing_seed = seed_of(seed, name)
    if all(parameter.is_meta for parameter in model.parameters()):
        return

    @torch.no_grad()  # the gradient mode is a setting of each thread
    def fill(name: str, sharded: ShardedParameter) -> None:
        value = initial_value(name, sharded.stored_shape, config, seed)
        sharded.parameter.copy_(sharded.shard.take(sharded.shard.pad(value)))

    parameters = sharded_parameters(model, tp_rank, tp_size)
    with ThreadPoolExecutor(_threads()) as pool:
        for _ in pool.map(fill, parameters.keys(), parameters.values()):
            pass  # the iteration raises exceptions of the threads


def _threads() -> int:
    """Return the number of threads: this process's share of the host's cores, at most 8.

    The limit bounds the memory of the tensors that are drawn at the same time.
    """
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return min(max(len(os.sched_getaffinity(0)) // processes, 1), MOST_THREADS)
