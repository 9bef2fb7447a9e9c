"""Static memory: slots, from which captured kernels read a micro-batch, and checks of addresses.

A slot owns a buffer with room for the largest capacity. Filling it is the micro-batch's one copy to
the device. ``cu_seqlens`` lies last in the buffer, so that every tensor has the same address for
every capacity, and all layers read the same memory. The next fill overwrites it. Each fill has a
number, the generation: reading an earlier micro-batch through the slot is an error.

There are as many slots as micro-batches in flight, between whose forward and backward another
micro-batch may come: one in training.
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
from megatron_packed.packed.micro_batch import MicroBatch, MicroBatchLayout
from megatron_packed.packed.params import PackedSeqParams
from megatron_packed.packed.shared_tables import NO_TABLES, SharedTables


class StaleMetadataError(RuntimeError):
    """A micro-batch was read through a slot that meanwhile holds another one."""


class InFlightError(RuntimeError):
    """Two micro-batches in flight were mixed up."""


class HostFactError(RuntimeError):
    """A function asked, while it was captured, for a number that differs from pack to pack.

    Args:
        name: of the number.
        instead: what to use.
    """

    def __init__(self, name: str, instead: str) -> None:
        super().__init__(
            f"{name} is another value in every pack, and a CUDA graph would replay the one it was captured with; use "
            f"the tensors of {instead} instead."
        )


_IN_THE_SLOT = frozenset({"cu_seqlens", "seq_idx", "position_ids", "valid", "tables"})
_HOST_FACTS_OF_METADATA = frozenset({"num_seqs", "cu_seqlens_cpu"})


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class SlotPackedSeqParams(PackedSeqParams):
    """The documents of the micro-batch that lies in a slot, as long as it lies there.

    Raises:
        StaleMetadataError: when a tensor is read after the slot was filled again.
    """

    slot: Slot
    capture_size: CaptureSize
    generation: int

    def __getattribute__(self, name: str) -> object:
        if name in _IN_THE_SLOT:
            object.__getattribute__(self, "check_current")(name)
        return object.__getattribute__(self, name)

    def check_current(self, name: str) -> None:
        """
        Raises:
            StaleMetadataError: another micro-batch lies in the slot; ``name`` is what was to be
                read.
        """
        # Not by ``self.slot``: that would come back here through `__getattribute__`.
        slot = object.__getattribute__(self, "slot")
        generation = object.__getattribute__(self, "generation")
        if slot.generation != generation:
            raise StaleMetadataError(
                f"{name} of micro-batch {generation} was read when the slot already held micro-batch "
                f"{slot.generation}; a micro-batch in a slot must be done, forward and backward, before the next."
            )


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class StaticPackedSeqParams(PackedSeqParams):
    """Metadata that a module sees while it is captured: tensors of the slot, no fact of one pack.

    ``max_seqlen``, ``total_tokens`` and ``capacity`` are those of the capture size and constant.

    Raises:
        HostFactError: when a host fact of one pack is read; a graph would keep it for all packs.
    """

    def __getattribute__(self, name: str) -> object:
        if name in _HOST_FACTS_OF_METADATA:
            raise HostFactError(name, "PackedSeqParams")
        return object.__getattribute__(self, name)


class Slot:
    """Room for one micro-batch in flight.

    Args:
        total_tokens: token slots T of every micro-batch.
        capacity: documents of the largest capture size.
        device: where the buffer lives.
    """

    def __init__(self, total_tokens: int, capacity: int, device: torch.device | str) -> None:
        self.total_tokens = total_tokens
        self.capacity = capacity
        self.buffer = MicroBatchLayout(total_tokens, capacity).buffer.allocate().to(device)
        """``(num_bytes,)`` uint8, never moved."""
        self.generation = 0
        """Counts fills."""
        self.replayed_position = -1
        """Number of the last graph that was replayed over what lies in the slot, in the order of
        their capture.
        """
        self.final_position: int | None = None
        """That of the backward pass which will end the micro-batch; None where no gradients were
        asked for.
        """
        self.current: SlotPackedSeqParams | None = None
        """What lies in the slot; None while a micro-batch runs outside it."""
        self._tables: dict[CaptureSize, SharedTables] = {}

    def bytes_of(self, size: CaptureSize) -> Tensor:
        """Return the part of the buffer that a micro-batch of ``size`` fills."""
        return self.buffer[: MicroBatchLayout(self.total_tokens, size.capacity).buffer.num_bytes]

    def static(self, size: CaptureSize) -> StaticPackedSeqParams:
        """Return the metadata at its fixed addresses, for capture; without tables until they are set."""
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
        """Set the tables of micro-batches of ``size``; the caller refreshes them at each fill."""
        self._tables[size] = tables

    def forget_tables(self) -> None:
        """Give up all tables: they lie in memory of the graphs."""
        self._tables.clear()

    def fill(self, micro_batch: MicroBatch, size: CaptureSize) -> MicroBatch:
        """Copy ``micro_batch`` into the slot (one copy, queued) and return it as it lies there.

        Raises:
            ValueError: it was built for another number of tokens or documents than the capture
            size's.
        """
        layout = micro_batch.layout
        if (layout.total_tokens, layout.capacity) != (self.total_tokens, size.capacity):
            raise ValueError(
                f"a micro-batch of {layout.total_tokens} tokens with room for {layout.capacity} documents does not lie "
                f"in a slot of {self.total_tokens} tokens as one for {size.capacity} documents; build it for that size."
            )
        # non_blocking: from pinned memory the copy is queued, and the host goes on.
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
        # Kernels were captured with the bound of the size, so eager neighbours get the same one.
        packed["max_seqlen"] = size.max_seqlen
        packed["tables"] = self._tables.get(size, NO_TABLES)
        self.current = SlotPackedSeqParams(
            **packed, slot=self, capture_size=size, generation=self.generation
        )
        return dataclasses.replace(placed, packed=self.current)

    def vacate(self) -> None:
        """Empty the slot; metadata that still refers to it is stale from here on."""
        self.generation += 1
        self.current = None
        self.final_position = None

    def holds(self, packed: object) -> bool:
        """Return whether ``packed`` is the micro-batch that lies in the slot now."""
        return packed is not None and packed is self.current

    @property
    def in_flight(self) -> bool:
        """True if the micro-batch in the slot has not run yet or awaits its backward pass.

        Only replays count: passes that run eagerly leave no trace here.
        """
        not_begun = self.current is not None and self.replayed_position < 0
        return not_begun or (
            self.final_position is not None and self.replayed_position < self.final_position
        )


class SlotRing:
    """All slots of one model.

    [Note: whose call it is]
    A call of a captured module belongs to the micro-batch

    1. whose metadata it is given;
    2. without metadata: in whose slot the hidden states lie, where a captured module has returned
      them;
    3. else to the one under way: the one that was placed last, or named last by 1.

    Only 3 can be mistaken: where a second micro-batch is placed before the first has run, and the
    first module to be captured takes no metadata. What it returns is right even so, as it depends
    on the hidden states alone, but it lies in the slot of the other micro-batch; the next module
    that takes metadata finds that out.
    """

    def __init__(self, slots: Sequence[Slot]) -> None:
        self.slots = tuple(slots)
        self.under_way: SlotPackedSeqParams | None = None
        """None while a micro-batch runs outside the slots."""
        self.returned: dict[int, Slot] = {}
        """Address of hidden states that captured modules return -> their slot; empty for one slot."""
        self._oldest_first = list(slots)

    def choose(self, usable: Callable[[Slot], bool]) -> Slot:
        """Return the slot for the next micro-batch: the least recently filled one of those without a
        micro-batch in flight, or of all if there is none.
        """
        candidates = [slot for slot in self._oldest_first if usable(slot)]
        return next((slot for slot in candidates if not slot.in_flight), candidates[0])

    def fill(self, slot: Slot, micro_batch: MicroBatch, size: CaptureSize) -> MicroBatch:
        """Fill ``slot`` as `Slot.fill` does, and make its micro-batch the one under way."""
        placed = slot.fill(micro_batch, size)
        self.under_way = slot.current
        self._oldest_first.remove(slot)
        self._oldest_first.append(slot)
        return placed

    def leave(self) -> None:
        """Let a micro-batch run outside the slots, until the next fill; those in flight stay."""
        self.under_way = None

    def vacate(self) -> None:
        """Empty all slots."""
        self.under_way = None
        for slot in self.slots:
            slot.vacate()

    def of_call(
        self, args: Sequence[object], options: Mapping[str, object]
    ) -> SlotPackedSeqParams | None:
        """Return the micro-batch in the slot to which a call of a captured module belongs.

        None if the call belongs to a micro-batch outside the slots.

        Reads: [Note: whose call it is].
        Raises:
            InFlightError: the hidden states lie in the slot of another micro-batch.
        """
        named = next(
            (value for value in (*args, *options.values()) if isinstance(value, PackedSeqParams)),
            None,
        )
        candidate = self.under_way if named is None else named
        self.under_way = next((slot.current for slot in self.slots if slot.holds(candidate)), None)
        # An address on the host is enough: nothing is read from the device.
        hidden = args[0] if args and self.returned else None
        lies_in = self.returned.get(hidden.data_ptr()) if isinstance(hidden, Tensor) else None
        if lies_in is None:
            return self.under_way
        if named is None:
            return lies_in.current
        if self.under_way is not None and not lies_in.holds(self.under_way):
            raise InFlightError(
                f"a module was given the metadata of micro-batch {self.under_way.generation} in slot "
                f"{self.slots.index(self.under_way.slot)} and hidden states that lie in slot "
                f"{self.slots.index(lies_in)}, which is another micro-batch's. Pass it what the module before it "
                "returned for the same micro-batch; where the first module takes no metadata, place each micro-batch "
                "right before its forward pass."
            )
        return self.under_way


Place = tuple[Mapping[str, Any], str]
"""A mapping and a name in it, not the tensor: ``module.to()`` replaces a buffer's tensor."""


class AddressCheck:
    """Addresses of the tensors that graphs use, to detect a reallocation (``data_ptr`` changed).

    Args:
        places: each holds a tensor or None.
    """

    def __init__(self, places: Iterable[Place] = ()) -> None:
        self._places = list(places)
        self._addresses = self._now()

    @property
    def addresses_changed(self) -> bool:
        """True if a tensor lies elsewhere than when this object was made."""
        return self._addresses != self._now()

    def _now(self) -> list[int]:
        tensors = (place.get(name) for place, name in self._places)
        return [0 if tensor is None else tensor.data_ptr() for tensor in tensors]


@contextmanager
def values_restored(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Put the values of ``tensors`` back at the end, at the same addresses."""
    before = [
        (tensor, tensor.detach().clone())
        for tensor in {id(tensor): tensor for tensor in tensors}.values()
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, values in before:
                tensor.copy_(values)


def capture_size_of(micro_batch: MicroBatch) -> CaptureSize:
    """Return the size that a micro-batch was built in."""
    return CaptureSize(micro_batch.layout.capacity, micro_batch.packed.max_seqlen)


def same_memory(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors are the same elements at the same addresses."""
    return (
        a.data_ptr() == b.data_ptr()
        and a.dtype == b.dtype
        and a.shape == b.shape
        and a.stride() == b.stride()
    )


@torch.no_grad()
def bring(tensor: Tensor, static: Tensor) -> None:
    """Copy a tensor to where a graph reads it, unless it already lies there."""
    if not same_memory(tensor, static):
        static.copy_(tensor)
