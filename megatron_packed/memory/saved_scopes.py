"""What a part of a forward pass saves for its backward pass, put away together when the part is
done.

[Note: saved tensors that travel]
Inside a scope autograd saves places in the stead of tensors. A place knows its tensor's shape and
where it lies in a storage; storages that are saved several times, by views or by the next scope,
travel once. When the scope ends, all that was found in it goes to ``keep`` as one bundle; the first
place of the bundle that the backward pass looks into takes all of it back. Memory goes as it would
without scopes: with the last place that needs it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_packed.memory.recompute import (
    WRITTEN_TO,
    Keep,
    Kept,
    SavedAround,
)
from megatron_packed.torch_private import Hooks, current_graph_task_id, saved_tensors_hooks_in_force


class SavedScopes:
    """Scopes whose saved tensors travel. One for each layer: what it puts away is asked for by its
    own backward pass.

    Args:
        keep: where they are put, see [Note: where inputs are kept].
        min_elements: tensors with fewer are saved as ever.
    """

    def __init__(self, keep: Keep, min_elements: int) -> None:
        self._keep, self.min_elements = keep, min_elements
        self._known: dict[int, _Known] = {}

    def scope(self, owner: nn.Module) -> AbstractContextManager[None]:
        """Around a part of a forward pass; parameters and buffers of ``owner`` stay where they are.

        Without gradients, and where the backward pass computes something again, it does nothing.
        Scopes do not nest: what an inner one is around belongs to it alone.
        """
        if not torch.is_grad_enabled() or current_graph_task_id() != -1:
            return nullcontext()
        return self._scope(owner)

    @contextmanager
    def _scope(self, owner: nn.Module) -> Iterator[None]:
        tensors = (*owner.parameters(), *owner.buffers())
        scope = _Scope(self, set(map(_address, tensors)), saved_tensors_hooks_in_force())
        with saved_tensors_hooks(scope.save, look_up):
            yield
        scope.put_away(self._keep)

    def storage_of(self, tensor: Tensor, here: _Bundle) -> _Storage:
        """The record of a tensor's storage: of this scope, or of an earlier one that has put away
        all of the tensor; of the same values, which nobody has written over since.
        """
        storage = tensor.untyped_storage()
        known = self._known.get(storage.data_ptr())
        if known is not None and not known.alive.expired():  # type: ignore[no-untyped-call]
            found = known.record()
            if (
                found is not None
                and found.is_of(tensor)
                and (found.bundle is here or found.covers(tensor))
            ):
                return found
        record = _Storage(tensor, here)
        self._known[storage.data_ptr()] = _Known(StorageWeakRef(storage), weakref.ref(record))  # type: ignore[no-untyped-call]
        return record

    def tidy(self) -> None:
        """Forget storages that are gone."""
        if len(self._known) > 256:
            self._known = {
                address: known
                for address, known in self._known.items()
                if known.record() is not None
            }


class _Known(NamedTuple):
    alive: StorageWeakRef
    """Of the storage: once it is gone, its address may be another's."""
    record: Callable[[], _Storage | None]


class _Bundle:
    """What one scope has put away."""

    def __init__(self) -> None:
        self.kept: Kept | None = None
        self.records: list[weakref.ref[_Storage]] = []

    def fill(self) -> None:
        """Take it back, for all storages that are still wanted."""
        assert self.kept is not None, "the scope has not ended"
        for reference, tensor in zip(self.records, self.kept.take(), strict=True):
            record = reference()
            if record is not None:
                record.memory = tensor
        self.kept = None


class _Storage:
    """A range of one storage: elements ``[begin, end)`` of it, everything that was saved of it."""

    def __init__(self, tensor: Tensor, bundle: _Bundle) -> None:
        self.dtype, self.bundle, self._version = tensor.dtype, bundle, tensor._version
        self.spoiled = False
        """Whether somebody wrote to it before it was put away."""
        self.begin, self.end = _range(tensor)
        self.memory: Tensor | None = tensor.detach()
        """The tensor that it was found by, until the scope ends; then the range, when it is back."""
        bundle.records.append(weakref.ref(self))

    def is_of(self, tensor: Tensor) -> bool:
        return self.dtype == tensor.dtype and self._version == tensor._version

    def covers(self, tensor: Tensor) -> bool:
        begin, end = _range(tensor)
        return self.begin <= begin and end <= self.end

    def extend(self, tensor: Tensor) -> None:
        begin, end = _range(tensor)
        self.begin, self.end = min(self.begin, begin), max(self.end, end)

    def leave(self) -> Tensor:
        """The range, which it holds no longer."""
        assert self.memory is not None
        self.spoiled = (
            self.memory._version != self._version
        )  # told to who asks for it, as autograd does
        tensor, self.memory = (
            self.memory.as_strided((self.end - self.begin,), (1,), self.begin),
            None,
        )
        return tensor


class _Place(NamedTuple):
    """What autograd saves in the stead of a tensor."""

    record: _Storage
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


class _Scope:
    """One run of a part."""

    def __init__(self, scopes: SavedScopes, apart: set[int], around: Hooks | None) -> None:
        self._scopes, self._apart, self._around = scopes, apart, around
        self._bundle = _Bundle()
        self._records: list[_Storage] = []

    def save(self, tensor: Tensor) -> Tensor | _Place | SavedAround:
        if (
            tensor.numel() < self._scopes.min_elements
            or not _plain(tensor)
            or _address(tensor) in self._apart
        ):
            return (
                tensor
                if self._around is None
                else SavedAround(self._around[1], self._around[0](tensor))
            )
        record = self._scopes.storage_of(tensor, self._bundle)
        if record.bundle is self._bundle:
            record.extend(tensor)
            if record not in self._records:
                self._records.append(record)
        return _Place(record, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def put_away(self, keep: Keep) -> None:
        if self._records:
            self._bundle.kept = keep([record.leave() for record in self._records])
        self._scopes.tidy()


def look_up(saved: Tensor | _Place | SavedAround) -> Tensor:
    """What was saved, where autograd wants it."""
    if isinstance(saved, Tensor):
        return saved
    if isinstance(saved, SavedAround):
        return saved.unpack(saved.packed)
    record = saved.record
    if record.spoiled:
        raise RuntimeError(WRITTEN_TO)
    if record.memory is None:
        record.bundle.fill()
    assert record.memory is not None
    begin = record.memory.storage_offset() - record.begin
    return record.memory.as_strided(saved.shape, saved.stride, begin + saved.offset)


def _plain(tensor: Tensor) -> bool:
    """Whether its values are the bytes of its storage."""
    return tensor.layout is torch.strided and not tensor.is_conj() and not tensor.is_neg()


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _range(tensor: Tensor) -> tuple[int, int]:
    """First and last element in its storage, the last one excluded."""
    begin = int(tensor.storage_offset())
    return begin, begin + 1 + sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride())
    )
