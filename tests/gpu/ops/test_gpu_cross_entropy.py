"""Chunked cross-entropy on a GPU: errors, isolation, determinism, replay, memory, no host sync."""

import pytest
import torch
import torch.nn.functional as F

from megatron_packed.ops.cross_entropy.api import linear_cross_entropy
from support.gpu_checks import (
    T,
    check_determinism,
    check_errors,
    check_no_sync,
    check_replay,
    leaves_like,
)

pytestmark = pytest.mark.gpu

D, VOCAB, ROWS = 512, 50257, 50304  # a vocabulary size without useful divisors


@pytest.fixture
def case():
    generator = torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn(T, D, generator=generator, device="cuda").bfloat16()
    weight = (torch.randn(ROWS, D, generator=generator, device="cuda") * 0.05).bfloat16()
    labels = torch.randint(0, VOCAB, (T,), generator=generator, device="cuda", dtype=torch.int32)
    mask = (torch.rand(T, generator=generator, device="cuda") < 0.8).float()
    return hidden, weight, labels, mask


def loss(labels, mask, backend="triton", chunk=384):
    def kernel(hidden, weight):
        return linear_cross_entropy(
            hidden, weight, labels, mask, vocab_size=VOCAB, chunk_tokens=chunk, backend=backend
        )[0]

    return kernel


def plain(labels, mask):
    def dense(hidden, weight):
        logits = hidden @ weight[:VOCAB].T
        return (F.cross_entropy(logits.float(), labels.long(), reduction="none") * mask).sum()

    return dense


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_loss_and_gradients(case, backend):
    hidden, weight, labels, mask = case
    check_errors(
        loss(labels, mask, backend),
        plain(labels, mask),
        plain(labels, mask),
        [hidden, weight],
        torch.bfloat16,
    )


def test_kernel_in_float32_is_the_dense_loss(case):
    hidden, weight, labels, mask = (x.float() if x.is_floating_point() else x for x in case)
    leaves = leaves_like([hidden, weight], torch.float32)
    for function in (loss(labels, mask), loss(labels, mask, chunk=T)):
        got, want = (f(*leaves) for f in (function, plain(labels, mask)))
        torch.testing.assert_close(got, want, rtol=1e-5, atol=0)
        for x, y in zip(torch.autograd.grad(got, leaves), torch.autograd.grad(want, leaves)):
            torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-5)


def test_gradient_accumulates_into_main_grad_in_float32(case):
    hidden, weight, labels, mask = case
    scale = torch.tensor(1 / 800, device="cuda")
    want = torch.autograd.grad(loss(labels, mask)(hidden, weight.requires_grad_()) * scale, weight)[
        0
    ]
    for promised in (None, scale):
        parameter = torch.nn.Parameter(weight.detach().clone())
        parameter.main_grad = torch.ones(ROWS, D, device="cuda")
        x = hidden.clone().requires_grad_()
        loss_sum, _ = linear_cross_entropy(
            x, parameter, labels, mask, vocab_size=VOCAB, grad_scale=promised
        )
        (loss_sum * scale).backward() if promised is None else loss_sum.backward(promised)
        assert parameter.grad is None and x.grad.isfinite().all()
        error = (parameter.main_grad - 1 - want.float()).abs().max() / want.float().abs().max()
        assert error <= 2**-7
        assert (parameter.main_grad[VOCAB:] == 1).all()


def test_logits_scaling_of_a_power_of_two_equals_scaled_hidden_states(case):
    """Division by 8 is exact, so both ways round identically."""
    hidden, weight, labels, mask = case
    results = []
    for factor, scaling in ((1, 8.0), (1 / 8, None)):
        x = (hidden * factor).requires_grad_()
        parameter = torch.nn.Parameter(weight.clone())
        parameter.main_grad = torch.zeros(ROWS, D, device="cuda")
        loss_sum, _ = linear_cross_entropy(
            x, parameter, labels, mask, vocab_size=VOCAB, logits_scaling=scaling
        )
        loss_sum.backward()
        results.append((loss_sum.detach(), x.grad * factor, parameter.main_grad))
    assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(*results))


def test_isolation(case):
    hidden, weight, labels, mask = case
    changed = hidden.clone()
    changed[300] += 2
    results = []
    for values in (hidden, changed):
        x = values.clone().requires_grad_()
        loss_sum, loss_T = linear_cross_entropy(
            x,
            weight,
            labels,
            torch.ones_like(mask),
            vocab_size=VOCAB,
            chunk_tokens=384,
            backend="triton",
        )
        results.append((loss_T, torch.autograd.grad(loss_sum, x)[0]))
    keep = torch.arange(T, device="cuda") != 300
    for before, after in zip(*results):
        assert torch.equal(before[keep], after[keep]) and not torch.equal(before[300], after[300])


def test_determinism_and_no_host_sync(case):
    hidden, weight, labels, mask = case
    check_determinism(loss(labels, mask), [hidden, weight], torch.bfloat16)
    check_no_sync(loss(labels, mask), [hidden, weight], torch.bfloat16)


def test_replay_over_other_labels(case):
    hidden, weight, labels, mask = case
    updates = [
        lambda: None,
        lambda: labels.random_(0, VOCAB),
        lambda: mask.zero_(),
    ]
    check_replay(loss(labels, mask), [hidden, weight], torch.bfloat16, updates)


def test_logits_of_the_whole_pack_never_exist(case):
    hidden, weight, labels, mask = case
    x = hidden.clone().requires_grad_()
    kernel = loss(labels, mask, chunk=128)
    kernel(x, weight).backward()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    kernel(x, weight).backward()
    grown = torch.cuda.max_memory_allocated() - before
    chunk_bytes = 128 * ROWS * 2
    assert chunk_bytes <= grown < chunk_bytes + 2**24 < T * ROWS * 2


@pytest.mark.parametrize(
    "in_forward", [True, False], ids=["gradients in forward", "gradients in backward"]
)
def test_gradients_need_no_buffer_of_the_weights_size_and_no_host_wait(case, in_forward):
    hidden, weight, labels, mask = case
    scale = torch.tensor(1 / 800, device="cuda")

    def run(main_grad, in_forward):
        parameter = torch.nn.Parameter(weight)
        parameter.main_grad, x = main_grad, hidden.clone().requires_grad_()
        loss_sum, _ = linear_cross_entropy(
            x,
            parameter,
            labels,
            mask,
            vocab_size=VOCAB,
            chunk_tokens=128,
            grad_scale=scale if in_forward else None,
        )
        loss_sum.backward(scale) if in_forward else (loss_sum * scale).backward()
        return loss_sum.detach(), x.grad

    main_grads = [torch.ones(ROWS, D, device="cuda") for _ in range(3)]
    expected = run(main_grads[0], not in_forward)
    run(main_grads[1], in_forward)  # tunes kernels
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = run(main_grads[2], in_forward)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.max_memory_allocated() - before < 128 * ROWS * 2 + 2**24 < ROWS * D * 2
    for one, other in zip((*found, main_grads[2]), (*expected, main_grads[0])):
        assert torch.equal(one, other)
