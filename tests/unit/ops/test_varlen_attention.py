"""The reference against a dense float64 softmax, isolation, and FlexAttention's block tables.

The block tables are compared with those of FlexAttention's mask builder.
"""

import sys
from importlib import import_module
from itertools import pairwise
from types import ModuleType

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from megatron_packed.ops.backend_dispatch import NoBackendError
from megatron_packed.ops.varlen_attention import (
    api,
    flex,
    reference,
    sdpa,
    tables,
    torch_varlen,
)
from megatron_packed.ops.varlen_attention.api import AttentionCall, prepare_tables, varlen_attention

PACKINGS = {
    "one document": [96],
    "length one, two, three": [1, 2, 3, 1, 1, 88],
    "empty documents": [0, 40, 0, 0, 56, 0],
    "more than a block": [31, 270, 19],
    "hundred documents": [1] * 60 + [2] * 45,
}


def offsets(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def random_qkv(
    tokens: int, heads: int = 4, kv_heads: int = 2, head_dim: int = 8, dtype=torch.float32
):
    generator = torch.Generator().manual_seed(tokens)
    return [
        torch.randn(tokens, n, head_dim, generator=generator, dtype=torch.float64)
        .to(dtype)
        .requires_grad_()
        for n in (heads, kv_heads, kv_heads)
    ]


def dense_attention(q, k, v, cu_seqlens, window=None):
    """Compute each document by a dense float64 softmax, without code of the package."""
    outputs = []
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1).double() for x in (k, v))
    q = q.double()
    for start, end in pairwise(cu_seqlens.tolist()):
        scores = (
            torch.einsum("qnh,knh->nqk", q[start:end], k[start:end]).double() * q.shape[-1] ** -0.5
        )
        for i in range(end - start):
            hidden = [j for j in range(end - start) if j > i or (window and i - j >= window)]
            scores[:, i, hidden] = -torch.inf
        outputs.append(torch.einsum("nqk,knh->qnh", scores.softmax(-1), v[start:end].double()))
    return torch.cat(outputs)


def output_weight(output):
    generator = torch.Generator().manual_seed(7)
    return torch.randn(output.shape, generator=generator, dtype=torch.float64)


def gradients(output, inputs):
    loss = (output.double() * output_weight(output)).sum()
    return torch.autograd.grad(loss, inputs, retain_graph=True)


def assert_close_with_gradients(out, want, inputs):
    torch.testing.assert_close(out.to(want.dtype), want, rtol=1e-5, atol=1e-6)
    for got, expected in zip(gradients(out, inputs), gradients(want, inputs)):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("window", [None, 1, 5, 300])
@pytest.mark.parametrize("lengths", PACKINGS.values(), ids=PACKINGS)
def test_reference_is_dense_attention_of_each_document(lengths, window):
    cu_seqlens = offsets(lengths)
    q, k, v = random_qkv(sum(lengths))
    out = varlen_attention(q, k, v, cu_seqlens, max(lengths), window_size=window)
    want = dense_attention(q, k, v, cu_seqlens, window)
    assert_close_with_gradients(out, want, (q, k, v))


def pack_with_a_mask(q, k, v, cu_seqlens, window, cu_seqlens_k=None):
    """Run on a CPU the code for GPUs, which computes the pack as one segment with a mask."""
    call = AttentionCall(
        cu_seqlens=cu_seqlens,
        cu_seqlens_k=cu_seqlens if cu_seqlens_k is None else cu_seqlens_k,
        max_seqlen=q.shape[0],
        softmax_scale=8**-0.5,
        window_size=window,
        deterministic=True,
        tables=None,
    )
    documents = reference._Documents.on_device(call, q.shape[0], k.shape[0])
    return reference._attend_segment(q * call.softmax_scale, k, v, 0, documents, window)


@pytest.mark.parametrize("window", [None, 7])
def test_the_gpu_path_is_the_cpu_path(window, monkeypatch):
    lengths = [1, 300, 0, 40, 259]
    cu_seqlens, tokens = offsets(lengths), sum(lengths)
    q, k, v = random_qkv(tokens)
    masked = pack_with_a_mask(q, k, v, cu_seqlens, window)
    alone = varlen_attention(q, k, v, cu_seqlens, tokens, window_size=window)
    torch.testing.assert_close(masked, alone, rtol=1e-5, atol=1e-6)
    # With limit 0, backward recomputes each block, with the same bits.
    monkeypatch.setattr(reference, "_SAVED_SCORES_LIMIT", 0)
    recomputed = pack_with_a_mask(q, k, v, cu_seqlens, window)
    assert torch.equal(recomputed, masked)
    for got, expected in zip(gradients(recomputed, (q, k, v)), gradients(masked, (q, k, v))):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("masks", [False, True], ids=["cpu path", "gpu path"])
@pytest.mark.parametrize("window", [None, 1, 5])
@pytest.mark.parametrize("lengths", PACKINGS.values(), ids=PACKINGS)
def test_a_part_of_the_queries_sees_the_earlier_keys_of_its_documents(lengths, window, masks):
    """A part holds the rows of the whole pack, its own last, as from a ring of ranks."""
    cu_seqlens, tokens = offsets(lengths), sum(lengths)
    inputs = random_qkv(tokens)
    want = dense_attention(*inputs, cu_seqlens, window)
    sums = [torch.zeros_like(x) for x in inputs]
    for begin, end in pairwise([0, 1, tokens // 3, tokens // 2, tokens]):
        held = torch.arange(end - tokens, end) % tokens
        own = cu_seqlens.clamp(begin, end)
        first = cu_seqlens[cu_seqlens <= begin].max()
        seen = torch.where(own > begin, own, first) - (end - tokens)
        rows = (torch.arange(begin, end), held, held)
        q, k, v = (x[row].detach().requires_grad_() for x, row in zip(inputs, rows))
        if masks:
            out = pack_with_a_mask(q, k, v, own - begin, window, seen)
        else:
            options = {"window_size": window, "cu_seqlens_k": seen}
            out = varlen_attention(q, k, v, own - begin, tokens, **options)
        torch.testing.assert_close(out.to(want.dtype), want[begin:end], rtol=1e-5, atol=1e-6)
        loss = (out.double() * output_weight(want)[begin:end]).sum()
        for total, row, gradient in zip(sums, rows, torch.autograd.grad(loss, (q, k, v))):
            total[row] += gradient
    for total, expected in zip(sums, gradients(want, inputs)):
        torch.testing.assert_close(total, expected, rtol=1e-5, atol=2e-6)


class _GarbageOutside(torch.autograd.Function):
    """The identity, whose gradient is NaN outside of the documents' keys, as kernels may leave it."""

    @staticmethod
    def forward(ctx, x, offsets_k):
        ctx.outside = torch.ones(len(x), dtype=torch.bool)
        ctx.outside[int(offsets_k[0]) : int(offsets_k[-1])] = False
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dx):
        return dx.masked_fill(ctx.outside[:, None, None], torch.nan), None


def test_rows_outside_all_documents_get_zeros_whatever_the_kernel_leaves_there(monkeypatch):
    run = reference.run

    def kernel(q, k, v, call):
        return run(q, *(_GarbageOutside.apply(x, call.cu_seqlens_k) for x in (k, v)), call)

    monkeypatch.setattr(reference, "run", kernel)
    q, k, v = random_qkv(20)
    part = [x.detach().requires_grad_() for x in (q[8:14], k, v)]
    seen = torch.tensor([5, 12, 14], dtype=torch.int32)
    out = varlen_attention(*part, offsets([4, 2]), 20, cu_seqlens_k=seen)
    for gradient in gradients(out, part)[1:]:
        assert gradient[5:14].abs().amin(dim=(1, 2)).gt(0).all()
        assert gradient[:5].eq(0).all() and gradient[14:].eq(0).all()


def test_offsets_of_keys_that_do_not_fit_are_refused():
    q, k, v = random_qkv(8)
    own = offsets([3, 5])
    for wrong, why in {
        (0, 3, 9): "at most S = 8 rows",
        (0, 2, 8): "as many keys as a document has queries",
    }.items():
        with pytest.raises(ValueError, match=why):
            varlen_attention(q, k, v, own, 9, cu_seqlens_k=torch.tensor(wrong, dtype=torch.int32))
    with pytest.raises(ValueError, match="as long as cu_seqlens"):
        varlen_attention(q, k, v, own, 9, cu_seqlens_k=own[:2])
    with pytest.raises(NoBackendError, match="earlier context-parallel ranks"):
        varlen_attention(q, k, v, own, 9, cu_seqlens_k=own, backend="sdpa")


def test_bf16_errs_no_more_than_rounding_its_result():
    q, k, v = random_qkv(64, dtype=torch.bfloat16)
    out = varlen_attention(q, k, v, offsets([10, 54]), 54)
    want = dense_attention(q, k, v, offsets([10, 54]))
    assert out.dtype == torch.bfloat16
    assert ((out.double() - want).abs() <= want.abs() * 2**-8 + 1e-6).all()


@pytest.mark.parametrize("perturbed", [0, 1, 2])
def test_a_changed_document_leaves_the_others_bits(perturbed):
    lengths = [37, 300, 63]
    cu_seqlens = offsets(lengths)
    q, k, v = random_qkv(sum(lengths))
    start, end = int(cu_seqlens[perturbed]), int(cu_seqlens[perturbed + 1])
    changed = [x.detach().clone() for x in (q, k, v)]
    for x in changed:
        x[start + lengths[perturbed] // 2] = torch.nan  # Even a NaN must stay in its document.
        x.requires_grad_()
    outs = [varlen_attention(*inputs, cu_seqlens, max(lengths)) for inputs in ((q, k, v), changed)]
    grads = [gradients(outs[0], (q, k, v)), gradients(outs[1], changed)]
    neighbours = torch.ones(sum(lengths), dtype=torch.bool)
    neighbours[start:end] = False
    assert torch.equal(outs[0][neighbours], outs[1][neighbours])
    assert not torch.equal(outs[0][~neighbours], outs[1][~neighbours])
    for before, after in zip(*grads):
        assert torch.equal(before[neighbours], after[neighbours])


def test_packed_equals_alone_bit_for_bit():
    lengths = [5, 290, 1, 44]
    cu_seqlens = offsets(lengths)
    q, k, v = random_qkv(sum(lengths))
    packed = varlen_attention(q, k, v, cu_seqlens, max(lengths))
    for start, end in pairwise(cu_seqlens.tolist()):
        alone = varlen_attention(
            q[start:end], k[start:end], v[start:end], offsets([end - start]), end - start
        )
        assert torch.equal(packed[start:end], alone)


@pytest.mark.parametrize("window", [None, 16])
def test_sdpa_with_a_mask_agrees(window):
    lengths = [3, 60, 1, 64]
    cu_seqlens = offsets(lengths)
    q, k, v = random_qkv(128)
    seq_idx = tables.document_numbers(cu_seqlens, 128)
    prepared = prepare_tables(
        "sdpa",
        seq_idx,
        cu_seqlens,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        dtype=q.dtype,
        window_size=window,
    )
    want = varlen_attention(q, k, v, cu_seqlens, 64, window_size=window)
    for given in (prepared, None):
        out = varlen_attention(
            q, k, v, cu_seqlens, 64, window_size=window, tables=given, backend="sdpa"
        )
        assert_close_with_gradients(out, want, (q, k, v))


def test_document_numbers_skip_empty_documents():
    assert tables.document_numbers(offsets([2, 0, 3, 0]), 5).tolist() == [[0, 0, 2, 2, 2]]


@pytest.mark.parametrize("window", [None, 1, 128, 129, 200, 257])
@pytest.mark.parametrize(
    "lengths", [[1024], [128] * 8, [100, 28, 300, 1, 1, 82, 512], [1] * 300 + [724], [1023, 1]]
)
def test_block_tables_list_what_the_mask_shows(lengths, window):
    cu_seqlens = offsets(lengths)
    built = tables.build_block_tables(tables.document_numbers(cu_seqlens, 1024), window)
    want = create_block_mask(
        built.mask_mod(), 1, 1, 1024, 1024, device="cpu", BLOCK_SIZE=tables.BLOCK
    )
    pairs = {
        (built.kv_num, built.kv_index): (want.kv_num_blocks, want.kv_indices),
        (built.full_kv_num, built.full_kv_index): (want.full_kv_num_blocks, want.full_kv_indices),
        (built.q_num, built.q_index): (want.q_num_blocks, want.q_indices),
        (built.full_q_num, built.full_q_index): (want.full_q_num_blocks, want.full_q_indices),
    }
    for (number, index), (want_number, want_index) in pairs.items():
        assert torch.equal(number, want_number)
        for row, count in enumerate(number.flatten().tolist()):
            assert torch.equal(index[0, 0, row, :count], want_index[0, 0, row, :count])


@pytest.mark.parametrize("window", [None, 100])
def test_flex_follows_its_tables_without_recompiling(window):
    """Check with dynamo's eager backend that one compiled function fits all packings."""
    q, k, v = (x.detach() for x in random_qkv(256))
    counters = torch._dynamo.utils.counters["stats"]
    counters.clear()
    attend = flex.compiled_attention(window, 0.3, True, backend="eager")
    for lengths in ([256], [100, 156], [1] * 56 + [200]):
        cu_seqlens = offsets(lengths)
        built = tables.build_block_tables(tables.document_numbers(cu_seqlens, 256), window)
        assert all(
            torch.equal(a, b)
            for a, b in zip(built.tensors(), built.from_tensors(built.tensors(), 1).tensors())
        )
        got = attend(*(x.transpose(0, 1)[None] for x in (q, k, v)), *built.tensors())[0].transpose(
            0, 1
        )
        want = varlen_attention(q, k, v, cu_seqlens, 256, softmax_scale=0.3, window_size=window)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=2e-6)
    assert counters["unique_graphs"] == 1


def test_flex_compiles_more_sizes_than_torch_allows_by_default():
    attend = flex.compiled_attention(None, 0.7, False, backend="eager")
    built = tables.build_block_tables(torch.zeros(1, 128, dtype=torch.int32), None)
    for heads in range(1, 11):
        x = torch.ones(1, heads, 128, 16)
        assert attend(x, x, x, *built.tensors()).shape == x.shape


def test_block_tables_are_refilled_in_place():
    first, second = (
        tables.build_block_tables(tables.document_numbers(offsets(lengths), 512), None)
        for lengths in ([512], [200, 312])
    )
    addresses = [first.kv_index.data_ptr(), first.document_T.data_ptr()]
    first.copy_from(second)
    assert [first.kv_index.data_ptr(), first.document_T.data_ptr()] == addresses
    assert torch.equal(first.kv_num, second.kv_num) and torch.equal(
        first.document_T, second.document_T
    )
    with pytest.raises(ValueError, match="window 5 cannot refill"):
        first.copy_from(tables.build_block_tables(tables.document_numbers(offsets([512]), 512), 5))


def test_wrong_offsets_are_refused():
    q, k, v = random_qkv(10)
    for lengths, message in (
        ([4, 5], "start at 0, never decrease and end at T = 10"),
        ([12, -2], "start at 0"),
    ):
        with pytest.raises(ValueError, match=message):
            varlen_attention(q, k, v, offsets(lengths), 12)
    with pytest.raises(
        ValueError, match=r"longest document has 10 tokens, more than max_seqlen \(4\)"
    ):
        varlen_attention(q, k, v, offsets([10]), 4)
    with pytest.raises(ValueError, match="int32"):
        varlen_attention(q, k, v, offsets([10]).long(), 10)
    with pytest.raises(ValueError, match="N a multiple of K"):
        varlen_attention(q[:, :3], k, v, offsets([10]), 10)
    with pytest.raises(ValueError, match="negative"):
        varlen_attention(q, k, v, offsets([10]), 10, window_size=-1)


def test_forced_backends_say_why_they_cannot_serve():
    q, k, v = random_qkv(10)
    needs = r"(does not import|CUDA capability).*"
    for name in ("flash_attn_4", "flash_attn_2", "transformer_engine", "torch_varlen", "flex"):
        with pytest.raises(NoBackendError, match=f"{name}: .*{needs}"):
            varlen_attention(q, k, v, offsets([10]), 10, backend=name)
    assert (
        api.OP.select(
            api.VarlenAttentionInputs(**{**INPUTS, "device_type": "cpu", "capability": None})
        ).name
        == "reference"
    )
    assert (
        prepare_tables("auto", torch.zeros(1, 10, dtype=torch.int32), offsets([10]), **SIZES)
        is None
    )
    many_tokens = api.VarlenAttentionInputs(**{**INPUTS, "tokens": 65536})
    assert any("65536" in reason for reason in sdpa.not_supported_reasons(many_tokens))


def test_the_32_bit_guard_counts_the_padding_of_each_document():
    # With 16 heads of dimension 128 the limit is 2^31 / (16 * 128) = 1,048,576 padded rows.
    assert api.padded_gradient_elements(1_048_576 - 128 * 10 - 1, 10, 16, 128) < 2**31
    assert api.padded_gradient_elements(1_048_576 - 128 * 10, 10, 16, 128) >= 2**31
    assert api.padded_gradient_elements(0, 1, 1, 40) == 128 * 64


SIZES = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "dtype": torch.float32}
INPUTS = dict(
    **SIZES,
    tokens=128,
    device_type="cuda",
    capability=(9, 0),
    window_size=None,
    deterministic=False,
    oversized_backward=0,
)


def reasons(module, **changes):
    return " ".join(
        module.not_supported_reasons(
            api.VarlenAttentionInputs(
                **{**INPUTS, "dtype": torch.bfloat16, "head_dim": 64, **changes}
            )
        )
    )


def test_limits_of_kernels_are_reasons():
    assert reasons(torch_varlen) == "" and reasons(flex) == ""
    assert "float32" in reasons(flex, dtype=torch.float32)
    assert "multiple of 128" in reasons(flex, tokens=130)
    assert "power of 2" in reasons(flex, head_dim=96)
    assert "3 query heads per key head" in reasons(flex, num_heads=6)
    assert "deterministic" in reasons(torch_varlen, deterministic=True)
    assert "3000000000 elements" in reasons(torch_varlen, oversized_backward=3_000_000_000)
    assert "capability 8" in reasons(flex, capability=(7, 5))
    assert "changing order" in reasons(sdpa, deterministic=True)


@pytest.fixture
def flash_attn_4(monkeypatch):
    """Provide the backend, with a stand-in for the package, which CPU machines lack."""
    name = "megatron_packed.ops.varlen_attention.flash_attn_4"
    interface = ModuleType("flash_attn.cute.interface")
    interface.flash_attn_varlen_func = None
    for module in (ModuleType("flash_attn"), ModuleType("flash_attn.cute"), interface):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.delitem(sys.modules, name, raising=False)
    yield import_module(name)
    sys.modules.pop(name, None)


@pytest.mark.parametrize("capability", [(9, 0), (10, 0)])
def test_flash_attn_4_takes_no_head_whose_gradients_are_wrong(flash_attn_4, capability):
    def refused(head_dim):
        return "multiple of 32" in reasons(flash_attn_4, head_dim=head_dim, capability=capability)

    assert [size for size in range(8, 136, 8) if not refused(size)] == [32, 64, 96, 128]
    assert refused(256) == (capability == (10, 0))


def test_auto_prefers_other_kernels_to_flex_for_wide_heads():
    wide = {"dtype": torch.bfloat16, "head_dim": 256}
    assert "torch_varlen is faster" in reasons(flex, **wide)
    assert reasons(flex, **wide, automatic=False) == ""
    # torch_varlen has no deterministic backward pass, so flex remains.
    assert "torch_varlen" not in reasons(flex, **wide, deterministic=True)
    assert reasons(flex, **{**wide, "head_dim": 128}) == ""


def test_oversized_inputs_are_found_before_a_kernel_runs(monkeypatch):
    monkeypatch.delenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", raising=False)
    sizes = {
        "num_heads": 16,
        "num_kv_heads": 2,
        "head_dim": 128,
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
    }
    found = api.attention_inputs(
        **sizes,
        tokens=8192,
        num_sequences=8200,
        window_size=None,
        deterministic=False,
        automatic=True,
    )
    assert (
        found.oversized_backward == (8192 + 128 * 8200) * 16 * 128 and found.oversized_square == 0
    )
    many = {**sizes, "tokens": 8192, "num_sequences": 66, "window_size": None, "automatic": False}
    found = api.attention_inputs(**many, deterministic=True)
    assert found.oversized_backward == 0 and found.oversized_square == 66 * 16 * 8192**2
    # The user's environment variable also makes cuDNN deterministic.
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    assert api.attention_inputs(**many, deterministic=False).oversized_square == 66 * 16 * 8192**2


@pytest.mark.parametrize("documents", [1, 3, 1024])
def test_room_for_documents_does_not_decide_which_kernel_auto_takes(documents):
    """Check that the capacity does not affect the choice of ``auto``.

    A pack that falls back to eager execution has a smaller capacity than its graph.
    """
    sizes = {
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 64,
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
    }
    found = api.attention_inputs(
        **sizes,
        tokens=1024,
        num_sequences=documents,
        window_size=None,
        deterministic=True,
        automatic=True,
    )
    assert found.oversized_square == 1025 * 4 * 1024**2


def test_limits_of_kernels_are_exact(monkeypatch):
    """Check both limits: 2^31 elements of flash-attn's buffer and 2^30 scores of cuDNN's workspace.

    Inputs with one row less are supported.
    """
    monkeypatch.delenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", raising=False)
    sizes = {
        "num_heads": 1,
        "num_kv_heads": 1,
        "head_dim": 128,
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
        "num_sequences": 4,
        "window_size": None,
    }
    for tokens, elements in ((2**24 - 128 * 4 - 1, 0), (2**24 - 128 * 4, 2**31)):
        found = api.attention_inputs(**sizes, tokens=tokens, deterministic=False, automatic=True)
        assert (found.oversized_backward, found.oversized_square) == (elements, 0)
    for tokens, elements in ((2**14 - 1, 0), (2**14, 2**30)):
        found = api.attention_inputs(**sizes, tokens=tokens, deterministic=True, automatic=False)
        assert (found.oversized_backward, found.oversized_square) == (0, elements)
