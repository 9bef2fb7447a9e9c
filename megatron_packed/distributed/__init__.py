"""Process groups, collectives, flat gradient buffers, ZeRO-1 layout, and hang and failure reports.

Process groups: ``groups.py``, ``init_process_groups.py``. Collectives: ``collectives.py`` (without
autograd), ``differentiable.py`` (with autograd), ``all_to_all.py`` (exchanges that change the
layout). Data-parallel reduction and ZeRO-1: ``data_parallel_reduce.py``,
``overlapped_collectives.py``, ``zero1_layout.py``, ``flat_buffers.py``. Tensor parallelism:
``tensor_parallel_shards.py``, ``tensor_parallel_gradients.py``. Hangs and failures:
``hang_detection.py``, ``failure_watch.py``, ``last_operation.py``.
"""

from typing import TYPE_CHECKING

from megatron_packed.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from megatron_packed.distributed.determinism import (
        configure_determinism as configure_determinism,
    )
    from megatron_packed.distributed.failure_watch import FailureWatch as FailureWatch
    from megatron_packed.distributed.flat_buffers import FlatBuffers as FlatBuffers
    from megatron_packed.distributed.groups import ParallelGroups as ParallelGroups
    from megatron_packed.distributed.hang_detection import DeviceHangError as DeviceHangError
    from megatron_packed.distributed.overlapped_collectives import (
        OverlappedGather as OverlappedGather,
    )
    from megatron_packed.distributed.overlapped_collectives import (
        OverlappedReduce as OverlappedReduce,
    )
    from megatron_packed.distributed.rng import RngState as RngState
    from megatron_packed.distributed.rng import seed_all as seed_all
    from megatron_packed.distributed.tensor_parallel_shards import Shard as Shard
    from megatron_packed.distributed.tensor_parallel_shards import (
        ShardedParameter as ShardedParameter,
    )
    from megatron_packed.distributed.tensor_parallel_shards import set_shard as set_shard
    from megatron_packed.distributed.tensor_parallel_shards import (
        sharded_parameters as sharded_parameters,
    )
    from megatron_packed.distributed.zero1_layout import FlatLayout as FlatLayout
else:
    __all__, __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "determinism": ["configure_determinism"],
            "failure_watch": ["FailureWatch"],
            "flat_buffers": ["FlatBuffers"],
            "zero1_layout": ["FlatLayout"],
            "groups": ["ParallelGroups"],
            "hang_detection": ["DeviceHangError"],
            "overlapped_collectives": ["OverlappedGather", "OverlappedReduce"],
            "rng": ["RngState", "seed_all"],
            "tensor_parallel_shards": [
                "Shard",
                "ShardedParameter",
                "set_shard",
                "sharded_parameters",
            ],
        },
    )
