"""Fused RoPE kernel on a GPU: bits of the reference, any strides, replay, 64-bit offsets."""

import pytest
import torch

from megatron_packed.ops.rope.api import OP, apply_rope, rope_tables
from support.gpu_checks import PACKINGS, T, check_no_sync, check_replay, leaves_like, pack, step

pytestmark = pytest.mark.gpu


def tables(rotary_dim, positions=T):
    return rope_tables(positions, rotary_dim, 10000.0, "cuda")


def values(heads, kv_heads, head_dim):
    """Return q and k as strided views, as a fused projection returns them."""
    fused = torch.randn(
        T,
        heads + 2 * kv_heads,
        head_dim,
        device="cuda",
        generator=torch.Generator("cuda").manual_seed(1),
    )
    return [fused[:, :heads], fused[:, heads : heads + kv_heads]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "rotary_dim"),
    [(8, 2, 128, 128), (5, 1, 64, 32), (4, 4, 80, 40), (3, 3, 16, 2)],
)
def test_the_reference_bit_for_bit(heads, kv_heads, head_dim, rotary_dim, dtype):
    positions = pack(PACKINGS[0]).position_ids
    leaves = leaves_like(values(heads, kv_heads, head_dim), dtype)
    results = [
        step(lambda q, k, b=b: apply_rope(q, k, positions, *tables(rotary_dim), backend=b), leaves)
        for b in ("reference", "triton")
    ]
    for want, got in zip(*results):
        # This bound holds for low precisions too, because the bits are equal.
        assert got.dtype == dtype and (got.float() - want.float()).abs().max() <= 5e-7
        assert torch.equal(got, want)


def test_auto_takes_the_kernel():
    q, k = values(8, 2, 128)
    apply_rope(q, k, pack(PACKINGS[0]).position_ids, *tables(128))
    assert {backend.name for key, backend in OP.chosen.items() if key[0] == "auto"} == {"triton"}


def test_zero_stride_gradients_and_transposed_layouts():
    x = torch.randn(16, 3, T, device="cuda", requires_grad=True)  # (H, N, T)
    results = []
    for backend in ("reference", "triton"):
        q = x.permute(2, 1, 0)
        turned = apply_rope(
            q, q[:, :1], torch.arange(T, device="cuda"), *tables(16), backend=backend
        )
        results.append(torch.autograd.grad(turned[0].sum() + turned[1].sum(), x)[0])
    assert torch.equal(*results)


def test_no_host_sync():
    positions = pack(PACKINGS[0]).position_ids
    cos, sin = tables(128)
    check_no_sync(
        lambda q, k: apply_rope(q, k, positions, cos, sin, backend="triton"),
        values(8, 2, 128),
        torch.bfloat16,
    )


def test_replay_over_other_packings():
    positions = pack(PACKINGS[0]).position_ids.clone()
    cos, sin = tables(128)
    check_replay(
        lambda q, k: apply_rope(q, k, positions, cos, sin, backend="triton"),
        values(8, 2, 128),
        torch.bfloat16,
        [
            lambda lengths=lengths: positions.copy_(pack(lengths).position_ids)
            for lengths in PACKINGS
        ],
    )


def test_positions_outside_the_tables_are_nan_rows():
    q, k = values(2, 1, 64)
    positions = torch.arange(T, device="cuda")
    turned, _ = apply_rope(q, k, positions, *tables(64, positions=T - 3), backend="triton")
    assert turned[: T - 3].isfinite().all() and turned[T - 3 :].isnan().all()


def test_offsets_beyond_32_bits():
    tokens, heads, head_dim = 2**17 + 8, 128, 128  # 2^31 + 131,072 elements
    q = torch.ones(tokens, heads, head_dim, device="cuda", dtype=torch.bfloat16)
    positions = torch.arange(tokens, device="cuda", dtype=torch.int32)
    cos, sin = tables(head_dim, positions=tokens)
    turned, _ = apply_rope(q, q[:, :1], positions, cos, sin, backend="triton")
    want, _ = apply_rope(q[-4:], q[-4:, :1], positions[-4:], cos, sin, backend="reference")
    assert torch.equal(turned[-4:], want)
