"""Triton kernels of the gated delta rule on a GPU: errors, isolation, determinism, poison, graphs."""

from functools import partial

import pytest
import torch

from megatron_packed.ops.gated_delta_rule.api import gated_delta_rule
from megatron_packed.ops.gated_delta_rule.tables import build_tables
from support.delta_rule_cases import (
    ALL,
    PER_TOKEN,
    STRENGTHS,
    boundaries,
    cast,
    forward_backward,
    gradient_errors_near_one_direction,
    inputs,
    low_precision,
    repeated_keys,
    with_gradients,
)
from support.delta_rule_parts import results_in_parts
from support.op_packs import (
    assert_repeats,
    assert_replays,
    leaks,
    no_sync,
    norm_error,
    relative_error,
)

pytestmark = pytest.mark.gpu

SIZES = (2, 4, 128, 128)
PACKS = {
    "around a chunk": [1, 63, 64, 65, 127, 129, 2],
    "one document fills the pack": [700],
    "documents of several segments": [1537, 30, 513, 512, 1025],
    "empty capacity": [5, 0, 300, 0, 0, 0],
    "over 100 documents": [1, 2, 3, 10] * 30,
}
RESULTS = ("o", *(f"d{name}" for name in ALL))
LOCAL = ("o", *(f"d{name}" for name in PER_TOKEN))
"""Results with one row per token."""


error = partial(norm_error, least=1e-9)


def triton_rule(values, lengths, **options):
    return forward_backward(values, lengths, backend="triton", **options)


@pytest.mark.parametrize("strength", STRENGTHS.values(), ids=STRENGTHS.keys())
@pytest.mark.parametrize("lengths", PACKS.values(), ids=PACKS.keys())
def test_bfloat16_errs_at_most_twice_as_much_as_pytorch(lengths, strength):
    options = {"allow_neg_eigval": bool(strength)}
    low = cast(inputs(sum(lengths), SIZES, device="cuda", **strength), torch.bfloat16)
    exact = {name: value.double() for name, value in low.items()}
    want = forward_backward(exact, lengths, backend="reference", **options)
    got = triton_rule(low, lengths, **options)
    plain = with_gradients(low_precision, low, lengths, doubled=bool(strength))
    for name in RESULTS:
        found, of_plain = error(got[name], want[name]), error(plain[name], want[name])
        assert found < 2 * max(of_plain, 2**-9), (name, found, of_plain)


def test_vectors_near_one_direction_do_not_err_more():
    errors = gradient_errors_near_one_direction(SIZES, PACKS["one document fills the pack"], "cuda")
    for name, (apart, near) in errors.items():
        assert near < 1.7 * apart, (name, near, apart)


KEPT = {"decay": 0.001, "beta": -3.0}
"""Arguments of `inputs` with which a state lasts over several parts."""


@pytest.mark.parametrize(
    ("lengths", "parts"), [([1200], 3), ([500, 33, 64, 500, 1, 102], 2), ([1, 2, 3, 10] * 30, 4)]
)
@pytest.mark.parametrize("doubled", [False, True])
def test_parts_of_a_pack_err_at_most_twice_as_much_as_pytorch(lengths, parts, doubled):
    options = {"allow_neg_eigval": doubled}
    low = cast(inputs(sum(lengths), SIZES, device="cuda", **KEPT), torch.bfloat16)
    exact = {name: value.double() for name, value in low.items()}
    want = forward_backward(exact, lengths, backend="reference", **options)
    got = results_in_parts(low, lengths, parts, backend="triton", **options)
    plain = with_gradients(low_precision, low, lengths, doubled=doubled)
    for name in RESULTS:
        found, of_plain = error(got[name], want[name]), error(plain[name], want[name])
        assert found < 2 * max(of_plain, 2**-9), (name, found, of_plain)


def test_documents_in_parts_that_are_not_cut_have_the_bits_of_the_pack():
    lengths = [600, 40, 128, 129, 5, 698]
    low = cast(inputs(1600, SIZES, device="cuda", **KEPT), torch.bfloat16)
    whole, parts = triton_rule(low, lengths), results_in_parts(low, lengths, 2, backend="triton")
    for name in LOCAL:
        for rows in (slice(768), slice(897, None)):
            assert torch.equal(whole[name][rows], parts[name][rows]), name
    results = partial(results_in_parts, lengths=lengths, parts=2, backend="triton")
    parameters = {name: low[name] for name in ALL if name not in PER_TOKEN}

    def run(per_token):
        found = results({**per_token, **parameters})
        return {name: found[name] for name in LOCAL}

    assert not leaks(run, {name: low[name] for name in PER_TOKEN}, lengths)


@pytest.mark.parametrize("sizes", [SIZES, (1, 3, 96, 192), (2, 2, 40, 24)], ids=str)
@pytest.mark.parametrize("lengths", [[1, 130, 2, 255, 60], [8192], [3000, 1, 700, 4491]], ids=str)
def test_repeated_keys_with_a_doubled_beta_keep_their_precision(lengths, sizes):
    """One key, no decay and a beta near 2: products in bf16 would outgrow the result."""
    low = cast(repeated_keys(sum(lengths), sizes, device="cuda"), torch.bfloat16)
    exact = {name: value.double() for name, value in low.items()}
    options = {"allow_neg_eigval": True}
    want = forward_backward(exact, lengths, backend="reference", **options)
    reference = forward_backward(low, lengths, backend="reference", **options)
    got = triton_rule(low, lengths, **options)
    for name in RESULTS:
        bound = 2 * error(reference[name], want[name])
        assert error(got[name], want[name]) < bound, (name, error(got[name], want[name]), bound)


@pytest.mark.parametrize("doubled", [False, True])
@pytest.mark.parametrize(
    "sizes",
    [
        (1, 3, 96, 192),
        (2, 2, 40, 24),
        (3, 6, 48, 64),
        (1, 2, 104, 40),
        (3, 3, 32, 64),
        (1, 1, 32, 241),
        (1, 2, 24, 40),
        (3, 3, 9, 64),
        (1, 4, 8, 8),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sizes_of_heads(sizes, dtype, doubled):
    lengths, options = PACKS["around a chunk"], {"allow_neg_eigval": doubled}
    values = cast(inputs(sum(lengths), sizes, device="cuda"), dtype)
    exact = {name: value.double() for name, value in values.items()}
    want = forward_backward(exact, lengths, backend="reference", **options)
    got = triton_rule(values, lengths, **options)
    for name in RESULTS:
        assert error(got[name], want[name]) < (2e-5 if dtype == torch.float32 else 1.5e-2), name


@pytest.mark.parametrize("strength", STRENGTHS.values(), ids=STRENGTHS.keys())
def test_float32_is_the_recurrence(strength):
    lengths = [65, 1, 130, 0, 64]
    values = inputs(sum(lengths), SIZES, device="cuda", **strength)
    want = forward_backward(values, lengths, backend="recurrence")
    got = triton_rule(cast(values, torch.float32), lengths)
    for name in RESULTS:
        assert relative_error(got[name], want[name]) < 5e-5, name


def test_documents_do_not_touch_each_other_by_a_bit():
    lengths = [1100, 2, 64, 600, 5]
    values = cast(inputs(sum(lengths), SIZES, device="cuda"), torch.bfloat16)
    parameters = {name: values[name] for name in ALL[5:]}

    def run(per_token):
        results = triton_rule({**per_token, **parameters}, lengths)
        return {name: results[name] for name in LOCAL}

    assert not leaks(run, {name: values[name] for name in PER_TOKEN}, lengths)


def test_same_bits_in_each_run_and_at_each_capacity():
    lengths = PACKS["around a chunk"]
    values = cast(inputs(sum(lengths), (16, 32, 128, 128), device="cuda"), torch.bfloat16)
    first = assert_repeats(lambda: triton_rule(values, lengths), times=10)
    for spare in (500, 70_000):  # a grid has at most 65,535 programs in its second axis
        padded = triton_rule(values, [*lengths, *[0] * spare])
        assert all(torch.equal(first[name], padded[name]) for name in RESULTS)


def test_short_documents_have_the_same_bits_in_packs_that_may_have_joints():
    """The kernels are compiled with and without the states at joints."""
    lengths = [67, 200]
    values = cast(inputs(sum(lengths), SIZES, device="cuda"), torch.bfloat16)
    short, rows = triton_rule(values, lengths), slice(sum(lengths))
    long = {
        name: torch.cat([x, x.new_ones(900, *x.shape[1:])]) if name in PER_TOKEN else x
        for name, x in values.items()
    }
    leaves_of = {name: x.detach().requires_grad_() for name, x in long.items()}
    o = gated_delta_rule(
        *leaves_of.values(), *boundaries([*lengths, 900], "cuda"), backend="triton"
    )
    weight = torch.linspace(-1, 1, values["v"].numel(), dtype=torch.float64, device="cuda").sin()
    weight = (7 * weight).sin().view(values["v"].shape).to(o.dtype)
    gradients = torch.autograd.grad(o[rows], [leaves_of[name] for name in PER_TOKEN], weight)
    for name, got in zip(LOCAL, (o, *gradients)):
        assert torch.equal(got[rows], short[name]), name


def test_nothing_uninitialised_is_read():
    """Fill the free memory with NaN, so that a kernel that reads unwritten memory returns NaN."""
    lengths = [5, 0, 1100, 0, 0, 600]
    values = cast(inputs(sum(lengths), SIZES, device="cuda"), torch.bfloat16)
    want = triton_rule(values, lengths)
    for fill in (torch.nan, torch.inf):
        poison = [
            torch.full((2**20 >> i,), fill, device="cuda") for i in range(12) for _ in range(8)
        ]
        del poison
        got = triton_rule(values, lengths)
        assert all(torch.equal(got[name], want[name]) for name in RESULTS)


def test_replays_of_many_packings_equal_eager_without_host_wait():
    tokens, capacity = 600, 40
    values = cast(inputs(tokens, SIZES, device="cuda"), torch.bfloat16)
    generator = torch.Generator().manual_seed(0)

    def metadata(cuts):
        offsets = torch.randperm(tokens - 1, generator=generator)[:cuts].sort().values + 1
        lengths = torch.diff(offsets, prepend=torch.tensor([0]), append=torch.tensor([tokens]))
        lengths = [*lengths.tolist(), *[0] * (capacity - cuts - 1)]
        return dict(zip(("seq_idx", "cu_seqlens"), boundaries(lengths, "cuda")))

    static = {**values, **metadata(3)}

    def run(static):
        leaves = [static[name].detach().requires_grad_() for name in ALL]
        tables = build_tables(static["cu_seqlens"], tokens, segment=64)
        o = gated_delta_rule(
            *leaves, static["seq_idx"], static["cu_seqlens"], tables=tables, backend="triton"
        )
        return dict(zip(RESULTS, (o, *torch.autograd.grad(o, leaves, torch.ones_like(o)))))

    run(static)
    no_sync(run, static)
    changes = [{**metadata(int(cuts)), "k": torch.randn_like(values["k"])} for cuts in range(1, 30)]
    assert_replays(run, static, changes)
