"""Copies of the rows of a part that hold data, when only the device knows their number."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module

from torch import Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class UsedRows:
    """Numbers of used rows of the parts that a rank sends and receives; used rows come first."""

    sent_e: Tensor
    """``(e,)`` integers on the device: used rows of the part for each rank; may exceed the part."""
    received_e: Tensor
    """``(e,)`` integers on the device: used rows of the part from each rank."""
    row_bytes: int
    certain: int
    """Bytes at the beginning of each part that are copied in any case, without this class."""

    @property
    def reversed(self) -> UsedRows:
        """Used rows of an exchange in the opposite direction."""
        return UsedRows(
            sent_e=self.received_e,
            received_e=self.sent_e,
            row_bytes=self.row_bytes,
            certain=self.certain,
        )

    def copy(self, target: Tensor, source: Tensor, rank: int, start: int, *, sent: bool) -> None:
        """Copy the bytes of used rows; other bytes of ``target`` keep their values.

        Args:
            target: contiguous uint8.
            source: contiguous uint8 of the same size: bytes of a part.
            rank: number of the rank that receives the part, or that sent it.
            start: position of these bytes in the part.
            sent: True for a part that this rank sends.
        """
        rows_e = self.sent_e if sent else self.received_e
        if target.device.type == "cpu":
            used = max(int(rows_e[rank]) * self.row_bytes - start, 0)
            target[:used] = source[:used]
            return
        kernels = import_module("megatron_packed.ops.permute.triton_kernels")
        kernels.copy_used(target, source, rows_e, rank, self.row_bytes, start)


def used_rows(
    counts_ee: Tensor, rank: int, row: Tensor, certain_rows: int, rows: int
) -> UsedRows | None:
    """Return the used rows of the parts of this rank; None if all rows are copied in any case.

    Args:
        counts_ee: rows from each rank to each rank.
        rank: number of this rank.
        row: one row, which gives the bytes.
        certain_rows: rows at the beginning of each part that are copied in any case.
        rows: rows of a part.
    """
    if certain_rows >= rows:
        return None
    row_bytes = row.numel() * row.element_size()
    return UsedRows(
        sent_e=counts_ee[rank].contiguous(),
        received_e=counts_ee[:, rank].contiguous(),
        row_bytes=row_bytes,
        certain=certain_rows * row_bytes,
    )
