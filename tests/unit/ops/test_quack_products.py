"""Experts by quack's products, with a stand-in for the package (`quack_stand_in`)."""

from importlib import import_module

import pytest
import torch

from megatron_packed.ops import quack_tiles
from megatron_packed.ops.grouped_mlp.api import GroupedMLPInputs, grouped_mlp
from megatron_packed.ops.quack_tiles import least_padded_tile
from support.quack_stand_in import clear_by_torch, quack_stand_in

NAME = "megatron_packed.ops.grouped_mlp.quack"
E, R, D, F = 4, 90, 16, 24


@pytest.fixture
def quack(monkeypatch):
    with quack_stand_in(monkeypatch) as stand_in:
        yield stand_in


@pytest.fixture
def backend(quack, monkeypatch):
    """Module of the backend, with the stand-in and with zeros written by plain torch."""
    clear_by_torch(monkeypatch)
    return import_module(NAME)


def run(steps, offsets, accumulate, rows=R):
    """Outputs and gradients; unused rows of x and dy are NaN for the backend."""
    generator = torch.Generator().manual_seed(0)
    x, dy = torch.randn(2, rows, D, generator=generator).bfloat16()
    w1, w2 = (
        torch.randn(E, *shape, generator=generator).bfloat16().requires_grad_()
        for shape in ((F, D), (D, F))
    )
    end = int(offsets[-1])
    x[end:] = dy[end:] = torch.nan if steps else 0
    x.requires_grad_()
    if steps is None:
        y = grouped_mlp(x, w1, w2, offsets, activation="squared_relu", backend="reference")
        y.backward(dy)
        return y.detach(), x.grad, w1.grad, w2.grad
    if accumulate:
        w1.main_grad, w2.main_grad = (torch.ones_like(w, dtype=torch.float32) for w in (w1, w2))
    hidden = steps.activate(steps.fc1(x, w1, offsets), "squared_relu")
    y = steps.fc2(hidden, w2, offsets)
    y.backward(dy)
    gradients = (w.main_grad - 1 if accumulate else w.grad for w in (w1, w2))
    return y.detach(), x.grad, *gradients


@pytest.mark.parametrize("accumulate", [True, False])
@pytest.mark.parametrize("ends", [[20, 20, 61, 84], [0, 0, 0, 0], [1, 90, 90, 90]])
def test_outputs_and_gradients_are_those_of_the_reference(backend, ends, accumulate):
    offsets = torch.tensor(ends, dtype=torch.int32)
    for got, want in zip(
        run(backend, offsets, accumulate), run(None, offsets, accumulate), strict=True
    ):
        assert torch.isfinite(got).all()
        torch.testing.assert_close(got.float(), want.float(), rtol=3e-2, atol=3e-2)


def test_a_pack_without_rows_launches_nothing(backend, quack):
    offsets = torch.zeros(E, dtype=torch.int32)
    for accumulate in (True, False):
        found = run(backend, offsets, accumulate, rows=0)
        assert not any(one.any() for one in found)
    assert quack.launched == 0


def test_plans_of_other_row_counts_do_not_pile_up(backend, quack, monkeypatch):
    monkeypatch.setattr(quack_tiles, "_PLANS_KEPT", 7)
    for rows in range(84, 104):
        run(backend, torch.tensor([20, 20, 61, 84], dtype=torch.int32), True, rows=rows)
        assert 0 < len(quack.gemm_module._gemm_plan_cache) <= 7


@pytest.mark.parametrize(
    "tile, rows, columns",
    [
        # Row counts are unknown.
        ((128, 192), None, [384, 768, 1536, 1856, 2688]),
        ((192, 128), None, [8, 128, 192, 256, 512, 1024, 2048, 4096]),
        # Weight gradients: both widths are multiples of only one tile's.
        ((128, 192), 1024, [2688]),
        ((192, 128), 2688, [1024]),
        ((128, 192), 2048, [768]),
        ((192, 128), 768, [2048]),
        ((128, 128), 1024, [2048]),
        # Both widths are padded: each of the last two to 2,048 columns, the first to 2,304.
        ((128, 128), 1400, [2000]),
        ((192, 128), 1900, [2000]),
        ((128, 192), 1856, [2688]),
    ],
)
def test_the_tile_pads_the_output_least(tile, rows, columns):
    assert {least_padded_tile(each, rows) for each in columns} == {tile}


@pytest.mark.parametrize("rows", [8, 128, 200, 1024])
def test_tiles_do_not_depend_on_row_counts(backend, quack, rows):
    offsets = torch.full((E,), rows, dtype=torch.int32)
    narrow, wide = (torch.ones(rows, width).bfloat16() for width in (256, 384))
    backend.PRODUCTS.rows(narrow, torch.ones(E, 256, 384).bfloat16(), offsets)
    backend.PRODUCTS.rows(wide, torch.ones(E, 384, 256).bfloat16(), offsets)
    backend.PRODUCTS.weight_gradient(wide, wide, offsets)
    backend.PRODUCTS.weight_gradient(narrow, narrow, offsets)
    assert quack.tiles == [(128, 192), (192, 128), (128, 192), (128, 128)]


def test_what_cannot_be_is_refused_with_its_reason(backend, monkeypatch):
    inputs = GroupedMLPInputs(
        channels=12,
        experts=E,
        hidden_in=F,
        hidden_out=F,
        activation="squared_relu",
        dtype=torch.float32,
        weight_dtype=torch.float32,
        device_type="cuda",
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (10, 0))
    monkeypatch.setattr(backend._quack, "gemm", lambda A, B, D, cu_seqlens_m: None)
    version, tiles, dtype, size = backend.not_supported_reasons(inputs)
    assert "has no ['add_to_output', 'cluster_M'," in version and "0.6.5 works" in version
    assert tiles == "the tiles are those of compute capability 9.x, found (10, 0)"
    assert "must be bfloat16" in dtype and size == "channels (12) is not divisible by 8"
