"""Masks and block tables that all attention layers of one micro-batch share.

The tables are built from the document numbers by a fixed number of vectorised operations. Shapes
depend only on T, and the host reads nothing back. So the build can be captured, or its result can be
copied into the tables of a captured graph.

Shapes: T token slots, B = T / 128 blocks of 128 tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

BLOCK = 128
"""Tokens per block of FlexAttention's tables."""


@dataclass(frozen=True)
class KernelTables:
    """Tables for one window size; each backend that reads tables has a class of them."""

    window_size: int | None = field(kw_only=True)

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the tensors, without the window size, in the order of the fields."""
        return tuple(value for value in vars(self).values() if isinstance(value, Tensor))

    def copy_from(self, other: KernelTables) -> None:
        """Copy the tables of another packing with the same T and window into these tensors.

        All tensors keep their addresses, so a captured graph reads the new contents.

        Raises:
            ValueError: the tables differ in class or window.
        """
        if type(self) is not type(other) or self.window_size != other.window_size:
            raise ValueError(
                f"Tables of type {type(other).__name__} with window {other.window_size} cannot refill "
                f"{type(self).__name__} with window {self.window_size}; pass tables of the same type and window."
            )
        for own, new in zip(self.tensors(), other.tensors(), strict=True):
            own.copy_(new)


@dataclass(frozen=True)
class BlockTables(KernelTables):
    """FlexAttention's block lists for causal attention inside documents.

    Partial blocks have hidden and visible pairs and are masked element by element. Full blocks have
    only visible pairs. The lists are padded: entry ``[q, j]`` is valid only for ``j < num[q]``.
    """

    document_T: Tensor
    """int32 document number of each token; never decreases."""
    kv_num: Tensor
    """int32 (1, 1, B): number of partial key blocks of each query block."""
    kv_index: Tensor
    """int32 (1, 1, B, B): partial key blocks of each query block."""
    full_kv_num: Tensor
    """int32 (1, 1, B): number of full key blocks of each query block."""
    full_kv_index: Tensor
    """int32 (1, 1, B, B): full key blocks of each query block."""
    q_num: Tensor
    """int32 (1, 1, B): number of partial query blocks of each key block."""
    q_index: Tensor
    """int32 (1, 1, B, B): partial query blocks of each key block."""
    full_q_num: Tensor
    """int32 (1, 1, B): number of full query blocks of each key block."""
    full_q_index: Tensor
    """int32 (1, 1, B, B): full query blocks of each key block."""

    @classmethod
    def from_tensors(cls, tensors: tuple[Tensor, ...], window_size: int | None) -> BlockTables:
        """Build tables from the result of ``tensors``."""
        return cls(*tensors, window_size=window_size)

    def mask_mod(self) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
        """Return FlexAttention's element mask.

        The mask reads ``document_T``, so it uses the contents that ``copy_from`` has written.
        """
        document_T, window_size = self.document_T, self.window_size

        def visible(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return (q >= k) & (document_T[q] == document_T[k])

        if window_size is None:
            return visible

        def visible_in_window(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return (q >= k) & (q - k < window_size) & (document_T[q] == document_T[k])

        return visible_in_window


@dataclass(frozen=True, kw_only=True)
class MaskTable(KernelTables):
    """Boolean (T, T) mask of one micro-batch (T^2 bytes), True if the query (row) sees the key."""

    mask_TT: Tensor


TABLES: dict[str, type[BlockTables | MaskTable]] = {"flex": BlockTables, "sdpa": MaskTable}
"""Backend -> tables that it reads; all other backends read none."""


def build_tables(
    backend: str, seq_idx_1T: Tensor, window_size: int | None
) -> BlockTables | MaskTable:
    """Build the tables of a backend of `TABLES` for one micro-batch."""
    if backend == "flex":
        return build_block_tables(seq_idx_1T, window_size)
    mask_TT = visible_pairs(seq_idx_1T.view(-1), window_size)
    return MaskTable(mask_TT=mask_TT, window_size=window_size)


def document_numbers(cu_seqlens: Tensor, tokens: int) -> Tensor:
    """Return the document number of each token, int32 ``(1, T)``, from ``cu_seqlens``.

    Documents of length 0 also have a number.

    Example: ``[0, 2, 2, 5]`` gives ``[[0, 0, 2, 2, 2]]``.
    """
    token_T = torch.arange(tokens, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    return torch.searchsorted(cu_seqlens[1:].contiguous(), token_T, right=True, out_int32=True)[
        None
    ]


def visible_pairs(document_T: Tensor, window_size: int | None) -> Tensor:
    """Return boolean ``(T, T)``, True if the row's token (query) sees the column's token (key)."""
    token_T = torch.arange(document_T.shape[0], device=document_T.device)
    distance_TT = token_T[:, None] - token_T[None, :]
    visible_TT = (distance_TT >= 0) & (document_T[:, None] == document_T[None, :])
    return visible_TT if window_size is None else visible_TT & (distance_TT < window_size)


def build_block_tables(seq_idx_1T: Tensor, window_size: int | None) -> BlockTables:
    """Build block lists from document numbers.

    Documents are contiguous, so their numbers never decrease. Query block q and key block k < q have
    a visible pair exactly if the last token of k and the first token of q are in one document. All
    their pairs are visible if the first token of k and the last token of q are in one document. A
    block always has visible pairs with itself, but not all pairs are visible.

    Raises:
        ValueError: T is not a multiple of 128.
    """
    document_T = seq_idx_1T.reshape(-1)
    tokens = document_T.shape[0]
    if tokens % BLOCK:
        raise ValueError(
            f"T ({tokens}) is not a multiple of {BLOCK}, the block size of FlexAttention's tables; pad the pack."
        )
    first_B, last_B = document_T[::BLOCK], document_T[BLOCK - 1 :: BLOCK]
    block_B = torch.arange(tokens // BLOCK, device=document_T.device)
    # Distance in blocks from the key block (column) to the query block (row).
    behind_BB = block_B[:, None] - block_B[None, :]
    meets_BB = (behind_BB == 0) | ((behind_BB > 0) & (last_B[None, :] == first_B[:, None]))
    full_BB = (behind_BB > 0) & (first_B[None, :] == last_B[:, None])
    if window_size is not None:
        # The nearest pair is the last key and the first query. The farthest pair is the first key and
        # the last query.
        meets_BB &= (behind_BB - 1) * BLOCK + 1 < window_size
        full_BB &= (behind_BB + 1) * BLOCK - 1 < window_size
    partial_BB = meets_BB & ~full_BB
    dense = (partial_BB, full_BB, partial_BB.T, full_BB.T)
    lists = [table for dense_BB in dense for table in _ordered(dense_BB)]
    return BlockTables(document_T.to(torch.int32).clone(), *lists, window_size=window_size)


def _ordered(dense_BB: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of True columns of each row, and the column numbers with these first."""
    number_B = dense_BB.sum(1, dtype=torch.int32)
    index_BB = torch.argsort(dense_BB.to(torch.int32), dim=1, descending=True, stable=True).to(
        torch.int32
    )
    return number_B[None, None].contiguous(), index_BB[None, None].contiguous()
