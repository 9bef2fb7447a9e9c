"""Detection, on a CPU, of host reads in a module: they would make a GPU wait, and no CUDA graph could
repeat them.

On a CPU every tensor is in host memory, so nothing waits and no error occurs. The functions of torch
that a module calls show its reads nevertheless.
"""

from __future__ import annotations

import dataclasses
import inspect
import linecache
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from megatron_packed.packed.params import PackedSeqParams

_READS = {
    "item": ".item()",
    "tolist": ".tolist()",
    "numpy": ".numpy()",
    "cpu": ".cpu()",
    "__array__": "NumPy",
    "__float__": "float()",
    "__int__": "int()",
    "__index__": "an index or a range",
    "__complex__": "complex()",
    "__bool__": "bool(), if or while",
    "__contains__": "in",
    "__format__": "print() or a text",
    "__repr__": "print() or a text",
    "is_nonzero": "is_nonzero()",
    "equal": "equal()",
    "allclose": "allclose()",
}
"""Function of torch that reads the values of its first tensor, and how it looks in source code."""
_SHAPED_BY_VALUES = {
    "nonzero",
    "argwhere",
    "masked_select",
    "unique",
    "unique_consecutive",
    "bincount",
}
"""Functions whose results have a number of elements that depends on values of the device."""
_FACTORIES = {"arange", "empty", "full", "ones", "rand", "randn", "tensor", "zeros"}
"""Functions that read a tensor among their sizes or values."""
HOST_FACTS = frozenset({"num_seqs", "cu_seqlens_cpu"})
"""Attributes of `PackedSeqParams` that are on the host and differ from pack to pack."""
_OWN_FILES = str(Path(__file__).parents[1])
_BETWEEN = (__file__, inspect.getfile(PackedSeqParams), str(Path(torch.__file__).parent))
"""Beginnings of file names between a read and the code of the read."""


class HostRead(NamedTuple):
    """Place in source code that reads a value of the device, or a host value of one pack."""

    what: str
    file: str
    line: int

    def __str__(self) -> str:
        source = linecache.getline(self.file, self.line).strip()
        return f"{self.what} in {self.file}:{self.line}{f' ({source})' if source else ''}"


def host_reads(
    function: Callable[..., Any], args: tuple[Any, ...], options: Mapping[str, Any]
) -> tuple[Any, list[HostRead]]:
    """Call a function on a CPU; return its result and its host reads, each place once.

    Reads by this package are left out: its plain PyTorch kernels read lengths on a CPU, and a GPU
    has other kernels.

    Args:
        function: forward of a module.
        args, options: its arguments. Metadata is replaced by a copy that notes reads of host values.
    """
    reads: dict[HostRead, None] = {}

    def note(what: str) -> None:
        place = _caller()
        if place is not None:
            reads[HostRead(what, *place)] = None

    watch = _Watch(note)
    watched = [watch.metadata(value) for value in args]
    watched_options = {name: watch.metadata(value) for name, value in options.items()}
    with watch:
        result = function(*watched, **watched_options)
    return result, list(reads)


class _Watch(TorchFunctionMode):
    """Watch over calls of torch that reports host reads by name.

    Tensors that were made on the host stay host tensors, and reading them costs a GPU nothing.

    Args:
        note: called with the source-code form of each read.
    """

    def __init__(self, note: Callable[[str], None]) -> None:
        super().__init__()
        self._note = note
        self._on_host: dict[int, Tensor] = {}
        """Address of a storage -> tensor that keeps it allocated, for tensors made on the host."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = list(_tensors((args, kwargs)))
        name = getattr(func, "__name__", "")
        on_device = [tensor for tensor in tensors if _storage(tensor) not in self._on_host]
        what = _read(name, args, kwargs) if on_device else None
        if what is not None:
            self._note(what)
        result = func(*args, **kwargs)
        leaves_device = name == "cpu" or (name == "to" and what is not None)
        if leaves_device or (not on_device and (tensors or kwargs.get("device") is None)):
            for tensor in _tensors(result):
                self._on_host[_storage(tensor)] = tensor
        return result

    def metadata(self, value: Any) -> Any:
        """Return metadata as a copy that notes reads of its host values; other values unchanged."""
        if not isinstance(value, PackedSeqParams):
            return value
        fields = {
            field.name: getattr(value, field.name) for field in dataclasses.fields(PackedSeqParams)
        }
        self._on_host[_storage(value.cu_seqlens_cpu)] = value.cu_seqlens_cpu
        return _WatchedPackedSeqParams(**fields, note=self._note)


def _read(name: str, args: Any, kwargs: Mapping[str, Any]) -> str | None:
    """Return how a host read by a function of torch looks in source code; None if it reads nothing."""
    if name in _READS:
        return _READS[name]
    arguments = [value for value in args if value is not None]
    reads = {
        "to": "cpu"
        in (*(value for value in arguments if isinstance(value, str)), kwargs.get("device")),
        "where": len(arguments) + len(kwargs) == 1,
        "repeat_interleave": any(
            isinstance(value, Tensor) for value in (*arguments[1:], kwargs.get("repeats"))
        )
        and kwargs.get("output_size") is None,
        "one_hot": len(arguments) == 1 and kwargs.get("num_classes", -1) == -1,
        "__getitem__": len(arguments) > 1 and any(map(_selects_by_value, _indices(arguments[1]))),
        "__setitem__": len(arguments) > 2 and _writes_by_value(arguments[1], arguments[2]),
    }
    if reads.get(name, name in _SHAPED_BY_VALUES or name in _FACTORIES):
        return {
            "to": '.to("cpu")',
            "__getitem__": "an index by values",
            "__setitem__": "an index by values",
            "repeat_interleave": "repeat_interleave() without output_size",
        }.get(name, f"{name}()")
    return None


def _indices(index: Any) -> tuple[Any, ...]:
    return index if isinstance(index, tuple) else (index,)


def _selects_by_value(index: Any) -> bool:
    """Return whether a part of an index needs values of a tensor: a mask, a number or a border."""
    if isinstance(index, slice):
        return any(isinstance(end, Tensor) for end in (index.start, index.stop, index.step))
    if not isinstance(index, Tensor):
        return False
    return index.dtype in (torch.bool, torch.uint8) or index.dim() == 0


def _writes_by_value(index: Any, value: Any) -> bool:
    """Return whether an assignment needs values of its index; a mask does not for a single value."""
    single = not isinstance(value, Tensor) or value.numel() == 1
    masks = [part for part in _indices(index) if isinstance(part, Tensor)]
    filled = single and len(masks) == 1 and masks[0].dtype == torch.bool and masks[0].dim() > 0
    return not filled and any(map(_selects_by_value, _indices(index)))


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested sequences and mappings."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class _WatchedPackedSeqParams(PackedSeqParams):
    """Metadata that notes each read of a host value of one pack."""

    note: Callable[[str], None]

    def __getattribute__(self, name: str) -> object:
        if name in HOST_FACTS:
            object.__getattribute__(self, "note")(name)
        return object.__getattribute__(self, name)


def _caller() -> tuple[str, int] | None:
    """Return file and line of the code that reads a value; None if it belongs to this package."""
    frame = inspect.currentframe()
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(_BETWEEN):
            return None if file.startswith(_OWN_FILES) else (file, frame.f_lineno)
        frame = frame.f_back
    return None
