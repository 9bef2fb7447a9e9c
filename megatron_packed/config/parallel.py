"""How the work is spread over processes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_packed.config.errors import Problem
from megatron_packed.config.options import Section, Sound, option

NOT_BUILT = {
    "tensor_model_parallel_size": "tensor parallelism",
    "context_parallel_size": "context parallelism",
    "expert_model_parallel_size": "expert parallelism",
    "pipeline_model_parallel_size": "pipeline parallelism",
}


@dataclass(frozen=True, kw_only=True)
class ParallelConfig(Section, title="parallel"):
    """Sizes of the parallel axes. Data parallelism takes all processes; every other size is 1 for now."""

    tensor_model_parallel_size: int = option(1, "Ranks that share each matrix; 1.", unit="ranks", minimum=1)
    context_parallel_size: int = option(1, "Ranks that share each pack; 1.", unit="ranks", minimum=1)
    expert_model_parallel_size: int = option(1, "Ranks that share the experts; 1.", unit="ranks", minimum=1)
    pipeline_model_parallel_size: int = option(1, "Ranks that share the layers; 1.", unit="ranks", minimum=1)
    use_distributed_optimizer: bool = option(
        False, "Each data-parallel rank keeps and updates its part of the fp32 masters and moments (ZeRO-1)."
    )
    distributed_backend: str | None = option(
        None, "Library for collectives; by default nccl on GPUs and gloo on CPUs.", choices=("nccl", "gloo")
    )
    distributed_timeout_minutes: int = option(
        10, "A collective that takes longer ends the run.", unit="minutes", minimum=1, maximum=100000
    )

    def rules(self, sound: Sound) -> Iterator[Problem]:
        for name, axis in NOT_BUILT.items():
            size = getattr(self, name)
            if sound(name) and size != 1:
                yield Problem(self.flag(name), str(size), f"{axis} is not built yet",
                              "give 1: all processes are data-parallel")
