"""Our kernels of the scan on parts of a pack, in Triton's interpreter; test_triton_interpreter.py runs them."""

from functools import partial

import pytest
import torch

from megatron_packed.ops.ssd import triton_kernels, triton_states, triton_tiles
from support.op_packs import leaks_of_tokens, relative_error
from support.scan_cases import LOCAL, PER_TOKEN, cast, make, results
from support.scan_parts import results_in_parts

SIZES = (4, 20, 2, 12)
"""N, P, G and S; the tiles of the heads have unused channels."""
SMALL = (2, 20, 1, 12)
"""Heads of one group, where only parts and documents matter."""

pytestmark = pytest.mark.usefixtures("float32_too")


def errors(lengths, parts, sizes, **inputs):
    values = make(sum(lengths), sizes, **inputs)
    want = results(values, lengths, "recurrence")
    got = results_in_parts(cast(values, torch.float32), lengths, parts)
    return {name: relative_error(got[name], want[name]) for name in want}


@pytest.mark.parametrize(
    ("sizes", "lengths", "parts", "segments"),
    [
        (SMALL, [150], 2, 1),
        (SIZES, [150], 2, 2),
        (SMALL, [40, 1, 60, 1, 18], 4, 1),
        (SMALL, [1, 2, 1], 4, 1),
    ],
    ids=str,
)
def test_parts_are_the_recurrence_of_the_pack(sizes, lengths, parts, segments, monkeypatch):
    """Parts have incomplete chunks, and documents begin at borders, span parts and are single tokens."""
    monkeypatch.setattr(triton_tiles, "_PROGRAMS", segments * sizes[0])
    found = errors(lengths, parts, sizes, decay=0.02)
    assert all(error < 3e-5 for error in found.values()), found


def test_documents_do_not_touch_each_other_by_a_bit():
    lengths = [5, 15, 28, 8]
    values = cast(make(sum(lengths), SMALL, decay=0.02), torch.float32)

    def found_by(restarts):
        run = partial(results_in_parts, lengths=lengths, parts=4, restarts=restarts)
        return leaks_of_tokens(run, values, PER_TOKEN, lengths, victims=[1])

    assert found_by(restarts=True) == set()
    assert found_by(restarts=False) == set(LOCAL)


@pytest.mark.parametrize("mutation", ["no message", "no message back", "no factors", "no border"])
def test_a_missing_step_is_seen(monkeypatch, mutation):
    sound, message = triton_states.state_from_parts, triton_states.message_of_part
    factors = triton_kernels.chunk_factors

    def without(messages_kX, shape, *, reverse=False):
        state_NPS = sound(messages_kX, shape, reverse=reverse)
        lost = reverse == (mutation == "no message back")
        return torch.zeros_like(state_NPS) if lost else state_NPS

    def with_factors_of_one(added):
        sent_1X = message(added)
        sent_1X[:, -SMALL[0] :] = 1
        return sent_1X

    if mutation == "no factors":
        monkeypatch.setattr(triton_kernels, "message_of_part", with_factors_of_one)
    elif mutation == "no border":
        monkeypatch.setattr(triton_kernels, "chunk_factors", lambda *x: factors(*x[:-1], None))
    else:
        monkeypatch.setattr(triton_kernels, "state_from_parts", without)
    found = errors([42], 3, SMALL, decay=0.02)
    assert found["d_dt"] > 1e-2, found
