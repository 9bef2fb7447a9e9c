"""`MicroBatch`: labels and masks compared with a loop over tokens, one buffer, one copy."""

import pickle

import numpy as np
import pytest
import torch

from megatron_packed.packed.micro_batch import NO_LABEL, Document, MicroBatch, MicroBatchLayout
from megatron_packed.packed.params import NO_TABLES

TENSORS = ("tokens", "labels", "loss_mask", "scales", "depth_scales")
PACKED_TENSORS = ("cu_seqlens", "seq_idx", "position_ids", "valid")


def random_documents(rng, lengths):
    return [
        Document(
            rng.integers(1, 1000, length),
            rng.integers(0, 2, length) if rng.random() < 0.7 else None,
        )
        for length in lengths
    ]


def by_hand(documents, slots):
    """Return tokens, labels and mask, computed token by token."""
    tokens, labels, mask = [], [], []
    for document in documents:
        length = len(document.tokens)
        for at in range(length):
            counts = at + 1 < length and (
                document.target_mask is None or document.target_mask[at + 1]
            )
            tokens.append(document.tokens[at])
            labels.append(document.tokens[at + 1] if counts else NO_LABEL)
            mask.append(1 if counts else 0)
    tail = slots - len(tokens)
    return tokens + [0] * tail, labels + [NO_LABEL] * tail, mask + [0] * tail


@pytest.mark.parametrize(
    ("lengths", "slots", "capacity"),
    [
        ([3, 5], 10, 4),
        ([1, 1, 2], 4, None),
        ([9], 9, None),
        ([], 5, 2),
        (list(range(1, 120)), 8000, 128),
    ],
)
def test_labels_never_cross_a_boundary(lengths, slots, capacity):
    documents = random_documents(np.random.default_rng(len(lengths)), lengths)
    batch = MicroBatch.build(documents, slots, capacity, scales=(0.25, 0.5))
    tokens, labels, mask = by_hand(documents, slots)
    assert batch.tokens.tolist() == tokens
    assert batch.labels.tolist() == labels
    assert batch.loss_mask.tolist() == mask
    assert batch.tokens.dtype == batch.labels.dtype == torch.int32
    assert batch.loss_mask.dtype == batch.scales.dtype == torch.float32
    assert batch.scales.tolist() == [0.25, 0.5]
    assert batch.num_real_tokens == sum(lengths)
    assert batch.num_target_tokens == sum(mask)
    assert batch.packed.document_lengths.tolist() == lengths
    assert batch.packed.capacity == (len(lengths) if capacity is None else capacity)


def test_every_token_but_the_first_is_a_target_without_a_mask():
    batch = MicroBatch.build([(np.arange(1, 6), None), (np.arange(11, 13), None)], 8)
    assert batch.labels.tolist() == [2, 3, 4, 5, NO_LABEL, 12, NO_LABEL, NO_LABEL]
    assert batch.num_target_tokens == 4 + 1


def test_padding_token_is_still_a_target():
    """The last token of a document is a target even if it equals the padding token (0)."""
    batch = MicroBatch.build([(np.array([7, 8, 0]), np.array([0, 0, 1]))], 6)
    assert batch.labels.tolist()[:3] == [NO_LABEL, 0, NO_LABEL]
    assert batch.loss_mask.tolist() == [0, 1, 0, 0, 0, 0]


def test_all_tensors_are_views_of_one_buffer():
    batch = MicroBatch.build([(np.arange(1, 4), None)], 6, capacity=2)
    storage = batch.buffer.untyped_storage().data_ptr()
    for tensor in [getattr(batch, name) for name in TENSORS] + [
        getattr(batch.packed, name) for name in PACKED_TENSORS
    ]:
        assert tensor.untyped_storage().data_ptr() == storage
        assert tensor.data_ptr() % 16 == 0


def test_layout_depends_on_shapes_alone_so_bytes_can_be_copied_over():
    """Copying a new pack over a buffer updates all tensors in place, as a CUDA-graph slot needs."""
    rng = np.random.default_rng(0)
    first = MicroBatch.build(random_documents(rng, [3, 5]), 20, capacity=6, scales=(1.0, 1.0))
    second = MicroBatch.build(
        random_documents(rng, [1, 2, 3, 4]), 20, capacity=6, scales=(0.5, 0.25)
    )
    assert first.layout == second.layout == MicroBatchLayout(20, 6)
    addresses = [getattr(first, name).data_ptr() for name in TENSORS]
    first.buffer.copy_(second.buffer)
    assert [getattr(first, name).data_ptr() for name in TENSORS] == addresses
    for name in TENSORS:
        assert torch.equal(getattr(first, name), getattr(second, name))
    for name in PACKED_TENSORS:
        assert torch.equal(getattr(first.packed, name), getattr(second.packed, name))
    assert first.packed.cu_seqlens_cpu.tolist() == [
        0,
        3,
        8,
        20,
        20,
        20,
        20,
        20,
    ]  # cu_seqlens_cpu is not in the copied buffer, so its values did not change


def test_offsets_do_not_depend_on_the_capacity():
    """Tensors have the same offsets for all capacities, so that one buffer serves all of them."""
    small, large = (MicroBatchLayout(37, capacity).buffer for capacity in (2, 502))
    starts = [
        {section.name: section.start for section in layout.sections} for layout in (small, large)
    ]
    assert starts[0] == starts[1]
    assert set(starts[0]) == {*TENSORS, *PACKED_TENSORS}
    assert large.num_bytes - small.num_bytes == 4 * 500  # only cu_seqlens depends on the capacity
    rng = np.random.default_rng(3)
    documents = random_documents(rng, [3, 5])
    buffers = [MicroBatch.build(documents, 37, capacity).buffer for capacity in (2, 40)]
    end = starts[0]["cu_seqlens"]
    assert torch.equal(buffers[0][:end], buffers[1][:end])


def test_equal_packs_have_equal_bytes():
    """Buffers of the same pack are equal byte for byte, including the gaps between sections."""
    builds = [MicroBatch.build([(np.arange(5), None)], 9, capacity=3) for _ in range(2)]
    assert torch.equal(builds[0].buffer, builds[1].buffer)


def test_to_copies_once_and_only_when_needed(monkeypatch):
    batch = MicroBatch.build([(np.arange(1, 4), None)], 6, capacity=2)
    assert batch.to("cpu") is batch
    moves = []
    real = torch.Tensor.to

    def counted(self, *args, **kwargs):
        moves.append(self.data_ptr())
        return real(self, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "to", counted)
    moved = batch.to("meta", non_blocking=True)
    assert moves == [batch.buffer.data_ptr()]
    assert moved.labels.device.type == moved.packed.valid.device.type == "meta"
    assert moved.packed.cu_seqlens_cpu is batch.packed.cu_seqlens_cpu
    assert (moved.num_real_tokens, moved.num_target_tokens, moved.packed.max_seqlen) == (3, 2, 3)


def test_wrong_documents_are_refused():
    with pytest.raises(ValueError, match="document 1 has 2 tokens but a target mask of 3 entries"):
        MicroBatch.build([(np.arange(2), None), (np.arange(2), np.ones(3))], 8)
    with pytest.raises(ValueError, match="document 1 has length 0"):
        MicroBatch.build([(np.arange(2), None), (np.arange(0), None)], 8)
    with pytest.raises(ValueError, match="3 documents do not fit into a capacity of 2"):
        MicroBatch.build([(np.arange(2), None)] * 3, 8, capacity=2)


@pytest.mark.parametrize("mask", [[0.5, 1.0], [-100, 7], [float("nan"), 1], [2, 0]])
def test_weights_and_labels_are_no_target_masks(mask):
    with pytest.raises(
        ValueError, match="document 1 has a target mask with entries other than 0 and 1"
    ):
        MicroBatch.build(
            [(np.arange(2), np.array([True, True])), (np.arange(2), np.array(mask))], 8
        )


def test_without_scales_a_pack_is_normalised_by_its_own_targets():
    documents = [(np.arange(1, 6), None), (np.arange(1, 5), np.array([0, 0, 1, 1]))]
    assert MicroBatch.build(documents, 12).scales.tolist() == pytest.approx([1 / 6, 1.0])
    assert MicroBatch.build([(np.arange(1, 6), np.zeros(5))], 12).scales.tolist() == [1.0, 1.0]
    assert MicroBatch.build([], 12).scales.tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("tokens", "found"),
    [
        (
            np.array([1, 2**33, 3]),
            "token 8589934592 at position 1; .* 0 or more and is stored as int32",
        ),
        (np.array([1, 2**33], np.uint64), "token 8589934592 at position 1"),
        (np.array([2**31], np.uint32), "token 2147483648 at position 0"),
        (np.array([4, -100, 3], np.int32), "token -100 at position 1; a token number is 0 or more"),
        (np.array([4, -1]), "token -1 at position 1"),
        (
            np.array([1.5, 2.0]),
            r"tokens of type float64 and shape \(2,\), beginning with 1.5; .* one-dimensional array of integers",
        ),
        (np.array([True, False]), "tokens of type bool"),
        (np.array(["a", "b"]), "tokens of type <U1"),
        (np.array([[1, 2]]), r"tokens of type int64 and shape \(1, 2\)"),
        (torch.tensor([3.0]), "tokens of type float32"),
    ],
)
def test_tokens_that_are_no_token_numbers_are_refused(tokens, found):
    with pytest.raises(ValueError, match=f"document 1 has {found}"):
        MicroBatch.build([(np.arange(3), None), (tokens, None)], 8)


@pytest.mark.parametrize(
    "dtype", [np.int8, np.uint8, np.uint16, np.int32, np.uint32, np.int64, np.uint64, ">i4", list]
)
def test_tokens_of_any_integer_type_are_taken(dtype):
    tokens = [0, 5, 100] if dtype is list else np.array([0, 5, 100], dtype)
    assert MicroBatch.build([(tokens, None)], 4, vocab_size=101).tokens.tolist() == [0, 5, 100, 0]
    with pytest.raises(
        ValueError, match=r"document 0 has token 100 at position 2; .* is below vocab_size=100"
    ):
        MicroBatch.build([(tokens, None)], 4, vocab_size=100)


def test_a_pack_is_shown_in_one_short_line():
    batch = MicroBatch.build([(np.arange(1, 6), None), (np.arange(3), None)], 10, capacity=4)
    packed = "PackedSeqParams(2 documents in 10 slots, capacity 4, longest row 5, cpu)"
    assert repr(batch.packed) == packed
    assert repr(batch) == f"MicroBatch(8 tokens, 6 targets, {packed})"


@pytest.mark.gpu
def test_one_copy_to_the_gpu_from_pinned_memory():
    from torch.profiler import ProfilerActivity, profile

    batch = MicroBatch.build(
        random_documents(np.random.default_rng(1), [3, 50, 7]), 100, capacity=8
    ).pin_memory()
    assert batch.buffer.is_pinned()
    batch.to("cuda")
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        moved = batch.to("cuda", non_blocking=True)
        torch.cuda.synchronize()
    assert len([event for event in profiler.events() if "Memcpy HtoD" in event.name]) == 1
    for name in TENSORS:
        assert torch.equal(getattr(moved, name).cpu(), getattr(batch, name))
    for name in PACKED_TENSORS:
        assert torch.equal(getattr(moved.packed, name).cpu(), getattr(batch.packed, name))


def test_aligned_documents_by_hand():
    documents = [Document(np.arange(1, 6)), Document(np.arange(11, 15)), Document(np.array([21]))]
    batch = MicroBatch.build(documents, 20, capacity=4, alignment=4)
    assert batch.packed.cu_seqlens.tolist() == [0, 8, 12, 16, 20, 20]
    assert batch.tokens.tolist() == [
        1,
        2,
        3,
        4,
        5,
        0,
        0,
        0,
        11,
        12,
        13,
        14,
        21,
        0,
        0,
        0,
        0,
        0,
        0,
        0,
    ]
    assert batch.labels.tolist() == [2, 3, 4, 5, 0, 0, 0, 0, 12, 13, 14, 0, 0, 0, 0, 0, 0, 0, 0, 0]
    assert batch.loss_mask.tolist() == [1, 1, 1, 1, 0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0]
    assert batch.packed.valid.int().tolist() == [1] * 5 + [0] * 3 + [1] * 4 + [1] + [0] * 7
    assert batch.packed.position_ids.tolist() == [*range(8), *range(4), *range(4), *range(4)]
    assert (batch.num_real_tokens, batch.num_target_tokens, batch.packed.max_seqlen) == (10, 7, 8)


def test_aligned_documents_that_do_not_fit_are_refused():
    documents = [Document(np.arange(5)), Document(np.arange(3))]
    MicroBatch.build(documents, 12, alignment=4)
    with pytest.raises(ValueError, match="hold 12 tokens, but the pack has total_tokens = 11"):
        MicroBatch.build(documents, 11, alignment=4)


def test_labels_for_hugging_face_are_those_of_the_tokens_themselves():
    """The model shifts the labels; first tokens, unmarked tokens and the tail have -100."""
    documents = [([5, 6, 7], [1, 0, 1]), ([8, 9], None)]
    batch = MicroBatch.build(documents, 7, capacity=3)
    found = batch.to_huggingface()
    assert found["input_ids"].tolist() == [[5, 6, 7, 8, 9, 0, 0]]
    assert found["labels"].tolist() == [[-100, -100, 7, -100, 9, -100, -100]]
    assert found["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0, 1]]
    assert {found[name].dtype for name in ("input_ids", "labels", "position_ids")} == {torch.int64}
    for side in "qk":
        assert found[f"cu_seq_lens_{side}"].tolist() == [0, 3, 5, 7, 7]
        assert found[f"max_length_{side}"] == 3


def test_a_pickle_holds_one_buffer():
    """Another process gets the same micro-batch, with views of one tensor and without tables."""
    batch = MicroBatch.build([([5, 6, 7], None)], 5, capacity=2, max_seqlen=5)
    found = pickle.loads(pickle.dumps(batch))
    for name in TENSORS:
        assert torch.equal(getattr(found, name), getattr(batch, name))
    for name in PACKED_TENSORS:
        assert torch.equal(getattr(found.packed, name), getattr(batch.packed, name))
    assert found.packed.tables is NO_TABLES and found.packed.max_seqlen == 5
    assert (found.num_real_tokens, found.num_target_tokens, found.packed.num_seqs) == (3, 2, 1)
    found.buffer.zero_()
    assert not found.tokens.any() and not found.packed.cu_seqlens.any()
