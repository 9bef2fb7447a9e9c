"""Tests of collated packs against packs made by hand, and of the loader.

Micro-batches are a function of (plan, step), also if a run is killed or changes its number of
ranks.
"""

import json
import threading
from contextlib import ExitStack

import numpy as np
import pytest
import torch

from megatron_packed.data.errors import DataError
from megatron_packed.data.loader import Loader, collate
from megatron_packed.data.packing.evaluation_plan import EvaluationPlan
from megatron_packed.data.packing.pack_plan import PackPlan
from megatron_packed.data.packing.packer import Packer
from megatron_packed.data.packing.pieces import Pieces
from megatron_packed.data.sources.tokenized_dataset import TokenizedDataset
from megatron_packed.packed.capture_sizes import CaptureSize, CaptureSizes
from support.data_helpers import conversation, open_lines

SLOTS = 64
ROOMY = CaptureSizes.from_capacities([64], SLOTS)


def pieces_of(dataset, policy="split"):
    pieces = Pieces.cut(dataset.lengths, SLOTS, policy)
    return pieces, dataset.count_targets(pieces.document, pieces.start, pieces.length)


def loader_of(dataset, plan, rank=0, **options):
    return Loader(dataset, plan, dp_rank=rank, total_tokens=SLOTS, **options)


def plan_of(dataset, dp_size=1, cls=PackPlan, packs_per_step=4, alignment=1, **options):
    packer = Packer(slots=SLOTS, method="balanced", window=64, alignment=alignment)
    return cls(
        *pieces_of(dataset),
        packer=packer,
        packs_per_step=packs_per_step,
        dp_size=dp_size,
        seed=5,
        **options,
    )


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> TokenizedDataset:
    random = np.random.default_rng(1)
    lines = [
        json.dumps(
            {"prompt": f"{n}:" * random.integers(1, 4), "completion": "ab" * random.integers(1, 50)}
        )
        for n in range(300)
    ]
    return open_lines(tmp_path_factory.mktemp("data"), lines)


def test_a_pack_by_hand(tmp_path):
    lines = [
        json.dumps({"prompt": "ab", "completion": "cd"}),
        json.dumps({"prompt": "", "completion": "xyz"}),
    ]
    data = open_lines(tmp_path, lines)
    pieces = Pieces.cut(data.lengths, 12, "error")
    batch = collate(data, pieces, [1, 0], total_tokens=12, capacity=3, scales=(0.5, 0.25))
    a, b, c, d, x, y, z, end = (*b"abcd", *b"xyz", 256)
    assert batch.tokens.tolist() == [x, y, z, end, a, b, c, d, end, 0, 0, 0]
    assert batch.labels.tolist() == [y, z, end, 0, 0, c, d, end, 0, 0, 0, 0]
    assert batch.loss_mask.tolist() == [1, 1, 1, 0, 0, 1, 1, 1, 0, 0, 0, 0]
    assert batch.packed.cu_seqlens.tolist() == [0, 4, 9, 12, 12]
    assert batch.packed.position_ids.tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 4, 0, 1, 2]
    assert batch.scales.tolist() == [0.5, 0.25]
    assert (batch.num_real_tokens, batch.num_target_tokens, batch.packed.num_seqs) == (9, 6, 2)


def test_pieces_of_a_long_document_predict_nothing_across_the_cut(tmp_path):
    data = open_lines(tmp_path, [json.dumps({"text": "abcdefg"})], sft=False)
    pieces = Pieces.cut(data.lengths, 3, "split")
    assert (pieces.start.tolist(), pieces.length.tolist()) == ([0, 3, 6], [3, 3, 2])
    batch = collate(data, pieces, [2, 0, 1], total_tokens=8)
    a, b, c, d, e, f, g, end = (*b"abcdefg", 256)
    assert batch.tokens.tolist() == [g, end, a, b, c, d, e, f]
    assert batch.labels.tolist() == [end, 0, b, c, 0, e, f, 0]
    assert batch.loss_mask.tolist() == [1, 0, 1, 1, 0, 1, 1, 0]
    counts = data.count_targets(pieces.document, pieces.start, pieces.length)
    assert counts.tolist() == [2, 2, 1] and batch.num_target_tokens == counts.sum()


def test_chat_targets_in_a_pack(tmp_path):
    data = open_lines(tmp_path, [conversation("q", "yes", "q", "no")])
    pieces = Pieces.cut(data.lengths, 128, "error")
    batch = collate(data, pieces, [0], total_tokens=128)
    labels = batch.labels[batch.loss_mask == 1].tolist()
    assert labels == [*b"yes", 258, *b"no", 258]


def test_an_empty_pack_is_all_tail(dataset):
    batch = collate(dataset, pieces_of(dataset)[0], [], total_tokens=SLOTS)
    assert (batch.num_real_tokens, batch.num_target_tokens) == (0, 0)
    assert not batch.packed.valid.any() and not batch.loss_mask.any()


def test_a_step_has_the_targets_and_scales_that_the_plan_says(dataset):
    plan = plan_of(dataset, dp_size=2)
    loaders = [loader_of(dataset, plan, rank=rank, capture_sizes=ROOMY) for rank in range(2)]
    for step in range(12):
        batches = [batch for loader in loaders for batch in loader.micro_batches(step)]
        assert len(batches) == 4
        assert sum(batch.num_target_tokens for batch in batches) == plan.step(step).global_targets
        for batch in batches:
            assert batch.scales.tolist() == pytest.approx(list(plan.step(step).scales))
            assert batch.packed.capacity == 64
    for loader in loaders:
        loader.close()


def test_every_micro_batch_has_the_size_of_the_smallest_size_that_holds_it(dataset):
    """Each micro-batch has the smallest capture size that fits. Its tokens are the same as without
    capture sizes.

    If no capture size fits, the micro-batch is identical to the one made without capture sizes.
    """
    plan = plan_of(dataset, cls=EvaluationPlan)
    capture_sizes = CaptureSizes(
        (
            CaptureSize(1, SLOTS),
            CaptureSize(2, SLOTS // 2),
            CaptureSize(2, SLOTS),
            CaptureSize(3, SLOTS),
        )
    )
    seen = set()
    with (
        loader_of(dataset, plan) as plain,
        loader_of(dataset, plan, capture_sizes=capture_sizes) as sized,
    ):
        for step in range(len(plan)):
            for exact, batch in zip(
                plain.micro_batches(step), sized.micro_batches(step), strict=True
            ):
                capture_size = capture_sizes.smallest_for(
                    exact.packed.num_seqs, exact.packed.max_seqlen
                )
                size = capture_size or CaptureSize(exact.packed.capacity, exact.packed.max_seqlen)
                assert (batch.packed.capacity, batch.packed.max_seqlen) == (
                    size.capacity,
                    size.max_seqlen,
                )
                for name in ("tokens", "labels", "loss_mask", "scales"):
                    assert torch.equal(getattr(batch, name), getattr(exact, name))
                for name in ("seq_idx", "position_ids", "valid"):
                    assert torch.equal(getattr(batch.packed, name), getattr(exact.packed, name))
                assert (
                    batch.packed.document_lengths.tolist() == exact.packed.document_lengths.tolist()
                )
                seen.add(capture_size)
    assert seen == {*capture_sizes.sizes, None}


def test_ranks_whose_graphs_share_collectives_get_the_same_size(dataset):
    """With ``same_on_all_ranks``, all ranks get the smallest capture size that fits all their micro-batches.

    If no capture size fits, all ranks get the same capacity above the capture sizes.
    """
    plan = plan_of(dataset, cls=EvaluationPlan, dp_size=2)
    capture_sizes = CaptureSizes.from_capacities([1, 2], SLOTS)
    seen = set()
    with ExitStack() as stack:
        options = {"total_tokens": SLOTS, "capture_sizes": capture_sizes}
        alone, together_loaders = (
            [
                stack.enter_context(
                    Loader(dataset, plan, dp_rank=rank, same_on_all_ranks=together, **options)
                )
                for rank in range(2)
            ]
            for together in (False, True)
        )
        for step in range(len(plan)):
            own = [loader.micro_batches(step) for loader in alone]
            common = [loader.micro_batches(step) for loader in together_loaders]
            for *exact, first, second in zip(*own, *common, strict=True):
                most = max(batch.packed.num_seqs for batch in exact)
                capture_size = capture_sizes.smallest_for(most, SLOTS)
                assert (
                    first.packed.capacity
                    == second.packed.capacity
                    == (capture_size.capacity if capture_size else most)
                )
                for one, other in zip(exact, (first, second), strict=True):
                    assert torch.equal(one.tokens, other.tokens)
                    seen.add((one.packed.capacity, other.packed.capacity))
    assert (1, 2) in seen and any(mine <= 2 < common for mine, common in seen)


def test_the_tail_is_a_row_that_a_size_must_hold(tmp_path):
    data = open_lines(tmp_path, [json.dumps({"text": "abc"})], sft=False)
    capture_sizes = CaptureSizes((CaptureSize(1, SLOTS // 2), CaptureSize(1, SLOTS)))
    with loader_of(
        data,
        plan_of(data, packs_per_step=1),
        capture_sizes=capture_sizes,
    ) as loader:
        packed = loader.micro_batches(0)[0].packed
    assert (packed.document_lengths.tolist(), packed.capacity, packed.max_seqlen) == ([4], 1, SLOTS)


def test_documents_of_an_aligned_plan_lie_at_its_multiples(dataset):
    plan = plan_of(dataset, cls=EvaluationPlan, alignment=8)
    with loader_of(dataset, plan, capture_sizes=ROOMY) as loader:
        batches = [batch for step in range(len(plan)) for batch in loader.micro_batches(step)]
    assert not any((batch.packed.cu_seqlens % 8).any() for batch in batches)
    assert {batch.packed.total_tokens for batch in batches} == {SLOTS}
    # valid tokens are the tokens of every document, once
    for name in ("tokens", "labels", "loss_mask"):
        seen = (
            torch.cat([getattr(batch, name)[batch.packed.valid] for batch in batches]).sort().values
        )
        whole = [
            collate(dataset, plan.pieces, [n], total_tokens=SLOTS) for n in range(len(plan.pieces))
        ]
        assert torch.equal(
            seen,
            torch.cat([getattr(pack, name)[pack.packed.valid] for pack in whole]).sort().values,
        )
        assert not any(getattr(batch, name)[~batch.packed.valid].any() for batch in batches)


# --------------------------------------------------------------------------------------------------------------
# resume


def packs_of(loaders, step):
    """Return the packs of a step over all ranks as sorted bytes.

    The order is removed because the ranks of packs may differ.
    """
    return sorted(
        batch.buffer.numpy().tobytes() for loader in loaders for batch in loader.micro_batches(step)
    )


@pytest.fixture(scope="module")
def uninterrupted(dataset):
    with loader_of(dataset, plan_of(dataset), capture_sizes=ROOMY, prefetch=0) as loader:
        return [packs_of([loader], step) for step in range(80)]  # 80 steps are more than two epochs


@pytest.mark.parametrize("seed", range(6))
def test_killed_anywhere_on_any_number_of_ranks_nothing_is_repeated_or_skipped(
    dataset, uninterrupted, seed
):
    random = np.random.default_rng(seed)
    step, seen = 0, []
    while step < len(uninterrupted):
        dp_size = int(random.choice([1, 2, 4]))
        plan = plan_of(dataset, dp_size)
        prefetch = int(random.integers(0, 6))
        loaders = [
            loader_of(
                dataset,
                plan,
                rank=rank,
                capture_sizes=ROOMY,
                prefetch=prefetch,
            )
            for rank in range(dp_size)
        ]
        for _ in range(int(random.integers(1, 30))):
            if step < len(uninterrupted):
                seen.append(packs_of(loaders, step))
                step += 1
        for loader in loaders:
            loader.close()  # prepared micro-batches that were not requested are dropped
    assert seen == uninterrupted


def test_every_document_comes_once_an_epoch(dataset):
    plan = plan_of(dataset, packs_per_step=1)
    with loader_of(dataset, plan) as loader:
        for epoch in range(2):
            start = sum(len(plan.epoch(earlier)) for earlier in range(epoch))
            tokens = np.concatenate(
                [
                    loader.micro_batches(start + n)[0].tokens.numpy()
                    for n in range(len(plan.epoch(epoch)))
                ]
            )
            real = np.concatenate([dataset.document(n)[0] for n in range(len(dataset))])
            assert (
                np.bincount(tokens)[1:].tolist() == np.bincount(real)[1:].tolist()
            )  # tokens of the tail are 0


def test_a_step_is_the_same_however_it_is_reached(dataset):
    plan = plan_of(dataset)
    with loader_of(dataset, plan, prefetch=5) as loader:
        forward = {step: packs_of([loader], step) for step in range(10)}
        for step in (7, 7, 2, 9, 0, 1, 2, 30, 3):
            expected = forward.get(step) or packs_of([loader], step)
            assert packs_of([loader], step) == expected
        loader.close()
        assert packs_of([loader], 4) == forward[4]


def test_a_finite_plan_is_gone_through_again_and_again(dataset):
    plan = plan_of(dataset, dp_size=2, cls=EvaluationPlan)
    with loader_of(dataset, plan, rank=1, prefetch=3) as loader:
        rounds = [[packs_of([loader], step) for step in range(len(plan))] for _ in range(2)]
        assert rounds[0] == rounds[1] and len(rounds[0]) == plan.num_steps > 3
        with pytest.raises(ValueError, match="steps 0 to"):
            loader.micro_batches(len(plan))


# ---------------------------------------------------------------------------------------------------------
# the thread


def test_micro_batches_are_prepared_ahead_up_to_the_depth_and_not_twice(dataset, monkeypatch):
    made = []
    prepare = Loader._prepare

    def counted(self, step, number):
        made.append((step, number))
        return prepare(self, step, number)

    monkeypatch.setattr(Loader, "_prepare", counted)
    with loader_of(dataset, plan_of(dataset), prefetch=6) as loader:
        loader.micro_batches(0)
        loader._pool.submit(
            lambda: None
        ).result()  # wait until all submitted micro-batches are prepared
        assert made == [(0, n) for n in range(4)] + [(1, n) for n in range(4)] + [(2, 0), (2, 1)]
        loader.micro_batches(1)
        loader.micro_batches(2)
        loader._pool.submit(lambda: None).result()
        assert made == [(step, n) for step in range(4) for n in range(4)] + [(4, 0), (4, 1)]


def test_an_error_in_the_thread_reaches_the_consumer(tmp_path):
    data = open_lines(
        tmp_path, [json.dumps({"text": chr(97 + n) * 50}) for n in range(40)], sft=False
    )
    path, plan = data.directory / "tokens.bin", plan_of(data)
    path.write_bytes(path.read_bytes()[:-1] + b"\1")
    with loader_of(TokenizedDataset(data.directory), plan) as loader:
        for _ in range(2):  # a second request raises the error again
            with pytest.raises(DataError, match=r"tokens\.bin"):
                loader.micro_batches(0)


def test_close_ends_the_thread(dataset):
    before = threading.active_count()
    loader = loader_of(dataset, plan_of(dataset), prefetch=4)
    loader.micro_batches(0)
    assert threading.active_count() == before + 1
    loader.close()
    loader.close()
    assert threading.active_count() == before


def test_a_plan_of_other_documents_is_refused(dataset, tmp_path):
    plan = plan_of(dataset)
    with pytest.raises(ValueError, match="dp_rank"):
        loader_of(dataset, plan, rank=1)
    fewer = open_lines(tmp_path, [json.dumps({"text": "x"})], sft=False)
    with pytest.raises(ValueError, match="document 299"):
        loader_of(fewer, plan)
    shorter = open_lines(tmp_path, [json.dumps({"text": "x"})] * 300, sft=False)
    with pytest.raises(ValueError, match="longer than their documents"):
        loader_of(shorter, plan)
