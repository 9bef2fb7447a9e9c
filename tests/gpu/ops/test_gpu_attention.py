"""Attention backends on a GPU: errors, isolation, determinism, capture and replay, no host sync."""

from itertools import pairwise

import pytest
import torch

from megatron_packed.ops.backend_dispatch import NoBackendError
from megatron_packed.ops.varlen_attention import api as backends
from megatron_packed.ops.varlen_attention.api import OP, prepare_tables, varlen_attention
from support.gpu_checks import (
    PACKINGS,
    T,
    check_determinism,
    check_errors,
    check_isolation,
    check_no_sync,
    check_replay,
    pack,
    supported,
)

pytestmark = pytest.mark.gpu

KERNELS = [name for name in OP.names() if name != "reference"]
SHAPES = {"grouped": (8, 2, 128, None), "window": (4, 4, 64, 100), "wide": (16, 2, 256, 100)}
HEADS = {
    f"head {size}": (4, 2, size, None)
    for size in (8, 16, 24, 40, 48, 72, 80, 96, 104, 112, 160, 192)
}
"""Other head dimensions; flash-attn 4 has wrong gradients for some of them."""
NO_DETERMINISTIC_FORM = ("torch_varlen", "sdpa")
LOOSE = 1e-2
"""Tolerance of gradients whose order of summation changes; a removed boundary changes them by 1."""


class Setup:
    """One backend with one static pack."""

    def __init__(self, backend: str, shape: str, *, deterministic: bool = False):
        self.backend, self.deterministic = backend, deterministic
        self.heads, self.kv_heads, self.head_dim, self.window = (SHAPES | HEADS)[shape]
        self.static = pack(PACKINGS[0])
        inputs = backends.attention_inputs(
            **self.sizes,
            tokens=T,
            device=torch.device("cuda", 0),
            num_sequences=49,
            automatic=False,
        )
        supported(OP, inputs, backend)
        self.tables = self.prepare(self.static)
        generator = torch.Generator("cuda").manual_seed(0)
        self.values = [
            torch.randn(T, n, self.head_dim, generator=generator, device="cuda").bfloat16()
            for n in (self.heads, self.kv_heads, self.kv_heads)
        ]

    @property
    def sizes(self):
        return {
            "num_heads": self.heads,
            "num_kv_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "dtype": torch.bfloat16,
            "window_size": self.window,
            "deterministic": self.deterministic,
        }

    def prepare(self, packed):
        return prepare_tables(self.backend, packed.seq_idx, packed.cu_seqlens, **self.sizes)

    def kernel(self, q, k, v, backend=None):
        tables = self.tables if backend is None else None
        return varlen_attention(
            q,
            k,
            v,
            self.static.cu_seqlens,
            T,
            seq_idx_1T=self.static.seq_idx,
            window_size=self.window,
            tables=tables,
            deterministic=self.deterministic,
            backend=backend or self.backend,
        )

    def use(self, lengths):
        """Refill the static metadata in place."""
        packed = pack(lengths)
        for name in ("cu_seqlens", "seq_idx"):
            getattr(self.static, name).copy_(getattr(packed, name))
        if self.tables is not None:
            self.tables.copy_from(self.prepare(packed))


def exact(setup):
    return lambda q, k, v: setup.kernel(q, k, v, backend="reference")


def plain(setup):
    """Run each document separately with torch operations in the dtype of the inputs."""

    def attention(q, k, v):
        k, v = (x.repeat_interleave(setup.heads // setup.kv_heads, dim=1) for x in (k, v))
        outputs = []
        for start, end in pairwise(setup.static.cu_seqlens_cpu.tolist()):
            distance = torch.arange(end - start, device="cuda")[:, None] - torch.arange(
                end - start, device="cuda"
            )
            hidden = (distance < 0) | (distance >= (setup.window or T))
            scores = torch.einsum("qnh,knh->nqk", q[start:end], k[start:end]) * setup.head_dim**-0.5
            probabilities = (
                scores.float().masked_fill(hidden, float("-inf")).softmax(-1).to(q.dtype)
            )
            outputs.append(torch.einsum("nqk,knh->qnh", probabilities, v[start:end]))
        return torch.cat(outputs)

    return attention


@pytest.mark.parametrize("shape", SHAPES)
def test_the_reference_on_a_gpu_is_the_one_on_a_cpu(shape):
    setup = Setup("reference", shape)
    on_gpu = setup.kernel(*(x.float() for x in setup.values))
    on_cpu = varlen_attention(
        *(x.float().cpu() for x in setup.values),
        setup.static.cu_seqlens.cpu(),
        T,
        window_size=setup.window,
    )
    torch.testing.assert_close(on_gpu.cpu(), on_cpu, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("shape", [*SHAPES, *HEADS])
@pytest.mark.parametrize("backend", KERNELS)
def test_errors(backend, shape):
    setup = Setup(backend, shape)
    check_errors(setup.kernel, exact(setup), plain(setup), setup.values, torch.bfloat16)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("backend", KERNELS)
def test_isolation(backend, shape):
    loose = backend in NO_DETERMINISTIC_FORM
    setup = Setup(backend, shape, deterministic=not loose)
    start = sum(PACKINGS[0][:6])
    check_isolation(
        setup.kernel,
        setup.values,
        slice(start, start + PACKINGS[0][6]),
        torch.bfloat16,
        atol=LOOSE if loose else 0,
    )


def test_the_isolation_check_sees_a_removed_boundary():
    setup = Setup("reference", "grouped")
    start = sum(PACKINGS[0][:6])
    setup.use(PACKINGS[1])
    with pytest.raises(AssertionError, match="other documents changed"):
        check_isolation(
            setup.kernel, setup.values, slice(start, start + PACKINGS[0][6]), torch.bfloat16
        )


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("backend", [name for name in KERNELS if name not in NO_DETERMINISTIC_FORM])
def test_determinism(backend, shape):
    setup = Setup(backend, shape, deterministic=True)
    check_determinism(setup.kernel, setup.values, torch.bfloat16)


@pytest.mark.parametrize("backend", NO_DETERMINISTIC_FORM)
def test_backends_without_a_deterministic_form_refuse_it(backend):
    setup = Setup("reference", "grouped", deterministic=True)
    with pytest.raises(NoBackendError, match=backend):
        setup.kernel(*setup.values, backend=backend)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("backend", KERNELS)
def test_replay_over_other_packings(backend, deterministic):
    setup = Setup(backend, "grouped", deterministic=deterministic)
    updates = [lambda lengths=lengths: setup.use(lengths) for lengths in (*PACKINGS, PACKINGS[0])]
    check_replay(
        setup.kernel, setup.values, torch.bfloat16, updates, atol=0 if deterministic else LOOSE
    )


@pytest.mark.parametrize("backend", [*KERNELS, "reference"])
def test_no_host_sync(backend):
    setup = Setup(backend, "grouped")
    check_no_sync(setup.kernel, setup.values, torch.bfloat16)


@pytest.mark.parametrize("backend", ["flex", "sdpa"])
def test_tables_are_built_without_a_sync_and_under_capture(backend):
    setup = Setup(backend, "window")
    packed = pack(PACKINGS[2])
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        want = setup.prepare(packed)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        built = setup.prepare(setup.static)
    setup.static.seq_idx.copy_(packed.seq_idx)
    graph.replay()
    for name, value in vars(want).items():
        if isinstance(value, torch.Tensor):
            number = {"kv_index": "kv_num", "full_kv_index": "full_kv_num", "q_index": "q_num"}.get(
                name
            )
            got = getattr(built, name)
            if number is not None:  # entries beyond the count are undefined
                counted = (
                    torch.arange(value.shape[-1], device="cuda") < getattr(want, number)[..., None]
                )
                value, got = value * counted, got * counted
            assert torch.equal(got, value), name


@pytest.mark.parametrize("lengths", [[1] * 48, [T], [T - 1], [1]])
@pytest.mark.parametrize("backend", KERNELS)
def test_extreme_packings(backend, lengths):
    setup = Setup(backend, "grouped")
    setup.use(lengths)
    got, want = (setup.kernel(*setup.values, backend=name) for name in (backend, "reference"))
    torch.testing.assert_close(got.float(), want.float(), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("lengths", [[1, 0], [1, 0, 1, 1]])
@pytest.mark.parametrize("backend", KERNELS)
def test_documents_of_one_token_beside_empty_ones(backend, lengths):
    """A token that sees only itself gets its own value, and all gradients go to that value."""
    heads, kv_heads, head_dim, _ = SHAPES["grouped"]
    inputs = backends.attention_inputs(
        tokens=sum(lengths),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=torch.bfloat16,
        device=torch.device("cuda", 0),
        num_sequences=len(lengths),
        window_size=None,
        deterministic=False,
        automatic=False,
    )
    supported(OP, inputs, backend)
    q, k, v = (
        torch.randn(sum(lengths), n, head_dim, device="cuda", dtype=torch.bfloat16).requires_grad_()
        for n in (heads, kv_heads, kv_heads)
    )
    cu_seqlens = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    out = varlen_attention(q, k, v, cu_seqlens, 1, backend=backend)
    repeated = v.repeat_interleave(heads // kv_heads, dim=1)
    found, want = (torch.autograd.grad(y.float().sum(), v)[0] for y in (out, repeated))
    torch.testing.assert_close(out, repeated)
    torch.testing.assert_close(found, want)


def test_auto_takes_the_fastest_that_is_here():
    setup = Setup("reference", "grouped")
    inputs = backends.attention_inputs(
        **setup.sizes, tokens=T, device=torch.device("cuda", 0), num_sequences=49, automatic=False
    )
    reasons = OP.explain(inputs)
    usable = [name for name, why in reasons.items() if not why]
    assert usable and OP.select(inputs).name == usable[0] != "reference", reasons
