"""Gradients in bf16: which parameters have them, their place in the buffers, and the update."""

import pytest
import torch
from torch import nn

from megatron_packed.config.sections.parallel import ParallelConfig
from megatron_packed.distributed.flat_buffers import FlatBuffers
from megatron_packed.distributed.gradient_precision import GradientPrecision
from megatron_packed.distributed.zero1_layout import BufferPart, Ownership
from megatron_packed.optim.adamw import OP
from megatron_packed.optim.optimizer import Optimizer
from support.random_tensors import normal

LOW = GradientPrecision(low=True)
BF16 = torch.bfloat16


def model_of(dtype: torch.dtype = BF16) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 40), nn.LayerNorm(40), nn.Linear(40, 10)).to(dtype)
    model[1].no_weight_decay = True
    return model


def test_options_give_the_rule() -> None:
    assert GradientPrecision.from_config(ParallelConfig()) == GradientPrecision()
    for options in ({"grad_reduce_in_bf16": True}, {"main_grads_dtype": "bf16"}):
        assert GradientPrecision.from_config(ParallelConfig(**options)) == LOW
    given = ParallelConfig(
        grad_reduce_in_bf16=True,
        ddp_param_name_patterns_for_fp32_local_accumulation=("output.*",),
        ddp_reduce_scatter_with_fp32_accumulation=False,
    )
    assert GradientPrecision.from_config(given) == GradientPrecision(True, ("output.*",), False)


@pytest.mark.parametrize(
    ("name", "parameter", "exact", "low"),
    [
        ("layers.0.mixer.fc1.weight", torch.zeros(2, 3, dtype=BF16), (), True),
        ("layers.0.mixer.experts.fc1", torch.zeros(2, 3, 4, dtype=BF16), (), True),
        ("layers.0.mixer.fc1.weight", torch.zeros(2, 3), (), False),
        ("layers.0.norm.weight", torch.zeros(3, dtype=BF16), (), False),
        ("layers.0.mixer.router.weight", torch.zeros(2, 3, dtype=BF16), (), False),
        ("layers.0.mixer.conv1d.weight", torch.zeros(2, 3, dtype=BF16), (), False),
        ("output.weight", torch.zeros(2, 3, dtype=BF16), ("layers.*", "output.*"), False),
        ("output.weight", torch.zeros(2, 3, dtype=BF16), ("all",), False),
        ("embedding.weight", torch.zeros(2, 3, dtype=BF16), ("output.*",), True),
    ],
)
def test_matrices_in_bf16_have_low_gradients(name, parameter, exact, low) -> None:
    assert GradientPrecision(low=True, exact=exact).is_low(name, parameter) is low


@pytest.mark.parametrize("owners", [1, 2])
def test_low_gradients_are_first_and_half_as_large(owners) -> None:
    buffers = FlatBuffers(model_of(), {"loss": 3}, ownership=Ownership(size=owners), precision=LOW)
    layout = buffers.layout
    assert layout.parts == [BufferPart(BF16, low=True), BufferPart(BF16)]
    assert layout.low_numel == layout.span(layout.parts[0])[1] == buffers.low_grads.numel()
    assert buffers.low_grads.numel() + buffers.grads.numel() == layout.numel
    for name, parameter in buffers.parameters.items():
        dtype = BF16 if parameter.dim() > 1 else torch.float32
        assert parameter.main_grad.dtype == dtype, name
    loss = buffers.parameters["0.weight"].float().square().sum()
    (loss + buffers.parameters["1.bias"].float().sum()).backward()
    gradient = 2 * buffers.parameters["0.weight"].detach()
    assert torch.equal(buffers.parameters["0.weight"].main_grad, gradient)
    buffers.extras["loss"].fill_(7)
    assert buffers.tail[:3].tolist() == [7, 7, 7]
    owned = [part for part, _ in buffers.owned_grads()]
    assert owned == layout.parts  # shares of two dtypes are never merged
    buffers.zero_grad()
    assert not buffers.low_grads.any() and not buffers.storage.any()


def step_of(precision: GradientPrecision, implementation: str) -> Optimizer:
    """Return the optimizer after two steps with gradients that bf16 represents exactly."""
    buffers = FlatBuffers(model_of(), precision=precision)
    optimizer = Optimizer(
        buffers,
        beta1=0.9,
        beta2=0.95,
        eps=1e-8,
        weight_decay=0.1,
        clip_grad=0.5,
        implementation=implementation,
    )
    for step in range(2):
        buffers.zero_grad()
        for number, name in enumerate(sorted(buffers.parameters)):
            parameter = buffers.parameters[name]
            drawn = normal(*parameter.shape, seed=10 * step + number)
            parameter.main_grad.copy_(drawn.to(BF16))
        stats = optimizer.step(1e-2)
    optimizer.norm = stats.grad_norm.item()
    return optimizer


@pytest.mark.parametrize("implementation", ["torch", "reference"])
def test_the_update_reads_low_gradients_as_their_values_in_fp32(
    implementation, monkeypatch
) -> None:
    from megatron_packed.optim import optimizer as module

    monkeypatch.setattr(module, "MAX_CONVERTED_ELEMENTS", 640)  # several slices
    assert implementation in [backend.name for backend in OP.backends]
    low, full = (step_of(each, implementation) for each in (LOW, GradientPrecision()))
    assert low.norm == pytest.approx(full.norm, rel=1e-6) and low.norm > 1
    wanted = full.state_shards()
    for name, found in low.state_shards().items():
        # The rows of the norm differ, so the divisor may differ by its rounding.
        torch.testing.assert_close(found, wanted[name], rtol=1e-6, atol=1e-9)


def test_a_low_gradient_set_aside_for_the_norm_comes_back() -> None:
    from megatron_packed.optim.clipping import Counted, norm_and_flag

    buffers = FlatBuffers(model_of(), precision=LOW)
    for gradients in (buffers.low_grads, buffers.grads):
        gradients.fill_(1)
    parts = [part for _, part in buffers.owned_grads()]
    low = buffers.layout.low_numel
    elsewhere = [buffers.gradients(0, 64), buffers.gradients(low, low + 64)]
    norm, flag = norm_and_flag(Counted(parts, elsewhere))
    assert norm.item() == pytest.approx((buffers.layout.numel - 128) ** 0.5) and not flag
    assert all(bool((part == 1).all()) for part in parts)
