"""Every private name of torch that the package calls, each with why no public one serves.

All were checked with torch 2.11 and 2.13. A name that a later torch lacks raises a
``RuntimeError`` in the call that needs it, so that runs which do not need it still start. What the
step calls often is bound when this module is imported and costs no further call.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor
from torch.distributed import distributed_c10d

F = TypeVar("F", bound=Callable[..., Any])
Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]
"""A pair for ``torch.autograd.graph.saved_tensors_hooks``: pack and unpack."""


def _cure(error: Exception) -> str:
    return (
        f"{error}: megatron_packed calls it; torch {torch.__version__} is installed, and torch "
        "2.11 and 2.13 were checked: install one of them."
    )


def _bound(name: Callable[[], F]) -> F:
    """Return the function that ``name`` refers to; where torch lacks it, one that says so."""
    try:
        return name()
    except AttributeError as error:
        message = _cure(error)

    def missing(*args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(message)

    return missing  # type: ignore[return-value]


# Nested results of modules. torch has no public flattening of nested containers; `torch.func` and
# `torch.export` use these. `TreeSpec` is a type, so the import itself has to succeed.
try:
    from torch.utils._pytree import TreeSpec as TreeSpec
    from torch.utils._pytree import tree_flatten as tree_flatten
    from torch.utils._pytree import tree_leaves as tree_leaves
    from torch.utils._pytree import tree_unflatten as tree_unflatten
except ImportError as error:
    raise ImportError(_cure(error)) from error


# Lists of tensors in few kernels. The public way is a loop with one kernel for each tensor.
foreach_add_ = _bound(lambda: torch._foreach_add_)
"""Add a list of tensors, or a number, to a list of tensors in place."""
foreach_copy_ = _bound(lambda: torch._foreach_copy_)
"""Copy the second list of tensors into the first."""
foreach_mul_ = _bound(lambda: torch._foreach_mul_)
"""Multiply a list of tensors in place by a list of numbers."""
foreach_zero_ = _bound(lambda: torch._foreach_zero_)
"""Write zeros into a list of tensors."""

fused_adamw_ = _bound(lambda: torch._fused_adamw_)
"""The kernel of ``torch.optim.AdamW(fused=True)``. The public class owns its states, which lie in
our flat buffers, and has no arguments for ``grad_scale`` and ``found_inf``.
"""

grouped_mm = getattr(torch.nn.functional, "grouped_mm", None) or _bound(lambda: torch._grouped_mm)
"""``torch.nn.functional.grouped_mm``, under its private name where it is not public yet."""

current_graph_task_id = _bound(lambda: torch._C._current_graph_task_id)
"""Return the number of the backward pass that runs on this thread, -1 outside of one. Publicly
only hooks inside the backward pass know of it.
"""

_top_hooks = _bound(lambda: torch._C._autograd._top_saved_tensors_default_hooks)


def saved_tensors_hooks_in_force() -> Hooks | None:
    """Return the innermost hooks for saved tensors, which hooks of an inner scope would replace.

    ``torch.autograd.graph.saved_tensors_hooks`` sets hooks and returns none that are set.
    """
    hooks: Hooks | None = _top_hooks(True)
    return hooks


def end_allocate_to_pool(device_index: int, pool: tuple[int, int]) -> None:
    """Let the allocator record no more allocations into a graph pool.

    ``CUDAGraph.capture_end`` does it, but not when the capture was invalidated.
    """
    _bound(lambda: torch._C._cuda_endAllocateToPool)(device_index, pool)


def release_pool(device_index: int, pool: tuple[int, int]) -> None:
    """Drop one reference to a graph pool; its memory is free when the last is gone.

    ``CUDAGraph.reset`` does it, but not for a graph whose capture was invalidated.
    """
    _bound(lambda: torch._C._cuda_releasePool)(device_index, pool)


def record_memory_history(max_entries: int) -> None:
    """Record allocations with their Python stacks, for pytorch.org/memory_viz.

    torch documents this function and has no public name for it.
    """
    _bound(lambda: torch.cuda.memory._record_memory_history)(
        max_entries=max_entries, stacks="python"
    )


def dump_memory_snapshot(path: str) -> None:
    """Write what `record_memory_history` recorded; torch documents it under this name alone."""
    _bound(lambda: torch.cuda.memory._dump_snapshot)(path)  # type: ignore[no-untyped-call]


def on_out_of_memory(observer: Callable[[int, int, int, int], None]) -> None:
    """Call ``observer(device, wanted, total, free)`` when the allocator of a GPU runs out.

    The public ``torch.cuda.OutOfMemoryError`` arrives after the allocator freed its cache.
    """
    attach = _bound(lambda: torch._C._cuda_attach_out_of_memory_observer)  # type: ignore[attr-defined]
    attach(observer)


def nccl_trace_json() -> str | bytes | None:
    """Return torch's flight recorder of NCCL as JSON; None if this torch has none.

    ``TORCH_NCCL_DUMP_ON_TIMEOUT`` is the public way, and writes when NCCL times out. A hang is
    reported earlier and goes on without this record, so a missing name is no error.
    """
    dump = getattr(torch._C._distributed_c10d, "_dump_nccl_trace_json", None)
    return None if dump is None else dump(True, True)


def default_store() -> distributed_c10d.Store:
    """Return the store that all ranks of ``init_process_group`` share.

    A second public ``TCPStore`` needs a port that launchers do not hand out.
    """
    return _bound(lambda: distributed_c10d._get_default_store)()


def abort_process_group() -> None:
    """Abort the communicators of all groups; without this name in torch, leave them to the driver.

    ``destroy_process_group`` is the public way, and waits for collectives of ranks that are gone.
    """
    abort = getattr(distributed_c10d, "_abort_process_group", None)
    if abort is not None:
        abort()


def set_timeout(
    group: distributed_c10d.ProcessGroup, device: torch.device, timeout: timedelta
) -> None:
    """Set the timeout of a group's watchdog; publicly it is an argument of the group's creation, and
    the same as that of its collectives.
    """
    group._get_backend(device)._set_default_timeout(timeout)
