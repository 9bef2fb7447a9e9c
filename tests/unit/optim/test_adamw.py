"""Every AdamW implementation against the formulas and torch.optim, and the reasons for refusals."""

import sys
import types
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_packed.ops.backend_dispatch import NoBackendError
from megatron_packed.optim.adamw import OP, AdamWInputs, Control, Reference, Slices, TorchFused
from megatron_packed.optim.adamw_multi_tensor import (
    Apex,
    TransformerEngine,
    apex_problems,
    launch_per_decay,
)

BETA1, BETA2, EPS = 0.9, 0.95, 1e-8


def make_slices(seed: int = 0) -> list[Slices]:
    generator = torch.Generator().manual_seed(seed)

    def tensors(positive: bool = False) -> list[torch.Tensor]:
        made = [torch.randn(n, generator=generator) for n in (257, 64)]
        return [t.square() for t in made] if positive else made

    return [
        Slices(
            weight_decay=wd,
            params=tensors(),
            grads=tensors(),
            exp_avgs=tensors(),
            exp_avg_sqs=tensors(True),
        )
        for wd in (0.1, 0.0)
    ]


def on_device(slices: list[Slices]) -> list[Slices]:
    """Return the same slices with weight decays as tensors."""
    return [replace(one, weight_decay=torch.tensor(one.weight_decay)) for one in slices]


def control(*, step: int = 5, skip: float = 0.0, divisor: float | None = 2.5) -> Control:
    return Control(
        lr=torch.tensor(1e-2),
        step=torch.tensor(float(step)),
        skip=torch.tensor(skip),
        grad_divisor=None if divisor is None else torch.tensor(divisor),
        beta1=BETA1,
        beta2=BETA2,
        eps=EPS,
    )


def state(slices: list[Slices]) -> list[torch.Tensor]:
    return [
        t.clone() for group in slices for t in [*group.params, *group.exp_avgs, *group.exp_avg_sqs]
    ]


def capturable_kernel(
    chunk, noop, lists, lr, beta1, beta2, eps, step, mode, bias, weight_decay, inv_scale
) -> None:
    """Compute the update as apex's and TransformerEngine's kernels do: same dtypes, same order."""
    assert chunk == 65536 and mode == 1 and bias == 1
    assert (noop.dtype, step.dtype, lr.dtype, inv_scale.dtype) == (torch.int32, torch.int32) + (
        torch.float32,
    ) * 2
    assert {t.shape for t in (noop, step, lr, inv_scale)} == {(1,)}
    if int(noop) == 1:
        return
    for grad, param, exp_avg, exp_avg_sq in zip(*lists):
        grad.mul_(inv_scale)
        exp_avg.copy_(beta1 * exp_avg + (1 - beta1) * grad)
        exp_avg_sq.copy_(beta2 * exp_avg_sq + (1 - beta2) * grad * grad)
        unbiased, unbiased_sq = (
            exp_avg / (1 - beta1 ** int(step)),
            exp_avg_sq / (1 - beta2 ** int(step)),
        )
        param.sub_(lr * (unbiased / (unbiased_sq.sqrt() + eps) + weight_decay * param))


def run_multi_tensor(slices: list[Slices], numbers: Control) -> None:
    launch_per_decay(
        lambda op, noop, lists, *args: op(65536, noop, lists, *args),
        capturable_kernel,
        slices,
        numbers,
    )


RUNS = [Reference.run, TorchFused.run, run_multi_tensor]


@pytest.mark.parametrize("run", RUNS, ids=["reference", "torch", "multi_tensor"])
@pytest.mark.parametrize("divisor", [None, 2.5])
@pytest.mark.parametrize("step", [1, 1000])
@pytest.mark.parametrize("decay", [list, on_device])
def test_one_update_follows_the_formulas(run, divisor: float | None, step: int, decay) -> None:
    slices, exact = make_slices(), make_slices()
    run(decay(slices), control(step=step, divisor=divisor))
    for found, start in zip(slices, exact):
        for i in range(2):
            p, g, m, v = (
                t[i].double()
                for t in (start.params, start.grads, start.exp_avgs, start.exp_avg_sqs)
            )
            g = g / (divisor or 1.0)
            m = BETA1 * m + (1 - BETA1) * g
            v = BETA2 * v + (1 - BETA2) * g * g
            p = p * (1 - 1e-2 * start.weight_decay)
            p = p - 1e-2 * (m / (1 - BETA1**step)) / ((v / (1 - BETA2**step)).sqrt() + EPS)
            for got, want in (
                (found.params[i], p),
                (found.exp_avgs[i], m),
                (found.exp_avg_sqs[i], v),
            ):
                torch.testing.assert_close(got.double(), want, rtol=5e-6, atol=1e-7)


@pytest.mark.parametrize("run", RUNS, ids=["reference", "torch", "multi_tensor"])
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("decay", [list, on_device])
def test_a_skipped_update_changes_no_bit(run, bad: float, decay) -> None:
    slices = decay(make_slices())
    slices[0].grads[0][3] = bad
    before = state(slices)
    run(slices, control(skip=1.0, divisor=bad))
    assert all(torch.equal(a, b) for a, b in zip(state(slices), before))
    slices[0].grads[0][3] = 1.0
    run(slices, control(skip=0.0))
    assert not any(torch.equal(a, b) for a, b in zip(state(slices), before))


def test_auto_is_torch_and_others_must_be_able() -> None:
    assert OP.select(AdamWInputs(device_type="cpu")).name == "torch"
    assert OP.select(AdamWInputs(device_type="cpu"), "reference").name == "reference"
    with pytest.raises(
        NoBackendError, match=r"'apex' does not support .*the kernel runs on cuda, not on cpu"
    ):
        OP.select(AdamWInputs(device_type="cpu"), "apex")
    with pytest.raises(NoBackendError, match="has no backend 'lion'"):
        OP.select(AdamWInputs(device_type="cpu"), "lion")


def test_a_stranger_called_apex_is_recognised_without_importing_it(
    tmp_path: Path, monkeypatch
) -> None:
    assert apex_problems() == ["NVIDIA's apex is not installed."]
    stranger = tmp_path / "apex"
    stranger.mkdir()
    (stranger / "__init__.py").write_text("raise SystemExit('imported a stranger')")
    monkeypatch.syspath_prepend(str(tmp_path))
    [problem] = apex_problems()
    assert "is not NVIDIA's: it has no multi_tensor_apply" in problem and str(stranger) in problem
    (stranger / "multi_tensor_apply").mkdir()
    [problem] = apex_problems()
    assert "without its CUDA extensions" in problem
    (tmp_path / "amp_C.py").write_text("multi_tensor_adam = None")
    [problem] = apex_problems()
    assert "too old" in problem
    monkeypatch.delitem(sys.modules, "amp_C")
    (tmp_path / "amp_C.py").write_text(
        "multi_tensor_adam_capturable = multi_tensor_adam = None  # now it is there"
    )
    assert apex_problems() == []
    monkeypatch.delitem(sys.modules, "amp_C")
    assert "apex" not in sys.modules


def test_apex_and_transformer_engine_launch_their_capturable_kernels(monkeypatch) -> None:
    """With stand-ins for the packages, the module finds the kernel and calls it by its
    signature.
    """

    def applier(op, noop, lists, *args):
        return op(65536, noop, lists, *args)

    monkeypatch.setitem(
        sys.modules, "amp_C", types.SimpleNamespace(multi_tensor_adam_capturable=capturable_kernel)
    )
    monkeypatch.setitem(
        sys.modules, "apex.multi_tensor_apply", types.SimpleNamespace(multi_tensor_applier=applier)
    )
    engine = types.SimpleNamespace(
        multi_tensor_adam_capturable=capturable_kernel, multi_tensor_applier=applier
    )
    for name in ("transformer_engine", "transformer_engine.pytorch"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch.optimizers", engine)
    expected = make_slices()
    Reference.run(expected, control())
    for backend in (Apex, TransformerEngine):
        slices = make_slices()
        backend.run(slices, control())
        for found, want in zip(state(slices), state(expected)):
            torch.testing.assert_close(found, want, rtol=5e-6, atol=1e-7)
    assert TransformerEngine.not_supported_reasons(AdamWInputs(device_type="cuda")) == []
