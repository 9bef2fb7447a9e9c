"""Cases of test_triton_interpreter.py: rope, rms_norm, activation, token rows, cross_entropy.

The sizes are tiny because the interpreter is slow.
"""

import pytest
import torch

from megatron_packed.ops.activation import api as activation_api
from megatron_packed.ops.cross_entropy.api import linear_cross_entropy
from megatron_packed.ops.rms_norm.api import rms_norm, rms_norm_with_residual
from megatron_packed.ops.rope.api import apply_rope, rope_tables
from megatron_packed.ops.token_rows import add_token_rows
from support.random_tensors import normal
from support.split_vocabulary import check_split, check_unknown_label, check_weight_gradient

BACKENDS = ("reference", "triton")


def both(function, inputs):
    """Return pairs of each output and gradient, from the reference and from the kernel.

    Both get the same random upstream gradients.
    """
    results = []
    for backend in BACKENDS:
        outputs = function(backend)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        upstream = [normal(y.shape, seed=i) for i, y in enumerate(outputs)]
        results.append(
            (
                *outputs,
                *torch.autograd.grad(
                    outputs, inputs, [u.to(y.dtype) for u, y in zip(upstream, outputs)]
                ),
            )
        )
    return zip(*results)


@pytest.mark.parametrize(
    ("head_dim", "rotary_dim", "heads", "kv_heads"), [(16, 16, 5, 1), (20, 12, 4, 2), (8, 2, 1, 1)]
)
def test_rope_is_the_reference_bit_for_bit(head_dim, rotary_dim, heads, kv_heads):
    # q and k are strided views of one tensor.
    fused = torch.randn(70, heads + 2 * kv_heads, head_dim, requires_grad=True)
    positions = torch.randint(0, 50, (70,), dtype=torch.int32)
    tables = rope_tables(50, rotary_dim, 10000.0)
    q, k = fused[:, :heads], fused[:, heads : heads + kv_heads]
    for want, got in both(
        lambda backend: apply_rope(q, k, positions, *tables, backend=backend), [fused]
    ):
        assert got.is_contiguous() and torch.equal(got, want)


def test_rope_takes_any_strides_and_zero_stride_gradients():
    # The layout is (H, N, T), so the head dimension is not contiguous.
    x = torch.randn(8, 3, 9, requires_grad=True)
    tables = rope_tables(9, 8, 10000.0)
    results = []
    for backend in BACKENDS:
        q, k = apply_rope(
            x.permute(2, 1, 0), x.permute(2, 1, 0)[:, :1], torch.arange(9), *tables, backend=backend
        )
        # The upstream gradient of a sum is an expanded tensor with strides 0.
        results.append((q, k, torch.autograd.grad(q.sum() + k.sum(), x)[0]))
    for want, got in zip(*results):
        assert torch.equal(got, want)


def test_rope_marks_positions_outside_its_tables():
    q = torch.randn(4, 1, 8)
    turned, _ = apply_rope(
        q, q, torch.tensor([0, 5, -1, 1 << 40]), *rope_tables(5, 8, 10000.0), backend="triton"
    )
    assert torch.equal(turned[0], q[0]) and turned[1:].isnan().all()


@pytest.mark.parametrize(("tokens", "features"), [(7, 33), (20, 256), (1, 2500)])
def test_rms_norm(tokens, features):
    x = torch.randn(tokens, features, requires_grad=True)
    weight = torch.rand(features, requires_grad=True)
    for want, got in both(lambda backend: rms_norm(x, weight, 1e-5, backend=backend), [x, weight]):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("groups", "heads"), [(4, 3), (5, 1), (1, 2)])
def test_rms_norm_of_heads_in_a_fused_projection(groups, heads):
    fused = torch.randn(groups, (heads + 2) * 12, requires_grad=True)
    x = fused[:, : heads * 12].view(groups, heads, 12)
    weight = (torch.rand(12) - 0.5).requires_grad_()
    for want, got in both(
        lambda backend: rms_norm(x, weight, 1e-5, zero_centered=True, backend=backend),
        [fused, weight],
    ):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(2, 6, 3, 40), (7, 3, 33)])
def test_rms_norm_with_residual_of_strided_rows(shape):
    wide, weight = torch.randn(shape, requires_grad=True), torch.rand(shape[-1], requires_grad=True)
    x = wide.select(-2, 1)
    for want, got in both(
        lambda backend: rms_norm_with_residual(x, weight, 1e-5, backend=backend), [wide, weight]
    ):
        assert got.shape == want.shape
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_the_residuals_gradient_is_added_inside_the_kernel():
    """Check that one autograd node makes both outputs, so that autograd adds no gradients of x."""
    x, weight = torch.randn(6, 40).bfloat16().requires_grad_(), torch.rand(40).bfloat16()
    upstream = [torch.randn(6, 40).bfloat16() for _ in range(2)]
    normed, residual = rms_norm_with_residual(x, weight, 1e-5, backend="triton")
    assert normed.grad_fn is residual.grad_fn
    assert residual.data_ptr() == x.data_ptr()
    (got,) = torch.autograd.grad((normed, residual), x, upstream)
    wide = x.detach().float().requires_grad_()
    outputs = rms_norm_with_residual(wide, weight.float(), 1e-5, backend="reference")
    (want,) = torch.autograd.grad(outputs, wide, [u.float() for u in upstream])
    # The interpreter truncates bits where a GPU rounds.
    torch.testing.assert_close(got.float(), want, rtol=2**-7, atol=1e-5)


def test_rms_norm_adds_into_main_grad():
    x, weight = torch.randn(9, 70), torch.nn.Parameter(torch.rand(70))
    rms_norm(x, weight, 1e-5, backend="reference").square().sum().backward()
    want, weight.grad = weight.grad, None
    weight.main_grad = torch.full((70,), 2.0)
    rms_norm(x, weight, 1e-5, backend="triton").square().sum().backward()
    assert weight.grad is None
    torch.testing.assert_close(weight.main_grad, want + 2, rtol=1e-5, atol=1e-5)


def test_rows_of_rms_norm_do_not_see_each_other():
    x, weight = torch.randn(6, 40), torch.rand(40)
    results = []
    for value in (1.0, torch.nan):
        changed = x.clone()
        changed[2] = value
        changed.requires_grad_()
        y = rms_norm(changed, weight, 1e-5, backend="triton")
        results.append((y, torch.autograd.grad(y.sum(), changed)[0]))
    keep = torch.arange(6) != 2
    for before, after in zip(*results):
        assert torch.equal(before[keep], after[keep])


@pytest.mark.parametrize("kind", activation_api.KINDS)
@pytest.mark.parametrize("shape", [(3, 2100), (2, 5, 6)])
def test_activation(kind, shape):
    wide = (torch.randn(*shape[:-1], 2 * shape[-1]) * 3).requires_grad_()
    x = wide[..., : shape[-1]]  # The rows are strided.
    for want, got in both(
        lambda backend: activation_api.activation(x, kind, backend=backend), [wide]
    ):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_gelu_is_precise_where_it_is_small():
    x = torch.linspace(-9, 9, 900)[None].requires_grad_()
    y = activation_api.activation(x, "gelu", backend="triton")
    exact = x.detach().double()
    distribution = torch.special.log_ndtr(exact).exp()
    slope = distribution + exact * torch.exp(-exact.square() / 2) / (2 * torch.pi) ** 0.5
    torch.testing.assert_close(y.double(), exact * distribution, rtol=1e-5, atol=1e-30)
    torch.testing.assert_close(
        torch.autograd.grad(y.sum(), x)[0].double(), slope, rtol=0, atol=5e-7
    )


@pytest.mark.parametrize(("groups", "features"), [(2, 2100), (3, 5), (9, 40), (1, 1)])
def test_sigmoid_gate_of_a_fused_projection(groups, features):
    x = torch.randn(4, groups, features, requires_grad=True)
    fused = (3 * torch.randn(4, groups, 2 * features + 3)).requires_grad_()
    gate = fused[..., 1 : 1 + features]
    for want, got in both(
        lambda backend: activation_api.sigmoid_gate(x, gate, backend=backend), [x, fused]
    ):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("tokens", "vocab", "features"), [(1, 3, 5), (40, 2, 20), (30, 99, 1030)])
def test_rows_of_tokens_are_added_to_their_table(tokens, vocab, features):
    generator = torch.Generator().manual_seed(0)
    tokens_T = torch.randint(vocab, (tokens,), generator=generator).int()
    rows = torch.randn(tokens, features + 3, generator=generator).bfloat16()[:, 2:-1]
    table = torch.randn(vocab, features, generator=generator)
    want = table.double().index_add(0, tokens_T, rows.double())
    add_token_rows(table, tokens_T, rows)
    torch.testing.assert_close(table.double(), want, rtol=1e-6, atol=1e-5)


def test_rows_of_tokens_are_added_in_fp32_to_a_table_in_bf16():
    rows, table = torch.full((300, 8), 2**-8), torch.ones(2, 8, dtype=torch.bfloat16)
    add_token_rows(table, torch.ones(300, dtype=torch.int32), rows)
    # Sums in bf16 would stay at 1, because 2**-8 is half of its last place there.
    expected = torch.stack([torch.ones(8), 1 + 300 * rows[0]]).bfloat16()
    assert torch.equal(table, expected)


@pytest.mark.parametrize("scaled_in_forward", [False, True])
@pytest.mark.parametrize(("rows", "vocab"), [(40, 33), (5000, 4500)])
def test_cross_entropy(rows, vocab, scaled_in_forward):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(7, 8, generator=generator, requires_grad=True)
    weight = torch.randn(rows, 8, generator=generator, requires_grad=True)
    labels = torch.randint(0, vocab, (7,), generator=generator, dtype=torch.int32)
    labels[2], mask = -100, torch.tensor([1.0, 1.0, 0.0, 1.0, 0.5, 1.0, 0.0])
    scale = torch.tensor(0.3)
    results = []
    for backend in BACKENDS:
        loss_sum, loss_T = linear_cross_entropy(
            hidden,
            weight,
            labels,
            mask,
            vocab_size=vocab,
            chunk_tokens=4,
            backend=backend,
            grad_scale=scale if scaled_in_forward else None,
        )
        upstream = {"grad_outputs": scale} if scaled_in_forward else {}
        loss = loss_sum if scaled_in_forward else loss_sum * scale
        results.append((loss_sum, loss_T, *torch.autograd.grad(loss, (hidden, weight), **upstream)))
    for want, got in zip(*results):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    assert not results[1][3][vocab:].any() and not results[1][2][2].any()


def test_cross_entropy_of_a_label_outside_the_vocabulary_is_nan_in_its_row_alone():
    hidden, weight = torch.randn(3, 4), torch.randn(10, 4)
    labels = torch.tensor([1, 9, 2])
    _, loss_T = linear_cross_entropy(
        hidden, weight, labels, torch.ones(3), vocab_size=9, backend="triton"
    )
    assert loss_T.isnan().tolist() == [False, True, False]


@pytest.mark.parametrize(("ranks", "rows", "vocab"), [(4, 64, 37), (2, 9000, 4700)])
def test_cross_entropy_of_a_vocabulary_spread_over_ranks(ranks, rows, vocab):
    check_split("triton", ranks=ranks, rows=rows, vocab=vocab)
    check_split("triton", ranks=ranks, rows=rows, vocab=vocab, grad_scale=torch.tensor(0.3))


def test_cross_entropy_of_a_vocabulary_spread_over_ranks_weight_and_labels():
    check_weight_gradient("triton")
    check_unknown_label("triton")
