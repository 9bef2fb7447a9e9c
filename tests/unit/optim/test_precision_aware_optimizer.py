"""`Optimizer` with bf16 moments and with masters that are weights and remainders."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron_packed.config.sections.optim import OptimizerConfig
from megatron_packed.distributed.flat_buffers import FlatBuffers
from megatron_packed.distributed.gradient_precision import FULL_PRECISION, GradientPrecision
from megatron_packed.optim.adamw import OP
from megatron_packed.optim.master_remainders import split_masters
from megatron_packed.optim.optimizer import Optimizer
from megatron_packed.optim.state_precision import StatePrecision

BF16, F32 = torch.bfloat16, torch.float32
LOW = StatePrecision(exp_avg=BF16, exp_avg_sq=BF16, remainders=True, seed=5)
SKIPS = torch.tensor(1.0)


class Tiny(nn.Module):
    """Parameters of both dtypes, of which one has no weight decay."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(seed)
        for name, shape, dtype in (("a", (40, 24), BF16), ("b", (70,), BF16), ("c", (5, 9), F32)):
            values = torch.randn(shape, generator=draw).to(dtype)
            self.register_parameter(name, nn.Parameter(values))
        self.b.no_weight_decay = True


def made(precision: StatePrecision, seed: int = 0, **options: Any) -> Optimizer:
    options = {"weight_decay": 0.1, "clip_grad": 1.0, **options}
    return Optimizer(FlatBuffers(Tiny(seed)), precision=precision, **options)


def steps(optimizer: Optimizer, numbers: range, hold: Tensor | None = None) -> None:
    for number in numbers:
        for name, parameter in optimizer.buffers.parameters.items():
            draw = torch.Generator().manual_seed(100 * number + ord(name))
            parameter.main_grad.copy_(torch.randn(parameter.shape, generator=draw))
        optimizer.step(1e-2, hold=hold)


def state_of(optimizer: Optimizer) -> dict[str, Tensor]:
    """Return copies of weights, whole masters and moments, and the number of steps."""
    state = {name: view.clone() for name, view in optimizer.state_shards().items()}
    state |= {f"master/{name}": pair.values() for name, pair in optimizer.pairs().items()}
    weights = optimizer.buffers.parameters.items()
    return state | {f"weight/{name}": p.detach().clone() for name, p in weights}


def assert_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def test_each_parameter_takes_the_bytes_of_its_dtypes() -> None:
    """Masters of bf16 weights take 2 bytes, and each moment 2; float32 weights are their own masters."""
    low, wide = made(LOW), made(StatePrecision())
    elements = low.buffers.layout.numel
    of_bf16 = sum(p.numel() for p in low.buffers.params.values() if p.dtype == BF16)
    assert low.implementation == "reference" and wide.implementation == "torch"
    tensors = (low.exp_avg, low.exp_avg_sq, low.remainders)
    assert [t.nbytes for t in tensors] == [2 * elements, 2 * elements, 2 * of_bf16]
    assert wide.remainders.numel() == 0 and wide.exp_avg.nbytes == 4 * elements
    assert low.pairs().keys() == {"a", "b"} and not wide.pairs()
    assert {"remainder/a", "remainder/b", "master/c"} <= low.state_shards().keys()
    addresses = [pair.weights.data_ptr() for pair in low.pairs().values()]
    assert addresses == [low.buffers.parameters[name].data_ptr() for name in low.pairs()]


@pytest.mark.parametrize("moments", [F32, BF16], ids=str)
def test_pairs_hold_the_masters_of_a_run_with_float32_masters(moments: torch.dtype) -> None:
    """Over 200 steps, of which some are skipped, masters have the same bits; weights are rounded up."""
    precision = StatePrecision(exp_avg=moments, exp_avg_sq=moments, seed=5)
    wide = made(precision, implementation="reference")
    pairs = made(StatePrecision(**{**vars(precision), "remainders": True}))
    for first in range(0, 200, 10):
        for optimizer in (wide, pairs):
            steps(optimizer, range(first, first + 9))
            steps(optimizer, range(first + 9, first + 10), hold=SKIPS)
    found, expected = state_of(pairs), state_of(wide)
    for name in ("a", "b"):
        del found[f"remainder/{name}"]
        rounded = split_masters(expected[f"master/{name}"])[0]
        expected[f"weight/{name}"] = rounded.view(expected[f"weight/{name}"].shape)
    assert_equal(found, expected)
    assert pairs.steps == 180


def test_a_skipped_step_changes_nothing_and_its_repetition_draws_the_same() -> None:
    optimizer, other = made(LOW), made(LOW)
    steps(optimizer, range(3))
    before = state_of(optimizer)
    steps(optimizer, range(3, 4), hold=SKIPS)
    assert_equal(state_of(optimizer), before)
    steps(optimizer, range(3, 5))
    steps(other, range(5))
    assert_equal(state_of(optimizer), state_of(other))


def test_draws_depend_on_the_seed_and_nearest_draws_nothing() -> None:
    """Stochastic rounding changes moments only in their last place."""
    found = {}
    for seed in (5, 6):
        for stochastic in (True, False):
            precision = StatePrecision(**{**vars(LOW), "seed": seed, "stochastic": stochastic})
            optimizer = made(precision)
            steps(optimizer, range(1))
            found[seed, stochastic] = optimizer.exp_avg.clone()
    assert torch.equal(found[5, False], found[6, False])
    assert not torch.equal(found[5, True], found[6, True])
    torch.testing.assert_close(found[5, True], found[5, False], rtol=2**-7, atol=0)


def test_a_whole_state_loads_into_every_precision() -> None:
    """Masters keep all bits, and bf16 moments are exact in float32."""
    source = made(LOW)
    steps(source, range(4))
    whole = {
        name: tensor
        for name, tensor in state_of(source).items()
        if not name.startswith(("remainder/", "weight/"))
    }
    again, wide = made(LOW, seed=1), made(StatePrecision(), seed=1)
    again.load_state(whole)
    assert_equal(state_of(again), state_of(source))
    wide.load_state(whole)
    found = state_of(wide)
    assert all(torch.equal(found[name], tensor.float()) for name, tensor in whole.items())
    back = made(LOW, seed=2)
    back.load_state({name: found[name] for name in whole})
    assert_equal(state_of(back), state_of(source))


def test_loaded_weights_become_masters() -> None:
    optimizer = made(LOW)
    steps(optimizer, range(2))
    assert optimizer.remainders.any()
    with torch.no_grad():
        optimizer.buffers.parameters["a"].fill_(0.25)
    optimizer.reset_masters()
    assert (optimizer.pairs()["a"].values() == 0.25).all() and not optimizer.remainders.any()


def test_the_norm_of_parameters_is_that_of_the_masters() -> None:
    """With pairs the norm has the bits of a run with float32 masters."""
    norms = []
    for precision, implementation in (
        (StatePrecision(), "reference"),
        (StatePrecision(remainders=True), "auto"),
    ):
        start, end = 0, 64  # elements that another rank counts
        optimizer = made(
            precision,
            implementation=implementation,
            params_norm=True,
            counted_elsewhere=[(start, end)],
        )
        steps(optimizer, range(3))
        norms.append(optimizer._stats.params_norm)
        counted = torch.cat(
            [state_of(optimizer)[f"master/{name}"] for name in ("a", "b", "c")]
        ).double()
        norm = counted[end:].norm()
        assert norms[-1].item() == pytest.approx(norm.item(), rel=1e-6)
    assert torch.equal(*norms)


def test_words_about_the_precision_of_a_run() -> None:
    """Console, report and `--explain` name masters and moments that are not float32."""
    low = OptimizerConfig(
        lr=1.0,
        use_precision_aware_optimizer=True,
        exp_avg_dtype="bf16",
        exp_avg_sq_dtype="bf16",
    )
    assert OptimizerConfig(lr=1.0).state_words(True) == ""
    assert low.state_words(True) == (
        " in 2 bytes beside the weight, bf16 moments (rounded stochastically)"
    )
    one = replace(low, exp_avg_sq_dtype="fp32", moment_rounding="nearest")
    assert one.state_words(False) == ", bf16 first moments (rounded to nearest)"


def test_a_kernel_for_float32_refuses_another_state() -> None:
    reasons = OP.explain(LOW.inputs("cuda"))
    assert any("needs float32 masters and moments" in reason for reason in reasons["torch"])
    assert reasons["triton"] == [] and "copies" in reasons["reference"][0]


@pytest.mark.parametrize("precision", [LOW, StatePrecision(exp_avg=BF16), StatePrecision()])
def test_gradients_in_bf16_update_as_float32_gradients_of_the_same_values(precision) -> None:
    """The matrix has gradients in bf16, and vectors keep float32. The statistics have both."""
    found = []
    for gradients in (GradientPrecision(low=True), FULL_PRECISION):
        buffers = FlatBuffers(Tiny(), precision=gradients)
        optimizer = Optimizer(
            buffers, precision=precision, clip_grad=0.0, params_norm=True, count_zeros_of=1075
        )
        dtypes = [{grad.dtype for grad in group.grads} for group in optimizer._slices]
        assert all(len(alike) == 1 for alike in dtypes)
        assert buffers.low_grads.numel() == (gradients.low and 4096)
        for number in range(3):
            for name, parameter in buffers.parameters.items():
                draw = torch.Generator().manual_seed(100 * number + ord(name))
                parameter.main_grad.copy_(torch.randn(parameter.shape, generator=draw).to(BF16))
            stats = optimizer.step(1e-2)
        assert stats.grad_zeros.sum() == 0 and stats.params_norm > 1
        found.append((state_of(optimizer), stats.grad_norm.clone(), stats.params_norm.clone()))
    (low, *norms), (full, *expected) = found
    assert_equal(low, full)
    torch.testing.assert_close(norms, expected, rtol=1e-6, atol=0)


def test_the_one_pass_update_reads_gradients_in_bf16(monkeypatch) -> None:
    """No copy of them in float32 is made before it; other implementations get one."""
    seen = []
    for name, precision in (("reference", LOW), ("torch", StatePrecision())):
        buffers = FlatBuffers(Tiny(), precision=GradientPrecision(low=True))
        loaded = OP.select(precision.inputs("cpu"), name).loaded
        run = loaded.run

        def watched(slices, control, run=run):
            seen.extend(grad.dtype for group in slices for grad in group.grads)
            run(slices, control)

        monkeypatch.setattr(loaded, "run", staticmethod(watched))
        Optimizer(buffers, precision=precision).step(1e-2)
        assert (BF16 in seen) == (name == "reference")
        seen.clear()
