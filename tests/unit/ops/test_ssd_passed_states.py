"""Mamba-2's scan and convolution of a pack in parts against the recurrence of the complete pack."""

from functools import partial

import pytest
import torch
from torch.nn.functional import softplus

from megatron_packed.ops.ssd import passed_states
from megatron_packed.ops.ssd.api import ssd
from megatron_packed.ops.ssd.passed_states import add_entering, entering_state, leaving_state
from support import scan_cases
from support.op_packs import boundaries, leaks_of_tokens, relative_error, with_gradients
from support.scan_cases import NAMES as ALL
from support.scan_cases import PER_TOKEN

N, P, G, S, PARTS = 4, 3, 2, 5, 4
TOKENS = 48
PACKS = {
    "a document over all parts": [48],
    "parts begin with documents": [12, 24, 12],
    "cut inside": [5, 11, 3, 20, 9],
    "three parts long, and single tokens": [1, 1, 33, 1, 1, 11],
    "shorter than the convolution, at borders": [11, 2, 10, 1, 1, 10, 2, 11],
    "empty documents": [0, 7, 0, 24, 0, 17, 0],
}


def make(dtype=torch.float64):
    values = scan_cases.make(TOKENS, (N, P, G, S), bias=0.0)
    values["dt"] -= 2
    values["A_log"][0] -= 3  # keeps the state over all parts
    return {name: value.to(dtype) for name, value in values.items()}


def in_parts(values, lengths, parts=PARTS):
    """Run the scan in parts, as ranks do that exchange states."""
    seq_idx_1T, cu_seqlens = boundaries(lengths)
    size = TOKENS // parts
    own = [
        {name: v[r * size :][:size] if name in PER_TOKEN else v for name, v in values.items()}
        for r in range(parts)
    ]
    seq_idx = seq_idx_1T.view(parts, 1, size)
    offsets = [(cu_seqlens - r * size).clamp(0, size) for r in range(parts)]
    left = [
        leaving_state(v["x"], v["dt"], v["A_log"], v["B"], v["dt_bias"], seq_idx[r])
        for r, v in enumerate(own)
    ]
    states, logs = map(torch.stack, zip(*left))
    ys = []
    for r, v in enumerate(own):
        y = ssd(*(v[name] for name in ALL), seq_idx[r], offsets[r], chunk_size=8)
        state = entering_state(states, logs, seq_idx[:, 0, -1], r, seq_idx[r, 0, :1])
        ys.append(add_entering(y, state, v["dt"], v["A_log"], v["C"], v["dt_bias"], seq_idx[r]))
    return torch.cat(ys)


def whole(values, lengths):
    arguments = [values[name] for name in ALL]
    return ssd(*arguments, *boundaries(lengths), chunk_size=8, backend="recurrence")


def forward_backward(scan, values, lengths):
    return with_gradients(lambda values: scan(values, lengths), values)


@pytest.mark.parametrize("lengths", PACKS.values(), ids=PACKS.keys())
@pytest.mark.parametrize("parts", [2, 4, 24])
def test_parts_are_the_recurrence_of_the_pack(lengths, parts):
    def scan(values, lengths):
        return in_parts(values, lengths, parts)

    want = forward_backward(whole, make(), lengths)
    got = forward_backward(scan, make(), lengths)
    single = forward_backward(
        scan, {name: value.float() for name, value in make().items()}, lengths
    )
    for name in want:
        assert relative_error(got[name], want[name]) < 1e-12, name
        assert relative_error(single[name], want[name]) < 1e-5, name


@pytest.mark.parametrize("lengths", list(PACKS.values())[:-1], ids=list(PACKS)[:-1])
def test_documents_do_not_touch_each_other_by_a_bit(lengths):
    run = partial(forward_backward, in_parts, lengths=lengths)
    assert leaks_of_tokens(run, make(torch.float32), PER_TOKEN, lengths) == set()


def test_a_document_inside_a_part_has_the_bits_of_the_part_alone():
    lengths = PACKS["cut inside"]
    values, seq_idx_1T = make(torch.bfloat16), boundaries(lengths)[0]
    values |= {name: values[name].float() for name in ("A_log", "D", "dt_bias")}
    y = in_parts(values, lengths)
    inner = {name: v[36:] if name in PER_TOKEN else v for name, v in values.items()}
    arguments = [inner[name] for name in ALL]
    alone = ssd(*arguments, seq_idx_1T[:, 36:], boundaries([3, 9])[1], chunk_size=8)
    assert y.dtype == torch.bfloat16 and torch.equal(y[39:], alone[3:])
    assert not torch.equal(y[36:39], alone[:3])


def test_gradients_of_some_inputs_and_steep_decays():
    values = make(torch.float32)
    values |= {"dt": values["dt"] + 1e4, "x": values["x"].requires_grad_()}
    seq_idx_1T = boundaries([20, 28])[0]
    arguments = [values[name] for name in ("x", "dt", "A_log", "B", "dt_bias")]
    state, log = leaving_state(*arguments, seq_idx_1T)
    assert not torch.equal(log, torch.zeros(N)) and log.min() < -1e5
    (dx,) = torch.autograd.grad(state.sum() + log.sum(), values["x"])
    assert dx.isfinite().all() and dx[:20].abs().max() == 0 and dx[-1].abs().max() > 0


def test_decays_of_a_long_part_are_summed_in_float64_and_rounded_once():
    """Logarithms of float32 inputs err by one rounding, as they do for a part of one token."""
    tokens, heads, rounding = 4096, 8, 2**-24
    generator = torch.Generator().manual_seed(0)
    dt_TN = torch.randn(tokens, heads, generator=generator) - 5
    A_log_N = torch.linspace(0.02, 1.7, heads).log()
    bias_N = torch.randn(heads, generator=generator) / 8
    one_TN1 = torch.ones(tokens, heads, 1)
    seq_idx_1T = torch.zeros(1, tokens, dtype=torch.int32)
    steps_TN = softplus(dt_TN + bias_N).double()
    sums_TN = (steps_TN * -A_log_N.double().exp()).cumsum(0)
    _, log_N = leaving_state(one_TN1, dt_TN, A_log_N, one_TN1, bias_N, seq_idx_1T)
    assert ((log_N / sums_TN[-1] - 1).abs() < 1.001 * rounding).all()
    # A state of one and C of one: the term of the entering state is the decay up to each token.
    empty_TN1, state_N11 = torch.zeros_like(one_TN1), torch.ones(heads, 1, 1)
    y_TN1 = add_entering(empty_TN1, state_N11, dt_TN, A_log_N, one_TN1, bias_N, seq_idx_1T)
    errors_TN = (y_TN1[..., 0] / sums_TN.exp() - 1).abs()
    # The exponential itself errs by at most two roundings.
    assert (errors_TN < (1.001 * sums_TN.abs() + 2) * rounding).all()


@pytest.mark.parametrize("mutation", ["no decay between parts", "no mask of the first document"])
def test_a_missing_step_is_seen(monkeypatch, mutation):
    if mutation == "no decay between parts":
        sound = passed_states._leaving_state
        monkeypatch.setattr(
            passed_states,
            "_leaving_state",
            lambda *tensors: (sound(*tensors)[0], torch.zeros_like(sound(*tensors)[1])),
        )
        lengths = PACKS["a document over all parts"]
    else:
        sound = passed_states._from_entering
        monkeypatch.setattr(
            passed_states,
            "_from_entering",
            lambda *tensors: sound(*tensors[:-1], torch.zeros_like(tensors[-1])),
        )
        lengths = PACKS["cut inside"]
    values = make()
    assert relative_error(in_parts(values, lengths), whole(values, lengths)) > 1e-3
