"""Experts with squared ReLU in quack's products on a GPU: separate products, float64, rows, graphs, memory."""

from functools import partial

import pytest
import torch

from megatron_packed.config.optional_packages import is_installed
from megatron_packed.layers.backends import Backends
from megatron_packed.layers.build import Build
from megatron_packed.layers.moe.layer import GroupedExperts
from megatron_packed.layers.moe.parallel import ExpertParallel
from megatron_packed.ops.grouped_mlp.api import JOINED, grouped_mlp
from support.gpu_memory_modes import requested_bytes
from support.op_packs import assert_repeats, assert_replays, no_sync, norm_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not is_installed("quack.gemm"), reason="quack is not installed"),
]
R, E = 1000, 8
SIZES = [(256, 384), (512, 1024), (64, 72)]
"""Hidden size and inner size.

The tiles are 128 x 192, 128 x 128 and 128 x 128 in forward; 128 x 192, 192 x 128 and 192 x 128 in backward.
"""
ENDS = {
    "unused experts and rows": [0, 5, 5, 700, 700, 701, 961, 961],
    "one row": [0, 0, 0, 1, 1, 1, 1, 1],
    "all rows in one expert": [0, 0, 0, R, R, R, R, R],
    "full": [125, 250, 375, 500, 625, 750, 875, R],
    "whole tiles": [128, 320, 512, 704, 832, 960, 960, 960],
    "no rows": [0] * E,
}


def values(size, ends, seed=0):
    """Return the inputs; rows of x and dy after the last offset are NaN."""
    hidden, inner = size
    generator = torch.Generator("cuda").manual_seed(seed)

    def normal(*shape, scale=1.0):
        draw = torch.randn(*shape, generator=generator, device="cuda")
        return (scale * draw).bfloat16()

    given = {
        "x": normal(R, hidden),
        "w1": normal(E, inner, hidden, scale=hidden**-0.5),
        "w2": normal(E, hidden, inner, scale=inner**-0.5),
        "dy": normal(R, hidden),
    }
    for name in ("x", "dy"):
        given[name][ends[-1] :] = torch.nan
    return given | {"offsets": torch.tensor(ends, dtype=torch.int32, device="cuda")}


def run(given, backend="quack_joined", accumulate=False):
    """Return output and gradients; with ``accumulate`` those of weights are added to ones."""
    leaf = {name: given[name].detach().requires_grad_() for name in ("x", "w1", "w2")}
    sums = {name: torch.ones_like(leaf[name], dtype=torch.float32) for name in ("w1", "w2")}
    for name in sums if accumulate else ():
        leaf[name].main_grad = sums[name]
    y = grouped_mlp(*leaf.values(), given["offsets"], activation="squared_relu", backend=backend)
    found = torch.autograd.grad(y, leaf.values(), given["dy"], allow_unused=accumulate)
    return {"y": y.detach()} | dict(zip(leaf, found)) | (sums if accumulate else {})


def exact(given):
    """Return the results in float64."""
    wide = {name: each.nan_to_num().double() for name, each in given.items() if name != "offsets"}
    return run(wide | {"offsets": given["offsets"]}, "reference")


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("ends", ENDS.values(), ids=ENDS)
@pytest.mark.parametrize("size", SIZES)
def test_the_op_has_the_bits_of_separate_products(size, ends, accumulate):
    given = values(size, ends)
    got, apart = (run(given, backend, accumulate) for backend in ("quack_joined", "quack"))
    used = torch.diff(given["offsets"], prepend=given["offsets"].new_zeros(1)) > 0
    for name, want in exact(given).items():
        found = got[name]
        assert torch.equal(found, apart[name]) and torch.isfinite(found).all(), name
        if name in ("w1", "w2"):
            assert (found[~used] == accumulate).all(), "unused experts get no gradient"
            found = found - float(accumulate)
        else:
            assert not found[ends[-1] :].any(), name
        assert (found.double() - want).norm() <= 1e-2 * want.norm(), name


def test_micro_batches_are_summed_in_float32():
    size, ends = SIZES[0], ENDS["unused experts and rows"]
    first, second = values(size, ends), values(size, ENDS["full"], seed=1)
    second |= {name: first[name] for name in ("w1", "w2")}
    weights = {name: first[name].requires_grad_() for name in ("w1", "w2")}
    for weight in weights.values():
        weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
    singly = []
    for given in (first, second):
        singly.append(run(given, accumulate=True))
        x = given["x"].requires_grad_()
        y = grouped_mlp(x, *weights.values(), given["offsets"], activation="squared_relu")
        y.backward(given["dy"])
    for name, weight in weights.items():
        want = sum(each[name].double() - 1 for each in singly)
        assert norm_error(weight.main_grad, want) < 1e-5 and weight.grad is None


@pytest.mark.parametrize("accumulate", [False, True])
def test_every_run_gives_the_same_bits(accumulate):
    given = values(SIZES[0], ENDS["unused experts and rows"])
    assert_repeats(partial(run, given, accumulate=accumulate))


@pytest.mark.parametrize("size", SIZES)
def test_a_row_keeps_its_bits_wherever_it_and_other_rows_are(size):
    """The rows of expert 3 move, and other experts get other rows, or fewer."""
    rows = slice(375, 500)
    before = values(size, ENDS["full"])
    want = run(before)
    for start, ends in (
        (0, [0, 0, 0, 125, 125, 125, 125, R]),
        (813, [400, 400, 813, 938] + [938] * 4),
    ):
        after = values(size, ENDS["full"], seed=2) | {name: before[name] for name in ("w1", "w2")}
        moved = slice(start, start + 125)
        for name in ("x", "dy"):
            after[name][moved] = before[name][rows]
        after["offsets"] = torch.tensor(ends, dtype=torch.int32, device="cuda")
        got = run(after)
        for name in ("y", "x"):
            assert torch.equal(got[name][moved], want[name][rows]), name


@pytest.mark.parametrize("accumulate", [False, True])
def test_replay_with_other_routings_equals_eager(accumulate):
    static = values(SIZES[1], ENDS["full"])
    changes = [values(SIZES[1], ends, seed) for seed, ends in enumerate(ENDS.values(), start=1)]
    assert_replays(partial(run, accumulate=accumulate), static, changes)


def test_a_pack_without_slots():
    given = values(SIZES[0], ENDS["no rows"])
    empty = given | {name: given[name][:0] for name in ("x", "dy")}
    for accumulate in (False, True):
        found = run(empty, accumulate=accumulate)
        assert found["y"].shape == found["x"].shape == (0, SIZES[0][0])
        assert all((found[name] == accumulate).all() for name in ("w1", "w2"))


def test_nothing_waits_for_the_device_and_no_activation_is_saved():
    hidden, inner = 512, 4096
    held = {}
    for backend in ("quack", "quack_joined"):
        given = values((hidden, inner), ENDS["full"])
        run(given, backend, accumulate=True)
        torch.cuda.synchronize()
        no_sync(run, given, backend, True)
        before = requested_bytes()
        leaf = [given[name].requires_grad_() for name in ("x", "w1", "w2")]
        y = grouped_mlp(*leaf, given["offsets"], activation="squared_relu", backend=backend)
        held[backend] = requested_bytes() - before
        del y, leaf  # else the next measurement begins with them
    saved = held["quack"] - held["quack_joined"]
    assert abs(saved - R * inner * 2) <= 4096  # offsets


def test_layers_join_unless_their_steps_are_observed(monkeypatch):
    runs, run_joined = [], JOINED.loaded.run
    monkeypatch.setattr(JOINED.loaded, "run", lambda *x: runs.append(None) or run_joined(*x))
    hidden, inner = SIZES[0]
    layer = GroupedExperts(
        E,
        hidden,
        inner,
        kind="squared_relu",
        ep=ExpertParallel(),
        build=Build(backends=Backends(), device="cuda", dtype=torch.bfloat16),
    )
    given = values(SIZES[0], ENDS["full"])
    with torch.no_grad():
        layer.fc1.copy_(given["w1"])
        layer.fc2.copy_(given["w2"])
    called = []
    joined = layer(given["x"], given["offsets"])
    assert len(runs) == 1
    layer.moe_act.register_forward_hook(lambda module, inputs, output: called.append(output.shape))
    assert torch.equal(layer(given["x"], given["offsets"]), joined)
    assert called == [(R, inner)] and len(runs) == 1
