"""Optimizer step on a GPU: no host sync, capture, skipped steps, implementations and their
oracle.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from megatron_packed.distributed.flat_buffers import FlatBuffers
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.optim.adamw import OP, AdamWInputs
from megatron_packed.optim.optimizer import Optimizer
from support.gpu_capture import capture

pytestmark = pytest.mark.gpu

IMPLEMENTATIONS = ["torch", "transformer_engine", "apex", "reference"]
# (rtol, atol) after 20 steps. optim/adamw_multi_tensor.py explains why the kernels of
# TransformerEngine and apex differ from the reference.
TOLERANCES = {"torch": (1e-5, 1e-6), "transformer_engine": (1e-4, 1e-5), "apex": (1e-4, 1e-5)}


class Mixed(nn.Module):
    """Module with bf16 matrices and norms and float32 vectors: every kind of slice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(96, 200), nn.LayerNorm(200), nn.Linear(200, 64)).to(
            torch.bfloat16
        )
        self.gate = nn.Parameter(torch.randn(64, 3))
        self.a_log = nn.Parameter(torch.randn(3))
        for p in self.parameters():
            p.no_weight_decay = p.dim() == 1

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        return (self.body(x_TD).float() @ self.gate * self.a_log.exp()).square().mean()


def build(
    implementation: str, clip_grad: float = 0.1, beta2: float = 0.999, **options
) -> tuple[Mixed, FlatBuffers, Optimizer]:
    reasons = OP.explain(AdamWInputs(device_type="cuda"))[implementation]
    if reasons:
        pytest.skip("; ".join(reasons))
    model = Mixed().cuda()
    buffers = FlatBuffers(model, extras={"loss": 1}, counters={"experts": 4})
    optimizer = Optimizer(
        buffers,
        clip_grad=clip_grad,
        weight_decay=0.1,
        beta2=beta2,
        implementation=implementation,
        **options,
    )
    return model, buffers, optimizer


def batches(count: int) -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [torch.randn(32, 96, device="cuda", dtype=torch.bfloat16) for _ in range(count)]


def queue_gradients(model: Mixed, buffers: FlatBuffers, x_TD: torch.Tensor) -> None:
    buffers.zero_grad()
    loss = model(x_TD)
    loss.backward()
    buffers.extras["loss"].add_(loss.detach())
    buffers.counters["experts"].add_(torch.ones(4, device="cuda"))
    buffers.all_reduce(ParallelGroups.single("cuda"))


@contextmanager
def no_synchronisation() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def everything(model: Mixed, optimizer: Optimizer) -> list[torch.Tensor]:
    return [*model.parameters(), *optimizer.state_shards().values()]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_steps_never_wait_for_the_device(implementation: str) -> None:
    model, buffers, optimizer = build(implementation)
    data = batches(6)
    for x_TD in data[:2]:  # libraries may synchronise while they load
        queue_gradients(model, buffers, x_TD)
        optimizer.step(1e-3, loss=buffers.extras["loss"])
    with no_synchronisation():
        for number, x_TD in enumerate(data[2:]):
            queue_gradients(model, buffers, x_TD)
            stats = optimizer.step(1e-3 / (number + 1), loss=buffers.extras["loss"])
    assert (
        stats.nonfinite.item() == 0 and stats.grad_norm.item() > 0.1 and optimizer.steps.item() == 6
    )


@pytest.mark.parametrize("beta2", [0.999, 1 - 2**-10])
@pytest.mark.parametrize("clip_grad", [0.0, 0.1])
@pytest.mark.parametrize("implementation", list(TOLERANCES))
def test_implementations_agree_with_the_oracle(
    implementation: str, clip_grad: float, beta2: float
) -> None:
    """A kernel may differ only by the float32 rounding of 1 - beta2.

    The second beta2 and 1 - beta2 are exact in float32. For the first beta2, a kernel that
    subtracts in float32 differs by the rounding of 1 - beta2.
    """
    runs = {name: build(name, clip_grad, beta2) for name in (implementation, "reference")}
    for step, x_TD in enumerate(batches(20)):
        queue_gradients(*runs["reference"][:2], x_TD)
        # Both get the same gradients, because the test compares only the optimizers.
        runs[implementation][1].storage.copy_(runs["reference"][1].storage)
        stats = {name: run[2].step(1e-3 * (step + 1)) for name, run in runs.items()}
        assert stats[implementation].grad_norm.item() == stats["reference"].grad_norm.item()
    found, expected = (runs[name][2].state_shards() for name in (implementation, "reference"))
    rtol, atol = TOLERANCES[implementation]
    # The rounding of 1 - beta2 is 1.3e-5 for 0.999 and 0 for the second beta2.
    rtol += abs(float(1 - torch.tensor(beta2)) / (1 - beta2) - 1)
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=rtol, atol=atol)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_non_finite_step_changes_no_bit(implementation: str, bad: float) -> None:
    model, buffers, optimizer = build(implementation)
    first, second = batches(2)
    queue_gradients(model, buffers, first)
    optimizer.step(1e-3)
    before = [t.clone() for t in everything(model, optimizer)]
    queue_gradients(model, buffers, second)
    model.gate.main_grad[1, 1] = bad
    with no_synchronisation():
        stats = optimizer.step(1e-3)
    assert stats.nonfinite.item() == 1 and not stats.grad_norm.isfinite().item()
    for now, then in zip(everything(model, optimizer), before):
        assert torch.equal(now.view(torch.uint8), then.view(torch.uint8))
    queue_gradients(model, buffers, second)
    assert optimizer.step(1e-3).nonfinite.item() == 0 and optimizer.steps.item() == 2


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("decay", ["constant decay", "changing decay"])
def test_a_captured_step_replays_with_new_rates_gradients_and_flags(
    implementation: str, decay: str
) -> None:
    options = {"weight_decay_changes": decay == "changing decay"}
    eager_model, eager_buffers, eager = build(implementation, **options)
    model, buffers, optimizer = build(implementation, **options)
    gradients = []
    for x_TD in batches(4):
        queue_gradients(eager_model, eager_buffers, x_TD)
        gradients.append(eager_buffers.storage.clone())
    gradients[2][5] = float("nan")

    initial = {name: t.clone() for name, t in optimizer.state_shards().items()}
    graph, stats = capture(
        lambda: optimizer.step(loss=buffers.extras["loss"]), lambda: optimizer.step(0.0), times=1
    )
    optimizer.load_state(initial)

    flags = []
    for step, storage in enumerate(gradients):
        lr = 1e-2 / (step + 1)
        eager_buffers.storage.copy_(storage)
        for one in (eager, optimizer):
            one.set_weight_decay(0.5 * step)
        eager.step(lr, loss=eager_buffers.extras["loss"])
        buffers.storage.copy_(storage)
        optimizer.set_lr(lr)
        graph.replay()
        flags.append(stats.nonfinite.item())
    assert flags == [0.0, 0.0, 1.0, 0.0] and optimizer.steps.item() == 3
    for replayed, expected in zip(everything(model, optimizer), everything(eager_model, eager)):
        assert torch.equal(replayed, expected)


def test_forward_backward_and_step_in_one_graph() -> None:
    """Hooks, flat buffers and optimizer keep parameters at the addresses that the graph uses."""
    eager_model, eager_buffers, eager = build("torch")
    model, buffers, optimizer = build("torch")
    data = batches(5)
    static_TD = data[0].clone()
    initial = {name: t.clone() for name, t in optimizer.state_shards().items()}

    def step(lr: float | None = None, **options: Any) -> None:
        queue_gradients(model, buffers, static_TD)
        optimizer.step(lr, **options)

    graph, _ = capture(lambda: step(loss=buffers.extras["loss"]), lambda: step(0.0))
    optimizer.load_state(initial)
    buffers.check_addresses()
    for x_TD in data:
        queue_gradients(eager_model, eager_buffers, x_TD)
        eager.step(1e-2, loss=eager_buffers.extras["loss"])
        static_TD.copy_(x_TD)
        optimizer.set_lr(1e-2)
        graph.replay()
    assert buffers.counters["experts"].value().tolist() == [1] * 4
    # If a gradient is nearly zero, another order of summation can change its sign and the
    # direction of Adam's step. All other values are equal.
    pairs = zip(model.parameters(), eager_model.parameters())
    close = [torch.isclose(p, q, rtol=1e-2, atol=1e-4).float().mean().item() for p, q in pairs]
    assert min(close) > 0.98
    start = [initial[f"master/{name}"].view_as(p) for name, p in model.named_parameters()]
    assert not any(
        torch.isclose(p.float(), q, rtol=1e-2, atol=1e-4).all()
        for p, q in zip(model.parameters(), start)
    )
    assert optimizer.steps.item() == len(data)
