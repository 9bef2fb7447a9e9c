"""All private names of torch that the package uses, each with the reason.

All names were checked with torch 2.11 and 2.13. If a later torch lacks a name, the call that needs it
raises a ``RuntimeError``. So runs that do not need this name still work. Functions that every step
calls are bound at import, so that a call has no extra cost.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import lru_cache
from importlib import import_module
from types import FunctionType
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor
from torch.distributed import distributed_c10d

F = TypeVar("F", bound=Callable[..., Any])
Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]
"""Pair of pack hook and unpack hook for ``torch.autograd.graph.saved_tensors_hooks``."""


def _cure(error: Exception) -> str:
    return (
        f"{error}: megatron_packed needs this name, and torch {torch.__version__} is installed. Install torch "
        "2.11 or 2.13, which were checked."
    )


def _bound(name: Callable[[], F]) -> F:
    """Return the torch function that ``name`` looks up.

    If torch lacks this function, return a function that raises a ``RuntimeError``.
    """
    try:
        return name()
    except AttributeError as error:
        message = _cure(error)

    def missing(*args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(message)

    return missing  # type: ignore[return-value]


# `TorchDispatchMode` sees each operation, also in the backward pass; the public modes of
# `torch.overrides` see calls from Python only.
# The others are for nested results of modules. torch has no public function that flattens nested
# containers; `torch.func` and `torch.export` use these functions. `TreeSpec` is a type, so this
# import must succeed.
try:
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
    from torch.utils._pytree import TreeSpec as TreeSpec
    from torch.utils._pytree import tree_flatten as tree_flatten
    from torch.utils._pytree import tree_leaves as tree_leaves
    from torch.utils._pytree import tree_unflatten as tree_unflatten
except ImportError as error:
    raise ImportError(_cure(error)) from error


# Operations on lists of tensors in few kernels. The public way is a loop with one kernel per tensor.
foreach_add_ = _bound(lambda: torch._foreach_add_)
"""Adds a list of tensors, or a number, to a list of tensors in place."""
foreach_copy_ = _bound(lambda: torch._foreach_copy_)
"""Copies the second list of tensors into the first."""
foreach_mul_ = _bound(lambda: torch._foreach_mul_)
"""Multiplies a list of tensors in place by a list of numbers."""
foreach_zero_ = _bound(lambda: torch._foreach_zero_)
"""Writes zeros into a list of tensors."""

fused_adamw_ = _bound(lambda: torch._fused_adamw_)
"""Kernel of ``torch.optim.AdamW(fused=True)``.

The public class allocates its own optimizer states, but the package stores them in flat buffers. The
public class also has no arguments ``grad_scale`` and ``found_inf``.
"""

grouped_mm = getattr(torch.nn.functional, "grouped_mm", None) or _bound(lambda: torch._grouped_mm)
"""``torch.nn.functional.grouped_mm``, or its private name in versions where it is not public."""


def storage_address(tensor: Tensor) -> int:
    """Return the address of a tensor's memory; on the meta device, that of its storage object.

    Storages without memory all have the address 0, so their objects distinguish them.
    """
    storage = tensor.untyped_storage()
    return storage.data_ptr() or int(storage._cdata)


current_graph_task_id = _bound(lambda: torch._C._current_graph_task_id)
"""Returns the number of the backward pass that runs on this thread; -1 outside a backward pass.

torch has no public function for this, except in hooks inside the backward pass.
"""

_top_hooks = _bound(lambda: torch._C._autograd._top_saved_tensors_default_hooks)


def saved_tensors_hooks_in_force() -> Hooks | None:
    """Return the current innermost hooks for saved tensors; None if there are none.

    The public ``torch.autograd.graph.saved_tensors_hooks`` sets hooks, but cannot return them.
    """
    hooks: Hooks | None = _top_hooks(True)
    return hooks


def end_allocate_to_pool(device_index: int, pool: tuple[int, int]) -> None:
    """Stop the allocator from recording allocations into a graph pool.

    The public ``CUDAGraph.capture_end`` does this too, but not after the capture was invalidated.
    """
    _bound(lambda: torch._C._cuda_endAllocateToPool)(device_index, pool)


def release_pool(device_index: int, pool: tuple[int, int]) -> None:
    """Drop one reference to a graph pool, whose memory is freed with the last reference.

    The public ``CUDAGraph.reset`` does this too, but not if the graph's capture was invalidated.
    """
    _bound(lambda: torch._C._cuda_releasePool)(device_index, pool)


def record_memory_history(max_entries: int) -> None:
    """Record allocations with their Python stacks, for pytorch.org/memory_viz.

    torch documents this function under its private name, and has no public name for it.
    """
    _bound(lambda: torch.cuda.memory._record_memory_history)(
        max_entries=max_entries, stacks="python"
    )


def dump_memory_snapshot(path: str) -> None:
    """Write the history that `record_memory_history` recorded to a file.

    torch documents this function under its private name, and has no public name for it.
    """
    _bound(lambda: torch.cuda.memory._dump_snapshot)(path)  # type: ignore[no-untyped-call]


def on_out_of_memory(observer: Callable[[int, int, int, int], None]) -> None:
    """Register ``observer(device, requested, total, free)`` for out-of-memory errors of a GPU.

    The observer runs before the allocator frees its cache. The public ``torch.cuda.OutOfMemoryError``
    is raised only afterwards.
    """
    attach = _bound(lambda: torch._C._cuda_attach_out_of_memory_observer)  # type: ignore[attr-defined]
    attach(observer)


def nccl_trace_json() -> str | bytes | None:
    """Return torch's flight recorder of NCCL as JSON; None if this torch has none.

    The public variable ``TORCH_NCCL_DUMP_ON_TIMEOUT`` writes the record only when NCCL times out, but
    a hang is reported earlier. The report also works without this record, so a missing name is not
    an error.
    """
    dump = getattr(torch._C._distributed_c10d, "_dump_nccl_trace_json", None)
    return None if dump is None else dump(True, True)


def default_store() -> distributed_c10d.Store:
    """Return the store that all ranks of ``init_process_group`` share.

    A second, public ``TCPStore`` would need another port, which launchers do not provide.
    """
    return _bound(lambda: distributed_c10d._get_default_store)()


def abort_process_group() -> None:
    """Abort the communicators of all groups, if torch has this function.

    Otherwise the driver cleans up when the process ends. The public ``destroy_process_group`` would
    wait for collectives with ranks that no longer run.
    """
    abort = getattr(distributed_c10d, "_abort_process_group", None)
    if abort is not None:
        abort()


def symmetric_memory() -> Any:
    """Return torch's module of symmetric memory, which registers the operations ``symm_mem``.

    torch documents ``torch.ops.symm_mem`` and this module under their private name.

    Raises:
        ImportError: this torch has no such module.
    """
    return import_module("torch.distributed._symmetric_memory")


def set_timeout(
    group: distributed_c10d.ProcessGroup, device: torch.device, timeout: timedelta
) -> None:
    """Set the timeout of a group's watchdog.

    The public way is an argument when the group is created, and then also sets the timeout of its
    collectives.
    """
    group._get_backend(device)._set_default_timeout(timeout)


def allow_recompilations(number: int) -> None:
    """Let ``torch.compile`` compile one function for at least this number of different inputs.

    The limit has no public name, and `torch.compile` with ``fullgraph`` fails above it.
    """
    config: Any = import_module("torch._dynamo.config")
    try:
        config.recompile_limit = max(config.recompile_limit, number)
    except AttributeError as error:
        raise RuntimeError(_cure(error)) from error


@contextmanager
def compiler_not_imported() -> Iterator[None]:
    """Let operations on the meta device run without an import of ``torch._dynamo``, which takes 0.8 s.

    torch computes shapes on the meta device in Python. It hides these functions from ``torch.compile``
    at their first call, for which it imports the compiler. Inside of the context they count as hidden
    already. Without these private names of torch the import happens.
    """
    functions = [] if "torch._dynamo" in sys.modules else _hidden_from_compiler()
    functions = [each for each in functions if not hasattr(each, _HIDDEN)]
    for function in functions:
        setattr(function, _HIDDEN, function)
    try:
        yield
    finally:
        for function in functions:
            delattr(function, _HIDDEN)


_HIDDEN = "__dynamo_disable"


@lru_cache(maxsize=1)
def _hidden_from_compiler() -> list[FunctionType]:
    """Return the functions that torch hides from ``torch.compile`` at their first call."""
    hide = getattr(torch, "_disable_dynamo", None)
    if hide is None:
        return []
    code = hide(lambda: None).__code__
    # No `isinstance`: it would ask objects that warn of their own deprecation for their class.
    wrappers = [
        each for each in gc.get_objects() if type(each) is FunctionType and each.__code__ is code
    ]
    cells = (dict(zip(code.co_freevars, each.__closure__ or ())) for each in wrappers)
    return [of_wrapper["fn"].cell_contents for of_wrapper in cells if "fn" in of_wrapper]
