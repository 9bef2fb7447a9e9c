"""The gated delta rule: its definition, the chunked reference, isolation, and the chunks of a pack."""

from functools import partial

import pytest
import torch
from torch.nn.functional import softplus

from megatron_packed.ops import triton_mode
from megatron_packed.ops.backend_dispatch import NoBackendError, Request, tune
from megatron_packed.ops.gated_delta_rule import reference
from megatron_packed.ops.gated_delta_rule.api import (
    OP,
    GatedDeltaRuleInputs,
    gated_delta_rule,
    inputs_of,
)
from megatron_packed.ops.gated_delta_rule.tables import CHUNK, build_tables, max_chunks
from support.delta_rule_cases import ALL, PER_TOKEN, inputs
from support.op_packs import (
    assert_sums_in_float32,
    boundaries,
    leaks_of_tokens,
    relative_error,
    run_without_values,
    with_gradients,
)
from support.random_tensors import normal

G, N, K, V = 2, 4, 5, 7
PACKS = {
    "around a chunk": [63, 64, 65, 1],
    "one document fills the pack": [130],
    "one token": [1],
    "short documents and a tail": [1, 2, 3, 20],
    "empty capacity": [5, 0, 66, 0, 0],
}


def make(tokens, dtype=torch.float64, *, sizes=(G, N, K, V), **strength):
    return {name: value.to(dtype) for name, value in inputs(tokens, sizes, **strength).items()}


def forward_backward(values, lengths, *, weight=None, **options):
    def run(values):
        return gated_delta_rule(*(values[name] for name in ALL), *boundaries(lengths), **options)

    return with_gradients(run, values, weight, "o")


def of_transformers(values, lengths, *, doubled):
    """Run transformers' token by token form on each document, in float32."""
    qwen3_next = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    beta = values["b"].sigmoid() * (2 if doubled else 1)
    g = -values["A_log"].exp() * softplus(values["a"] + values["dt_bias"])
    # Before transformers 5.23 the form takes one key for each value head.
    per_key = values["v"].shape[1] // values["k"].shape[1]
    q, k = (values[name].repeat_interleave(per_key, dim=1) for name in "qk")
    tensors = (q, k, values["v"], g, beta)
    outputs = []
    for documents in zip(*(x.split(lengths) for x in tensors)):
        if documents[0].shape[0]:
            o, _ = qwen3_next.torch_recurrent_gated_delta_rule(
                *(x[None] for x in documents), use_qk_l2norm_in_kernel=True
            )
            outputs.append(o[0])
    return torch.cat(outputs)


@pytest.mark.parametrize("backend", ["recurrence", "reference"])
@pytest.mark.parametrize("doubled", [False, True])
@pytest.mark.parametrize("name", ["around a chunk", "empty capacity"])
def test_output_is_that_of_transformers(name, doubled, backend):
    values = make(sum(PACKS[name]), torch.float32)
    got = gated_delta_rule(
        *values.values(), *boundaries(PACKS[name]), allow_neg_eigval=doubled, backend=backend
    )
    want = of_transformers(values, PACKS[name], doubled=doubled)
    assert relative_error(got, want) < 2e-6


def test_recurrence_computes_in_float32_or_float64():
    values = make(70)
    exact = forward_backward(values, [33, 37], backend="recurrence")
    for dtype, bound in ((torch.float32, 1e-5), (torch.bfloat16, 0.02)):
        low = {k: v.to(dtype if k in PER_TOKEN else torch.float32) for k, v in values.items()}
        got = forward_backward(low, [33, 37], backend="recurrence")
        assert got["o"].dtype == got["dv"].dtype == dtype
        for name in exact:
            assert 1e-9 < relative_error(got[name], exact[name]) < bound, name


STRENGTHS = {
    "ordinary": {},
    "weak decay, beta near 1": {"decay": 0.001, "beta": 8.0},
    "strong decay, beta near 0": {"decay": 50.0, "beta": -8.0},
    "strong decay, beta near 1": {"decay": 300.0, "beta": 8.0},
}


@pytest.mark.parametrize("strength", STRENGTHS.values(), ids=STRENGTHS.keys())
@pytest.mark.parametrize("lengths", PACKS.values(), ids=PACKS.keys())
def test_reference_is_the_recurrence(lengths, strength):
    """Compare all gradients, with a beta up to 2 except in the ordinary case."""
    values, doubled = make(sum(lengths), **strength), bool(strength)
    run = partial(forward_backward, lengths=lengths, allow_neg_eigval=doubled)
    want = run(values, backend="recurrence")
    got = run(values, backend="reference")
    single = run({name: x.float() for name, x in values.items()}, backend="reference")
    for name in want:
        assert relative_error(got[name], want[name]) < 1e-11, name
        # 1 - sigmoid(8) in the gradient of b has a relative error of 2e-4 in float32.
        assert relative_error(single[name], want[name]) < (2e-4 if name == "db" else 2e-5), name


@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (2, 6, 9, 3), (3, 3, 3, 17)], ids=str)
def test_sizes_of_heads(sizes):
    lengths = [66, 3]
    values = make(69, sizes=sizes)
    want = forward_backward(values, lengths, backend="recurrence")
    got = forward_backward(values, lengths, backend="reference")
    assert max(relative_error(got[name], want[name]) for name in want) < 1e-11


def test_gradients_are_those_of_finite_differences():
    values = [x.requires_grad_() for x in make(68, sizes=(1, 2, 3, 2)).values()]
    run = partial(gated_delta_rule, backend="reference", allow_neg_eigval=True)
    torch.autograd.gradcheck(
        lambda *inputs: run(*inputs, *boundaries([66, 2])), values, fast_mode=True
    )


def test_packed_equals_documents_one_by_one():
    lengths = [63, 2, 70]
    values = make(sum(lengths))
    weight = normal(sum(lengths), N, V, seed=1)
    packed = forward_backward(values, lengths, weight=weight)
    per_document = zip(*(values[name].split(lengths) for name in PER_TOKEN))
    alone = [
        forward_backward(values | dict(zip(PER_TOKEN, own)), [length], weight=one)
        for length, own, one in zip(lengths, per_document, weight.split(lengths))
    ]
    for name in packed:
        parts = [document[name] for document in alone]
        shared = name in ("dA_log", "ddt_bias")
        want = torch.stack(parts).sum(0) if shared else torch.cat(parts)
        assert relative_error(packed[name], want) < 1e-12, name


LEAKY = [2, 40, 66, 3, 130, 20]


def leaks_of_reference(dtype):
    run = partial(forward_backward, lengths=LEAKY, backend="reference")
    return leaks_of_tokens(run, make(sum(LEAKY), dtype), PER_TOKEN, LEAKY)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_documents_do_not_touch_each_other_by_a_bit(dtype):
    assert leaks_of_reference(dtype) == set()


def test_values_that_are_not_finite_stay_in_their_document():
    values = make(sum(LEAKY), torch.float32)
    values["v"][50] = torch.inf
    results = forward_backward(values, LEAKY, backend="reference")
    for name in ("o", *(f"d{name}" for name in PER_TOKEN)):
        assert results[name][:42].isfinite().all() and results[name][108:].isfinite().all()


def test_gradients_that_are_not_finite_stay_in_their_document():
    """The free places of all chunks read the last token's gradient before the mask."""
    weight = torch.ones(sum(LEAKY), N, V)
    weight[-1] = torch.inf
    values = make(sum(LEAKY), torch.float32)
    results = forward_backward(values, LEAKY, weight=weight, backend="reference")
    for name in (f"d{name}" for name in PER_TOKEN):
        assert results[name][: -LEAKY[-1]].isfinite().all()


def test_a_removed_boundary_is_caught(monkeypatch):
    """A state that enters all chunks changes the documents after it, and their gradients before."""
    places = reference.Places.from_tables

    def open_places(tables, tokens):
        found = places(tables, tokens)
        return found._replace(starts_Q=torch.zeros_like(found.starts_Q))

    monkeypatch.setattr(reference.Places, "from_tables", open_places)
    assert leaks_of_reference(torch.float32) == {"o", *(f"d{name}" for name in PER_TOKEN)}


def test_every_element_is_written():
    """Memory that was allocated and not written would be NaN here."""
    values = make(142, torch.float32)
    want = forward_backward(values, [70, 0, 72, 0], backend="reference")
    assert torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    try:
        got = forward_backward(values, [70, 0, 72, 0], backend="reference")
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(got[name], want[name]) for name in want)


def test_bfloat16_inputs_are_accumulated_in_float32():
    weight = normal(100, N, V, seed=1)
    assert_sums_in_float32(forward_backward, make(100), PER_TOKEN, [70, 30], weight)


def test_no_host_sync_and_static_shapes():
    run = partial(gated_delta_rule, backend="reference")
    run_without_values(run, *make(100, torch.float32).values(), *boundaries([60, 40]))


def test_given_tables_and_strided_views_are_accepted():
    lengths, values = PACKS["around a chunk"], make(193, torch.float32)
    bounds = boundaries(lengths)
    want = gated_delta_rule(*values.values(), *bounds)
    tables = tuple(build_tables(bounds[1], 193))
    assert torch.equal(gated_delta_rule(*values.values(), *bounds, tables=tables), want)
    wide = torch.cat([values[name].flatten(1) for name in PER_TOKEN], dim=1)
    columns = wide.split([values[name][0].numel() for name in PER_TOKEN], dim=1)
    views = {name: x.unflatten(1, values[name].shape[1:]) for name, x in zip(PER_TOKEN, columns)}
    got = gated_delta_rule(*(values | views).values(), *bounds)
    assert relative_error(got, want) < 1e-6


def test_the_reference_has_nothing_to_tune():
    values = make(8, torch.float32)
    tune([Request(OP, "auto", inputs_of(values["k"], values["v"]))], torch.device("cpu"))


@pytest.mark.parametrize("lengths", [*PACKS.values(), [0, 0, 5, 0], [64], [1, 1, 1]], ids=str)
def test_chunks_start_again_at_each_document(lengths):
    _, cu_seqlens = boundaries(lengths)
    tokens = sum(lengths)
    chunks, first, count = [], [], []
    for document, (start, end) in enumerate(zip(cu_seqlens.tolist(), cu_seqlens.tolist()[1:])):
        starts = range(start, end, CHUNK)
        first.append(len(chunks))
        count.append(len(starts))
        chunks += [(document, s, min(s + CHUNK, end)) for s in starts]
    spare = max_chunks(tokens, len(lengths)) - len(chunks)
    assert spare >= 0
    chunks += [(len(lengths) - 1, tokens, tokens)] * spare
    tables = build_tables(cu_seqlens, tokens)
    assert list(zip(*(x.tolist() for x in tables[:3]))) == chunks
    assert (tables.first_chunk_D.tolist(), tables.num_chunks_D.tolist()) == (first, count)
    assert {x.dtype for x in tables} == {torch.int32}


def walks_of(lengths, segment):
    """Return the walks of a pack and their joints, ``(start, end, joint at start, joint at end)``."""
    walks, joints, offset = [], 0, 0
    for length in lengths:
        starts = range(offset, offset + length, segment or max(length, 1))
        for start in starts:
            end = min(start + starts.step, offset + length)
            joint_at_start = -1 if start == offset else joints - 1
            joint_at_end = -1 if start == starts[-1] else joints
            joints += start != starts[-1]
            walks.append((start, end, joint_at_start, joint_at_end))
        offset += length
    return sorted(walks, key=lambda walk: walk[0] - walk[1]), joints


@pytest.mark.parametrize("segment", [None, 64, 128])
@pytest.mark.parametrize(
    "lengths", [*PACKS.values(), [0, 0, 5, 0], [128], [129, 65, 1, 300], [1] * 9], ids=str
)
def test_walks_and_the_joints_between_them(lengths, segment):
    tables = build_tables(boundaries(lengths)[1], sum(lengths), segment=segment)
    walks, joints = walks_of(lengths, segment)
    found = list(zip(*tables.walks_4W.tolist()))
    assert found[: len(walks)] == walks
    assert all(
        start == end and joint_at_start == joint_at_end == -1
        for start, end, joint_at_start, joint_at_end in found[len(walks) :]
    )
    assert tables.counts_2.tolist() == [len(walks), joints]
    for joint in range(joints):
        walk_before, walk_after = (next(x for x in walks if x[i] == joint) for i in (3, 2))
        begins = int(walk_before[2] >= 0)
        assert tables.joints_5J[:, joint].tolist() == [*walk_before[:2], *walk_after[:2], begins]


@pytest.mark.parametrize("lengths", [[130, 5], [0, 5, 130, 0], [135], [5, 64, 66]], ids=str)
def test_the_ends_of_a_part_are_the_joint_with_number_0(lengths):
    tokens = sum(lengths)
    tables = build_tables(boundaries(lengths)[1], tokens, segment=64, of_part=True)
    walks, joints = walks_of(lengths, 64)
    # Numbers of other joints follow those of the ends.
    shifted = [
        (
            *(start, end),
            0 if start == 0 else joint_at_start + (joint_at_start >= 0),
            0 if end == tokens else joint_at_end + (joint_at_end >= 0),
        )
        for start, end, joint_at_start, joint_at_end in walks
    ]
    found = list(zip(*tables.walks_4W.tolist()))[: len(walks)]
    assert found == shifted and tables.counts_2.tolist() == [len(walks), joints + 1]
    for joint in range(joints + 1):
        walk_before, walk_after = (next(x for x in shifted if x[i] == joint) for i in (3, 2))
        begins = int(walk_before[2] >= 0)
        assert tables.joints_5J[:, joint].tolist() == [*walk_before[:2], *walk_after[:2], begins]


def test_the_number_of_chunks_is_the_smallest_safe_one():
    """Documents of 1 token more than whole chunks need all of them."""
    lengths = [65, 65, 1, 1]
    assert max_chunks(sum(lengths), len(lengths)) == 6
    assert build_tables(boundaries(lengths)[1], sum(lengths)).end_Q.tolist()[-1] == 132


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": torch.zeros(8, 3, K)}, r"q has shape \[8, 3, 5\] and k"),
        ({"v": torch.zeros(7, N, V)}, r"v has shape \[7, 4, 7\]"),
        ({"v": torch.zeros(8, 3, V)}, "3 value heads are not divisible by 2 key heads"),
        ({"b": torch.zeros(8, 3)}, r"b \[8, 3\]; both must be \(T, N\)"),
        ({"v": torch.zeros(8, N, V).double()}, "need one dtype"),
        ({"A_log": torch.zeros(3)}, r"A_log has shape \[3\]"),
    ],
    ids=["q", "tokens", "heads", "gates", "dtype", "A_log"],
)
def test_inputs_that_do_not_fit_are_refused(changes, message):
    values = make(8, torch.float32) | changes
    with pytest.raises(ValueError, match=message):
        gated_delta_rule(*values.values(), *boundaries([8]))


def test_boundaries_and_unknown_backends_are_refused():
    values, (seq_idx, cu_seqlens) = make(8, torch.float32).values(), boundaries([8])
    with pytest.raises(ValueError, match=r"seq_idx has shape \[1, 7\]"):
        gated_delta_rule(*values, seq_idx[:, 1:], cu_seqlens)
    with pytest.raises(ValueError, match=r"cu_seqlens is torch.int64 \[2\]"):
        gated_delta_rule(*values, seq_idx, cu_seqlens.long())
    with pytest.raises(NoBackendError, match="no backend 'fast'"):
        gated_delta_rule(*values, seq_idx, cu_seqlens, backend="fast")


@pytest.mark.parametrize(
    ("key_dim", "value_dim", "refused"),
    [(32, 64, True), (64, 241, True), (44, 64, True), (64, 16, True), (40, 24, False)],
)
def test_kernels_refuse_head_dimensions_that_an_old_ptxas_compiles_wrongly(
    monkeypatch, key_dim, value_dim, refused
):
    kernels = pytest.importorskip("megatron_packed.ops.gated_delta_rule.triton_kernels")
    inputs = GatedDeltaRuleInputs(
        tokens=8,
        key_heads=1,
        value_heads=1,
        key_dim=key_dim,
        value_dim=value_dim,
        allow_neg_eigval=False,
        deterministic=False,
        dtype=torch.bfloat16,
        device_type="cuda",
    )
    for right in ((12, 9), (13, 1)):
        monkeypatch.setattr(kernels, "ptxas_version", lambda right=right: right)
        assert kernels.not_supported_reasons(inputs) == []
    monkeypatch.setattr(kernels, "ptxas_version", lambda: (12, 8))
    found = kernels.not_supported_reasons(inputs)
    assert len(found) == refused
    assert all(
        "with ptxas 12.8" in each and "ptxas 12.9 by TRITON_PTXAS_PATH" in each for each in found
    )


@pytest.mark.parametrize(
    ("get_version", "version"),
    [
        (lambda: "ptxas: assembler\nrelease 12.8, V12.8.93", (12, 8)),
        (lambda arch=80: f"release {arch // 10}.{arch % 10}, V1", (9, 0)),
        (lambda arch: "none", (0, 0)),
    ],
    ids=["one ptxas", "by GPU", "unknown"],
)
def test_version_of_ptxas(monkeypatch, get_version, version):
    compiler = pytest.importorskip("triton.backends.nvidia.compiler")
    monkeypatch.setattr(compiler, "get_ptxas_version", get_version)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert triton_mode.ptxas_version.__wrapped__() == version
