# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Weight gradients of grouped products, added to float32 by the product itself.

PyTorch's grouped product would round a gradient to bf16, and a second kernel would add it. Here one
kernel computes ``main_grad[e] += dy_e^T x_e`` with the rows e of one expert. Each program owns one
tile of one expert. It sums over the rows of that expert in their order, on tensor cores in fp32, and
adds the tile to ``main_grad`` at the end. No other program touches the tile, so the result is
deterministic. The grid has a fixed size, and the offsets are read on the device.

[Note: rows of one expert]
The tensor memory accelerator (TMA) of Hopper copies tiles through descriptors that a program builds.
The descriptor of dy and x ends at the last row of the expert. Rows beyond it arrive as zeros, so a tile
never contains rows of the next expert or unused rows. The descriptor of ``main_grad`` ends at the
borders of the expert's matrix. The TMA adds the tile in the L2 cache, and no program reads it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_packed.ops.triton_loads import load, mask_of, rows_at

_ALIGNMENT = 16
"""Bytes that divide the addresses and row lengths of the tensors that the TMA reads or writes."""
_ROWS = 64
"""Rows of x and dy in one tile: the step of the sum."""
_TILE = (128, 256)
"""Tile of the gradient. The transposed tile was up to 15 % slower on an H200."""
_INTERPRETED_TILE = (32, 64)


def can_add(main_grad_EOI: Tensor, dy_RO: Tensor, x_RI: Tensor) -> bool:
    """Return True if `add_weight_gradient` supports these tensors."""
    interpreted = bool(triton.knobs.runtime.interpret)
    if not interpreted and not (
        main_grad_EOI.is_cuda and torch.cuda.get_device_capability(main_grad_EOI.device) >= (9, 0)
    ):
        return False
    tensors = (main_grad_EOI, dy_RO, x_RI)
    return (
        main_grad_EOI.dtype == torch.float32
        and all(tensor.is_contiguous() for tensor in tensors)
        and (
            interpreted
            or all(
                address % _ALIGNMENT == 0
                for tensor in tensors
                for address in (tensor.data_ptr(), tensor.shape[-1] * tensor.element_size())
            )
        )
    )


def add_weight_gradient(
    main_grad_EOI: Tensor, dy_RO: Tensor, x_RI: Tensor, offsets_E: Tensor
) -> None:
    """Add ``dy_e^T x_e`` to ``main_grad_EOI[e]`` for each expert e; experts without rows add nothing.

    Args:
        main_grad_EOI: ``(E, O, I)`` float32, contiguous.
        dy_RO: ``(R, O)`` sorted by expert, contiguous.
        x_RI: ``(R, I)`` sorted by expert, contiguous.
        offsets_E: ``(E,)`` int32 on the device: row number after the last row of each expert. Rows
            from ``offsets_E[-1]`` on are not read.
    """
    experts, width_out, width_in = main_grad_EOI.shape
    interpreted = bool(triton.knobs.runtime.interpret)
    block_o, block_i = _INTERPRETED_TILE if interpreted else _TILE
    if not interpreted:
        # Descriptors that programs build need scratch memory. The allocator is set for the calling
        # thread, which is one of autograd's.
        triton.set_allocator(_scratch)
    tiles = triton.cdiv(width_out, block_o) * triton.cdiv(width_in, block_i)
    _weight_gradient_kernel[(experts * tiles,)](
        dy_RO,
        x_RI,
        main_grad_EOI,
        offsets_E,
        OUT=width_out,
        IN=width_in,
        BLOCK_O=block_o,
        BLOCK_I=block_i,
        BLOCK_R=_ROWS,
        BY_TMA=not interpreted,
        num_warps=8,
        num_stages=3,
    )


def _scratch(size: int, alignment: int, stream: int | None) -> Tensor:
    return torch.empty(size, dtype=torch.int8, device="cuda")


@triton.jit
def _weight_gradient_kernel(
    dy_ptr,
    x_ptr,
    main_grad_ptr,
    offsets_ptr,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BY_TMA: tl.constexpr,
):
    """Compute one tile of one expert; see [Note: rows of one expert]."""
    TILES_O: tl.constexpr = (OUT + BLOCK_O - 1) // BLOCK_O
    TILES: tl.constexpr = TILES_O * ((IN + BLOCK_I - 1) // BLOCK_I)
    expert = tl.program_id(0) // TILES
    tile = tl.program_id(0) % TILES
    # Consecutive programs share a tile of x, the wider one.
    out = tile % TILES_O * BLOCK_O
    inner = tile // TILES_O * BLOCK_I
    end = tl.load(offsets_ptr + expert)
    start = load(offsets_ptr + expert - 1, expert > 0)
    if end > start:
        dy = tl.make_tensor_descriptor(dy_ptr, [end, OUT], [OUT, 1], [BLOCK_R, BLOCK_O])
        x = tl.make_tensor_descriptor(x_ptr, [end, IN], [IN, 1], [BLOCK_R, BLOCK_I])
        total = tl.zeros((BLOCK_O, BLOCK_I), tl.float32)
        for row in range(start, end, BLOCK_R):
            total = tl.dot(dy.load([row, out]).T, x.load([row, inner]), total)
        matrix_ptr = main_grad_ptr + expert.to(tl.int64) * OUT * IN
        if BY_TMA:
            # The TMA reads from shared memory, where a quarter of the tile fits beside the tiles
            # of dy and x.
            grad = tl.make_tensor_descriptor(
                matrix_ptr, [OUT, IN], [IN, 1], [BLOCK_O, BLOCK_I // 4]
            )
            left, right = _halves(total, BLOCK_O, BLOCK_I)
            first, second = _halves(left, BLOCK_O, BLOCK_I // 2)
            third, fourth = _halves(right, BLOCK_O, BLOCK_I // 2)
            grad.atomic_add([out, inner], first)
            grad.atomic_add([out, inner + BLOCK_I // 4], second)
            grad.atomic_add([out, inner + BLOCK_I // 2], third)
            grad.atomic_add([out, inner + 3 * (BLOCK_I // 4)], fourth)
        else:
            row = out + tl.arange(0, BLOCK_O)
            column = inner + tl.arange(0, BLOCK_I)
            at = rows_at(matrix_ptr, row, IN, column)
            mask = mask_of(row < OUT, column < IN)
            tl.store(at, load(at, mask) + total, mask=mask)


@triton.jit
def _halves(tile, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the left and the right half of a tile."""
    return tile.reshape(ROWS, 2, COLUMNS // 2).permute(0, 2, 1).split()
