"""Fixtures for kernels in Triton's interpreter."""

import importlib
import os
from functools import partial

import numpy as np
import pytest
import torch

if os.environ.get("TRITON_INTERPRET") == "1":
    from support import quick_interpreter

    quick_interpreter.install()


@pytest.fixture
def nothing_uninitialised(monkeypatch):
    """Fill new memory with NaN, so that a kernel that reads it has NaN in its results."""

    def filled(make, *arguments, **options):
        x = make(*arguments, **options)
        return x.fill_(torch.nan) if x.is_floating_point() else x

    monkeypatch.setattr(torch, "empty", partial(filled, torch.empty))
    monkeypatch.setattr(torch, "empty_like", partial(filled, torch.empty_like))


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


@pytest.fixture
def float32_too(monkeypatch):
    """Let the scan accept float32, so that errors of formulas are not hidden by roundings to bf16."""
    kernels = pytest.importorskip("megatron_packed.ops.ssd.triton_kernels")
    chosen = importlib.import_module("megatron_packed.ops.ssd.api").OP.chosen
    monkeypatch.setattr(kernels, "DTYPES", (torch.bfloat16, torch.float32))
    chosen.clear()
    yield
    chosen.clear()
