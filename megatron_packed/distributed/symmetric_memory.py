"""Symmetric memory: a buffer of each rank that the other ranks of a group map, and who can map it.

`SharedBuffer` is the mapping. `connect_over` makes an object over it, if all ranks of the run can use it.
``symmetric_rows.py`` gathers and scatters rows through such a buffer, and ``symmetric_exchange.py``
exchanges equal parts. Copy engines transfer the bytes over NVLink, and no kernel of NCCL runs. Multicast
(NVLS) is not used.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_packed.distributed.collectives import all_gather_json
from megatron_packed.distributed.groups import ParallelGroups, global_ranks
from megatron_packed.torch_private import symmetric_memory

MOST_RANKS = 8
"""Largest group: the GPUs of one host that NVLink connects directly."""
ALIGNMENT = 512
"""Bytes at whose multiples a slot or a piece starts: copies of aligned bytes are fastest."""
OVERLAPPING_DEVICES = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
"""torch's variable for tests: with the value 1, ranks of a group may share a GPU."""


class SharedBuffer:
    """Bytes of this rank, and the bytes of the other ranks of a group, which it maps.

    The constructor is a collective call of the group, and raises what torch raises.

    Args:
        group: the group; its ranks are on one host.
        device: device of this rank.
        nbytes: bytes of each rank.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, nbytes: int) -> None:
        torch_memory = symmetric_memory()._SymmetricMemory
        # Graphs contain addresses of this memory, so it must exist as long as this object does.
        self._own = torch_memory.empty_strided_p2p(
            (nbytes,), (1,), torch.uint8, device, group.group_name
        )
        self._memory = torch_memory.rendezvous(self._own)
        self.of_ranks: Sequence[Tensor] = [
            self._memory.get_buffer(rank, (nbytes,), torch.uint8)
            for rank in range(dist.get_world_size(group))
        ]
        """The ``(nbytes,)`` uint8 of each rank."""

    def barrier(self, stream: torch.cuda.Stream) -> None:
        """Let a stream wait until the streams of all ranks have reached this barrier.

        One order on all ranks: the barriers of a buffer run one after the other.
        """
        with torch.cuda.stream(stream):
            self._memory.barrier(channel=0)


def aligned_bytes(nbytes: int) -> int:
    """Return the smallest multiple of the alignment that is at least ``nbytes``."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class MappedRanks:
    """Ranks of a group that map each other's buffer, and the steps of their exchanges.

    A class over it allocates the buffer with `SharedBuffer`.

    Args:
        group: the group; its ranks are on one host.
        device: device of this rank.
    """

    _buffer: SharedBuffer | None
    """The buffer; None after `close`."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group = group
        self.device = device
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    def _peers(self) -> Iterator[int]:
        """Yield the other ranks; at each step every rank has another one."""
        return ((self.rank + step) % self.size for step in range(1, self.size))

    def _current(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.device)

    def _barrier(self, stream: torch.cuda.Stream) -> None:
        assert self._buffer is not None
        self._buffer.barrier(stream)

    def _copy(self, stream: torch.cuda.Stream, target: Tensor, source: Tensor) -> None:
        # Contiguous bytes on both sides: torch calls the driver's copy, which uses a copy engine
        # for the memory of another GPU.
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)

    def close(self) -> None:
        """Free the buffer. Call it after all graphs that use it were released."""
        self._buffer = None


class StreamEnd(NamedTuple):
    """End of work on another stream, for which the current stream can wait."""

    current: Callable[[], torch.cuda.Stream]
    event: torch.cuda.Event
    source: Tensor
    """Memory that the work reads."""

    def wait(self) -> None:
        self.current().wait_event(self.event)


class Closable(Protocol):
    """Object that owns symmetric memory."""

    def close(self) -> None: ...


M = TypeVar("M", bound=Closable)


def connect_over(
    group: dist.ProcessGroup,
    groups: ParallelGroups,
    make: Callable[[], M],
    check: Callable[[M], list[str]],
    own_reasons: Sequence[str] = (),
) -> M | str:
    """Make an object over the symmetric memory of a group, if all ranks of the run can use it.

    Args:
        group: group of this rank whose ranks share memory.
        groups: process groups of this rank.
        make: collective call of the group that maps the memory.
        check: collective call of the group that returns what is wrong with the object.
        own_reasons: reasons of this rank against it.
    Returns:
        The object, or the first reason of any rank.
    """
    facts = all_gather_json(own_facts(groups.device), groups)
    members = [facts[rank] for rank in global_ranks(group)]
    reasons = [*own_reasons, *not_supported_reasons(groups.device, members)]
    if reason := _first(all_gather_json(reasons, groups)):
        return reason
    memory: M | None = None
    failed = ""
    try:
        memory = make()
    except Exception as error:  # the driver or torch may refuse the mapping in many ways
        failed = f"the ranks cannot map each other's memory ({_sentence(error)})"
    # Agree before the first use: its barriers would wait for a rank without a mapping.
    reason = _first(all_gather_json([failed] if failed else [], groups))
    if not reason and memory is not None:
        reason = _first(all_gather_json(check(memory), groups))
    if reason or memory is None:
        if memory is not None:
            memory.close()
        return reason
    return memory


def own_facts(device: torch.device) -> dict[str, Any]:
    """Return the facts about this rank that the other ranks of its group must know, as JSON."""
    peers: list[bool] = []
    if device.type == "cuda":
        index = device.index or 0
        peers = [
            other == index or torch.cuda.can_device_access_peer(index, other)
            for other in range(torch.cuda.device_count())
        ]
    return {
        "host": socket.gethostname(),
        "device": device.index or 0,
        "peers": peers,
        "shares": os.environ.get(OVERLAPPING_DEVICES) == "1",
    }


def not_supported_reasons(
    device: torch.device, members: Sequence[dict[str, Any]] = ()
) -> list[str]:
    """Return why a group cannot share memory; empty if nothing is known against it.

    Args:
        device: device of this rank.
        members: `own_facts` of each rank of the group; empty if the other ranks are not known.
    """
    if device.type != "cuda":
        return [f"symmetric memory needs CUDA GPUs, but the device is {device.type}"]
    reasons = []
    try:
        symmetric_memory()
    except ImportError:
        reasons.append(f"torch {torch.__version__} has no symmetric memory")
    if len(members) > MOST_RANKS:
        reasons.append(
            f"the group has {len(members)} ranks, but symmetric memory is used for at most {MOST_RANKS}"
        )
    hosts = {member["host"] for member in members}
    if len(hosts) > 1:
        return [*reasons, f"the ranks of the group are on {len(hosts)} hosts"]
    devices = [member["device"] for member in members]
    if len(set(devices)) < len(devices) and not all(member["shares"] for member in members):
        reasons.append(
            "ranks of the group have the same GPU number; make all GPUs of the host visible to each"
        )
    apart = [
        f"GPU {member['device']} cannot access GPU {other}"
        for member in members
        for other in devices
        if not (other < len(member["peers"]) and member["peers"][other])
    ]
    return [*reasons, *apart[:1]]


def _first(by_rank: Sequence[Sequence[str]]) -> str:
    """Return the first reason of any rank; empty if there is none."""
    return next((reasons[0] for reasons in by_rank if reasons), "")


def _sentence(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
