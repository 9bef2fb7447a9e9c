"""The gated delta rule of a pack in parts against the recurrence of the complete pack."""

from functools import partial

import pytest
import torch

from megatron_packed.ops.backend_dispatch import NoBackendError
from megatron_packed.ops.gated_delta_rule import passed_states, reference
from megatron_packed.ops.gated_delta_rule.api import gated_delta_rule
from support import delta_rule_cases
from support.delta_rule_cases import ALL, PER_TOKEN
from support.delta_rule_parts import gathered_in_parts, part_of
from support.op_packs import boundaries, leaks_of_tokens, relative_error, with_gradients

SIZES = (2, 4, 5, 7)
"""G, N, K and V."""
TOKENS = 264
PACKS = {
    "a document over all parts": [264],
    "parts begin with documents": [66, 132, 66],
    "cut inside": [5, 80, 3, 101, 75],
    "three parts long, and single tokens": [1, 1, 196, 1, 1, 64],
    "shorter than the convolution, at borders": [65, 2, 64, 1, 1, 64, 2, 65],
    "empty documents": [0, 37, 0, 130, 0, 97, 0],
}
STRONG = {"decay": 50.0, "beta": -8.0}
WEAK = {"decay": 0.001, "beta": 8.0}
KEPT = {"decay": 0.001, "beta": -3.0}
"""Arguments with which a state lasts over all parts."""


def make(dtype=torch.float64, sizes=SIZES, **strength):
    values = delta_rule_cases.inputs(TOKENS, sizes, **strength)
    return {name: value.to(dtype) for name, value in values.items()}


def forward_backward(values, lengths, parts, **options):
    def run(values):
        if parts > 1:
            return gathered_in_parts(values, lengths, parts, **options)
        return gated_delta_rule(*(values[name] for name in ALL), *boundaries(lengths), **options)

    return with_gradients(run, values, output="o")


@pytest.mark.parametrize("lengths", PACKS.values(), ids=PACKS.keys())
@pytest.mark.parametrize("parts", [2, 4, 12])
def test_parts_are_the_recurrence_of_the_pack(lengths, parts):
    strength = {2: {}, 4: WEAK, 12: STRONG}[parts]
    options = {"allow_neg_eigval": parts == 4}
    values = make(**strength)
    want = forward_backward(values, lengths, 1, backend="recurrence", **options)
    got = forward_backward(values, lengths, parts, **options)
    single = {name: value.float() for name, value in values.items()}
    low = forward_backward(single, lengths, parts, **options)
    for name in want:
        assert relative_error(got[name], want[name]) < 1e-12, name
        # 1 - sigmoid(8) in the gradient of b has a relative error of 2e-4 in float32.
        bound = 2e-4 if parts == 4 and name == "db" else 1e-5
        assert relative_error(low[name], want[name]) < bound, name


def test_parts_of_one_token_are_the_recurrence_of_the_pack():
    values = {name: x[:6] if name in PER_TOKEN else x for name, x in make(**WEAK).items()}
    for lengths in ([6], [1, 3, 2], [0, 4, 0, 2]):
        want = forward_backward(values, lengths, 1, backend="recurrence")
        got = forward_backward(values, lengths, 6)
        for name in want:
            assert relative_error(got[name], want[name]) < 1e-12, (lengths, name)


def test_documents_that_are_not_cut_have_the_bits_of_their_part_alone():
    """Compare equal shapes: on a CPU the bits of a product depend on its shape."""
    lengths = [66, 10, 80, 5, 7, 30, 33, 33]
    values = make(torch.float32, **WEAK)
    weight = torch.linspace(-1, 1, TOKENS * SIZES[1] * SIZES[3]).view(TOKENS, *SIZES[1::2])

    def run(values, **options):
        return gathered_in_parts(values, lengths, 4, **options)

    found = with_gradients(run, values, weight, "o")
    whole = (None, [10, 56], [24, 5, 7, 30], [33, 33])
    cut, different = (set(), {1}, {0}, set()), set()
    for number, (own, cut_here) in enumerate(zip(whole, cut)):
        rows = slice(66 * number, 66 * number + 66)
        own = own or [66]
        alone = {name: x[rows] if name in PER_TOKEN else x for name, x in values.items()}
        alone = with_gradients(
            lambda values, own=own: gated_delta_rule(
                *(values[name] for name in ALL), *boundaries([*own, *[0] * (8 - len(own))])
            ),
            alone,
            weight[rows],
            "o",
        )
        ends = [sum(own[: i + 1]) for i in range(len(own))]
        for name in ("o", *(f"d{name}" for name in PER_TOKEN)):
            for i, (end, length) in enumerate(zip(ends, own)):
                inside = slice(end - length, end)
                same = torch.equal(found[name][rows][inside], alone[name][inside])
                assert same or i in cut_here, (number, name, i)
                different |= set() if same else {(number, name)}
    assert {(1, "dv"), (2, "o")} <= different


@pytest.mark.parametrize("lengths", list(PACKS.values())[:-1], ids=list(PACKS)[:-1])
def test_documents_do_not_touch_each_other_by_a_bit(lengths):
    run = partial(forward_backward, lengths=lengths, parts=4)
    values = make(torch.float32)
    # The decay of a single token has no effect.
    victims = [i for i, length in enumerate(lengths) if length > 1]
    assert leaks_of_tokens(run, values, PER_TOKEN, lengths, victims) == set()


def test_values_that_are_not_finite_stay_in_their_document():
    lengths = [60, 80, 70, 54]
    values = make(torch.float32)
    values["v"][70] = torch.inf
    values["k"][130] = torch.nan
    results = forward_backward(values, lengths, 4)
    for name in ("o", *(f"d{name}" for name in PER_TOKEN)):
        finite = results[name].isfinite()
        assert finite[:60].all() and finite[140:].all(), name
        assert name != "o" or not finite[132:140].any(), name


def test_backends_that_pass_no_states_are_refused():
    arguments, part = part_of(make(), [TOKENS], 1, 2)
    with pytest.raises(NoBackendError, match="passes no states between parts"):
        gated_delta_rule(*arguments, part=part, backend="recurrence")


@pytest.mark.parametrize("mutation", ["no state", "no map", "no border", "spare chunks"])
def test_a_missing_step_is_seen(monkeypatch, mutation):
    sound = passed_states.state_from_parts
    lengths = PACKS["a document over all parts"]
    if mutation == "no state":
        monkeypatch.setattr(
            reference, "state_of_gathered", lambda x, sizes, part: 0 * sound(x, sizes)
        )
    elif mutation == "no map":
        monkeypatch.setattr(
            passed_states,
            "state_from_parts",
            lambda x, sizes: sound(x[-1:], sizes),
        )
    elif mutation == "no border":
        lengths = PACKS["parts begin with documents"]
        monkeypatch.setattr(reference, "begins_inside", lambda *_: torch.ones(1).bool())
    else:
        places = reference.Places.from_tables

        def without_spare_chunks(tables, tokens):
            found = places(tables, tokens)
            return found._replace(free_X=torch.zeros_like(found.free_X))

        lengths = [200, 64, 0, 0, 0, 0]
        monkeypatch.setattr(reference.Places, "from_tables", without_spare_chunks)
    values = make(**KEPT)
    want = forward_backward(values, lengths, 1, backend="recurrence")["o"]
    assert relative_error(gathered_in_parts(values, lengths, 4), want) > 1e-3
