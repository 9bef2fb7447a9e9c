"""Optimizer steps over flat buffers: against torch.optim.AdamW, in bf16, skipped, saved, loaded."""

import numpy as np
import pytest
import torch
from torch import nn

from megatron_packed.config.sections.optim import OptimizerConfig
from megatron_packed.distributed.flat_buffers import FlatBuffers
from megatron_packed.distributed.zero1_layout import BufferPart
from megatron_packed.optim.optimizer import Optimizer
from support.random_tensors import normal

LR = float(np.float32(3e-3))  # the device holds float32: give torch.optim the same number
BETAS, EPS, DECAY = (0.9, 0.95), 1e-8, 0.1


def make_model(
    dtype: torch.dtype = torch.float32, sizes: tuple[int, int, int] = (24, 40, 10)
) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(*sizes[:2]), nn.LayerNorm(sizes[1]), nn.Linear(*sizes[1:])).to(
        dtype
    )
    for name, p in model.named_parameters():
        p.no_weight_decay = name.endswith("bias") or name.startswith("1.")
    return model


def make_optimizer(buffers: FlatBuffers, **changes) -> Optimizer:
    return Optimizer(
        buffers,
        **{"beta1": BETAS[0], "beta2": BETAS[1], "eps": EPS, "weight_decay": DECAY, **changes},
    )


def torch_adamw(model: nn.Module, fused: bool) -> torch.optim.AdamW:
    groups = [
        {
            "params": [p for p in model.parameters() if p.no_weight_decay == skip],
            "weight_decay": 0.0 if skip else DECAY,
        }
        for skip in (False, True)
    ]
    return torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=EPS, fused=fused)


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    x = normal(6, model[0].in_features, seed=step)
    return model[:3](x.to(model[0].weight.dtype)).float().square().sum()


def backward(model: nn.Module, buffers: FlatBuffers, step: int) -> None:
    buffers.zero_grad()
    loss_of(model, step).backward()


# Multiples of 16: torch's CPU kernel rounds elements after its last full SIMD vector differently.
# Flat buffers have no such elements for any sizes of parameters, but torch.optim's tensors may
# have.
WHOLE_VECTORS = (32, 48, 16)


@pytest.mark.parametrize(
    ("implementation", "sizes", "tolerance"),
    [
        ("torch", WHOLE_VECTORS, 0.0),
        ("torch", (24, 40, 10), 1e-7),
        ("reference", (24, 40, 10), 1e-6),
    ],
)
def test_twenty_steps_equal_torch_adamw(
    implementation: str, sizes: tuple, tolerance: float
) -> None:
    """Without clipping, the fused kernel gives the same bits as torch.optim.AdamW."""
    ours, theirs = make_model(sizes=sizes), make_model(sizes=sizes)
    buffers = FlatBuffers(ours)
    optimizer = make_optimizer(buffers, clip_grad=0.0, implementation=implementation)
    reference = torch_adamw(theirs, fused=True)
    for step in range(20):
        backward(ours, buffers, step)
        stats = optimizer.step(LR)
        reference.zero_grad()
        loss_of(theirs, step).backward()
        reference.step()
        assert stats.nonfinite == 0
    for (name, p), q in zip(ours.named_parameters(), theirs.parameters()):
        torch.testing.assert_close(p, q, rtol=tolerance, atol=tolerance, msg=name)
    assert optimizer.steps == 20


def step_beside(
    ours: nn.Module,
    theirs: nn.Module,
    optimizer: Optimizer,
    reference: torch.optim.Optimizer,
    step: int,
) -> tuple[float, float]:
    """Step both optimizers with clipping to 0.5, and return both norms of the gradients."""
    backward(ours, optimizer.buffers, step)
    stats = optimizer.step(LR)
    reference.zero_grad()
    loss_of(theirs, step).backward()
    norm = nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
    reference.step()
    return stats.grad_norm, norm


def assert_equal_parameters(ours: nn.Module, theirs: nn.Module) -> None:
    for p, q in zip(ours.parameters(), theirs.parameters()):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def test_clipped_steps_equal_torch_clipping() -> None:
    ours, theirs = make_model(), make_model()
    optimizer = make_optimizer(FlatBuffers(ours), clip_grad=0.5)
    reference = torch_adamw(theirs, fused=True)
    for step in range(20):
        found, norm = step_beside(ours, theirs, optimizer, reference, step)
        assert norm > 0.5
        torch.testing.assert_close(found, norm, rtol=2e-5, atol=0)
    assert_equal_parameters(ours, theirs)


def test_the_options_are_those_of_torch_adamw() -> None:
    options = OptimizerConfig(
        lr=LR, adam_beta1=0.7, adam_beta2=0.6, adam_eps=5e-3, weight_decay=3.0, clip_grad=0.5
    )
    ours, theirs = make_model(), make_model()
    optimizer = Optimizer.from_config(FlatBuffers(ours), options)
    reference = torch_adamw(theirs, fused=True)
    for group in reference.param_groups:
        group.update(betas=(0.7, 0.6), eps=5e-3, weight_decay=3.0 * (group["weight_decay"] > 0))
    for step in range(3):
        step_beside(ours, theirs, optimizer, reference, step)
    assert_equal_parameters(ours, theirs)


def test_bf16_follows_a_float32_oracle_fed_with_the_same_gradients() -> None:
    model = make_model(torch.bfloat16, WHOLE_VECTORS)
    model.router = nn.Parameter(
        torch.randn(4, 16)
    )  # a float32 parameter among bf16 ones is its own master
    model.router.no_weight_decay = False
    oracle = {name: nn.Parameter(p.detach().float()) for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        oracle[name].no_weight_decay = p.no_weight_decay
    buffers = FlatBuffers(model)
    optimizer = make_optimizer(buffers, clip_grad=0.0)
    groups = [
        {
            "params": [q for q in oracle.values() if q.no_weight_decay == skip],
            "weight_decay": 0.0 if skip else DECAY,
        }
        for skip in (False, True)
    ]
    reference = torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=EPS, fused=True)
    masters = {
        n.removeprefix("master/"): t
        for n, t in optimizer.state_shards().items()
        if n.startswith("master/")
    }
    small_updates = 0
    for step in range(20):
        backward(model, buffers, step)
        model.router.main_grad.copy_(model.router.detach().sin())
        for name, q in oracle.items():
            q.grad = buffers.parameters[name].main_grad.clone()
        previous = {
            name: (p.detach().clone(), masters[name].clone())
            for name, p in model.named_parameters()
        }
        optimizer.step(LR)
        reference.step()
        for name, q in oracle.items():
            assert torch.equal(masters[name], q.detach().view(-1)), name
            p = buffers.parameters[name]
            assert torch.equal(p, q.detach().to(p.dtype)), name
            old, old_master = previous[name]
            small_updates += int(((p == old).view(-1) & (masters[name] != old_master)).sum())
    assert small_updates > 0  # masters keep updates that are too small for bf16
    assert model.router.data_ptr() == masters["router"].data_ptr()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("implementation", ["torch", "reference"])
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan"), "loss"])
def test_a_non_finite_step_changes_no_bit_and_is_reported(
    dtype, implementation: str, bad: float | str
) -> None:
    model = make_model(dtype)
    buffers = FlatBuffers(model, extras={"loss": 1})
    optimizer = make_optimizer(buffers, implementation=implementation)

    def everything() -> list[torch.Tensor]:
        return [*model.parameters(), *optimizer.state_shards().values()]

    for step in range(2):
        backward(model, buffers, step)
        assert optimizer.step(LR, loss=buffers.extras["loss"]).nonfinite == 0
    before = [t.clone() for t in everything()]
    backward(model, buffers, 2)
    if bad == "loss":
        buffers.extras["loss"].fill_(float("nan"))
    else:
        model[2].weight.main_grad[3, 7] = bad
    stats = optimizer.step(LR, loss=buffers.extras["loss"])
    assert stats.nonfinite == 1 and (bad == "loss") == bool(stats.grad_norm.isfinite())
    for now, then in zip(everything(), before):
        assert torch.equal(now.view(torch.uint8), then.view(torch.uint8))
    # The next step gives the same result as without the bad step.
    backward(model, buffers, 3)
    assert optimizer.step(LR).nonfinite == 0 and optimizer.steps == 3
    twin = make_model(dtype)
    twin_buffers = FlatBuffers(twin)
    twin_optimizer = make_optimizer(twin_buffers, implementation=implementation)
    for step in (0, 1, 3):
        backward(twin, twin_buffers, step)
        twin_optimizer.step(LR)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_round_trip_continues_bit_for_bit(dtype: torch.dtype) -> None:
    model = make_model(dtype)
    buffers = FlatBuffers(model)
    optimizer = make_optimizer(buffers)
    for step in range(3):
        backward(model, buffers, step)
        optimizer.step(LR)
    saved = {name: t.clone() for name, t in optimizer.state_shards().items()}
    shapes = optimizer.global_shapes()
    assert saved.keys() == shapes.keys() and shapes["exp_avg/0.weight"] == (40, 24)
    assert all(
        t.dim() == 1 and t.dtype == torch.float32 and t.is_contiguous() for t in saved.values()
    )

    other = make_model(dtype)
    with torch.no_grad():
        for p in other.parameters():
            p.add_(1.0)  # the loaded state must restore the weights
    other_buffers = FlatBuffers(other)
    loaded = make_optimizer(other_buffers)
    addresses = [t.data_ptr() for t in [*other.parameters(), *loaded.state_shards().values()]]
    loaded.load_state({name: t.view(shapes[name]) for name, t in saved.items()})
    for step in range(3, 5):
        for module, its_buffers, its_optimizer in (
            (model, buffers, optimizer),
            (other, other_buffers, loaded),
        ):
            backward(module, its_buffers, step)
            its_optimizer.step(LR)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters()))
    for name, tensor in loaded.state_shards().items():
        assert torch.equal(tensor, optimizer.state_shards()[name])
    assert [
        t.data_ptr() for t in [*other.parameters(), *loaded.state_shards().values()]
    ] == addresses


def test_weights_loaded_into_the_module_become_masters() -> None:
    model = make_model(torch.bfloat16)
    optimizer = make_optimizer(FlatBuffers(model))
    model.load_state_dict(
        {name: torch.full_like(t, 0.25) for name, t in model.state_dict().items()}
    )
    optimizer.reset_masters()
    assert (optimizer.state_shards()["master/0.weight"] == 0.25).all()
    optimizer.write_params()
    assert (model[0].weight == 0.25).all()


def test_a_state_that_does_not_fit_changes_nothing() -> None:
    optimizer = make_optimizer(FlatBuffers(make_model()))
    state = {name: torch.full_like(t, 7.0) for name, t in optimizer.state_shards().items()}
    missing = {name: t for name, t in state.items() if name != "exp_avg/0.bias"}
    with pytest.raises(ValueError, match=r"missing \['exp_avg/0.bias'\], unknown \['x'\]"):
        optimizer.load_state({**missing, "x": torch.zeros(1)})
    with pytest.raises(ValueError, match=r"master/2.bias has 3 elements, expected 10"):
        optimizer.load_state({**state, "master/2.bias": torch.zeros(3)})
    assert not any((t == 7).any() for t in optimizer.state_shards().values())


def test_padding_stays_zero_and_slices_cover_everything_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from megatron_packed.optim import optimizer as module

    monkeypatch.setattr(module, "MAX_SLICE_ELEMENTS", 320)  # long slices go to the kernel in pieces
    pieced, whole = make_model(), make_model()
    buffers, whole_buffers = FlatBuffers(pieced), FlatBuffers(whole)
    optimizer = make_optimizer(buffers)
    monkeypatch.undo()
    whole_optimizer = make_optimizer(whole_buffers)
    pieces = [t for group in optimizer._slices for t in group.params]
    assert (
        max(t.numel() for t in pieces) == 320
        and sum(t.numel() for t in pieces) == buffers.layout.numel
    )
    for step in range(3):
        backward(pieced, buffers, step)
        backward(whole, whole_buffers, step)
        optimizer.step(LR)
        whole_optimizer.step(LR)
    assert torch.equal(
        buffers.params[BufferPart(torch.float32)], whole_buffers.params[BufferPart(torch.float32)]
    )
    used = sum(p.numel() for p in pieced.parameters())
    assert (
        buffers.params[BufferPart(torch.float32)].count_nonzero() <= used
        and optimizer.exp_avg.count_nonzero() <= used
    )


def test_the_captured_form_keeps_the_learning_rate_written_before() -> None:
    """``step()`` without an argument reads the rate on the device, so a replay sees a new rate."""
    twins = []
    for explicit in (True, False):
        model = make_model()
        buffers = FlatBuffers(model)
        optimizer = make_optimizer(buffers)
        address = optimizer.lr.data_ptr()
        for step, lr in enumerate((1e-3, 5e-4)):
            backward(model, buffers, step)
            if explicit:
                optimizer.step(lr)
            else:
                optimizer.set_lr(lr)
                optimizer.step()
        assert optimizer.lr.data_ptr() == address
        twins.append(model)
    assert all(torch.equal(p, q) for p, q in zip(twins[0].parameters(), twins[1].parameters()))


def test_a_changing_weight_decay_is_read_on_the_device() -> None:
    """Steps whose weight decays are written to the device agree with torch's, which get numbers."""
    model, twin = make_model(), make_model()
    buffers = FlatBuffers(model)
    optimizer = make_optimizer(buffers, weight_decay_changes=True, clip_grad=0.0)
    reference = torch_adamw(twin, fused=True)
    address = optimizer.weight_decay.data_ptr()
    for step, decay in enumerate((0.0, 0.3, 7.0)):
        backward(model, buffers, step)
        optimizer.set_weight_decay(decay)
        optimizer.step(LR)
        reference.param_groups[0]["weight_decay"] = decay
        reference.zero_grad()
        loss_of(twin, step).backward()
        reference.step()
    assert optimizer.weight_decay.data_ptr() == address
    for p, q in zip(model.parameters(), twin.parameters()):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"beta1": 1.0}, r"adam_beta1 \(1.0\) must be in"),
        ({"eps": 0.0}, "the second moment of padding is zero"),
        ({"weight_decay": -1.0}, "must not be negative"),
        ({"implementation": "transformer_engine"}, "'transformer_engine' does not support"),
    ],
)
def test_refusals(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_optimizer(FlatBuffers(make_model()), **changes)
