"""Sections: one frozen dataclass for each subject, with its options, derived values and rules."""

from typing import TYPE_CHECKING

from megatron_packed.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from megatron_packed.config.sections.checkpoint import CheckpointConfig as CheckpointConfig
    from megatron_packed.config.sections.cuda_graph import CudaGraphConfig as CudaGraphConfig
    from megatron_packed.config.sections.data import DataConfig as DataConfig
    from megatron_packed.config.sections.logging import LoggingConfig as LoggingConfig
    from megatron_packed.config.sections.memory import MemoryConfig as MemoryConfig
    from megatron_packed.config.sections.model import ModelConfig as ModelConfig
    from megatron_packed.config.sections.optim import OptimizerConfig as OptimizerConfig
    from megatron_packed.config.sections.packing import PackingConfig as PackingConfig
    from megatron_packed.config.sections.parallel import ParallelConfig as ParallelConfig
    from megatron_packed.config.sections.profiling import ProfilingConfig as ProfilingConfig
    from megatron_packed.config.sections.training import TrainingConfig as TrainingConfig
else:
    __all__, __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "checkpoint": ["CheckpointConfig"],
            "cuda_graph": ["CudaGraphConfig"],
            "data": ["DataConfig"],
            "logging": ["LoggingConfig"],
            "memory": ["MemoryConfig"],
            "model": ["ModelConfig"],
            "optim": ["OptimizerConfig"],
            "packing": ["PackingConfig"],
            "parallel": ["ParallelConfig"],
            "profiling": ["ProfilingConfig"],
            "training": ["TrainingConfig"],
        },
    )
