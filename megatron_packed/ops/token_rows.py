# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Triton kernel that adds a gradient row of each token to the row of its table.

The tokens are sorted, so equal tokens are neighbours. A program adds all rows of one token in the order of
their positions, eight at a time. There are no atomics, so equal inputs give equal bits. A token's sum
does not depend on the other tokens.

Letters: T tokens, V rows of the table, D features.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_packed.ops.triton_loads import load, mask_of, rows_at

_ROWS = 8
_WIDEST_BLOCK = 1024
"""Features of a program: a block of rows has 32 values per thread."""


def add_token_rows(table_VD: Tensor, tokens_T: Tensor, rows_TD: Tensor) -> None:
    """Compute ``table[tokens[t]] += rows[t]`` for all t, in fp32.

    Args:
        table_VD: fp32 or bf16, contiguous; a bf16 row is rounded once.
        tokens_T: numbers of rows of the table.
        rows_TD: any floating dtype; any stride between rows.
    """
    tokens, features = rows_TD.shape
    if not rows_TD.numel():
        return
    if rows_TD.stride(1) != 1:
        rows_TD = rows_TD.contiguous()
    sorted_T, order_T = torch.sort(tokens_T, stable=True)
    block = min(_WIDEST_BLOCK, triton.next_power_of_2(features))
    _add_rows_kernel[(tokens, triton.cdiv(features, block))](
        table_VD,
        sorted_T,
        order_T,
        rows_TD,
        tokens,
        rows_TD.stride(0),
        FEATURES=features,
        ROWS=_ROWS,
        BLOCK_D=block,
        num_warps=8,
    )


@triton.jit(do_not_specialize=["tokens"])
def _add_rows_kernel(
    table_ptr,
    sorted_ptr,
    order_ptr,
    rows_ptr,
    tokens,
    stride,
    FEATURES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Add all rows of the token at one place of the sorted tokens, if it is the token's first place."""
    place = tl.program_id(0)
    token = tl.load(sorted_ptr + place)
    if (place == 0) | (tl.load(sorted_ptr + tl.maximum(place - 1, 0)) != token):
        column = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
        real = column < FEATURES
        table_row = table_ptr + token.to(tl.int64) * FEATURES + column
        total = load(table_row, real).to(tl.float32)
        count = ROWS
        while count == ROWS:
            places = place + tl.arange(0, ROWS)
            same = tl.load(sorted_ptr + places, mask=places < tokens, other=-1) == token
            row = load(order_ptr + places, same).to(tl.int64)
            x = load(rows_at(rows_ptr, row, stride, column), mask_of(same, real))
            total += tl.sum(x.to(tl.float32), axis=0)
            count = tl.sum(same.to(tl.int32), axis=0)
            place += ROWS
        tl.store(table_row, total, mask=real)
