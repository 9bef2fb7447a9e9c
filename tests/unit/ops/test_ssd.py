"""The chunked reference against the recurrence, its isolation, and the limits of the GPU backend."""

from functools import partial

import pytest
import torch

from megatron_packed.ops.backend_dispatch import NoBackendError
from megatron_packed.ops.ssd import int32_offsets, reference
from megatron_packed.ops.ssd.api import SSDInputs, ssd
from support import scan_cases
from support.op_packs import (
    PACKS,
    assert_sums_in_float32,
    boundaries,
    leaks_of_tokens,
    relative_error,
    run_without_values,
    with_gradients,
)
from support.random_tensors import normal
from support.scan_cases import NAMES as ALL
from support.scan_cases import PER_TOKEN

N, P, G, S = 4, 6, 2, 5


def make(tokens, dtype=torch.float32, **strength):
    values = scan_cases.make(tokens, (N, P, G, S), bias=0.0, **strength)
    return {name: value.to(dtype) for name, value in values.items()}


def forward_backward(values, lengths, *, chunk_size=16, backend="reference", weight=None):
    def run(values):
        inputs = (values[name] for name in ALL)
        return ssd(*inputs, *boundaries(lengths), chunk_size=chunk_size, backend=backend)

    return with_gradients(run, values, weight)


@pytest.mark.parametrize("lengths", PACKS.values(), ids=PACKS.keys())
@pytest.mark.parametrize("chunk_size", [16, 64])
def test_reference_is_the_recurrence(lengths, chunk_size):
    values = make(sum(lengths), torch.float64)
    want = forward_backward(values, lengths, backend="recurrence")
    got = forward_backward(values, lengths, chunk_size=chunk_size)
    single = forward_backward(
        {name: value.float() for name, value in values.items()}, lengths, chunk_size=chunk_size
    )
    for name in want:
        assert relative_error(got[name], want[name]) < 5e-12, name
        assert relative_error(single[name], want[name]) < 1e-5, name


@pytest.mark.parametrize("lengths", PACKS.values(), ids=PACKS.keys())
def test_packed_equals_documents_one_by_one(lengths):
    values = make(sum(lengths))
    weight = normal(sum(lengths), N, P, seed=1)
    packed = forward_backward(values, lengths, weight=weight)
    documents, start = [], 0
    for length in lengths:
        own = {
            name: v[start : start + length] if name in PER_TOKEN else v
            for name, v in values.items()
        }
        documents.append(forward_backward(own, [length], weight=weight[start : start + length]))
        start += length
    for name in packed:
        alone = [document[name] for document in documents]
        want = (
            torch.cat(alone) if name == "y" or name[1:] in PER_TOKEN else torch.stack(alone).sum(0)
        )
        assert relative_error(packed[name], want) < 1e-5, name


def leaks_of_reference(lengths, dtype=torch.float32):
    run = partial(forward_backward, lengths=lengths)
    return leaks_of_tokens(run, make(sum(lengths), dtype), PER_TOKEN, lengths)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["around a chunk of 16", "starts and ends inside chunks", "tail"])
def test_documents_do_not_touch_each_other_by_a_bit(name, dtype):
    assert leaks_of_reference(PACKS[name], dtype) == set()


def running_sum_through_the_chunk(values_QLN, seq_idx_QL):
    return values_QLN.cumsum(1)


def running_sum_by_subtraction(values_QLN, seq_idx_QL):
    total, before = values_QLN.cumsum(1), torch.zeros_like(values_QLN)
    starts = torch.nn.functional.pad(seq_idx_QL[:, 1:] != seq_idx_QL[:, :-1], (1, 0))
    for i in range(1, values_QLN.shape[1]):
        before[:, i] = torch.where(starts[:, i, None], total[:, i - 1], before[:, i - 1])
    return total - before


def no_mask(seq_idx_QL):
    return torch.ones(
        seq_idx_QL.shape[0], seq_idx_QL.shape[1], seq_idx_QL.shape[1], dtype=torch.bool
    )


@pytest.mark.parametrize(
    "name, broken",
    [
        ("document_sum", running_sum_through_the_chunk),
        ("document_sum", running_sum_by_subtraction),
        ("same_document", no_mask),
    ],
)
def test_a_removed_boundary_is_caught(monkeypatch, name, broken):
    """Check in float64 that a missing document boundary changes other documents.

    For fp32 inputs the sums are float64 too, and a difference of 1e-16 would rarely change a result.
    """
    monkeypatch.setattr(reference, name, broken)
    assert "y" in leaks_of_reference(PACKS["starts and ends inside chunks"], torch.float64)


def test_a_missing_seq_idx_is_caught(monkeypatch):
    true = reference.run
    monkeypatch.setattr(
        reference,
        "run",
        lambda *a, chunk_size: true(*a[:7], torch.zeros_like(a[7]), a[8], chunk_size=chunk_size),
    )
    leaked = leaks_of_reference(PACKS["starts and ends inside chunks"])
    assert leaked == {"y", "dx", "ddt", "dB", "dC"}


def test_the_chunk_size_changes_rounding_only():
    lengths = PACKS["starts and ends inside chunks"]
    values = make(sum(lengths))
    want = forward_backward(values, lengths, chunk_size=8)
    for chunk_size in (1, 7, 200):
        got = forward_backward(values, lengths, chunk_size=chunk_size)
        assert max(relative_error(got[name], want[name]) for name in want) < 1e-5, chunk_size


def test_very_strong_decay_stays_finite_and_right():
    """Check sums of dt A down to -10,000.

    exp of a difference across documents would be inf, and inf times the mask's 0 is NaN.
    """
    lengths = PACKS["starts and ends inside chunks"]
    values = make(sum(lengths), torch.float64, decay=100.0)
    want = forward_backward(values, lengths, backend="recurrence")
    got = forward_backward(
        {name: value.float() for name, value in values.items()}, lengths, chunk_size=64
    )
    for name in want:
        assert torch.isfinite(got[name]).all(), name
        assert relative_error(got[name], want[name]) < 1e-4, name


def test_bfloat16_inputs_are_accumulated_in_fp32():
    weight = normal(100, N, P, seed=1)
    assert_sums_in_float32(forward_backward, make(100), PER_TOKEN, [70, 30], weight)


def test_no_host_sync_and_static_shapes():
    run_without_values(
        partial(ssd, chunk_size=16, backend="reference"), *make(100).values(), *boundaries([60, 40])
    )


def sizes(**changes):
    usual = {
        "tokens": 8192,
        "heads": 64,
        "head_dim": 64,
        "groups": 8,
        "state_dim": 128,
        "chunk_size": 128,
    }
    usual |= {"row_stride": 6144, "dtype": torch.bfloat16, "device_type": "cuda"}
    return SSDInputs(**(usual | changes))


def test_offsets_that_overflow_32_bits_are_seen():
    assert int32_offsets.largest_offset(sizes()) < 2**31 and int32_offsets.pieces(sizes()) == 1
    # The states of 1024 chunks reach 2^31 exactly; those of 1023 chunks do not.
    wide = {"heads": 256, "row_stride": 256 * 64}
    assert int32_offsets.largest_offset(sizes(tokens=131072, **wide)) == 2**31
    assert int32_offsets.largest_offset(sizes(tokens=131072 - 128, **wide)) < 2**31
    assert int32_offsets.pieces(sizes(tokens=131072, **wide)) == 2
    # x is a column slice of rows with 36,864 elements. Its offsets overflow from 58,255 tokens on,
    # although x itself has far fewer elements.
    assert (
        int32_offsets.largest_offset(sizes(tokens=58_368, row_stride=36_864))
        > int32_offsets.OFFSET_LIMIT
    )
    # One contiguous copy of all heads is enough.
    assert int32_offsets.pieces(sizes(tokens=58_368, row_stride=36_864)) == 1
    # Even one head at a time overflows, so the inputs are refused.
    assert int32_offsets.pieces(sizes(tokens=2**24 * 2, heads=7, groups=1)) == 0


@pytest.mark.parametrize("groups", [1, 2])
def test_pieces_of_the_heads_are_the_whole(groups):
    lengths = [9, 20]
    values = make(29, torch.float64)
    values["B"], values["C"] = values["B"][:, :groups], values["C"][:, :groups]
    arguments, boundary = tuple(values.values()), boundaries(lengths)
    whole = ssd(*arguments, *boundary, chunk_size=16)
    for count in (2, 4):
        parts = [
            ssd(*int32_offsets.piece(arguments, i, count), *boundary, chunk_size=16)
            for i in range(count)
        ]
        torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-12, atol=1e-12)


def test_what_cannot_be_is_refused_with_its_numbers():
    values, (seq_idx, cu_seqlens) = make(8), boundaries([8])
    with pytest.raises(ValueError, match="4 heads are not divisible by 3 groups"):
        three = torch.zeros(8, 3, S)
        ssd(
            *(three if name in "BC" else values[name] for name in ALL),
            seq_idx,
            cu_seqlens,
            chunk_size=4,
        )
    with pytest.raises(ValueError, match=r"seq_idx has shape \[1, 7\]"):
        ssd(*values.values(), seq_idx[:, :7], cu_seqlens, chunk_size=4)
    with pytest.raises(ValueError, match="chunk_size is 0"):
        ssd(*values.values(), seq_idx, cu_seqlens, chunk_size=0)
    with pytest.raises(NoBackendError, match="mamba_ssm"):
        ssd(*values.values(), seq_idx, cu_seqlens, chunk_size=4, backend="mamba_ssm")
