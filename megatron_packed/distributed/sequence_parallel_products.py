"""Matrix products of sequence parallelism with the collectives around them.

A column-parallel layer gathers rows before its product, and a row-parallel layer scatters the sum of
products. The backward pass does the opposite. Without overlap, collectives and products run one after
the other. `TensorOverlap` runs a collective under a product in one of two ways:

* **Fused** (``all_gather``, ``reduce_scatter``, ``reduce_scatter_dgrad``): the product is computed in
  blocks, and each block is sent while the next is computed. It needs symmetric memory; see
  [Note: fused products] in ``symmetric_rows.py``.
* **In bulk** (``bulk_dgrad``, ``bulk_wgrad``): the backward pass of a column-parallel layer has two
  products, dX and dW. The rows for dW are gathered under the product dX, and dX is scattered under the
  product dW. Copy engines transfer the rows through symmetric memory. Without it these are the usual
  collectives, started earlier, so all results have the same bits, and they work across hosts.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_packed.distributed.collectives import (
    PendingRows,
    all_gather_rows,
    reduce_scatter_rows,
    start_gather_rows,
    start_scatter_rows,
)

if TYPE_CHECKING:
    from megatron_packed.distributed.symmetric_rows import SymmetricRows


@dataclass(frozen=True, kw_only=True)
class TensorOverlap:
    """Collectives of sequence-parallel linear layers that run under a matrix product."""

    all_gather: bool = False
    """Fuse the all-gather before a product with this product."""
    reduce_scatter: bool = False
    """Fuse the reduce-scatter after the product of a row-parallel layer with this product."""
    reduce_scatter_dgrad: bool = False
    """Fuse the reduce-scatter of dX with its product, instead of ``bulk_wgrad``."""
    bulk_dgrad: bool = False
    """Gather the rows for dW under the product dX."""
    bulk_wgrad: bool = False
    """Scatter dX under the product dW."""

    @property
    def fuses(self) -> bool:
        """True if a product is to be fused, which is possible with symmetric memory only."""
        return self.all_gather or self.reduce_scatter or self.reduce_scatter_dgrad


NO_OVERLAP = TensorOverlap()


class SequenceParallelProducts:
    """Products of this rank with the collectives of a tensor-parallel group.

    Args:
        group: tensor-parallel group.
        overlap: collectives that run under products.
    """

    def __init__(self, group: dist.ProcessGroup, overlap: TensorOverlap = NO_OVERLAP) -> None:
        self.group = group
        self.overlap = overlap
        self.memory: SymmetricRows | None = None
        """Symmetric memory; without it no product is fused."""
        self.reason = ""
        """Reason why there is no symmetric memory, if it was to be set up."""
        self.unfused: Counter[str] = Counter()
        """Reason -> number of products that were to be fused and were not. Replays do not count."""

    def gather_multiply(
        self,
        own_TI: Tensor,
        matrix_IO: Tensor,
        bias_O: Tensor | None = None,
        *,
        keep: bool = False,
    ) -> tuple[Tensor | None, Tensor]:
        """Gather the rows of all ranks and multiply them by a matrix.

        Args:
            own_TI: ``(T / size, I)`` rows of this rank.
            matrix_IO: ``(I, O)``.
            bias_O: ``(O,)`` or None. A fused product is rounded before the bias is added.
            keep: return the gathered rows too.
        Returns:
            ``(T, I)`` rows of all ranks, or None without ``keep``; ``(T, O)``.
        """
        rows, width = own_TI.shape
        if self.overlap.all_gather and (memory := self._memory(rows, width, own_TI)):
            x_TI, y_TO = memory.all_gather_matmul(own_TI, matrix_IO, keep=keep)
            return x_TI, y_TO if bias_O is None else y_TO + bias_O
        x_TI = all_gather_rows(own_TI, self.group)
        y_TO = x_TI @ matrix_IO if bias_O is None else torch.addmm(bias_O, x_TI, matrix_IO)
        return x_TI if keep else None, y_TO

    def multiply_scatter(self, x_TI: Tensor, matrix_IO: Tensor) -> Tensor:
        """Multiply by a matrix, sum over the ranks, and return this rank's ``(T / size, O)`` rows."""
        return self._multiply_scatter(x_TI, matrix_IO, self.overlap.reduce_scatter)

    def start_gather(self, own_TI: Tensor) -> PendingRows | None:
        """Start to gather the rows for dW, before the product dX; None without ``bulk_dgrad``."""
        if not self.overlap.bulk_dgrad:
            return None
        rows, width = own_TI.shape
        if self.memory is not None and (memory := self._memory(rows, width, own_TI)):
            return memory.start_gather(own_TI)
        return start_gather_rows(own_TI, self.group)

    def gathered(self, pending: PendingRows | None, own_TI: Tensor) -> Tensor:
        """Return the rows ``(T, I)`` for dW; gather them now if `start_gather` did not start."""
        return all_gather_rows(own_TI, self.group) if pending is None else pending.wait()

    def start_multiply_scatter(
        self, grad_TO: Tensor, weight_OI: Tensor, *, before_dw: bool
    ) -> PendingRows:
        """Compute dX, sum it over the ranks and keep this rank's rows.

        Args:
            grad_TO: ``(T, O)`` gradient of the layer's output.
            weight_OI: ``(O, I)``.
            before_dw: the product dW follows, so the reduce-scatter may run under it.
        """
        overlap = self.overlap
        if overlap.reduce_scatter_dgrad or (overlap.reduce_scatter and not before_dw):
            return PendingRows(None, self._multiply_scatter(grad_TO, weight_OI, fuse=True))
        grad_TI = grad_TO @ weight_OI
        if overlap.bulk_wgrad and before_dw:
            rows, width = grad_TI.shape[0] // self.group.size(), grad_TI.shape[1]
            even = rows * self.group.size() == grad_TI.shape[0]
            # The plain collective reports rows that do not divide evenly.
            if even and self.memory is not None and (memory := self._memory(rows, width, grad_TI)):
                return memory.start_scatter(grad_TI)
            return start_scatter_rows(grad_TI, self.group)
        return PendingRows(None, reduce_scatter_rows(grad_TI, self.group))

    def close(self) -> None:
        """Free the symmetric memory. Call it after all graphs were released."""
        if self.memory is not None:
            self.memory.close()
        self.memory = None

    def _multiply_scatter(self, x_TI: Tensor, matrix_IO: Tensor, fuse: bool) -> Tensor:
        rows, size = x_TI.shape[0], self.group.size()
        # The plain collective reports rows that do not divide evenly.
        if fuse and rows % size == 0:
            width = matrix_IO.shape[1]
            if memory := self._memory(rows // size, width, x_TI):
                return memory.matmul_reduce_scatter(x_TI, matrix_IO)
        return reduce_scatter_rows(x_TI @ matrix_IO, self.group)

    def _memory(self, rows: int, width: int, x: Tensor) -> SymmetricRows | None:
        """Return the symmetric memory if it holds ``rows`` of each rank, and count it if not."""
        if self.memory is None:
            self.unfused[self.reason or "no symmetric memory was set up"] += 1
            return None
        if self.memory.holds(rows, width, x.dtype):
            return self.memory
        self.unfused[f"{rows} rows of {width} channels do not fit in the symmetric memory"] += 1
        return None
