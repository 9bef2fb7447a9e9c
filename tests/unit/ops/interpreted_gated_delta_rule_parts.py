"""Kernels of the gated delta rule on parts of a pack, in Triton's interpreter; test_triton_interpreter.py runs them."""

from functools import partial

import pytest
import torch

from megatron_packed.ops.gated_delta_rule import triton_gradients, triton_kernels, triton_states
from megatron_packed.ops.gated_delta_rule.api import gated_delta_rule
from megatron_packed.ops.gated_delta_rule.tables import build_tables
from megatron_packed.ops.parts_of_pack import PartOfPack
from support.delta_rule_cases import (
    ALL,
    PER_TOKEN,
    cast,
    forward_backward,
    inputs,
    low_precision,
    with_gradients,
)
from support.delta_rule_parts import results_in_parts
from support.op_packs import (
    assert_errs_at_most_twice,
    boundaries,
    leaks_of_tokens,
    relative_error,
)

pytestmark = pytest.mark.usefixtures("nothing_uninitialised")

SMALL = (1, 2, 12, 20)
"""G, N, K and V; the tiles of the heads have unused channels."""
KEPT = {"decay": 0.01, "beta": -2.0}
"""Arguments of `inputs` with which a state lasts over several parts."""


def in_parts(values, lengths, parts, **options):
    return results_in_parts(values, lengths, parts, backend="triton", **options)


@pytest.mark.parametrize(
    ("sizes", "lengths", "parts"),
    [
        (SMALL, [140], 2),
        ((2, 4, 16, 16), [30, 1, 110, 1, 2], 3),
        ((1, 1, 20, 70), [128, 0, 2, 130, 0], 2),
        (SMALL, [64, 0, 64, 1, 63], 3),
        ((1, 2, 3, 2), [1, 2, 1], 4),
    ],
    ids=str,
)
def test_parts_are_the_recurrence_of_the_pack(sizes, lengths, parts):
    """Documents begin at borders, span parts and are single tokens; last chunks are not whole."""
    values, doubled = inputs(sum(lengths), sizes, **KEPT), sizes == SMALL
    options = {"allow_neg_eigval": doubled}
    want = forward_backward(values, lengths, backend="recurrence", **options)
    got = in_parts(cast(values, torch.float32), lengths, parts, **options)
    found = {name: relative_error(got[name], want[name]) for name in want}
    assert all(error < 1e-5 for error in found.values()), found


def test_bfloat16_errs_at_most_twice_as_much_as_pytorch(bfloat16_of_a_gpu):
    lengths = [100, 156]
    low = cast(inputs(sum(lengths), (1, 2, 32, 32), **KEPT), torch.bfloat16)
    exact = {name: value.double() for name, value in low.items()}
    want = forward_backward(exact, lengths, backend="recurrence")
    plain = with_gradients(low_precision, low, lengths)
    assert_errs_at_most_twice(in_parts(low, lengths, 2), plain, want)


@pytest.mark.parametrize(
    ("lengths", "parts"),
    [([260], 2), ([70, 1, 189], 2), ([5, 195, 100], 3), ([128, 64, 68], 2)],
    ids=str,
)
def test_segments_in_parts_are_the_recurrence_of_the_pack(lengths, parts, monkeypatch):
    """Parts have several segments of a document that begins before them, inside them, or ends after them."""
    monkeypatch.setattr(triton_kernels, "segment_tokens", lambda _: 64)
    values = inputs(sum(lengths), (1, 2, 16, 16), **KEPT)
    want = forward_backward(values, lengths, backend="recurrence")
    got = in_parts(cast(values, torch.float32), lengths, parts)
    found = {name: relative_error(got[name], want[name]) for name in want}
    assert all(error < 1e-5 for error in found.values()), found


@pytest.mark.parametrize("tokens", [64, 512])
def test_documents_that_are_not_cut_keep_their_bits(tokens, monkeypatch):
    """Two parts of 80 tokens have the bits of the complete pack, except for the cut document."""
    monkeypatch.setattr(triton_kernels, "segment_tokens", lambda _: tokens)
    lengths = [66, 30, 3, 61]
    values = cast(inputs(160, (1, 2, 16, 16), **KEPT), torch.float32)
    whole = forward_backward(values, lengths, backend="triton")
    got = in_parts(values, lengths, 2)
    for name in ("o", *(f"d{name}" for name in PER_TOKEN)):
        assert torch.equal(whole[name][:66], got[name][:66]), name
        assert torch.equal(whole[name][96:], got[name][96:]), name
        assert not torch.equal(whole[name][66:96], got[name][66:96]), name


def test_documents_do_not_touch_each_other_by_a_bit():
    lengths = [5, 15, 28, 8]
    values = cast(inputs(sum(lengths), (1, 2, 16, 16), **KEPT), torch.float32)
    run = partial(in_parts, lengths=lengths, parts=4)
    assert leaks_of_tokens(run, values, PER_TOKEN, lengths, victims=[1]) == set()


@pytest.mark.parametrize("name", ["q", "k"])
@pytest.mark.parametrize(
    ("lengths", "parts", "token"), [([130, 130], 2, 200), ([170, 220], 3, 240), ([170, 220], 3, 60)]
)
def test_values_that_are_not_finite_stay_in_documents_of_several_segments(
    lengths, parts, token, name, monkeypatch
):
    """A document begins at a border, or inside a part that another one enters."""
    monkeypatch.setattr(triton_kernels, "segment_tokens", lambda _: 64)
    values = cast(inputs(sum(lengths), (1, 1, 16, 16)), torch.float32)
    values[name][token] = torch.nan
    results = in_parts(values, lengths, parts)
    of_token = (torch.arange(sum(lengths)) < lengths[0]) == (token < lengths[0])
    for result in ("o", *(f"d{name}" for name in PER_TOKEN)):
        assert results[result][~of_token].isfinite().all(), result
    assert not results["dq"][of_token].isfinite().all()


def test_tables_of_a_part_are_not_those_of_a_pack():
    values, (seq_idx_1T, cu_seqlens) = cast(inputs(5, SMALL), torch.float32), boundaries([5])
    arguments = (*values.values(), seq_idx_1T, cu_seqlens)
    for of_part, part in ((True, None), (False, PartOfPack(0, 1, None, lambda *_, **__: None))):
        tables = build_tables(cu_seqlens, 5, of_part=of_part)
        with pytest.raises(ValueError, match=f"build the tables with of_part={not of_part}"):
            gated_delta_rule(*arguments, tables=tables, part=part, backend="triton")


def test_values_that_are_not_finite_stay_in_their_document():
    lengths = [20, 24, 10, 2, 8]
    values = cast(inputs(64, (1, 2, 16, 16)), torch.float32)
    values["v"][25] = torch.inf
    values["k"][40] = torch.nan
    results = in_parts(values, lengths, 4)
    for name in ("o", *(f"d{name}" for name in PER_TOKEN)):
        finite = results[name].isfinite()
        assert finite[:20].all() and finite[44:].all() and not finite[20:44].all(), name


MUTATIONS = (
    "no message",
    "no message back",
    "no map",
    "no border",
    "no first state",
    "half a last chunk",
)


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_missing_step_is_seen(monkeypatch, mutation):
    sound, lengths = triton_kernels.state_from_parts, [60]

    def without(messages_kX, sizes, *, reverse=False):
        if mutation == "no map":
            nearest = messages_kX[:1] if reverse else messages_kX[-1:]
            return sound(nearest, sizes, reverse=reverse)
        lost = reverse == (mutation == "no message back")
        return sound(messages_kX[:0] if lost else messages_kX, sizes, reverse=reverse)

    if mutation == "no border":
        lengths = [20, 20, 20]
        monkeypatch.setattr(triton_kernels, "begins_inside", lambda *_: torch.ones(1).bool())
    elif mutation == "no first state":
        monkeypatch.setattr(
            triton_kernels,
            "chunk_gradients",
            lambda *x, in_parts, **y: triton_gradients.chunk_gradients(*x, **y),
        )
    elif mutation == "half a last chunk":
        monkeypatch.setattr(
            triton_kernels,
            "gradients_of_states",
            lambda *x, **y: triton_states.gradients_of_states(*x[:-1], 0 * x[-1], **y),
        )
    else:
        monkeypatch.setattr(triton_kernels, "state_from_parts", without)
    values = inputs(60, (1, 2, 16, 16), **KEPT)
    want = forward_backward(values, lengths, backend="recurrence")
    got = in_parts(cast(values, torch.float32), lengths, 3)
    assert (
        max(relative_error(got[name], want[name]) for name in ("o", *map("d{}".format, ALL))) > 1e-2
    )
