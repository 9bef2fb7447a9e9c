"""Number of parameters of a configuration, read from its model on the meta device."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from megatron_packed.config.sections.model import ModelConfig
from megatron_packed.distributed.tensor_parallel_shards import is_expert
from megatron_packed.models.trace import complete_model


@dataclass(frozen=True, kw_only=True)
class ParameterCount:
    """Numbers of parameters of a model; every weight counts once, tied weights too."""

    total: int
    active: int
    """Parameters that one token uses: of the routed experts only ``moe_router_topk``."""
    embedding: int
    """Parameters of an embedding table that is only looked up; 0 if it is tied to the output."""

    frozen: int = 0
    """Parameters that are not trained (``--freeze-params``, ``--lora-rank``)."""
    multiplied_frozen: int = 0
    """Part of ``multiplied`` that is not trained."""

    @property
    def multiplied(self) -> int:
        """Active parameters that take part in a product with the token: all but ``embedding``."""
        return self.active - self.embedding


def count_parameters(config: ModelConfig, vocab_size: int) -> ParameterCount:
    """Count the parameters of the complete model. Repeated depths count once.

    Args:
        vocab_size: entries of the tokenizer; the tables have
            ``config.padded_vocab_size(vocab_size)`` rows.
    """
    model = complete_model(config, vocab_size)
    looked_up = None if model.output is None else model.embedding.weight
    frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
    return ParameterCount(
        total=model.num_parameters,
        active=sum(active_elements(parameter, config) for parameter in model.parameters()),
        embedding=0 if looked_up is None else looked_up.numel(),
        frozen=sum(parameter.numel() for parameter in frozen),
        multiplied_frozen=sum(
            active_elements(parameter, config) for parameter in frozen if parameter is not looked_up
        ),
    )


def active_elements(parameter: nn.Parameter, config: ModelConfig) -> int:
    """Return the number of elements of a parameter that one token uses."""
    if not is_expert(parameter):
        return parameter.numel()
    assert config.num_experts is not None
    return parameter.numel() * config.moe_router_topk // config.num_experts
