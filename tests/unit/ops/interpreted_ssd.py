"""Our kernels of the scan in Triton's interpreter; test_triton_interpreter.py runs them."""

from functools import partial

import pytest
import torch

from megatron_packed.ops.column_slices import split_columns
from megatron_packed.ops.ssd import triton_tiles
from megatron_packed.ops.ssd.api import OP, inputs_of, ssd
from support.op_packs import (
    assert_errs_at_most_twice,
    boundaries,
    leaks_of_tokens,
    relative_error,
)
from support.scan_cases import PER_TOKEN, cast, make, results, upstream

pytestmark = pytest.mark.usefixtures("nothing_uninitialised")

SIZES = (4, 20, 2, 12)
"""N, P, G and S; the tiles of the heads have unused channels."""

pytestmark = pytest.mark.usefixtures("float32_too")


@pytest.fixture
def few_programs(monkeypatch):
    """Make segments of several chunks, and programs that compute all heads of a group."""
    monkeypatch.setattr(triton_tiles, "_PROGRAMS", 8)
    monkeypatch.setattr(triton_tiles, "_GRADIENT_PROGRAMS", 1)


def check(values, lengths, bound=3e-5):
    """Compare all results. Gradients of decays are differences of sums, which cost a few digits."""
    want = results(values, lengths, "recurrence")
    got = results(cast(values, torch.float32), lengths)
    for name in want:
        assert relative_error(got[name], want[name]) < bound, name


@pytest.mark.parametrize("lengths", [[63, 64, 65, 1], [1, 2, 3, 20]], ids=str)
def test_kernels_are_the_recurrence(lengths):
    check(make(sum(lengths), SIZES), lengths)


@pytest.mark.parametrize("lengths", [[5, 150, 40, 64, 2]], ids=str)
def test_segments_of_several_chunks_and_groups_in_one_program(lengths, few_programs):
    check(make(sum(lengths), SIZES), lengths)


@pytest.mark.parametrize(
    ("sizes", "lengths"), [((1, 1, 1, 1), [1]), ((3, 33, 3, 17), [2, 1]), ((3, 70, 1, 3), [40, 27])]
)
def test_sizes_of_heads_and_groups(sizes, lengths):
    check(make(sum(lengths), sizes), lengths)


@pytest.mark.parametrize("state_dim", [64, 256])
def test_complete_tiles_and_states_in_parts(state_dim, few_programs):
    """Each tile is complete, so loads have no masks. A state of 256 has the most parts."""
    check(make(128, (2, 64, 1, state_dim)), [70, 58])


@pytest.mark.parametrize(("decay", "bias"), [(0.001, -6.0), (200.0, 4.0)])
def test_weak_and_strong_decay(decay, bias, few_programs):
    """Compare with a decay that keeps the state for long, and another that forgets it within a token."""
    check(make(80, (2, 20, 1, 12), decay=decay, bias=bias), [50, 30])


def test_steps_that_underflow_stay_finite():
    values = cast(make(70, SIZES), torch.float32)
    values["dt"][20:40] = -1000.0
    assert all(value.isfinite().all() for value in results(values, [33, 37]).values())


def test_bfloat16_errs_at_most_twice_as_much_as_pytorch(bfloat16_of_a_gpu, few_programs):
    lengths = [64, 97, 1, 30]
    low = cast(make(sum(lengths), (2, 16, 1, 16)), torch.bfloat16)
    want = results({name: value.double() for name, value in low.items()}, lengths, "recurrence")
    got, plain = results(low, lengths), results(low, lengths, "reference")
    assert_errs_at_most_twice(got, plain, want)


@pytest.mark.parametrize("restarts", [True, False])
def test_documents_do_not_touch_each_other_by_a_bit(restarts, few_programs):
    lengths = [5, 30, 70]
    values = cast(make(sum(lengths), (2, 20, 1, 12)), torch.float32)
    run = partial(results, lengths=lengths if restarts else [sum(lengths)])
    leaked = leaks_of_tokens(run, values, PER_TOKEN, lengths, victims=[1])
    assert (leaked == set()) is restarts


def test_chunk_size_has_no_effect_and_any_is_accepted():
    values = cast(make(40, SIZES), torch.float32)
    ys = [
        ssd(*values.values(), *boundaries([40]), chunk_size=size, backend="triton")
        for size in (1, 48, 256)
    ]
    assert torch.equal(ys[0], ys[1]) and torch.equal(ys[0], ys[2])


def test_strided_inputs_gradient_slots_and_main_grads():
    lengths = [40, 30]
    heads, head_dim, groups, state_dim = SIZES
    values = cast(make(70, SIZES), torch.float32)
    want = results(values, lengths)
    wide = torch.cat([values[name].flatten(1) for name in PER_TOKEN], dim=1).requires_grad_()
    shapes = ((heads, head_dim), (heads,), (groups, state_dim), (groups, state_dim))
    x, dt, B, C = split_columns(wide, *shapes)
    A_log, D, dt_bias = (torch.nn.Parameter(values[name]) for name in ("A_log", "D", "dt_bias"))
    A_log.main_grad = torch.full((heads,), 3.0)
    y = ssd(
        *(x, dt, A_log, B, C, D, dt_bias), *boundaries(lengths), chunk_size=64, backend="triton"
    )
    assert torch.equal(y, want["y"])
    y.backward(upstream(y))
    merged = torch.cat([want[f"d_{name}"].flatten(1) for name in PER_TOKEN], dim=1)
    assert torch.equal(wide.grad, merged)
    torch.testing.assert_close(A_log.main_grad - 3, want["d_A_log"], rtol=1e-5, atol=1e-5)
    assert A_log.grad is None
    assert torch.equal(D.grad, want["d_D"]) and torch.equal(dt_bias.grad, want["d_dt_bias"])


def test_only_the_inputs_are_saved_for_backward():
    values = {
        name: value.requires_grad_() for name, value in cast(make(70, SIZES), torch.float32).items()
    }
    saved = []

    def pack(x):
        saved.append(x.data_ptr())
        return x

    seq_idx_1T, cu_seqlens = boundaries([70])
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        ssd(*values.values(), seq_idx_1T, cu_seqlens, chunk_size=64, backend="triton")
    assert set(saved) == {x.data_ptr() for x in (*values.values(), seq_idx_1T)}


def test_unsupported_inputs_are_refused_with_reasons():
    def reasons(state_dim, dtype):
        x, B = torch.zeros(5, 2, 8, dtype=dtype), torch.zeros(5, 1, state_dim, dtype=dtype)
        return OP.explain(inputs_of(x, B, B, 48))["triton"]

    assert not reasons(256, torch.bfloat16) and not reasons(3, torch.bfloat16)
    assert "state_dim (257)" in reasons(257, torch.bfloat16)[0]
    assert "float16" in reasons(8, torch.float16)[0]
