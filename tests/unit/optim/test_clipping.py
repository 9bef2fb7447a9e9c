"""Gradient norm, non-finite flag and clipping against torch's functions."""

import pytest
import torch
from torch import nn

from megatron_packed.distributed.flat_buffers import FlatBuffers
from megatron_packed.optim.clipping import Counted, clip_divisor, global_norm, norm_and_flag
from support.random_tensors import normal


def model_with_gradients(scale: float) -> tuple[nn.Module, FlatBuffers]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 60), nn.LayerNorm(60), nn.Linear(60, 70))
    buffers = FlatBuffers(model)
    (model(torch.randn(8, 40)).square().mean() * scale).backward()
    return model, buffers


@pytest.mark.parametrize("scale", [1e-3, 100.0])
def test_clipping_equals_torch(scale: float) -> None:
    model, buffers = model_with_gradients(scale)
    for p in model.parameters():
        p.grad = p.main_grad.clone()
    expected_norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    norm, _ = norm_and_flag(Counted([buffers.grads]))
    torch.testing.assert_close(norm, expected_norm, rtol=1e-6, atol=0)
    assert (norm > 1) == (scale == 100.0)  # one case clips, the other must not
    divisor = clip_divisor(norm, 1.0)
    for p in model.parameters():
        torch.testing.assert_close(p.main_grad / divisor, p.grad, rtol=1e-6, atol=0)
    if scale < 1:
        assert divisor.item() == 1.0  # exactly 1: gradients below the limit keep every bit


def test_norm_does_not_drift_with_the_number_of_elements() -> None:
    grads = torch.full((4096 * 2500,), 1e-4)
    expected = 1e-4 * (4096 * 2500) ** 0.5
    assert global_norm(grads).item() == pytest.approx(expected, rel=1e-5)
    assert torch.equal(global_norm(grads), global_norm(grads.clone()))


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_one_bad_value_anywhere_raises_the_flag(bad: float) -> None:
    grads = torch.ones(8192)
    fine = torch.zeros(3)
    assert norm_and_flag(Counted([grads]))[1].item() == 0.0
    assert norm_and_flag(Counted([grads]), fine)[1].item() == 0.0
    fine[2] = bad
    assert norm_and_flag(Counted([grads]), fine)[1].item() == 1.0
    grads[5000] = bad
    _, flag = norm_and_flag(Counted([grads]))
    assert flag.item() == 1.0 and flag.shape == () and flag.dtype == torch.float32


def test_what_another_rank_counts_is_left_out_and_left_alone() -> None:
    grads = normal(2 * 4096)
    before, counted = grads.clone(), grads.clone()
    counted[5:700], counted[4000:5000] = 0, 0
    norm, _ = norm_and_flag(Counted([grads], [grads[5:700], grads[4000:5000]]))
    assert (
        torch.equal(norm, norm_and_flag(Counted([counted]))[0])
        and norm < norm_and_flag(Counted([grads]))[0]
    )
    assert torch.equal(grads, before)
