"""The gated delta rule: the recurrence against transformers, and the chunks of a pack."""

import pytest
import torch
from torch.nn.functional import pad, softplus

from megatron_packed.ops.backend_dispatch import NoBackendError
from megatron_packed.ops.gated_delta_rule.api import gated_delta_rule
from megatron_packed.ops.gated_delta_rule.tables import CHUNK, build_tables, max_chunks
from support.op_packs import relative_error

G, N, K, V = 2, 4, 5, 7
ALL = ("q", "k", "v", "a", "b", "A_log", "dt_bias")
PER_TOKEN = ALL[:5]
PACKS = {
    "around a chunk": [63, 64, 65, 1],
    "one document fills the pack": [130],
    "one token": [1],
    "short documents and a tail": [1, 2, 3, 20],
    "empty capacity": [5, 0, 66, 0, 0],
}


def boundaries(lengths):
    """Return ``seq_idx (1, T)`` and ``cu_seqlens (documents + 1,)``; documents may be empty."""
    seq_idx = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return seq_idx[None].int(), pad(torch.tensor(lengths).cumsum(0), (1, 0)).int()


def make(tokens, dtype=torch.float64, *, decay=1.0, beta=0.0, sizes=(G, N, K, V)):
    """Return random inputs.

    Args:
        decay: factor of A; 0.01 keeps the state for long, 50 forgets it within a token.
        beta: added to b; 8 gives a beta near 1 (2 if doubled), -8 near 0.
    """
    key_heads, value_heads, key_dim, value_dim = sizes
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    return {
        "q": normal(tokens, key_heads, key_dim),
        "k": normal(tokens, key_heads, key_dim),
        "v": normal(tokens, value_heads, value_dim),
        "a": normal(tokens, value_heads),
        "b": normal(tokens, value_heads) + beta,
        "A_log": (decay * torch.linspace(0.5, 2, value_heads)).log().to(dtype),
        "dt_bias": normal(value_heads),
    }


def forward_backward(values, lengths, *, weight=None, **options):
    """Return the output and the gradient of each input.

    The upstream gradient has a different value for each element.
    """
    values = {name: value.clone().requires_grad_() for name, value in values.items()}
    o = gated_delta_rule(*(values[name] for name in ALL), *boundaries(lengths), **options)
    if weight is None:
        weight = torch.linspace(-1, 1, o.numel(), dtype=torch.float64).view(o.shape)
    gradients = torch.autograd.grad((o * weight.to(o.dtype)).sum(), values.values())
    return {"o": o.detach(), **dict(zip((f"d{name}" for name in ALL), gradients))}


def of_transformers(values, lengths, *, doubled):
    """Run transformers' token by token form on each document, in float32."""
    qwen3_next = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    beta = values["b"].sigmoid() * (2 if doubled else 1)
    g = -values["A_log"].exp() * softplus(values["a"] + values["dt_bias"])
    tensors = (values["q"], values["k"], values["v"], g, beta)
    outputs = []
    for documents in zip(*(x.split(lengths) for x in tensors)):
        if documents[0].shape[0]:
            o, _ = qwen3_next.torch_recurrent_gated_delta_rule(
                *(x[None] for x in documents), use_qk_l2norm_in_kernel=True
            )
            outputs.append(o[0])
    return torch.cat(outputs)


@pytest.mark.parametrize("backend", ["recurrence"])
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


@pytest.mark.parametrize("lengths", [*PACKS.values(), [0, 0, 5, 0], [64], [1, 1, 1]], ids=str)
def test_chunks_start_anew_at_each_document(lengths):
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
