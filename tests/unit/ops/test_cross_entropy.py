"""The chunked loss against a dense float64 cross-entropy: loss, both gradients and errors."""

import pytest
import torch
import torch.nn.functional as F

from megatron_packed.ops.cross_entropy import reference
from megatron_packed.ops.cross_entropy.api import default_chunk_tokens, linear_cross_entropy
from support.split_vocabulary import check_split, check_unknown_label, check_weight_gradient

T, D, V, VOCAB = 37, 12, 24, 21


def case(dtype=torch.float32, supervised=0.7, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(T, D, generator=generator).to(dtype).requires_grad_()
    weight = torch.nn.Parameter(torch.randn(V, D, generator=generator).to(dtype))
    labels = torch.randint(0, VOCAB, (T,), generator=generator, dtype=torch.int32)
    mask = (torch.rand(T, generator=generator) < supervised).float()
    return hidden, weight, labels, mask


def dense(hidden, weight, labels, mask, scaling=None):
    logits = hidden.double() @ weight[:VOCAB].double().T / (scaling or 1)
    return F.cross_entropy(logits, labels.long(), reduction="none") * mask.double()


def test_scaling_by_one_changes_no_bit():
    results = []
    for scaling in (None, 1.0):
        hidden, weight, labels, mask = case()
        loss, _ = linear_cross_entropy(
            hidden, weight, labels, mask, vocab_size=VOCAB, logits_scaling=scaling
        )
        loss.backward()
        results.append((loss, hidden.grad, weight.grad))
    assert all(torch.equal(a, b) for a, b in zip(*results))


@pytest.mark.parametrize("main_grad", [False, True])
@pytest.mark.parametrize("scaled_in_forward", [False, True])
@pytest.mark.parametrize(
    ("chunk", "scaling"),
    [(1, None), (8, 3), (36, None), (37, 0.7), (100, None), (None, 8.0)],
)
def test_loss_and_gradients_are_the_dense_ones(chunk, scaling, scaled_in_forward, main_grad):
    hidden, weight, labels, mask = case()
    scale = torch.tensor(0.037)
    want_T = dense(hidden, weight, labels, mask, scaling)
    want_grads = torch.autograd.grad(want_T.sum() * scale, (hidden, weight))
    if main_grad:
        weight.main_grad = torch.ones(V, D)  # Stands for gradients of earlier micro-batches.
    grad_scale = scale if scaled_in_forward else None
    loss_sum, loss_T = linear_cross_entropy(
        hidden,
        weight,
        labels,
        mask,
        vocab_size=VOCAB,
        chunk_tokens=chunk,
        logits_scaling=scaling,
        grad_scale=grad_scale,
    )
    torch.testing.assert_close(loss_T.double(), want_T.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(loss_sum.double(), want_T.sum().detach(), rtol=1e-6, atol=1e-5)
    assert not loss_T.requires_grad
    loss_sum.backward(scale) if scaled_in_forward else (loss_sum * scale).backward()
    torch.testing.assert_close(hidden.grad, want_grads[0], rtol=1e-4, atol=1e-6)
    got = weight.main_grad - 1 if main_grad else weight.grad
    assert (weight.grad is None) == main_grad
    torch.testing.assert_close(got, want_grads[1], rtol=1e-4, atol=1e-6)
    assert not got[VOCAB:].any()


def test_bf16_errs_at_most_twice_as_much_as_plain_bf16():
    hidden, weight, labels, mask = case(torch.bfloat16)
    want = torch.autograd.grad(dense(hidden, weight, labels, mask).sum(), (hidden, weight))
    plain = (
        F.cross_entropy((hidden @ weight[:VOCAB].T).float(), labels.long(), reduction="none") * mask
    )
    plain_grads = torch.autograd.grad(plain.sum(), (hidden, weight))
    ours = torch.autograd.grad(
        linear_cross_entropy(hidden, weight, labels, mask, vocab_size=VOCAB, chunk_tokens=8)[0],
        (hidden, weight),
    )
    for got, other, exact in zip(ours, plain_grads, want):
        assert (got - exact).abs().max() <= 2 * (other - exact).abs().max()


def test_nothing_supervised_is_zero_and_finite():
    hidden, weight, labels, mask = case(supervised=0)
    loss_sum, loss_T = linear_cross_entropy(
        hidden, weight, labels, mask, vocab_size=VOCAB, chunk_tokens=8
    )
    (loss_sum * 0.5).backward()
    assert loss_sum == 0 and not loss_T.any() and not hidden.grad.any() and not weight.grad.any()


def test_labels_without_a_target_may_be_anything_but_a_supervised_one_must_exist():
    hidden, weight, labels, mask = case()
    mask[3], mask[4] = 0, 0
    want = linear_cross_entropy(hidden, weight, labels, mask, vocab_size=VOCAB)[0]
    labels[3], labels[4] = -100, V + 5
    assert linear_cross_entropy(hidden, weight, labels, mask, vocab_size=VOCAB)[0] == want
    mask[4] = 1
    assert linear_cross_entropy(hidden, weight, labels, mask, vocab_size=VOCAB)[0].isnan()


def test_a_changed_token_leaves_the_others_bits():
    hidden, weight, labels, mask = case(supervised=1)
    changed = hidden.detach().clone()
    changed[5] = 3.0
    changed.requires_grad_()
    results = []
    for x in (hidden, changed):
        loss_sum, loss_T = linear_cross_entropy(
            x, weight, labels, mask, vocab_size=VOCAB, chunk_tokens=8
        )
        results.append((loss_T, torch.autograd.grad(loss_sum, x)[0]))
    keep = torch.arange(T) != 5
    for before, after in zip(*results):
        assert torch.equal(before[keep], after[keep]) and not torch.equal(before[5], after[5])


def test_logits_of_the_whole_pack_never_exist(monkeypatch):
    sizes = []
    step = reference.softmax_step
    monkeypatch.setattr(
        reference,
        "softmax_step",
        lambda logits, *rest: (sizes.append(logits.shape[0]), step(logits, *rest)),
    )
    hidden, weight, labels, mask = case()
    linear_cross_entropy(hidden, weight, labels, mask, vocab_size=VOCAB)
    assert sizes == [19, 18]


def test_evaluation_forms_no_gradient():
    hidden, weight, labels, mask = case()
    weight.main_grad = torch.zeros(V, D)
    with torch.no_grad():
        loss_sum, _ = linear_cross_entropy(
            hidden,
            weight,
            labels,
            mask,
            vocab_size=VOCAB,
            grad_scale=torch.tensor(1.0),
            chunk_tokens=8,
        )
    assert not loss_sum.requires_grad and not weight.main_grad.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_gradients_are_the_same_bits_whether_formed_in_forward_or_in_backward(dtype):
    found = []
    for in_forward in (True, False):
        hidden, weight, labels, mask = case(dtype)
        weight.main_grad = torch.ones(V, D, dtype=torch.promote_types(dtype, torch.float32))
        scale = torch.tensor(1 / 3, dtype=weight.main_grad.dtype)
        loss_sum, _ = linear_cross_entropy(
            hidden,
            weight,
            labels,
            mask,
            vocab_size=VOCAB,
            chunk_tokens=8,
            grad_scale=scale if in_forward else None,
        )
        assert (weight.main_grad != 1).any() == in_forward
        loss_sum.backward(scale) if in_forward else (loss_sum * scale).backward()
        found.append((loss_sum.detach(), hidden.grad, weight.main_grad))
    assert all(torch.equal(*both) for both in zip(*found))


@pytest.mark.parametrize(
    "use",
    [
        # The upstream gradient has the same value, but is another tensor.
        lambda loss_sum, scale: (loss_sum * scale).backward(),
        lambda loss_sum, scale: loss_sum.backward(scale / 4),
        lambda loss_sum, scale: (loss_sum + 0.5 * loss_sum).backward(scale),
        lambda loss_sum, scale: [loss_sum.backward(scale, retain_graph=True) for _ in range(2)],
    ],
    ids=["another tensor", "another value", "a sum", "twice"],
)
def test_another_gradient_than_the_promised_one_is_an_error(use):
    hidden, weight, labels, mask = case()
    weight.main_grad = torch.zeros(V, D)
    scale = torch.tensor(0.5)
    loss_sum, _ = linear_cross_entropy(
        hidden, weight, labels, mask, vocab_size=VOCAB, grad_scale=scale
    )
    with pytest.raises(
        RuntimeError, match=r"loss_sum\.backward\(grad_scale\).* Leave grad_scale out"
    ):
        use(loss_sum, scale)


def test_a_float64_loss_is_scaled_in_float64():
    hidden, weight, labels, mask = case(torch.float64)
    want = torch.autograd.grad(dense(hidden, weight, labels, mask).sum() / 3, (hidden, weight))
    got = torch.autograd.grad(
        linear_cross_entropy(hidden, weight, labels, mask, vocab_size=VOCAB)[0] / 3,
        (hidden, weight),
    )
    for one, other in zip(got, want):
        torch.testing.assert_close(one, other, rtol=1e-13, atol=1e-13)


def test_frozen_weight_and_frozen_hidden():
    hidden, weight, labels, mask = case()
    loss = linear_cross_entropy(hidden.detach(), weight, labels, mask, vocab_size=VOCAB)[0]
    assert torch.autograd.grad(loss, weight)[0].any()
    loss = linear_cross_entropy(hidden, weight.detach(), labels, mask, vocab_size=VOCAB)[0]
    assert torch.autograd.grad(loss, hidden)[0].any()


@pytest.mark.parametrize(
    ("tokens", "rows", "chunk"),
    [(4096, 16384, 2048), (32768, 131072, 4096), (32768, 8192, 8192), (100, 512, 50), (1, 8, 1)],
)
def test_default_chunk(tokens, rows, chunk):
    assert default_chunk_tokens(tokens, rows) == chunk


def test_wrong_arguments_are_refused():
    hidden, weight, labels, mask = case()
    with pytest.raises(ValueError, match="vocab_size"):
        linear_cross_entropy(hidden, weight, labels, mask, vocab_size=V + 1)
    with pytest.raises(ValueError, match="chunk_tokens"):
        linear_cross_entropy(hidden, weight, labels, mask, vocab_size=V, chunk_tokens=0)
    with pytest.raises(ValueError, match="cast hidden"):
        linear_cross_entropy(hidden.double(), weight, labels, mask, vocab_size=V)
    with pytest.raises(ValueError, match="labels"):
        linear_cross_entropy(hidden, weight, labels[1:], mask, vocab_size=V)
    with pytest.raises(ValueError, match=r"grad_scale is torch.float64 of shape \(1,\)"):
        linear_cross_entropy(
            hidden,
            weight,
            labels,
            mask,
            vocab_size=V,
            grad_scale=torch.ones(1, dtype=torch.float64),
        )


@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_a_vocabulary_spread_over_ranks(dtype, tolerance, scale):
    grad_scale = None if scale is None else torch.tensor(scale, dtype=dtype)
    check_split("reference", dtype, tolerance=tolerance, grad_scale=grad_scale)
    check_split("reference", dtype, ranks=2, tolerance=tolerance)


def test_the_weight_gradient_of_a_vocabulary_spread_over_ranks():
    check_weight_gradient("reference")


def test_an_unknown_label_of_a_vocabulary_spread_over_ranks():
    check_unknown_label("reference")
