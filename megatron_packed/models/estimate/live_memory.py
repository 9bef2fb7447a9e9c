# mypy: disable-error-code="no-untyped-call"
"""Live bytes of the tensors that operations allocate on the meta device, and their peak."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, UntypedStorage

from megatron_packed.memory_purpose import Purpose, op_now, purpose_now
from megatron_packed.models.estimate.meta_results import new_results
from megatron_packed.models.estimate.traced_work import TracedWork
from megatron_packed.torch_private import TorchDispatchMode, current_graph_task_id

Amounts = Mapping[Purpose, int]


class RunningPart(NamedTuple):
    """Part of the model that runs."""

    name: str
    pool: str = ""
    """Name of the pool of memory from which it allocates."""


@dataclass(frozen=True, kw_only=True)
class Peak:
    """Moment of a micro-batch with the largest memory."""

    where: str
    amounts: Amounts
    op: str = ""
    """Op whose kernels need this memory; empty if there is none."""

    @property
    def bytes(self) -> int:
        return sum(self.amounts.values())


class _Storage:
    """Live bytes of one storage."""

    def __init__(self, num_bytes: int, purpose: Purpose, pool: str) -> None:
        self.bytes = num_bytes
        self.purpose = purpose
        self.pool = pool


class LiveMemory(TorchDispatchMode):
    """Mode that counts the bytes of live storages by purpose and pool.

    A storage is counted from its allocation until its last tensor is freed, as in torch's allocator,
    but without rounding. ``place`` says what runs.

    Args:
        ignored: tensors whose memory is not counted.
    """

    def __init__(self, ignored: Iterable[Tensor]) -> None:
        super().__init__()
        self.work = TracedWork()
        """Counter of the kernels that run."""
        self.place = RunningPart("")
        self._live: dict[int, _Storage | None] = {}
        self._references: dict[int, weakref.ref[UntypedStorage]] = {}
        self._received: list[_Storage] = []
        self._amounts: dict[str, Counter[Purpose]] = {}
        self._bytes: Counter[str] = Counter()
        self._peaks: dict[str, Peak] = {}
        self._most: Counter[str] = Counter()
        self._ignored = [tensor.untyped_storage() for tensor in ignored]
        for storage in self._ignored:
            self._live[storage._cdata] = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # True would import the compiler, which takes a second and is not used here.
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> object:
        result = new_results(func, args, kwargs or {})
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor):
                self._see(tensor.untyped_storage())
        self.work.note(func, args, result)
        return result

    def peak(self, pool: str = "") -> Peak:
        return self._peaks.get(pool, Peak(where="", amounts={}))

    def amounts(self, pool: str = "") -> Counter[Purpose]:
        """Return the live bytes of a pool."""
        return Counter(self._amounts.get(pool, {}))

    def keep_received(self) -> None:
        """Count received tensors that still live as activations: they are saved for backward."""
        for storage in self._received:
            self.add({storage.purpose: -storage.bytes}, storage.pool)
            storage.purpose = Purpose.ACTIVATIONS
            self.add({storage.purpose: storage.bytes}, storage.pool)
        self._received.clear()

    def add(self, amounts: Amounts, pool: str) -> None:
        """Add live bytes, which may be negative; no peak is noted."""
        live = self._amounts.setdefault(pool, Counter())
        for purpose, number in amounts.items():
            live[purpose] += number
            self._bytes[pool] += number

    def note(self, additional: Amounts | None = None, op: str = "") -> None:
        """Note the live bytes of the place's pool as a peak if they are the most so far.

        Args:
            additional: bytes that live in addition for a moment.
            op: op that runs at this moment; by default the op whose kernels run now.
        """
        pool = self.place.pool
        if self._bytes[pool] + sum((additional or {}).values()) > self._most[pool]:
            amounts = self.amounts(pool)
            amounts.update(additional or {})
            direction = "forward" if current_graph_task_id() == -1 else "backward"
            where = f"the {direction} pass of {self.place.name}"
            if op := op or op_now():
                where = f"{direction} of {op} in {self.place.name}"
            self._peaks[pool] = Peak(where=where, amounts=amounts, op=op)
            self._most[pool] = amounts.total()

    def forget_peaks(self) -> None:
        """Note peaks from now on."""
        self._peaks.clear()
        self._most.clear()

    def _see(self, seen: UntypedStorage) -> None:
        address = seen._cdata
        if address in self._live:
            return
        in_backward = current_graph_task_id() != -1
        of_pass = Purpose.GRADIENTS if in_backward else Purpose.ACTIVATIONS
        purpose = purpose_now() or of_pass
        num_bytes = 0 if purpose is Purpose.HOST else seen.nbytes()
        storage = _Storage(num_bytes, purpose, self.place.pool)
        self._live[address] = storage
        self._references[address] = weakref.ref(seen, lambda _: self._free(address))
        self.add({purpose: num_bytes}, storage.pool)
        if purpose is Purpose.COMMUNICATION and not in_backward:
            self._received.append(storage)
        self.note()

    def _free(self, address: int) -> None:
        storage = self._live.pop(address)
        del self._references[address]
        assert storage is not None, "ignored storages are held"
        self.add({storage.purpose: -storage.bytes}, storage.pool)
        storage.bytes = 0
