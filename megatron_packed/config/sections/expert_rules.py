"""Rules of expert parallelism."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from megatron_packed.config.errors import Problem
from megatron_packed.config.section import Sound
from megatron_packed.config.sections.model import ModelConfig
from megatron_packed.config.sections.model_parts.divisors import divisors
from megatron_packed.config.sections.packing import PackingConfig

if TYPE_CHECKING:
    from megatron_packed.config.sections.parallel import ParallelConfig


def expert_rules(
    parallel: ParallelConfig,
    model: ModelConfig,
    packing: PackingConfig,
    sound: Sound,
) -> Iterator[Problem]:
    """Yield problems of expert parallelism with the model and the packs. See `Sound` for ``sound``."""
    size, experts = parallel.expert_model_parallel_size, model.num_experts
    name = "expert_model_parallel_size"
    if not model.has_experts:
        if size > 1:
            yield parallel.problem(name, "the pattern has no expert layer (E)", "leave it out")
        return
    if sound("model.num_experts") and experts is not None and experts % size:
        yield parallel.problem(
            name,
            f"does not divide --num-experts ({experts})",
            f"choose from {divisors(experts)}",
        )
    width, ranks = model.moe_ffn_hidden_size, parallel.expert_tensor_parallel_size
    known = sound("model.moe_ffn_hidden_size", "parallel.expert_tensor_parallel_size")
    if known and parallel.splits_tokens_of_experts and width % ranks:
        yield parallel.problem(
            "expert_tensor_parallel_size",
            f"does not divide --moe-ffn-hidden-size ({width})",
            "give 1, or another --moe-ffn-hidden-size",
        )
    yield from _shared_token_rules(parallel, packing, sound)


def _shared_token_rules(
    parallel: ParallelConfig, packing: PackingConfig, sound: Sound
) -> Iterator[Problem]:
    """Yield a problem if tensor-parallel ranks that dispatch different tokens cannot share the slots
    of a pack evenly.
    """
    if not sound(
        "parallel.tensor_model_parallel_size",
        "parallel.expert_tensor_parallel_size",
        "parallel.context_parallel_size",
        "packing.seq_length",
        "packing.micro_batch_size",
    ):
        return
    tp, tokens = parallel.tensor_model_parallel_size, packing.tokens_per_pack
    cp = parallel.context_parallel_size
    uneven = tokens % (tp * cp)
    if parallel.splits_tokens_of_experts and uneven and not parallel.sequence_parallel:
        yield parallel.problem(
            "expert_tensor_parallel_size",
            f"requires the {tokens} token slots of a pack to divide evenly among "
            f"--tensor-model-parallel-size ({tp}) x --context-parallel-size ({cp}) ranks",
            f"choose a --tensor-model-parallel-size from {divisors(max(tokens // cp, 1))}, or leave "
            "it out",
        )
