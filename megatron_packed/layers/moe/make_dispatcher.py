"""Choice of a dispatcher."""

from __future__ import annotations

from megatron_packed.config.sections.model import ModelConfig
from megatron_packed.layers.backends import Backends
from megatron_packed.layers.moe.bounded_all_to_all import BoundedAllToAllDispatcher
from megatron_packed.layers.moe.dispatcher import (
    AllGatherDispatcher,
    AllToAllDispatcher,
    Dispatcher,
    LocalDispatcher,
    PaddedAllToAllDispatcher,
)
from megatron_packed.layers.moe.parallel import ExpertParallel


def make_dispatcher(config: ModelConfig, ep: ExpertParallel, backends: Backends) -> Dispatcher:
    """Return the dispatcher that ``config`` selects, or `LocalDispatcher` without a group."""
    return _kind(config, ep)(config, ep, backends)


def _kind(config: ModelConfig, ep: ExpertParallel) -> type[Dispatcher]:
    if ep.group is None:
        return LocalDispatcher
    if config.moe_token_dispatcher_type == "allgather":  # noqa: S105
        return AllGatherDispatcher
    if config.moe_pad_expert_input_to_capacity:
        return PaddedAllToAllDispatcher
    bounded = config.moe_expert_rank_capacity_factor is not None
    return BoundedAllToAllDispatcher if bounded else AllToAllDispatcher
