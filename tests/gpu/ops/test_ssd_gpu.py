"""Our kernels of the Mamba-2 scan on a GPU: errors, isolation, determinism, poison, graphs."""

import os
from functools import partial
from itertools import product

from support.op_packs import assert_repeats, assert_replays, norm_error

# The libraries read these at import or first use. They fix the order of sums and the tuned kernels.
os.environ.setdefault("MAMBA_DETERMINISTIC", "1")
os.environ.setdefault("TRITON_CACHE_AUTOTUNING", "1")

import pytest
import torch

from megatron_packed.ops.column_slices import split_columns
from megatron_packed.ops.ssd.api import ssd
from support.op_packs import boundaries, leaks, no_sync
from support.scan_cases import LOCAL, NAMES, PER_TOKEN, RESULTS, cast, make, results
from support.scan_parts import results_in_parts

pytestmark = pytest.mark.gpu

SIZES = (16, 64, 2, 128)
"""N, P, G and S."""
PACKS = {
    "around a chunk": [1, 63, 64, 65, 127, 129, 2, 1, 2, 3, 300],
    "one document fills the pack": [1500],
    "over 100 documents": [1, 2, 3, 10] * 40,
}
DECAYS = {
    "ordinary": {},
    "weak": {"decay": 0.001, "bias": -6.0},
    "strong": {"decay": 50.0, "bias": 2.0},
}
BF16 = 8e-3
"""Largest norm of the error of bf16 kernels, as in test_mamba_ops.py."""


error = partial(norm_error, least=1e-9)


def low_and_exact(lengths, sizes, **options):
    """Return inputs in bf16 and the results of the reference in float64 for these inputs."""
    low = cast(make(sum(lengths), sizes, device="cuda", **options), torch.bfloat16)
    return low, results({k: v.double() for k, v in low.items()}, lengths, "reference")


def assert_near(got, want, plain):
    """Compare the errors with those of plain PyTorch in bf16, since some sums nearly cancel."""
    errors = {name: error(got[name], want[name]) for name in RESULTS}
    allowed = {name: max(BF16, 2.5 * error(plain[name], want[name])) for name in RESULTS}
    assert {k: (errors[k], allowed[k]) for k in RESULTS if not errors[k] <= allowed[k]} == {}


@pytest.mark.parametrize("decay", DECAYS.values(), ids=DECAYS.keys())
@pytest.mark.parametrize("lengths", PACKS.values(), ids=PACKS.keys())
def test_bfloat16_is_the_reference(lengths, decay):
    low, want = low_and_exact(lengths, SIZES, **decay)
    got, plain = results(low, lengths), results(low, lengths, "reference")
    assert_near(got, want, plain)


@pytest.mark.parametrize(
    "sizes",
    [(1, 1, 1, 1), (3, 96, 3, 64), (6, 40, 2, 24), (4, 64, 1, 256), (5, 200, 1, 16)],
    ids=str,
)
def test_sizes_of_heads_groups_and_states(sizes):
    lengths = PACKS["around a chunk"]
    low, want = low_and_exact(lengths, sizes)
    got, plain = results(low, lengths), results(low, lengths, "reference")
    assert_near(got, want, plain)


@pytest.mark.parametrize("state_dim", [64, 128, 256])
def test_programs_that_take_many_heads_in_turn(state_dim):
    """Copies of later tiles overlap with products only if a program has several heads."""
    lengths = [700, 33, 64, 500, 1, 750]
    low, want = low_and_exact(lengths, (64, 64, 8, state_dim))
    got, plain = results(low, lengths), results(low, lengths, "reference")
    assert_near(got, want, plain)


@pytest.mark.parametrize("decay", DECAYS.values(), ids=DECAYS.keys())
@pytest.mark.parametrize(
    ("lengths", "parts"), [([1500], 4), ([700, 33, 64, 500, 1, 750], 2), ([1, 2, 3, 10] * 40, 4)]
)
def test_parts_of_a_pack_err_as_the_pack_does(lengths, parts, decay):
    """Compare the errors of 8 packs together. The error of A_log's gradient varies much from pack to pack."""
    squares = {name: torch.zeros(3, dtype=torch.float64, device="cuda") for name in RESULTS}
    for seed in range(8):
        low, want = low_and_exact(lengths, (64, 64, 8, 128), seed=seed, **decay)
        whole, in_parts = results(low, lengths), results_in_parts(low, lengths, parts)
        for name in RESULTS:
            found = (in_parts[name] - want[name], whole[name] - want[name], want[name])
            squares[name] += torch.stack([value.square().sum() for value in found])
    errors = {name: ((sums[:2] / sums[2]).sqrt()).tolist() for name, sums in squares.items()}
    assert {k: pair for k, pair in errors.items() if pair[0] > 1.5 * pair[1] + 1e-4} == {}


def test_documents_in_parts_do_not_touch_each_other_by_a_bit():
    lengths = [300, 2, 64, 129, 5, 700]
    values = cast(make(sum(lengths), SIZES, device="cuda"), torch.bfloat16)
    parameters = {name: values[name] for name in NAMES if name not in PER_TOKEN}

    def run(per_token):
        found = results_in_parts({**per_token, **parameters}, lengths, 4)
        return {name: found[name] for name in LOCAL}

    assert not leaks(run, {name: values[name] for name in PER_TOKEN}, lengths)


def test_errors_are_within_those_of_mamba_ssm():
    """Compare the errors of 32 packs together, for the same inputs and gradient of y in bf16.

    The gradient of A_log has 16 values. The ratio of its errors in one pack varies by a factor of 4.
    """
    lengths = [[700, 33, 64, 500, 1, 750], [700, 33, 64, 200], PACKS["around a chunk"], [1500]]
    found = {name: torch.zeros(3, dtype=torch.float64, device="cuda") for name in RESULTS}
    for pack, seed in product(lengths, range(8)):
        low = cast(make(sum(pack), SIZES, device="cuda", seed=seed), torch.bfloat16)
        wide = {name: value.double() for name, value in low.items()}
        want = results(wide, pack, "reference", upstream_dtype=torch.bfloat16)
        got, theirs = results(low, pack), results(low, pack, "mamba_ssm", chunk_size=128)
        for name, squares in found.items():
            parts = (got[name] - want[name], theirs[name] - want[name], want[name])
            squares += torch.stack([part.square().sum() for part in parts])
    errors = {name: ((squares[:2] / squares[2]).sqrt()).tolist() for name, squares in found.items()}
    print(errors)
    assert {k: pair for k, pair in errors.items() if pair[0] > 1.1 * pair[1] + 1e-4} == {}


@pytest.mark.parametrize("sizes", [SIZES, (64, 64, 8, 128)], ids=str)
def test_documents_do_not_touch_each_other_by_a_bit(sizes):
    lengths = [300, 2, 64, 129, 5, 700]
    values = cast(make(sum(lengths), sizes, device="cuda"), torch.bfloat16)
    parameters = {name: values[name] for name in NAMES if name not in PER_TOKEN}

    def run(per_token):
        found = results({**per_token, **parameters}, lengths)
        return {name: found[name] for name in LOCAL}

    assert not leaks(run, {name: values[name] for name in PER_TOKEN}, lengths)


@pytest.mark.parametrize("sizes", [(64, 64, 8, 128), (64, 64, 8, 256), (8, 64, 1, 128)], ids=str)
def test_every_run_gives_the_same_bits(sizes):
    lengths = [8192 - 5000, 4000, 999, 1]
    values = cast(make(8192, sizes, device="cuda"), torch.bfloat16)
    assert_repeats(lambda: results(values, lengths))


def test_nothing_uninitialised_is_read():
    """Fill the free memory with NaN, so that a kernel that reads unwritten memory returns NaN."""
    lengths = PACKS["around a chunk"]
    values = cast(make(sum(lengths), SIZES, device="cuda"), torch.bfloat16)
    want = results(values, lengths)
    for fill in (torch.nan, torch.inf):
        poison = [
            torch.full((2**22 >> i,), fill, device="cuda") for i in range(14) for _ in range(8)
        ]
        del poison
        got = results(values, lengths)
        assert all(torch.equal(got[name], want[name]) for name in RESULTS)


def test_replays_of_other_packings_equal_eager_without_host_wait():
    tokens = 1000
    values = cast(make(tokens, SIZES, device="cuda"), torch.bfloat16)
    packs = [[1000], [1, 2, 3, 4] * 100, [64] * 15 + [40], [500, 499, 1], [63, 65, 872]]
    static = {**values, "seq_idx": boundaries(packs[0], "cuda")[0]}
    unread = torch.zeros(1, dtype=torch.int32, device="cuda")

    def run(static):
        leaves = [static[name].detach().requires_grad_() for name in NAMES]
        y = ssd(*leaves, static["seq_idx"], unread, chunk_size=64, backend="triton")
        return dict(zip(RESULTS, (y, *torch.autograd.grad(y, leaves, torch.ones_like(y)))))

    run(static)
    no_sync(run, static)
    changes = [
        {"seq_idx": boundaries(pack, "cuda")[0], "B": torch.randn_like(values["B"])}
        for pack in packs
    ]
    assert_replays(run, static, changes)


def test_offsets_beyond_32_bits_are_right():
    """With rows of 32,768 elements, the last rows of x begin beyond 2^31 elements."""
    heads, head_dim, groups, state_dim = 2, 64, 1, 16
    lengths = [60_000, 5_000, 2_072]
    wide = torch.empty(sum(lengths), 32_768, dtype=torch.bfloat16, device="cuda")
    columns = wide[:, : heads * head_dim + 2 * groups * state_dim].normal_()
    shapes = ((heads, head_dim), (groups, state_dim), (groups, state_dim))
    x, B, C = split_columns(columns, *shapes)
    rest = make(1, (heads, head_dim, groups, state_dim), device="cuda")
    values = {**cast(rest, torch.bfloat16), "x": x, "B": B, "C": C}
    values["dt"] = torch.randn(sum(lengths), heads, device="cuda").bfloat16()
    got = results(values, lengths)
    want = results({name: value.contiguous() for name, value in values.items()}, lengths)
    assert all(torch.equal(got[name], want[name]) for name in RESULTS)
    assert want["y"][-100:].abs().min() >= 0 and want["y"][-100:].any()
