"""Matrix products fused with an all-gather or a reduce-scatter, over torch's symmetric memory.

[Note: fused products]
The ranks of a group map one buffer of each other (the workspace) into their address spaces. A fused
product computes block by block, one block of rows for each rank, on two streams. While one block is
computed, copy engines transfer the next block over NVLink. No kernel of NCCL runs. Barriers on the
device order the copies of the ranks, so a capture works as with every other kernel.

* The block of a gathered product has the rows of one rank. Its bits are those of one product over
  all rows if cuBLAS computes both with the same kernel, as it did in every measured case.
* A scattered product receives one term for each rank in the dtype of the product, and adds the terms
  in float32, in the order of ranks. For two ranks these are the bits of NCCL's sum. For more ranks it
  rounds once, and NCCL rounds after each addition.

torch allocates one workspace for each group and replaces it if a product needs a larger one. Graphs
contain the addresses of the workspace. So it is allocated once, before the first capture, for the
largest product. `SymmetricMemory` keeps it until `SymmetricMemory.close`, and larger products do not
use it. Multicast (NVLS) is not needed; torch uses it only for small gathered products.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_packed.distributed.collectives import all_gather_json
from megatron_packed.distributed.groups import ParallelGroups, global_ranks
from megatron_packed.torch_private import symmetric_memory

DTYPE = torch.bfloat16
"""Dtype in which fused products were compared with NCCL and cuBLAS."""
MOST_RANKS = 8
"""Largest group: the GPUs of one host that NVLink connects directly."""
OVERLAPPING_DEVICES = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
"""torch's variable for tests: with the value 1, ranks of a group may share a GPU."""
_CHECKED_ROWS, _CHECKED_WIDTH = 32, 64
_CLOSE = 0.02
"""Largest allowed relative difference of the products that a start checks."""


class SymmetricMemory:
    """Symmetric workspace of a group, and the products that exchange their rows through it.

    The constructor is a collective call of the group, and raises what torch raises.

    Args:
        group: the group; its ranks are on one host.
        nbytes: size of the workspace. See `workspace_bytes`.
    """

    def __init__(self, group: dist.ProcessGroup, nbytes: int) -> None:
        self.group = group
        self.nbytes = nbytes
        self._torch = symmetric_memory()
        self._torch.get_symm_mem_workspace(group.group_name, min_size=nbytes)
        # Graphs contain addresses of this memory, so it must exist as long as this object does.
        self.workspace: Tensor | None = self._workspaces[group.group_name]

    @property
    def _workspaces(self) -> dict[str, Tensor]:
        workspaces: dict[str, Tensor] = self._torch._group_name_to_workspace_tensor
        return workspaces

    def holds(self, nbytes: int) -> bool:
        """Return whether the workspace is large enough for a product that needs ``nbytes``."""
        return self.workspace is not None and nbytes <= self.nbytes

    def all_gather_matmul(
        self, own_TI: Tensor, matrix_IO: Tensor, *, keep: bool
    ) -> tuple[Tensor | None, Tensor]:
        """Return the rows of all ranks (None without ``keep``), and their product with a matrix.

        Args:
            own_TI: ``(T / size, I)`` rows of this rank.
            matrix_IO: ``(I, O)``; a transposed view is allowed.
            keep: return the gathered rows ``(T, I)`` too.
        Returns:
            Gathered rows or None; ``(T, O)``.
        """
        # `last_operation.py` finds this function by its name.
        group = self.group
        gathered_TI, (y_TO,) = torch.ops.symm_mem.fused_all_gather_matmul(
            own_TI.contiguous(), [matrix_IO], 0, group.group_name, return_A=keep
        )
        return gathered_TI, y_TO

    def matmul_reduce_scatter(self, x_TI: Tensor, matrix_IO: Tensor) -> Tensor:
        """Return this rank's rows of the sum of all ranks' products: ``(T, I)`` -> ``(T / size, O)``.

        T must be a multiple of the group size.
        """
        # `last_operation.py` finds this function by its name.
        group = self.group
        own_TO: Tensor = torch.ops.symm_mem.fused_matmul_reduce_scatter(
            x_TI.contiguous(), matrix_IO, "sum", 0, group.group_name
        )
        return own_TO

    def close(self) -> None:
        """Free the workspace. Call it after all graphs that use it were released."""
        if self.workspace is not None and self._workspaces.get(self.group.group_name) is (
            self.workspace
        ):
            del self._workspaces[self.group.group_name]
        self.workspace = None


def workspace_bytes(rows: int, width: int, dtype: torch.dtype) -> int:
    """Return the bytes of the workspace of products with ``rows`` of this rank, ``width`` wide.

    A gathered product stores its rows once. A scattered product has two buffers of this size.
    """
    return 2 * rows * width * dtype.itemsize


def connect(
    group: dist.ProcessGroup, groups: ParallelGroups, dtype: torch.dtype, nbytes: int
) -> SymmetricMemory | str:
    """Set up the symmetric memory of a group, and check its products on small matrices.

    This is a collective call of all ranks of the run. They agree: all of them get symmetric memory,
    or none does.

    Args:
        group: group of this rank whose ranks exchange rows.
        groups: process groups of this rank.
        dtype: dtype of the products.
        nbytes: bytes of the workspace, equal on all ranks.
    Returns:
        The symmetric memory, or the reason why it cannot be used.
    """
    reasons = [] if groups.device.type != "cuda" else dtype_reasons(dtype)
    return connect_over(
        group,
        groups,
        lambda: SymmetricMemory(group, nbytes),
        lambda memory: _wrong_products(memory, groups.device, dtype),
        reasons,
    )


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


def dtype_reasons(dtype: torch.dtype) -> list[str]:
    """Return why products in a dtype are not fused; empty if they may be."""
    if dtype == DTYPE:
        return []
    name = str(dtype).removeprefix("torch.")
    return [f"fused products are checked in bfloat16 only, but the dtype is {name}"]


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


def _wrong_products(memory: SymmetricMemory, device: torch.device, dtype: torch.dtype) -> list[str]:
    """Return the problem of the fused products on small matrices that every rank can compute."""
    group, generator = memory.group, torch.Generator().manual_seed(0)
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    rows, width = _CHECKED_ROWS, _CHECKED_WIDTH

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    x_TI = drawn(size * rows, width)
    matrices = [drawn(width, width) for _ in range(size)]
    own_rows = slice(rank * rows, (rank + 1) * rows)
    gathered_TI, y_TO = memory.all_gather_matmul(x_TI[own_rows], matrices[0], keep=True)
    summed_TO = memory.matmul_reduce_scatter(x_TI, matrices[rank])
    assert gathered_TI is not None
    terms = [x_TI[own_rows].float() @ matrix.float() for matrix in matrices]
    pairs = {
        "all_gather": (gathered_TI, x_TI),
        "all_gather_matmul": (y_TO, x_TI.float() @ matrices[0].float()),
        "matmul_reduce_scatter": (summed_TO, torch.stack(terms).sum(dim=0)),
    }
    return [
        f"{name} over symmetric memory gives wrong numbers"
        for name, (product, wanted) in pairs.items()
        if not (product.float() - wanted).norm() <= _CLOSE * wanted.float().norm()
    ]


def _first(by_rank: Sequence[Sequence[str]]) -> str:
    """Return the first reason of any rank; empty if there is none."""
    return next((reasons[0] for reasons in by_rank if reasons), "")


def _sentence(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
