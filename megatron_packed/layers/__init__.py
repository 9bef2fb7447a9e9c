"""Layers of a hybrid model on packed sequences, for any tensor- and context-parallel size."""

from typing import TYPE_CHECKING

from megatron_packed.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from megatron_packed.layers.attention import Attention as Attention
    from megatron_packed.layers.attention import Rotary as Rotary
    from megatron_packed.layers.backends import Backends as Backends
    from megatron_packed.layers.build import Build as Build
    from megatron_packed.layers.context_parallel import ContextParallel as ContextParallel
    from megatron_packed.layers.embedding import Embedding as Embedding
    from megatron_packed.layers.linear import ColumnParallelLinear as ColumnParallelLinear
    from megatron_packed.layers.linear import RowParallelLinear as RowParallelLinear
    from megatron_packed.layers.mlp import MLP as MLP
    from megatron_packed.layers.norm import Norm as Norm
    from megatron_packed.layers.tensor_parallel import TensorParallel as TensorParallel
else:
    __all__, __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "attention": ["Attention", "Rotary"],
            "backends": ["Backends"],
            "build": ["Build"],
            "context_parallel": ["ContextParallel"],
            "embedding": ["Embedding"],
            "linear": ["ColumnParallelLinear", "RowParallelLinear"],
            "mlp": ["MLP"],
            "norm": ["Norm"],
            "tensor_parallel": ["TensorParallel"],
        },
    )
