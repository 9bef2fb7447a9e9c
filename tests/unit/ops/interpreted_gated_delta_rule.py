"""Kernels of the gated delta rule in Triton's interpreter; test_triton_interpreter.py runs them."""

from functools import partial

import pytest
import torch
from torch.nn.functional import pad

from megatron_packed.ops.column_slices import split_columns
from megatron_packed.ops.gated_delta_rule import (
    on_meta,
    triton_kernels,
    triton_states,
    triton_tiles,
)
from megatron_packed.ops.gated_delta_rule.api import OP, gated_delta_rule, inputs_of
from megatron_packed.ops.gated_delta_rule.tables import CHUNK, build_tables
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
from support.op_packs import assert_errs_at_most_twice, leaks_of_tokens, relative_error

pytestmark = pytest.mark.usefixtures("nothing_uninitialised")

SIZES = (1, 2, 12, 20)
"""G, N, K and V; the tiles of the heads have unused channels."""
triton_rule = partial(forward_backward, backend="triton")


KEPT = {"decay": 0.01, "beta": -2.0}
"""Arguments of `inputs` with which a state lasts over several segments."""


def check(got, want, bound=5e-6):
    """Compare all results; a gradient that is zero by symmetry has an absolute bound."""
    for name in want:
        scale = max(want[name].abs().max().item(), 0.1)
        error = (got[name].double() - want[name].double()).abs().max().item()
        assert error < bound * scale, (name, error, scale)


@pytest.mark.parametrize("strength", STRENGTHS.values(), ids=STRENGTHS.keys())
def test_kernels_are_the_recurrence(strength):
    """Compare all gradients with float64, with a beta up to 2 except in the ordinary case."""
    lengths, options = [63, 1, 66], {"allow_neg_eigval": bool(strength)}
    values = inputs(sum(lengths), SIZES, **strength)
    want = forward_backward(values, lengths, backend="recurrence", **options)
    got = triton_rule(cast(values, torch.float32), lengths, **options)
    check(got, want)


@pytest.mark.parametrize(
    ("sizes", "lengths"),
    [
        ((2, 4, 12, 20), [63, 64, 65, 1]),
        ((1, 1, 3, 1), [130]),
        ((1, 3, 33, 70), [3]),
        ((1, 2, 16, 16), [1]),
        ((1, 2, 16, 16), [1, 2, 3, 20]),
        ((1, 2, 16, 16), [5, 0, 66, 0, 0]),
        ((1, 20, 16, 16), [65, 0, 3]),  # heads of several programs for the gates
    ],
)
def test_sizes_of_heads_and_documents(sizes, lengths):
    values = inputs(sum(lengths), sizes)
    want = forward_backward(values, lengths, backend="recurrence")
    got = triton_rule(cast(values, torch.float32), lengths)
    check(got, want)


def test_the_rounding_of_large_sums_of_gates_counts():
    """In each chunk the first token forgets all. The others remember, and their sums have its size."""
    values = inputs(130, (1, 2, 16, 16), **KEPT)
    values["a"][[0, 64]] = 3e5
    want = forward_backward(values, [130], backend="recurrence")
    check(triton_rule(cast(values, torch.float32), [130]), want)


def test_programs_share_more_documents_and_chunks_than_there_are_programs(monkeypatch):
    monkeypatch.setattr(triton_states, "_walk_programs", lambda blocks, walks: 3)
    monkeypatch.setattr(triton_tiles, "_SPARE_PROGRAMS", 1)
    lengths = [1, 2, 0, 66, 1, 3, 1, 5]
    values = inputs(sum(lengths), (1, 2, 16, 16))
    want = forward_backward(values, lengths, backend="recurrence")
    check(triton_rule(cast(values, torch.float32), lengths), want)


@pytest.fixture
def segments(monkeypatch):
    """Return a function that sets the tokens of a segment."""
    return lambda tokens: monkeypatch.setattr(triton_kernels, "segment_tokens", lambda _: tokens)


@pytest.mark.parametrize(
    ("sizes", "lengths", "tokens"),
    [
        (SIZES, [193, 0, 1, 130], 64),
        ((2, 4, 16, 16), [5, 256], 128),
        ((1, 1, 20, 33), [64, 128, 65], 64),
    ],
    ids=str,
)
def test_segments_of_long_documents_are_the_recurrence(sizes, lengths, tokens, segments):
    """Documents of one token, of whole segments and of one token more; beta is doubled once."""
    segments(tokens)
    values, options = inputs(sum(lengths), sizes, **KEPT), {"allow_neg_eigval": sizes == SIZES}
    want = forward_backward(values, lengths, backend="recurrence", **options)
    check(triton_rule(cast(values, torch.float32), lengths, **options), want)


@pytest.mark.parametrize("mutation", ["nothing passed", "passed from other documents"])
def test_wrong_states_at_joints_are_seen(mutation, segments, monkeypatch):
    segments(64)
    sound, lengths = triton_kernels.pass_on, [130, 66]

    def wrong(states_JNVK, maps_JNKK, tables, *x, **options):
        if mutation == "nothing passed":
            states_JNVK.zero_()
            return
        joints_5J = tables.joints_5J.clone()
        joints_5J[4] = 1
        maps_JNKK = torch.ones_like(maps_JNKK)
        sound(states_JNVK, maps_JNKK, tables._replace(joints_5J=joints_5J), *x, **options)

    values = inputs(sum(lengths), (1, 2, 16, 16), **KEPT)
    want = forward_backward(values, lengths, backend="recurrence")
    monkeypatch.setattr(triton_kernels, "pass_on", wrong)
    got = triton_rule(cast(values, torch.float32), lengths)
    for name in ("o", "dv"):
        assert relative_error(got[name], want[name]) > 1e-2, name


@pytest.mark.parametrize("strength", STRENGTHS.values(), ids=STRENGTHS.keys())
def test_bfloat16_errs_at_most_twice_as_much_as_pytorch(strength, bfloat16_of_a_gpu, segments):
    """Compare both with the recurrence of the rounded inputs in float64; two documents have two segments."""
    segments(64)
    lengths = [66, 65, 1]
    low = cast(inputs(sum(lengths), (1, 2, 32, 32), **strength), torch.bfloat16)
    exact = {name: value.double() for name, value in low.items()}
    want = forward_backward(exact, lengths, backend="recurrence")
    got = triton_rule(low, lengths)
    plain = with_gradients(low_precision, low, lengths)
    assert_errs_at_most_twice(got, plain, want)


def test_vectors_near_one_direction_do_not_err_more(bfloat16_of_a_gpu):
    """The gradient loses its component along the vector before it is rounded, not after that."""
    errors = gradient_errors_near_one_direction((1, 2, 32, 32), [256])
    for name, (apart, near) in errors.items():
        assert near < 1.7 * apart, (name, near, apart)


def test_repeated_keys_with_a_doubled_beta_keep_their_precision(bfloat16_of_a_gpu):
    """One key, no decay and a beta near 2: products in bf16 would err by some percent."""
    lengths, options = [130, 1, 66], {"allow_neg_eigval": True}
    low = cast(repeated_keys(sum(lengths), (1, 2, 32, 32)), torch.bfloat16)
    exact = {name: value.double() for name, value in low.items()}
    want = forward_backward(exact, lengths, backend="reference", **options)
    reference = forward_backward(low, lengths, backend="reference", **options)
    got = triton_rule(low, lengths, **options)
    for name in want:
        error, bound = (relative_error(x[name], want[name]) for x in (got, reference))
        assert error <= 2 * bound, (name, error, bound)


@pytest.mark.parametrize("tokens", [64, 512])
def test_documents_do_not_touch_each_other_by_a_bit(tokens, segments):
    segments(tokens)
    lengths = [66, 5, 67]
    values = cast(inputs(sum(lengths), (1, 2, 16, 16)), torch.float32)
    run = partial(triton_rule, lengths=lengths)
    assert not leaks_of_tokens(run, values, PER_TOKEN, lengths, [0, 1])


@pytest.mark.parametrize("tokens", [64, 512])
def test_a_document_has_the_same_bits_anywhere_in_a_pack_of_any_capacity(tokens, segments):
    segments(tokens)
    document = cast(inputs(67, (1, 2, 16, 16)), torch.float32)
    alone = triton_rule(document, [67])
    before, after = 35, 3
    pack = {
        name: pad(x, (0, 0) * (x.dim() - 1) + (before, after), value=0.7)
        if name in PER_TOKEN
        else x
        for name, x in document.items()
    }
    weights = {}

    def weighted(values, lengths, rows):
        values = {name: value.detach().requires_grad_() for name, value in values.items()}
        o = gated_delta_rule(*values.values(), *boundaries(lengths), backend="triton")
        weight = torch.ones_like(o)
        weight[rows] = weights.setdefault("all", torch.randn(67, *o.shape[1:]))
        gradients = torch.autograd.grad(o, [values[name] for name in PER_TOKEN], weight)
        return [o[rows], *(gradient[rows] for gradient in gradients)]

    alone = weighted(document, [67], slice(None))
    packed = weighted(pack, [before, 67, after, 0, 0, 0, 0], slice(before, before + 67))
    for one, other in zip(alone, packed):
        assert torch.equal(one, other)


@pytest.mark.parametrize("places", [{"v": 70, "k": 80}, {"a": 66}, {"b": 66}], ids=str)
def test_values_that_are_not_finite_stay_in_their_document(places, segments):
    segments(64)
    lengths = [66, 70, 65]
    values = cast(inputs(201, (1, 2, 12, 20)), torch.float32)
    for name, token in places.items():
        values[name][token] = torch.inf if name == "v" else torch.nan
    results = triton_rule(values, lengths)
    for name in ("o", *(f"d{name}" for name in PER_TOKEN)):
        assert results[name][:66].isfinite().all() and results[name][136:].isfinite().all(), name
        assert not results[name][66:136].isfinite().all(), name


def test_strided_inputs_gradient_slots_main_grads_and_given_tables():
    lengths, sizes = [40, 30], (1, 2, 16, 20)
    values = cast(inputs(70, sizes), torch.float32)
    want = triton_rule(values, lengths)
    shapes = [values[name].shape[1:] for name in PER_TOKEN]
    wide = torch.cat([values[name].flatten(1) for name in PER_TOKEN], dim=1).requires_grad_()
    slices = split_columns(wide, *map(tuple, shapes))
    parameters = [torch.nn.Parameter(values[name]) for name in ALL[5:]]
    parameters[0].main_grad = torch.full((2,), 3.0)
    metadata = boundaries(lengths)
    tables = tuple(build_tables(metadata[1], 70))
    o = gated_delta_rule(*slices, *parameters, *metadata, tables=tables, backend="triton")
    assert torch.equal(o, want["o"])
    weight = torch.linspace(-1, 1, o.numel(), dtype=torch.float64).sin()
    o.backward((7 * weight).sin().view(o.shape).to(o.dtype))
    merged = torch.cat([want[f"d{name}"].flatten(1) for name in PER_TOKEN], dim=1)
    assert torch.equal(wide.grad, merged)
    torch.testing.assert_close(parameters[0].main_grad - 3, want["dA_log"], rtol=1e-5, atol=1e-6)
    assert parameters[0].grad is None and torch.equal(parameters[1].grad, want["ddt_bias"])


def test_inputs_results_of_the_first_kernels_and_states_at_joints_are_saved_for_backward(
    monkeypatch,
):
    tokens, heads = 70, 2
    values = cast(inputs(tokens, (1, heads, 16, 16)), torch.float32)
    saved = {}

    def pack(x):
        saved[x.data_ptr()] = x
        return x

    metadata = boundaries([tokens])
    tables = build_tables(metadata[1], tokens, segment=64)
    tensors = [values[name].requires_grad_() for name in ALL]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        gated_delta_rule(*tensors, *metadata, tables=tables, backend="triton")
    known = {x.data_ptr() for x in (*tensors, *tables)}
    assert known <= set(saved)
    own = [x for address, x in saved.items() if address not in known]
    assert sorted(tuple(x.shape) for x in own) == [
        (1, heads, 16, 16),
        (1, heads, 16, 16),
        (2, 1, tokens),
        (2, heads, tokens, CHUNK),
        (6, heads, tokens),
    ]
    monkeypatch.setattr(on_meta, "of_shape", lambda *_, memory: memory)
    planned = on_meta.run(*tensors, *metadata, tables=tables, allow_neg_eigval=False)
    assert sum(x.nbytes for x in own) == sum(x.bytes for x in planned.saved)


def test_unsupported_inputs_are_refused_with_reasons():
    def reasons(key_dim, dtype):
        k, v = torch.zeros(5, 1, key_dim, dtype=dtype), torch.zeros(5, 2, 8, dtype=dtype)
        return OP.explain(inputs_of(k, v))["triton"]

    assert not reasons(128, torch.bfloat16) and not reasons(3, torch.float32)
    assert "key_dim (129)" in reasons(129, torch.bfloat16)[0]
    assert "float16" in reasons(8, torch.float16)[0]
