"""The reference against products row by row, its zero rows, and its isolation when routing changes."""

from functools import partial

import pytest
import torch

from megatron_packed.ops.activation.api import KINDS, activation
from megatron_packed.ops.backend_dispatch import NoBackendError
from megatron_packed.ops.grouped_mlp.api import grouped_mlp
from megatron_packed.ops.permute.api import permute, unpermute
from support.op_packs import run_without_values
from support.row_products import experts_row_by_row

R, D, E, F = 21, 6, 4, 5
OFFSETS = {
    "usual": [4, 9, 16, 19],
    "empty experts and no tail": [0, 10, 10, 21],
    "all rows to one": [0, 0, 20, 20],
    "no rows at all": [0, 0, 0, 0],
}


def make(kind, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    factor = 2 if kind == "swiglu" else 1
    return [
        torch.randn(*shape, generator=generator, dtype=dtype)
        for shape in ((R, D), (E, factor * F, D), (E, D, F))
    ]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ends", OFFSETS.values(), ids=OFFSETS.keys())
def test_every_row_goes_through_its_expert(kind, ends):
    x, w1, w2 = (value.requires_grad_() for value in make(kind))
    y = grouped_mlp(
        x, w1, w2, torch.tensor(ends, dtype=torch.int32), activation=kind, backend="reference"
    )
    want = torch.zeros(R, D, dtype=torch.float64)
    for row in range(ends[-1]):
        expert = next(e for e in range(E) if row < ends[e])
        want = want.index_add(
            0, torch.tensor([row]), (w2[expert] @ activation(w1[expert] @ x[row], kind))[None]
        )
    torch.testing.assert_close(y, want)
    assert not y[ends[-1] :].any()
    if ends[-1]:
        dy = torch.randn(R, D, dtype=torch.float64)
        got = torch.autograd.grad(y, (x, w1, w2), dy)
        for gradient, expected in zip(got, torch.autograd.grad(want, (x, w1, w2), dy)):
            torch.testing.assert_close(gradient, expected)
        assert not got[0][ends[-1] :].any()


@pytest.mark.parametrize("tokens", [24, 200])
def test_documents_do_not_touch_each_other_by_a_bit_though_their_rows_move(tokens):
    """Check that tokens keep their bits when other tokens change values and experts.

    The rows of the unchanged tokens move to other positions. A CPU may round a row by its place in a
    product, so the bits are those of `experts_row_by_row`.
    """
    width, experts, routes = 32, 8, 2
    torch.manual_seed(0)
    w1, w2, router = (
        torch.randn(experts, 64, width),
        torch.randn(experts, width, 64),
        torch.randn(width, experts),
    )
    valid = torch.arange(tokens) < tokens - 3

    def layer(x):
        x = x.clone().requires_grad_()
        scores, ids = (x @ router).softmax(-1).topk(routes)
        permuted = permute(x, ids, experts, valid, backend="reference")
        y = grouped_mlp(
            permuted.x_RD,
            w1,
            w2,
            permuted.offsets_E,
            activation="squared_relu",
            backend="reference",
        )
        y = unpermute(y, permuted, scores, backend="reference")
        return y.detach(), torch.autograd.grad(y.square().sum(), x)[0], permuted.row_TK

    x = torch.randn(tokens, width)
    changed = torch.cat([torch.randn(tokens // 2, width), x[tokens // 2 :]])
    kept = slice(tokens // 2, tokens)
    with experts_row_by_row():
        (y, dx, rows), (other_y, other_dx, other_rows) = layer(x), layer(changed)
    assert not torch.equal(rows[kept], other_rows[kept])  # The rows have moved.
    assert torch.equal(y[kept], other_y[kept]) and torch.equal(dx[kept], other_dx[kept])
    assert not torch.equal(y, other_y)
    for found, expected in zip(layer(changed)[:2], (other_y, other_dx)):
        atol = 1e-6 * float(expected.abs().max())
        torch.testing.assert_close(found, expected, rtol=0, atol=atol)


def test_no_host_sync_and_static_shapes():
    offsets = torch.tensor(OFFSETS["usual"], dtype=torch.int32)
    run_without_values(
        partial(grouped_mlp, activation="gelu", backend="reference"), *make("gelu"), offsets
    )


def test_what_cannot_be_is_refused_with_its_numbers():
    x, w1, w2 = make("gelu")
    offsets = torch.tensor(OFFSETS["usual"], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"with 'swiglu' they must be \(R, D\), \(E, 2F, D\)"):
        grouped_mlp(x, w1, w2, offsets, activation="swiglu")
    with pytest.raises(ValueError, match=r"offsets has shape \[3\]"):
        grouped_mlp(x, w1, w2, offsets[1:], activation="gelu")
    with pytest.raises(
        NoBackendError, match=r"must be bfloat16; channels \(6\) is not divisible by 8"
    ):
        grouped_mlp(x, w1, w2, offsets, activation="gelu", backend="grouped_mm")


def test_unused_rows_change_no_bit():
    """Bounds of expert buffers rely on it: 90 used rows in buffers of several sizes."""
    generator = torch.Generator().manual_seed(0)
    found = []
    x_RD, dy_RD = torch.randn(2, 90, 64, generator=generator)
    weights = [torch.randn(4, *shape, generator=generator) for shape in ((48, 64), (64, 48))]
    for rows in (90, 257, 1000):
        x, *leaves = (
            tensor.clone().requires_grad_()
            for tensor in (torch.nn.functional.pad(x_RD, (0, 0, 0, rows - 90)), *weights)
        )
        offsets = torch.tensor([20, 20, 61, 90], dtype=torch.int32)
        y = grouped_mlp(x, *leaves, offsets, activation="squared_relu", backend="reference")
        y.backward(torch.nn.functional.pad(dy_RD, (0, 0, 0, rows - 90)))
        found.append([y[:90].detach(), x.grad[:90], *(leaf.grad for leaf in leaves)])
    for others in found[1:]:
        assert all(torch.equal(one, other) for one, other in zip(found[0], others, strict=True))
