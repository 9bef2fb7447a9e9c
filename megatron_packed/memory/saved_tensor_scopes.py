"""Scopes whose saved tensors are offloaded together when a part of a forward pass ends.

[Note: saved tensors that travel]
Inside a scope autograd saves an `_OffloadedView` in the place of each tensor: a shape and a position
in a storage. Storages that are saved several times, by views or by the next scope, travel once.
When the scope ends, all storages found in it go to ``save`` as one group. The first view of the
group that the backward pass unpacks restores all of them. Memory lives as long as without scopes:
until the last view that needs it is gone.
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

from megatron_packed.memory.saved_tensors import (
    WRITTEN_TO,
    OuterPacked,
    SavedTensors,
    SaveTensors,
    pack_by_outer,
)
from megatron_packed.torch_private import Hooks, current_graph_task_id, saved_tensors_hooks_in_force


class SavedTensorScopes:
    """Scopes of one layer. A group belongs to one layer, so that its own backward pass restores it.

    See [Note: saved tensors that travel].

    Args:
        save: saves a group, see [Note: where inputs are saved].
        min_elements: tensors with fewer are saved by autograd as usual.
    """

    def __init__(self, save: SaveTensors, min_elements: int) -> None:
        self._save = save
        self.min_elements = min_elements
        self._known: dict[int, _KnownStorage] = {}

    def scope(self, owner: nn.Module) -> AbstractContextManager[None]:
        """Surround a part of a forward pass; parameters and buffers of ``owner`` stay in place.

        Without gradients, and while a backward pass recomputes something, it does nothing. An inner
        scope takes what it can; what it declines goes to the outer hooks.
        """
        # A recomputation's tensors are used at once; a trip to the host would only delay them.
        if not torch.is_grad_enabled() or current_graph_task_id() != -1:
            return nullcontext()
        return self._scope(owner)

    @contextmanager
    def _scope(self, owner: nn.Module) -> Iterator[None]:
        # Autograd saves weights as well. They live on the device anyway, so moving them frees
        # nothing.
        tensors = (*owner.parameters(), *owner.buffers())
        scope = _SavingScope(self, set(map(_address, tensors)), saved_tensors_hooks_in_force())
        with saved_tensors_hooks(scope.pack, unpack):
            yield
        # Not in a `finally`: after an exception there is no backward pass to save for.
        scope.end(self._save)

    def storage_of(self, tensor: Tensor, here: _ScopeGroup) -> _SavedStorage:
        """Return the record of a tensor's storage: one of this scope, or one of an earlier scope
        that saved the same values and covers all of the tensor.
        """
        storage = tensor.untyped_storage()
        known = self._known.get(storage.data_ptr())
        if known is not None and not known.alive.expired():  # type: ignore[no-untyped-call]
            found = known.record()
            if (
                found is not None
                and found.is_of(tensor)
                # An earlier group has been copied already and cannot grow.
                and (found.group is here or found.covers(tensor))
            ):
                return found
        record = _SavedStorage(tensor, here)
        # Both references are weak: this table must not keep device memory alive.
        self._known[storage.data_ptr()] = _KnownStorage(
            StorageWeakRef(storage),  # type: ignore[no-untyped-call]
            weakref.ref(record),
        )
        return record

    def forget_released(self) -> None:
        """Forget storages whose last view is gone, now and then."""
        if len(self._known) > 256:
            self._known = {
                address: known
                for address, known in self._known.items()
                if known.record() is not None
            }


class _KnownStorage(NamedTuple):
    alive: StorageWeakRef
    """Reference to the storage: once it is gone, its address may belong to another."""
    record: Callable[[], _SavedStorage | None]


class _ScopeGroup:
    """Storages that one scope has saved together."""

    def __init__(self) -> None:
        self.saved: SavedTensors | None = None
        # In the order in which the scope found them, like the strong list of `_SavingScope`, which
        # ``saved`` was made from. Weak: the views that autograd holds own the records. A record that is gone
        # needs no memory when the group is restored.
        self.records: list[weakref.ref[_SavedStorage]] = []

    def restore(self) -> None:
        """Restore the group, for all storages that are still wanted."""
        assert self.saved is not None, "the scope has not ended"
        for reference, tensor in zip(self.records, self.saved.restore(), strict=True):
            record = reference()
            if record is not None:
                record.restored = tensor
        self.saved = None


class _SavedStorage:
    """Elements ``[begin, end)`` of one storage: the range of everything that was saved of it."""

    def __init__(self, tensor: Tensor, group: _ScopeGroup) -> None:
        self.dtype = tensor.dtype
        self.group = group
        self._version = tensor._version
        self.modified = False
        """True if it was written to in place before the scope ended."""
        self.begin, self.end = _range(tensor)
        self.source: Tensor | None = tensor.detach()
        """Tensor that the storage was found by; its offsets count from the begin of the storage. None
        after the scope has ended.
        """
        self.restored: Tensor | None = None
        """The range in the backward pass; its offsets count from ``begin``."""
        group.records.append(weakref.ref(self))

    def is_of(self, tensor: Tensor) -> bool:
        return self.dtype == tensor.dtype and self._version == tensor._version

    def covers(self, tensor: Tensor) -> bool:
        begin, end = _range(tensor)
        return self.begin <= begin and end <= self.end

    def extend(self, tensor: Tensor) -> None:
        begin, end = _range(tensor)
        self.begin = min(self.begin, begin)
        self.end = max(self.end, end)

    def hand_over(self) -> Tensor:
        """Return the range and release it; note in ``modified`` if it was written to until now."""
        assert self.source is not None
        # The error is raised when the values are asked for, as autograd does for its own.
        self.modified = self.source._version != self._version
        tensor = self.source.as_strided((self.end - self.begin,), (1,), self.begin)
        # From here on the group alone decides how long the device memory lives.
        self.source = None
        return tensor


class _OffloadedView(NamedTuple):
    """View that autograd saves in the place of a tensor."""

    record: _SavedStorage
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


class _SavingScope:
    """One run of a part of the forward pass."""

    def __init__(self, scopes: SavedTensorScopes, excluded: set[int], outer: Hooks | None) -> None:
        self._scopes = scopes
        self._excluded = excluded
        self._outer = outer
        self._group = _ScopeGroup()
        # Strong until the scope ends, so that none goes before it is handed over: `_ScopeGroup`
        # pairs its weak references with the restored tensors by their order, which is this one.
        self._records: list[_SavedStorage] = []

    def pack(self, tensor: Tensor) -> Tensor | _OffloadedView | OuterPacked:
        if (
            tensor.numel() < self._scopes.min_elements
            or not _plain(tensor)
            or _address(tensor) in self._excluded
        ):
            return pack_by_outer(tensor, self._outer)
        record = self._scopes.storage_of(tensor, self._group)
        if record.group is self._group:
            record.extend(tensor)
            if record not in self._records:
                self._records.append(record)
        return _OffloadedView(record, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def end(self, save: SaveTensors) -> None:
        # Only now is every view of a storage known, so each storage travels once and whole.
        if self._records:
            self._group.saved = save([record.hand_over() for record in self._records])
        self._scopes.forget_released()


def unpack(saved: Tensor | _OffloadedView | OuterPacked) -> Tensor:
    """Return a saved tensor to autograd, restoring its group first."""
    if isinstance(saved, Tensor):
        return saved
    if isinstance(saved, OuterPacked):
        return saved.unpack(saved.packed)
    record = saved.record
    if record.modified:
        raise RuntimeError(WRITTEN_TO)
    if record.source is not None:  # a backward pass inside the scope: nothing was handed over yet
        return record.source.as_strided(saved.shape, saved.stride, saved.offset)
    if record.restored is None:
        record.group.restore()
    assert record.restored is not None
    # A view's offset counts from the begin of the old storage.
    begin = record.restored.storage_offset() - record.begin
    return record.restored.as_strided(saved.shape, saved.stride, begin + saved.offset)


def _plain(tensor: Tensor) -> bool:
    """Return True if the tensor's values are the bytes of its storage."""
    return tensor.layout is torch.strided and not tensor.is_conj() and not tensor.is_neg()


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _range(tensor: Tensor) -> tuple[int, int]:
    """Return the first element in the storage and the one after the last."""
    begin = int(tensor.storage_offset())
    return begin, begin + 1 + sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride())
    )
