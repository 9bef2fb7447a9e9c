"""Scopes around parts of a forward pass, at whose end the saved tensors are offloaded together.

[Note: saved tensors that travel]
Inside a scope autograd saves an `_OffloadedView` instead of each tensor: a shape and a position in a
storage. A storage that is saved several times, by views or by the next scope, is offloaded once. At
the end of the scope all its storages are passed to ``save`` as one group. When the backward pass
unpacks the first view of the group, the complete group is restored. Restored memory lives as long as
without scopes: until the last view that needs it is freed.
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
    span_of,
)
from megatron_packed.torch_private import (
    Hooks,
    current_graph_task_id,
    saved_tensors_hooks_in_force,
    storage_address,
)


class SavedTensorScopes:
    """Scopes of one layer.

    A group belongs to one layer, so that the backward pass of this layer restores it. See [Note:
    saved tensors that travel].

    Args:
        save: saves a group; see [Note: where inputs are saved].
        min_elements: autograd saves tensors with fewer elements as usual.
    """

    def __init__(self, save: SaveTensors, min_elements: int) -> None:
        self._save = save
        self.min_elements = min_elements
        self._known: dict[int, _KnownStorage] = {}

    def scope(self, owner: nn.Module) -> AbstractContextManager[None]:
        """Return a context for a part of a forward pass, which offloads the tensors saved inside.

        Without gradients, and in a recomputation, the context does nothing. In nested scopes the inner
        scope offloads the tensors that it supports, and the outer hooks get the others.

        Args:
            owner: module whose parameters and buffers stay on the device.
        """
        # The backward pass uses recomputed tensors at once, so offloading them would only cost time.
        if not torch.is_grad_enabled() or current_graph_task_id() != -1:
            return nullcontext()
        return self._scope(owner)

    @contextmanager
    def _scope(self, owner: nn.Module) -> Iterator[None]:
        # Autograd saves weights too. They stay on the device in any case, so offloading them would
        # free no memory.
        tensors = (*owner.parameters(), *owner.buffers())
        scope = _SavingScope(
            self, set(map(storage_address, tensors)), saved_tensors_hooks_in_force()
        )
        with saved_tensors_hooks(scope.pack, unpack):
            yield
        # Not in a `finally`: after an exception there is no backward pass.
        scope.end(self._save)

    def storage_of(self, tensor: Tensor, group: _ScopeGroup) -> _SavedStorage:
        """Return the record of a tensor's storage, an existing or a new one.

        A record of an earlier scope is used if it saved the same values and contains the complete
        tensor.
        """
        storage = tensor.untyped_storage()
        address = storage_address(tensor)
        entry = self._known.get(address)
        if entry is not None and not entry.alive.expired():  # type: ignore[no-untyped-call]
            existing = entry.record()
            if (
                existing is not None
                and existing.is_of(tensor)
                # The group of an earlier scope is already copied, so its range cannot be extended.
                and (existing.group is group or existing.covers(tensor))
            ):
                return existing
        record = _SavedStorage(tensor, group)
        # Both references are weak, because this table must not keep device memory alive.
        self._known[address] = _KnownStorage(
            StorageWeakRef(storage),  # type: ignore[no-untyped-call]
            weakref.ref(record),
        )
        return record

    def forget_released(self) -> None:
        """Remove the records of freed storages, if the table has more than 256 entries."""
        if len(self._known) > 256:
            self._known = {
                address: entry
                for address, entry in self._known.items()
                if entry.record() is not None
            }


class _KnownStorage(NamedTuple):
    alive: StorageWeakRef
    """Weak reference to the storage. After the storage is freed, another storage may
    have the same address.
    """
    record: Callable[[], _SavedStorage | None]


class _ScopeGroup:
    """Storages that one scope has saved together."""

    def __init__(self) -> None:
        self.saved: SavedTensors | None = None
        # Records in the order of ``saved``, which is the order of the list in `_SavingScope`. The
        # references are weak, because the views that autograd holds own the records. A freed record
        # needs no memory when the group is restored.
        self.records: list[weakref.ref[_SavedStorage]] = []

    def restore(self) -> None:
        """Restore the group, and give each record that still exists its tensor."""
        assert self.saved is not None, "the scope has not ended"
        for reference, tensor in zip(self.records, self.saved.restore(), strict=True):
            record = reference()
            if record is not None:
                record.restored = tensor
        self.saved = None


class _SavedStorage:
    """Range ``[begin, end)`` of the elements of one storage that contains all its saved tensors."""

    def __init__(self, tensor: Tensor, group: _ScopeGroup) -> None:
        self.dtype = tensor.dtype
        self.group = group
        self._version = tensor._version
        self.modified = False
        """True if the storage was written to in place before the scope ended."""
        self.begin, self.end = _range(tensor)
        self.source: Tensor | None = tensor.detach()
        """Tensor of this storage, with offsets from the storage's beginning; None after the scope."""
        self.restored: Tensor | None = None
        """Restored range, with offsets from ``begin``; None before the restore."""
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
        """Return the range and drop the reference; set ``modified`` if it was written to in place."""
        assert self.source is not None
        # An in-place write raises an error when autograd unpacks the tensor. Autograd also reports
        # a modified saved tensor only then.
        self.modified = self.source._version != self._version
        tensor = self.source.as_strided((self.end - self.begin,), (1,), self.begin)
        # From now on only the group keeps the device memory alive.
        self.source = None
        return tensor


class _OffloadedView(NamedTuple):
    """View that autograd saves instead of a tensor."""

    record: _SavedStorage
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


class _SavingScope:
    """One scope: one run of a part of the forward pass."""

    def __init__(self, scopes: SavedTensorScopes, excluded: set[int], outer: Hooks | None) -> None:
        self._scopes = scopes
        self._excluded = excluded
        self._outer = outer
        self._group = _ScopeGroup()
        # Strong references keep all records alive until the scope ends. `_ScopeGroup` matches its
        # weak references with the restored tensors by position, so the order of this list counts.
        self._records: list[_SavedStorage] = []

    def pack(self, tensor: Tensor) -> Tensor | _OffloadedView | OuterPacked:
        if (
            tensor.numel() < self._scopes.min_elements
            or not _plain(tensor)
            or storage_address(tensor) in self._excluded
        ):
            return pack_by_outer(tensor, self._outer)
        record = self._scopes.storage_of(tensor, self._group)
        if record.group is self._group:
            record.extend(tensor)
            if record not in self._records:
                self._records.append(record)
        return _OffloadedView(record, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def end(self, save: SaveTensors) -> None:
        # Only now are all saved views of a storage known, so each storage is offloaded once, with
        # the range of all its views.
        if self._records:
            self._group.saved = save([record.hand_over() for record in self._records])
        self._scopes.forget_released()


def unpack(saved: Tensor | _OffloadedView | OuterPacked) -> Tensor:
    """Return a saved tensor to autograd; restore its group first if necessary."""
    if isinstance(saved, Tensor):
        return saved
    if isinstance(saved, OuterPacked):
        return saved.unpack(saved.packed)
    record = saved.record
    if record.modified:
        raise RuntimeError(WRITTEN_TO)
    if record.source is not None:  # a backward pass inside the scope, before anything was offloaded
        return record.source.as_strided(saved.shape, saved.stride, saved.offset)
    if record.restored is None:
        record.group.restore()
    assert record.restored is not None
    # The offset of the view counts from the beginning of the original storage.
    begin = record.restored.storage_offset() - record.begin
    return record.restored.as_strided(saved.shape, saved.stride, begin + saved.offset)


def _plain(tensor: Tensor) -> bool:
    """Return True if the bytes of the storage are the tensor's values (no lazy conj or negation)."""
    return tensor.layout is torch.strided and not tensor.is_conj() and not tensor.is_neg()


def _range(tensor: Tensor) -> tuple[int, int]:
    """Return the tensor's range in its storage: first element, and last element plus one."""
    begin = int(tensor.storage_offset())
    return begin, begin + span_of(tensor)
