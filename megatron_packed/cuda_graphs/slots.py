"""Slots (static memory from which captured kernels read a micro-batch), and checks of addresses.

A slot owns a buffer that is large enough for the largest capacity. A fill of the slot is the only
copy of a micro-batch to the device. ``cu_seqlens`` is the last tensor in the buffer, so that every
tensor has the same address for every capacity. All layers read the same memory. The next fill
overwrites the buffer. Each fill has a number, the generation. Reading metadata of an earlier
generation through the slot is an error.

A micro-batch is in flight between its forward and its backward pass. There must be as many slots as
micro-batches in flight at the same time. Training uses one slot.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_packed.packed.capture_sizes import CaptureSize
from megatron_packed.packed.host_reads import HOST_FACTS
from megatron_packed.packed.micro_batch import MicroBatch, MicroBatchLayout
from megatron_packed.packed.params import NO_TABLES, PackedSeqParams, SharedTables


class StaleMetadataError(RuntimeError):
    """Access to a micro-batch whose slot has since been filled with another micro-batch."""


class InFlightError(RuntimeError):
    """Call of a module with metadata and hidden states of two different micro-batches."""


class HostFactError(RuntimeError):
    """Access, during a capture, to a number on the host that differs from pack to pack.

    Args:
        name: name of the number.
        instead: class whose tensors a captured function must use instead.
    """

    def __init__(self, name: str, instead: str) -> None:
        super().__init__(
            f"{name} differs from pack to pack, and a CUDA graph would repeat its value at the capture; use the "
            f"tensors of {instead} instead."
        )


_IN_THE_SLOT = frozenset({"cu_seqlens", "seq_idx", "position_ids", "valid", "tables"})


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class SlotPackedSeqParams(PackedSeqParams):
    """Metadata of the micro-batch in a slot, valid until the slot is filled again.

    Raises:
        StaleMetadataError: a tensor is read after the slot was filled again.
    """

    slot: Slot
    capture_size: CaptureSize
    generation: int

    def __getattribute__(self, name: str) -> object:
        if name in _IN_THE_SLOT:
            object.__getattribute__(self, "check_current")(name)
        return object.__getattribute__(self, name)

    def check_current(self, name: str) -> None:
        """Check that the slot still holds this micro-batch.

        Args:
            name: name of the tensor that is read, for the message.
        Raises:
            StaleMetadataError: the slot holds another micro-batch.
        """
        # Read the fields without ``self.slot``, which would call `__getattribute__` again.
        slot = object.__getattribute__(self, "slot")
        generation = object.__getattribute__(self, "generation")
        if slot.generation != generation:
            raise StaleMetadataError(
                f"{name} of micro-batch {generation} was read after micro-batch {slot.generation} was copied to the "
                "same slot. Finish forward and backward of a micro-batch before its slot is filled again."
            )


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class StaticPackedSeqParams(PackedSeqParams):
    """Metadata with which a module is captured: the slot's tensors, without numbers of one pack.

    ``max_seqlen``, ``total_tokens`` and ``capacity`` belong to the capture size and are constant.

    Raises:
        HostFactError: a host number of one pack is read; a graph would repeat it for all packs.
    """

    def __getattribute__(self, name: str) -> object:
        if name in HOST_FACTS:
            raise HostFactError(name, "PackedSeqParams")
        return object.__getattribute__(self, name)


class Slot:
    """Static memory for one micro-batch in flight.

    Args:
        total_tokens: token slots T of every micro-batch.
        capacity: capacity in documents of the largest capture size.
        device: device of the buffer.
    """

    def __init__(self, total_tokens: int, capacity: int, device: torch.device | str) -> None:
        self.total_tokens = total_tokens
        self.capacity = capacity
        self.buffer = MicroBatchLayout(total_tokens, capacity).buffer.allocate().to(device)
        """``(num_bytes,)`` uint8; its address never changes."""
        self.generation = 0
        """Number of fills so far."""
        self.replayed_position = -1
        """Position, in the order of captures, of the last graph replayed for the current micro-batch;
        -1 if no graph was replayed.
        """
        self.final_position: int | None = None
        """Position of the backward graph that ends the micro-batch; None if no replay with gradients
        has run.
        """
        self.current: SlotPackedSeqParams | None = None
        """Metadata of the micro-batch in the slot; None if the slot is empty."""
        self._tables: dict[CaptureSize, SharedTables] = {}

    def bytes_of(self, size: CaptureSize) -> Tensor:
        """Return the first bytes of the buffer, which a micro-batch of ``size`` fills."""
        return self.buffer[: MicroBatchLayout(self.total_tokens, size.capacity).buffer.num_bytes]

    def static(self, size: CaptureSize) -> StaticPackedSeqParams:
        """Return the metadata at its fixed addresses, for a capture of ``size``.

        The metadata has shared tables only after `set_tables`.
        """
        views = MicroBatchLayout(self.total_tokens, size.capacity).buffer.views(self.bytes_of(size))
        return StaticPackedSeqParams(
            cu_seqlens=views["cu_seqlens"],
            max_seqlen=size.max_seqlen,
            seq_idx=views["seq_idx"],
            position_ids=views["position_ids"],
            valid=views["valid"],
            num_seqs=0,
            cu_seqlens_cpu=torch.empty(0, dtype=torch.int32),
            total_tokens=self.total_tokens,
            tables=self._tables.get(size, NO_TABLES),
        )

    def set_tables(self, size: CaptureSize, tables: SharedTables) -> None:
        """Set the tables for micro-batches of ``size``. The caller refreshes the tables at each
        fill.
        """
        self._tables[size] = tables

    def forget_tables(self) -> None:
        """Drop all tables. The tables are in memory of the graphs, which is about to be freed."""
        self._tables.clear()

    def fill(self, micro_batch: MicroBatch, size: CaptureSize) -> MicroBatch:
        """Copy ``micro_batch`` into the slot by one queued copy; return the micro-batch in the slot.

        Raises:
            ValueError: ``micro_batch`` was built for another number of tokens, or for another
                capacity, than ``size``.
        """
        layout = micro_batch.layout
        if (layout.total_tokens, layout.capacity) != (self.total_tokens, size.capacity):
            raise ValueError(
                f"a micro-batch of {layout.total_tokens} tokens and {layout.capacity} documents does not match the "
                f"slot's {self.total_tokens} tokens and the capture size's {size.capacity} documents; build the "
                "micro-batch for this size."
            )
        # With non_blocking the copy from pinned memory is only queued, and the host does not wait
        # for the copy.
        target = self.bytes_of(size)
        target.copy_(micro_batch.buffer, non_blocking=True)
        self.generation += 1
        self.replayed_position = -1
        self.final_position = None
        placed = micro_batch.with_buffer(target)
        packed = {
            field.name: getattr(placed.packed, field.name)
            for field in dataclasses.fields(PackedSeqParams)
        }
        # Kernels were captured with the max_seqlen of the size. Modules that run eagerly between
        # replayed ones must use the same value.
        packed["max_seqlen"] = size.max_seqlen
        packed["tables"] = self._tables.get(size, NO_TABLES)
        self.current = SlotPackedSeqParams(
            **packed, slot=self, capture_size=size, generation=self.generation
        )
        return dataclasses.replace(placed, packed=self.current)

    def vacate(self) -> None:
        """Empty the slot. Metadata that still refers to the slot becomes stale."""
        self.generation += 1
        self.current = None
        self.final_position = None

    def holds(self, packed: object) -> bool:
        """Return whether ``packed`` is the metadata of the micro-batch now in the slot."""
        return packed is not None and packed is self.current

    @property
    def in_flight(self) -> bool:
        """True if the micro-batch in the slot has not run yet, or its backward pass has not ended.

        The slot records only replays. Modules that run eagerly do not change this value.
        """
        not_begun = self.current is not None and self.replayed_position < 0
        return not_begun or (
            self.final_position is not None and self.replayed_position < self.final_position
        )


class SlotRing:
    """All slots of one model.

    [Note: micro-batch of a call]
    A call of a captured module is assigned to a micro-batch by the first rule that applies:

    1. The call has metadata as an argument: the micro-batch of this metadata.
    2. A captured module returned the hidden states: the micro-batch in the slot of the hidden states.
    3. Otherwise: the current micro-batch, which was placed last or was last selected by rule 1.

    Only rule 3 can select a wrong micro-batch. That happens if a second micro-batch is placed before
    the first has run, and the first captured module takes no metadata. The values that this module
    returns are still correct, because they depend only on the hidden states. But they are in the
    slot of the other micro-batch, and the next module that takes metadata raises an `InFlightError`.
    """

    def __init__(self, slots: Sequence[Slot]) -> None:
        self.slots = tuple(slots)
        self.under_way: SlotPackedSeqParams | None = None
        """Metadata of the current micro-batch; None while a micro-batch runs outside the slots."""
        self.returned: dict[int, Slot] = {}
        """Address of hidden states that a captured module returns -> slot; empty if there is only
        one slot.
        """
        self._oldest_first = list(slots)

    def choose(self, usable: Callable[[Slot], bool]) -> Slot:
        """Return the slot for the next micro-batch.

        The function selects the least recently filled slot without a micro-batch in flight. If all
        slots have a micro-batch in flight, it selects the least recently filled slot.

        Args:
            usable: returns True for slots that may be chosen.
        """
        candidates = [slot for slot in self._oldest_first if usable(slot)]
        return next((slot for slot in candidates if not slot.in_flight), candidates[0])

    def fill(self, slot: Slot, micro_batch: MicroBatch, size: CaptureSize) -> MicroBatch:
        """Fill ``slot`` as `Slot.fill` does, and make its micro-batch the current micro-batch."""
        placed = slot.fill(micro_batch, size)
        self.under_way = slot.current
        self._oldest_first.remove(slot)
        self._oldest_first.append(slot)
        return placed

    def leave(self) -> None:
        """Start a micro-batch outside the slots. Micro-batches in flight stay in their slots."""
        self.under_way = None

    def vacate(self) -> None:
        self.under_way = None
        for slot in self.slots:
            slot.vacate()

    def of_call(
        self, args: Sequence[object], options: Mapping[str, object]
    ) -> SlotPackedSeqParams | None:
        """Return the metadata of the micro-batch to which a call of a captured module belongs.

        None if the call belongs to a micro-batch outside the slots. See [Note: micro-batch of a call].

        Raises:
            InFlightError: the hidden states are in the slot of another micro-batch.
        """
        named = next(
            (value for value in (*args, *options.values()) if isinstance(value, PackedSeqParams)),
            None,
        )
        candidate = self.under_way if named is None else named
        self.under_way = next((slot.current for slot in self.slots if slot.holds(candidate)), None)
        # Only the address is compared, which the host has. Nothing is read from the device.
        hidden = args[0] if args and self.returned else None
        lies_in = self.returned.get(hidden.data_ptr()) if isinstance(hidden, Tensor) else None
        if lies_in is None:
            return self.under_way
        if named is None:
            return lies_in.current
        if self.under_way is not None and not lies_in.holds(self.under_way):
            raise InFlightError(
                f"a module was called with the metadata of micro-batch {self.under_way.generation} in slot "
                f"{self.slots.index(self.under_way.slot)} and with hidden states of another micro-batch in slot "
                f"{self.slots.index(lies_in)}. Pass hidden states of the same micro-batch; if the first module takes "
                "no metadata, place each micro-batch right before its forward pass."
            )
        return self.under_way


AttributePlace = tuple[Mapping[str, Any], str]
"""Mapping and key where a tensor is stored.

It is not the tensor itself, because ``module.to()`` replaces the tensor of a buffer.
"""


class AddressCheck:
    """Addresses of the tensors that graphs use, to detect a reallocation (``data_ptr`` changed).

    Args:
        places: mappings and keys of the tensors; a value may be None.
    """

    def __init__(self, places: Iterable[AttributePlace] = ()) -> None:
        self._places = list(places)
        self._addresses = self._now()

    @property
    def addresses_changed(self) -> bool:
        """True if the address of a tensor differs from the address when this object was made."""
        return self._addresses != self._now()

    def _now(self) -> list[int]:
        tensors = (place.get(name) for place, name in self._places)
        return [0 if tensor is None else tensor.data_ptr() for tensor in tensors]


@contextmanager
def values_restored(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Return a context that restores the values of ``tensors`` in place at its end."""
    saved_values = [
        (tensor, tensor.detach().clone())
        for tensor in {id(tensor): tensor for tensor in tensors}.values()
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, values in saved_values:
                tensor.copy_(values)


def capture_size_of(micro_batch: MicroBatch) -> CaptureSize:
    """Return the capture size for which a micro-batch was built."""
    return CaptureSize(micro_batch.layout.capacity, micro_batch.packed.max_seqlen)


def same_memory(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors have the same address, dtype, shape and strides."""
    return (
        a.data_ptr() == b.data_ptr()
        and a.dtype == b.dtype
        and a.shape == b.shape
        and a.stride() == b.stride()
    )


@torch.no_grad()
def bring(tensor: Tensor, static: Tensor) -> None:
    """Copy ``tensor`` to the static tensor that a graph reads, unless both are the same memory."""
    if not same_memory(tensor, static):
        static.copy_(tensor)
