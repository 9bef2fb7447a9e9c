"""Scan by mamba-ssm's kernels in Triton's interpreter; skipped if mamba-ssm is not installed."""

from contextlib import nullcontext
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch

from megatron_packed.ops.column_slices import GradientBuffer, split_columns
from megatron_packed.ops.ssd import reference
from megatron_packed.ops.ssd.api import inputs_of
from support.op_packs import PACKS, boundaries, leaks, relative_error

pytest.importorskip("mamba_ssm")

N, P, G, S, CHUNK = 3, 16, 1, 32, 16
MODULES = ("ssd_bmm", "ssd_chunk_scan", "ssd_chunk_state", "ssd_combined", "ssd_state_passing")
NAMES = ("x", "dt", "A_log", "B", "C", "D", "dt_bias")


@pytest.fixture
def configuration():
    return 1


@pytest.fixture
def backend(configuration, monkeypatch):
    """Provide the backend with one tile size per kernel, because the interpreter cannot tune.

    Partial sums get space for one more tile than needed, and uninitialised memory is filled with
    NaN. So a test detects a read of memory that no kernel has written.
    """
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=4)
    )
    for name in MODULES:
        for kernel in vars(import_module(f"mamba_ssm.ops.triton.{name}")).values():
            if hasattr(kernel, "configs"):
                monkeypatch.setattr(
                    kernel, "configs", [kernel.configs[configuration % len(kernel.configs)]]
                )
    from megatron_packed.ops.ssd import gradients, mamba_ssm, tuned_launch

    most_tiles = gradients.most_tiles
    monkeypatch.setattr(gradients, "most_tiles", lambda *arguments: most_tiles(*arguments) + 1)
    monkeypatch.setattr(tuned_launch, "_tuned", {})
    torch.use_deterministic_algorithms(True)  # This mode fills uninitialised memory with NaN.
    yield mamba_ssm
    torch.use_deterministic_algorithms(False)


def make(tokens):
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    return {
        "xBC": normal(tokens, N * P + 2 * G * S),
        "dt": normal(tokens, N),
        "A_log": torch.linspace(0, 2, N),
        "D": normal(N),
        "dt_bias": normal(N) - 2,
    }


def results(module, values, lengths, passes=1):
    """Run forward and backward and return the output and the gradients.

    For values with ``main_grad``, the backend adds the gradient there.
    """
    leaf = {
        name: value if value.requires_grad else value.clone().requires_grad_()
        for name, value in values.items()
    }
    for _ in range(passes):
        x, B, C = split_columns(leaf["xBC"], (N, P), (G, S), (G, S))
        y = module.run(
            x,
            leaf["dt"],
            leaf["A_log"],
            B,
            C,
            leaf["D"],
            leaf["dt_bias"],
            *boundaries(lengths),
            chunk_size=CHUNK,
        )
        y.backward(torch.linspace(-1, 1, y.numel()).view(y.shape))
    return {"y": y.detach(), **{f"d_{name}": value.grad for name, value in leaf.items()}}


@pytest.mark.parametrize(
    ("configuration", "name"), [(0, "one document and a ragged end"), (1, "tail"), (5, "tail")]
)
def test_the_scan_is_its_reference(backend, name):
    lengths = PACKS[name]
    values = make(sum(lengths))
    want, tuning, got = (
        results(module, values, lengths) for module in (reference, backend, backend)
    )
    for key in want:
        assert relative_error(got[key], want[key]) < 3e-6, key
        # The first run uses the tuner, the second bypasses it; both give the same bits.
        assert torch.equal(got[key], tuning[key]), key


def test_tiles_are_chosen_at_the_requested_sizes(backend, monkeypatch):
    from megatron_packed.ops.ssd import tuned_launch

    tokens, launch = set(), tuned_launch.launch

    def recorded(kernel, grid, size, **arguments):
        tokens.add(arguments["seqlen"])
        return launch(kernel, grid, size, **arguments)

    monkeypatch.setattr(backend.gradients, "launch", recorded)
    x, B, _ = split_columns(make(40)["xBC"], (N, P), (G, S), (G, S))
    backend.tune(inputs_of(x, B, B, CHUNK), x.device)
    chosen = dict(tuned_launch._tuned)
    assert tokens == {40} and len(chosen) == 6
    results(backend, make(20), [20])
    assert tuned_launch._tuned == chosen


def test_kernels_run_without_hooks_and_theirs_stay(backend):
    from megatron_packed.ops.ssd import tuned_launch

    kernel = backend.gradients._chunk_state_bwd_db_kernel
    tuner = tuned_launch.without_hooks(kernel)
    assert all(config.pre_hook is None for config in tuner.configs)
    assert [config.kwargs for config in tuner.configs] == [
        config.kwargs for config in kernel.configs
    ]
    assert all(config.pre_hook is not None for config in kernel.configs)


def test_a_second_derivative_is_refused(backend):
    values = {name: value.requires_grad_() for name, value in make(20).items()}
    x, B, C = (
        values["xBC"][:, : N * P].view(-1, N, P),
        values["xBC"][:, None, -S:],
        values["xBC"][:, None, -S:],
    )
    y = backend.run(
        x,
        values["dt"],
        values["A_log"],
        B,
        C,
        values["D"],
        values["dt_bias"],
        *boundaries([20]),
        chunk_size=CHUNK,
    )
    (d_dt,) = torch.autograd.grad(y, values["dt"], y, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        d_dt.sum().backward()


def test_frozen_parameters_get_nothing(backend):
    values = make(20)
    for name in ("A_log", "D", "dt_bias"):
        values[name].main_grad = torch.zeros(N)
    x, B, C = split_columns(values["xBC"].requires_grad_(), (N, P), (G, S), (G, S))
    y = backend.run(
        x,
        values["dt"],
        values["A_log"],
        B,
        C,
        values["D"],
        values["dt_bias"],
        *boundaries([20]),
        chunk_size=CHUNK,
    )
    y.sum().backward()
    assert not any(values[name].main_grad.any() for name in ("A_log", "D", "dt_bias"))


def test_parameter_gradients_add_up_in_main_grad(backend):
    lengths = [20, 13]
    values = make(33)
    want = results(reference, values, lengths)
    for name in ("A_log", "D", "dt_bias"):
        values[name] = torch.nn.Parameter(values[name])
        values[name].main_grad = torch.full((N,), 3.0)
    got = results(backend, values, lengths, passes=2)
    for name in ("A_log", "D", "dt_bias"):
        assert got[f"d_{name}"] is None
        assert relative_error((values[name].main_grad - 3) / 2, want[f"d_{name}"]) < 3e-6, name


@pytest.mark.parametrize("restarts", [True, False])
def test_documents_do_not_touch_each_other_by_a_bit(backend, monkeypatch, restarts):
    lengths = [5, 20, 7]
    values = make(32)
    true = backend.chunk_sum_forward
    if not restarts:
        monkeypatch.setattr(
            backend, "chunk_sum_forward", lambda dt, a, b, seq, size: true(dt, a, b, seq * 0, size)
        )

    def run(inputs):
        found = results(backend, {**values, **inputs}, lengths)
        return {name: found[name] for name in ("y", "d_xBC", "d_dt")}

    leaked = leaks(run, {name: values[name] for name in ("xBC", "dt")}, lengths, victims=[0, 1])
    assert (leaked == set()) is restarts


def test_gradients_of_the_slices_share_a_buffer(backend, monkeypatch):
    in_place, true = [], GradientBuffer.collect

    def collect(self, gradients):
        whole = self._whole
        in_place.append(true(self, gradients) is whole)
        return whole

    monkeypatch.setattr(GradientBuffer, "collect", collect)
    results(backend, make(20), [20])
    assert in_place == [True]
