"""Number of zero gradients and norm of parameters, against plain loops over the parameters."""

import pytest
import torch
from torch import nn

from megatron_packed.distributed.flat_buffers import FlatBuffers
from megatron_packed.models.metrics_layout import MetricsLayout, StepValues
from megatron_packed.optim.clipping import ZEROS_UNIT, Counted, nonzeros
from megatron_packed.optim.optimizer import Optimizer
from megatron_packed.optim.statistics import Statistics
from support.random_tensors import normal
from support.recorder import Recorder


class Tied(nn.Module):
    """Model with bf16 and float32 parameters, padding in all buffers, and one tied parameter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(37, 24, dtype=torch.bfloat16)
        self.head = nn.Linear(24, 37, bias=False, dtype=torch.bfloat16)
        self.head.weight = self.embedding.weight
        self.router = nn.Parameter(torch.randn(5, 7))
        self.router.no_weight_decay = True


def job(**asked) -> tuple[Tied, FlatBuffers, Optimizer]:
    model = Tied()
    buffers = FlatBuffers(model)
    return model, buffers, Optimizer(buffers, clip_grad=0.1, **asked)


def test_both_are_those_of_a_loop_over_the_parameters() -> None:
    model, buffers, optimizer = job(params_norm=True, count_zeros_of=37 * 24 + 5 * 7)
    masters = {
        n.removeprefix("master/"): t
        for n, t in optimizer.state_shards().items()
        if n.startswith("master/")
    }
    for step in range(3):
        for parameter in model.parameters():
            grad = normal(parameter.shape, seed=step)
            parameter.main_grad.copy_(grad * (grad.abs() > 0.3))
        model.router.main_grad[0, 0] = 1e-45  # zero only after clipping, so not counted
        zeros = sum(int((parameter.main_grad == 0).sum()) for parameter in model.parameters())
        before = optimizer.exp_avg.clone()
        stats = optimizer.step(1e-2)
        assert stats.grad_zeros.tolist() == [0, zeros] and 100 < zeros < 500
        assert len(masters) == 2 and not torch.equal(before, optimizer.exp_avg)
        norm = sum(master.double().square().sum() for master in masters.values()).sqrt()
        torch.testing.assert_close(stats.params_norm.double(), norm, rtol=1e-7, atol=0)
    buffers.grads[3] = float("nan")
    buffers.grads[4:10] = 0
    held = stats.params_norm.clone()
    assert optimizer.step(1e-2).nonfinite == 1 and torch.equal(stats.params_norm, held)
    zeros = sum(int((parameter.main_grad == 0).sum()) for parameter in model.parameters())
    assert stats.grad_zeros.tolist() == [0, zeros]


def test_what_another_rank_counts_too_is_counted_once() -> None:
    """A rank counts half of a tensor that two ranks hold, and leaves out elements that another rank
    counts.
    """
    whole = normal(4096).where(torch.arange(4096) % 3 > 0, 0)
    copied = torch.ones(4096).where(torch.arange(4096) % 2 > 0, 0)
    mine = Counted([whole, copied], [whole[100:700]], [1, 2])
    before = whole.clone()
    statistics = Statistics(
        mine, mine, elements=10_000, params_norm=True, group=None, device=torch.device("cpu")
    )
    statistics.before_update()
    statistics.after_update()
    kept = torch.cat([whole[:100], whole[700:]])
    assert statistics.grad_zeros.tolist() == [0, 10_000 - int((kept != 0).sum()) - 1024]
    expected = (kept.double().square().sum() + 1024).sqrt()
    torch.testing.assert_close(statistics.params_norm.double(), expected, rtol=1e-6, atol=0)
    assert torch.equal(whole, before)


def test_more_zeros_than_float32_counts() -> None:
    grads, elements = torch.zeros(4096), 5 * ZEROS_UNIT + 12_345
    grads[0], grads[1], grads[2] = float("nan"), float("-inf"), 1e-45
    assert nonzeros(grads) == 3
    counted = Counted([grads])
    statistics = Statistics(
        counted, counted, elements=elements, params_norm=False, group=None, device=grads.device
    )
    statistics.before_update()
    statistics.after_update()
    layout = MetricsLayout(world_size=1)
    vector = [1.0] * layout.size
    vector[layout.slots["params_norm"]] = [7.5]
    vector[layout.slots["grad_zeros"]] = statistics.grad_zeros.tolist()
    vector[layout.slots["held"]] = [0.0]
    values = StepValues.from_list(vector)
    assert (values.grad_zeros, values.params_norm, values.held) == (elements - 3, 7.5, False)


def operations(**asked) -> list[str]:
    _, _, optimizer = job(**asked)
    with Recorder() as recorder:
        optimizer.step(1e-2)
    return [name for name, _ in recorder.calls]


def test_statistics_that_are_off_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    off, on = operations(), operations(params_norm=True, count_zeros_of=923)
    monkeypatch.setattr(Statistics, "before_update", lambda self: None)
    monkeypatch.setattr(Statistics, "after_update", lambda self: None)
    assert off == operations() and len(on) > len(off)
