"""Initial values of all parameters, as Megatron draws them.

Weights are normal with standard deviation ``init_method_std``. Projections that write into the
residual stream divide it by ``sqrt(L)`` with L layers, so that the variance of the stream does not
grow with depth. A layer of a hybrid pattern adds to the stream once, so Megatron
divides by ``sqrt(L)``. A classical Transformer block is two of these layers and adds to the stream
twice; the ``sqrt(2 L)`` of GPT-2 is therefore the same number. Biases are 0 and norms are 1,
stored as 0 with ``--apply-layernorm-1p``.
Mamba-2: ``A`` is uniform in [1, 16], ``D`` is 1, the step ``softplus(dt_bias)`` is log-uniform in
[0.001, 0.1], and the convolution is uniform in +-1/sqrt(width). Gated delta nets: ``A`` is uniform in
[1, 16], as in Megatron, ``dt_bias`` is 1, and the convolution is as in Mamba-2.

Every parameter has its own random generator on the CPU, seeded by (seed, name). A value therefore
depends neither on the device, nor on the other parameters, nor on the parallel layout.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b

import torch
from torch import Generator, Tensor, nn

from megatron_packed.config.layer_pattern import GATED_DELTA_NET
from megatron_packed.config.sections.model import ModelConfig
from megatron_packed.distributed.tensor_parallel_shards import ShardedParameter, sharded_parameters
from megatron_packed.layers.moe.router import Router

Fill = Callable[[Tensor, Generator, ModelConfig], None]

A_RANGE = (1.0, 16.0)
DT_RANGE = (1e-3, 1e-1)
DT_FLOOR = 1e-4
MOST_THREADS = 8


def _normal(value: Tensor, generator: Generator, config: ModelConfig) -> None:
    value.normal_(0.0, config.init_method_std, generator=generator)


def _residual_normal(value: Tensor, generator: Generator, config: ModelConfig) -> None:
    value.normal_(0.0, config.init_method_std / math.sqrt(config.num_layers), generator=generator)


def _ones(value: Tensor, generator: Generator, config: ModelConfig) -> None:
    value.fill_(1.0)


def _norm_scale(value: Tensor, generator: Generator, config: ModelConfig) -> None:
    value.fill_(0.0 if config.apply_layernorm_1p else 1.0)


def _zeros(value: Tensor, generator: Generator, config: ModelConfig) -> None:
    value.zero_()


def _convolution(value: Tensor, generator: Generator, config: ModelConfig) -> None:
    bound = 1 / math.sqrt(value.shape[1] if value.dim() == 2 else config.mamba_d_conv)
    value.uniform_(-bound, bound, generator=generator)


def _a_log(value: Tensor, generator: Generator, config: ModelConfig) -> None:
    value.uniform_(*A_RANGE, generator=generator).log_()


def _dt_bias(value: Tensor, generator: Generator, config: ModelConfig) -> None:
    low, high = (math.log(bound) for bound in DT_RANGE)
    dt = value.uniform_(low, high, generator=generator).exp().clamp_(min=DT_FLOOR)
    value.copy_(dt + torch.log(-torch.expm1(-dt)))  # inverse of softplus


RULES: dict[str, Fill] = {
    "embedding.weight": _normal,
    "output.weight": _normal,
    "final_norm.weight": _norm_scale,
    "final_norm.bias": _zeros,
    "norm.weight": _norm_scale,
    "norm.bias": _zeros,
    "mixer.norm.weight": _ones,
    "q_norm.weight": _norm_scale,
    "q_norm.bias": _zeros,
    "k_norm.weight": _norm_scale,
    "k_norm.bias": _zeros,
    "qkv.weight": _normal,
    "qkv.bias": _zeros,
    "proj.weight": _residual_normal,
    "proj.bias": _zeros,
    "fc1.weight": _normal,
    "fc1.bias": _zeros,
    "fc2.weight": _residual_normal,
    "fc2.bias": _zeros,
    "eh_proj.weight": _normal,
    "enorm.weight": _norm_scale,
    "enorm.bias": _zeros,
    "hnorm.weight": _norm_scale,
    "hnorm.bias": _zeros,
    "router.weight": _normal,
    "shared_expert_gate.weight": _normal,
    "fc1_latent_proj.weight": _normal,
    "fc2_latent_proj.weight": _residual_normal,
    "experts.fc1": _normal,
    "experts.fc2": _residual_normal,
    "in_proj.weight": _normal,
    "out_proj.weight": _residual_normal,
    "conv1d.weight": _convolution,
    "conv1d.bias": _convolution,
    "mixer.A_log": _a_log,
    "mixer.D": _ones,
    "mixer.dt_bias": _dt_bias,
}
"""Rule for each parameter, by the last three or two components of its name; three come first."""

GATED_DELTA_NET_RULES = {"mixer.dt_bias": _ones}
"""Rules of gated delta nets that differ from those of the same names in `RULES`."""


def seed_of(seed: int, name: str) -> int:
    """Return a 63-bit seed for one parameter, equal on all machines, unlike Python's ``hash``."""
    digest = blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def initial_value(name: str, shape: torch.Size, config: ModelConfig, seed: int) -> Tensor:
    """Return the complete tensor of one parameter, float32 on the CPU.

    Example:
        ``initial_value("layers.0.mixer.D", torch.Size([4]), config, 1234)`` is four ones.
    """
    value = torch.empty(shape, dtype=torch.float32)
    parts, rules = name.split("."), _rules(name, config)
    rule = rules.get(".".join(parts[-3:])) or rules[".".join(parts[-2:])]
    rule(value, torch.Generator().manual_seed(seed_of(seed, name)), config)
    return value


def _rules(name: str, config: ModelConfig) -> dict[str, Fill]:
    """Return the rules of the layer that has the parameter ``name``."""
    place = name.split(".")
    if place[0] == "layers" and config.layer_types[int(place[1])] == GATED_DELTA_NET:
        return RULES | GATED_DELTA_NET_RULES
    return RULES


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
