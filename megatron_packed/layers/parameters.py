"""Parameters of layers: functions that fill them with initial values, and marks for the optimizer.

The rules for the parameters outside of the layers' mixers are in `models.init`, and those of a
kind's mixer are in its file in ``layers/kinds``.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Generator, Tensor, nn

from megatron_packed.config.kinds.layer_kind import OptionsOfKind
from megatron_packed.config.sections.model import ModelConfig

Fill = Callable[[Tensor, Generator, OptionsOfKind], None]
"""Function that fills a complete parameter in place."""

A_RANGE = (1.0, 16.0)


def normal(value: Tensor, generator: Generator, config: ModelConfig) -> None:
    value.normal_(0.0, config.init_method_std, generator=generator)


def residual_normal(value: Tensor, generator: Generator, config: ModelConfig) -> None:
    """Fill a projection that writes into the residual stream."""
    value.normal_(0.0, config.init_method_std / math.sqrt(config.num_layers), generator=generator)


def ones(value: Tensor, generator: Generator, config: ModelConfig) -> None:
    value.fill_(1.0)


def zeros(value: Tensor, generator: Generator, config: ModelConfig) -> None:
    value.zero_()


def norm_scale(value: Tensor, generator: Generator, config: ModelConfig) -> None:
    """Fill the scale of a norm, which ``--apply-layernorm-1p`` stores minus one."""
    value.fill_(0.0 if config.apply_layernorm_1p else 1.0)


def convolution(value: Tensor, generator: Generator, config: ModelConfig) -> None:
    """Fill the weight ``(C, W)`` of a convolution: uniform in +-1/sqrt(W)."""
    bound = 1 / math.sqrt(value.shape[1])
    value.uniform_(-bound, bound, generator=generator)


def lora_input(value: Tensor, generator: Generator, config: ModelConfig) -> None:
    """Fill the A ``(..., I)`` of adapters as ``--lora-init`` says.

    Sources: PEFT's ``init_lora_weights`` True and "gaussian", and Megatron-Bridge's ``xavier``.
    """
    inputs, rank = value.shape[-1], config.lora_rank
    assert rank is not None
    if config.lora_init == "kaiming":
        bound = 1 / math.sqrt(inputs)
        value.uniform_(-bound, bound, generator=generator)
    elif config.lora_init == "xavier":
        value.normal_(0.0, math.sqrt(2 / (inputs + rank)), generator=generator)
    else:
        value.normal_(0.0, 1 / rank, generator=generator)


def a_log(value: Tensor, generator: Generator, config: ModelConfig) -> None:
    """Fill the logarithm of the decay rate A, which is uniform in [1, 16]."""
    value.uniform_(*A_RANGE, generator=generator).log_()


def no_weight_decay(parameter: nn.Parameter) -> nn.Parameter:
    """Mark a parameter as excluded from weight decay, and return it.

    Parameters without weight decay are norms, biases, and A_log, D and dt_bias of Mamba.
    """
    parameter.no_weight_decay = True  # type: ignore[attr-defined]
    return parameter


def keep_fp32(parameter: nn.Parameter) -> nn.Parameter:
    """Mark a parameter that stays in float32 in a bfloat16 model, and return it.

    Parameters that stay in float32 are A_log, D and dt_bias of Mamba, and the router's weight.
    """
    assert parameter.dtype == torch.float32, (
        "a parameter that stays in float32 must be created in float32"
    )
    parameter.keep_fp32 = True  # type: ignore[attr-defined]
    return parameter
