"""Process groups, collectives, flat gradient buffers, ZeRO-1 layout, and hang and failure reports.

Process groups: ``groups.py``, ``init_process_groups.py``. Collectives: ``collectives.py`` (without
autograd), ``differentiable.py`` (with autograd), ``all_to_all.py`` (exchanges that change the
layout). Data-parallel reduction and ZeRO-1: ``data_parallel_reduce.py``,
``overlapped_collectives.py``, ``zero1_layout.py``, ``flat_buffers.py``. Tensor parallelism:
``tensor_parallel_shards.py``, ``tensor_parallel_gradients.py``. Hangs and failures:
``hang_detection.py``, ``failure_watch.py``, ``last_operation.py``.
"""
