"""Fixtures for kernels in Triton's interpreter."""

import os

import numpy as np
import pytest
import torch

if os.environ.get("TRITON_INTERPRET") == "1":
    from support import quick_interpreter

    quick_interpreter.install()


@pytest.fixture
def bfloat16_of_a_gpu(monkeypatch):
    """Multiply and round bf16 tiles as a GPU does.

    The interpreter multiplies the bits of such tiles as integers, and truncates where a GPU rounds.
    """
    tl = pytest.importorskip("triton.language")
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    builder = interpreter.InterpreterBuilder
    create_dot, create_cast = builder.create_dot, builder.cast_impl

    def wide(tile):
        if tile.dtype.scalar != tl.bfloat16:
            return tile
        bits = tile.data.astype(np.uint32) << 16
        return interpreter.TensorHandle(bits.view(np.float32), tl.float32)

    def cast_impl(self, tile, dtype):
        if dtype.scalar != tl.bfloat16 or tile.dtype.scalar != tl.float32:
            return create_cast(self, tile, dtype)
        rounded = torch.from_numpy(np.ascontiguousarray(tile.data)).bfloat16()
        bits = rounded.view(torch.int16).numpy().view(np.uint16)
        return interpreter.TensorHandle(bits, tl.bfloat16)

    monkeypatch.setattr(
        builder, "create_dot", lambda self, a, b, *rest: create_dot(self, wide(a), wide(b), *rest)
    )
    monkeypatch.setattr(builder, "cast_impl", cast_impl)
