"""Offload of the inputs of recomputed functions: equal bits in gradients, and expected memory."""

import weakref

import pytest
import torch

from megatron_packed.memory.pinned_host_pool import PinnedHostPool
from megatron_packed.memory.recompute import checkpoint
from megatron_packed.memory.saved_tensors import SavedByAutograd
from support.late_streams import ORDERS, LateStreams
from support.offloaded_layers import LAYERS, OF_A_ROW, D, Model, gradients, offloader, pack


def train(models):
    """Run training steps on several models in turns; return all gradients and losses."""
    found = []

    def backward(loss):
        loss.backward()
        found.append(loss.detach())

    for step, rows in enumerate((5, 8, 3, 9, 9, 2)):
        for model in models:
            for layer in model.layers:
                layer.dropout = 0.3 if step == 3 else 0.0
            torch.manual_seed(step)
            backward(model(pack(rows)))  # gradients of all micro-batches and steps accumulate
            with torch.no_grad():
                found.append(model.eval()(pack(rows + 1)))
            in_flight = [model.train()(pack(rows, seed)) for seed in range(3)]
            model.fail_at = step % LAYERS
            with pytest.raises(KeyError):
                model(pack(rows, 7))
            model.fail_at = None
            for number in (1, 0, 2)[
                : 3 - step % 2
            ]:  # in odd steps one pass is dropped without a backward pass
                backward(in_flight[number])
            del in_flight
        losses = [model(pack(rows, 5)) for model in models]
        for loss in losses:
            backward(loss)
        for model in models:
            if model.save is not None:
                model.save.__self__.end_step()
    return [*found, *(parameter.grad for model in models for parameter in model.parameters())]


@pytest.fixture(scope="module")
def expected():
    return train([Model(1), Model(2)])


@pytest.mark.parametrize("buffers", [1, 2, 4])
@pytest.mark.parametrize(
    "order", [None, *ORDERS[::3]], ids=lambda order: "host" if order is None else order[0]
)
def test_gradients_are_those_of_none(buffers, order, expected):
    """Gradients with offload equal those without offload, bit for bit, with late copies.

    Each copy runs as late as the waits allow. The steps have changing sizes, accumulation,
    evaluation, exceptions, several passes in flight, and two models in turns.
    """
    models = [Model(1), Model(2)]
    offloads = [
        offloader(None if order is None else LateStreams(order, prompt=True), max_buffers=buffers)
        for _ in models
    ]
    for model, offload in zip(models, offloads):
        model.save = offload.save
    found = train(models)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert [offload.buffer_count.now for offload in offloads] == [buffers] * 2


def test_small_tensors_and_others_of_the_same_bundle():
    offload = offloader(min_elements=20)
    small, large = pack(4), pack(5)
    kept = offload.save([small, large, small])
    assert isinstance(offload.save([small]), SavedByAutograd)
    taken = kept.restore()
    assert taken[0] is small and taken[2] is small and torch.equal(taken[1], large)
    assert offload.pool.num_bytes == 512
    elsewhere = torch.empty(
        100, device="meta"
    )  # on another device, like a host tensor among GPU tensors
    kept = offload.save([large, elsewhere])
    assert kept.restore()[1] is elsewhere and isinstance(offload.save([elsewhere]), SavedByAutograd)


def test_what_comes_back_is_as_well_aligned_as_it_was():
    """A restored tensor has the same address alignment, on which kernels and heuristics depend."""
    offload, base = offloader(), torch.randn(300)
    for offset in (0, 3, 64, 77):
        view = base[offset : offset + 200].view(20, 10)
        kept = offload.save([view])
        offload.join()
        (taken,) = kept.restore()
        assert torch.equal(taken, view) and taken.storage_offset() == offset % 64


def test_that_nothing_is_large_enough_is_said_once():
    _, offload, said = gradients(LateStreams(prompt=True), min_elements=1000)
    assert said == [
        "offload has moved nothing: no activation that the options select has 1,000 elements "
        "(--min-offloaded-tensor-size)"
    ]
    assert offload.off_reason is None and offload.pool.pinned == 0


def test_writing_to_what_was_put_away_is_an_error_for_who_asks_for_it():
    """Only the restore of a group that was written to in place raises an error.

    The next group raises no error, and a group that is dropped raises no error.
    """
    for then in ("restore", "keep", "stays"):
        offload, tensor, other = (
            offloader(min_elements=20),
            pack(5 if then != "stays" else 1),
            pack(6),
        )
        kept = offload.save([tensor, other])
        tensor.add_(1)
        if then == "keep":
            assert torch.equal(offload.save([other]).restore()[0], other)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            kept.restore()
        assert not offload._offloaded and not offload._with_sources
    kept = offload.save([other])
    del kept
    other.add_(1)
    offload.save([pack(7)])


def test_a_failed_load_may_be_repeated():
    offload = offloader(streams := LateStreams(prompt=True, fail_device=[0, 1]))
    kept = [offload.save([pack(5, number)]) for number in range(3)]
    offload.join()
    with pytest.raises(torch.OutOfMemoryError):
        kept[2].restore()
    assert torch.equal(kept[2].restore()[0], pack(5, 2))
    del kept
    offload.reset()
    assert streams.host_bytes == offload.pool.num_bytes == 0


def test_after_an_error_of_the_device_another_backward_pass_may_follow():
    offload = offloader(LateStreams(prompt=True, fail_device=[0, 1]))
    weight = torch.ones(5, D, requires_grad=True)
    loss = checkpoint(lambda x: (x * weight).square().sum(), pack(5), save=offload.save)
    offload.join()
    with pytest.raises(torch.OutOfMemoryError):
        loss.backward()
    loss.backward()
    assert torch.equal(weight.grad, 2 * pack(5).square())


def test_sources_of_a_dropped_group_are_released_by_the_next_restore():
    offload = offloader(streams := LateStreams(prompt=True), forced_buffers=3)
    dropped, kept = (offload.save([streams.tensor(pack(5, number))]) for number in range(2))
    one = 5 * D * 4
    assert streams.device_bytes == 2 * one
    del dropped
    restored = kept.restore()
    assert streams.device_bytes == one and not offload._with_sources
    assert torch.equal(restored[0], pack(5, 1))


def test_a_graph_does_not_wait_for_a_prefetch_that_was_dropped(monkeypatch):
    offload = offloader(streams := LateStreams(prompt=True), forced_buffers=2)
    kept = [offload.save([streams.tensor(pack(5, number))]) for number in range(3)]
    offload.join()
    kept.pop().restore()
    prefetched = offload._offloaded[1]
    assert prefetched.prefetched is not None
    offload.join()
    monkeypatch.setattr(streams, "wait_event", None)
    offload.graph_boundary()
    assert prefetched.prefetched is None and len(kept) == 2


# -- memory -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("buffers", [1, 2, 4])
def test_the_number_of_inputs_on_the_device_is_bounded(buffers):
    """At most as many groups as there are buffers hold device memory.

    In the forward pass these are the newest sources. In the backward pass they are the group in use
    and the prefetched groups.
    """
    streams = LateStreams(prompt=True)
    offload = offloader(streams, forced_buffers=buffers)
    rows, kept, sources, most = 7, [], [], 0
    size = rows * D * 4
    for number in range(8):
        source = pack(rows, number)
        sources.append(weakref.ref(source))
        kept.append(offload.save([source]))
        del source
        assert sum(source() is not None for source in sources) == min(buffers, number + 1)
    assert streams.host_bytes == offload.pool.num_bytes == 8 * 512 and offload.pool.pinned == 8
    for number in reversed(range(8)):
        (tensor,) = kept.pop().restore()
        assert torch.equal(tensor, pack(rows, number))
        held = sum(source() is not None for source in sources)
        del tensor
        most = max(most, streams.device_bytes + held * size)
    # Groups whose sources were still on the device were not copied back.
    assert streams.allocations["device"] == 8 - buffers
    assert streams.most_device_bytes == min(buffers, 8 - buffers) * size
    assert most <= buffers * size
    for number in range(8):  # uses the same host blocks again
        kept.append(offload.save([pack(rows, number)]))
    assert offload.pool.pinned == 8


def test_a_buffer_with_a_reference_is_not_overwritten():
    offload = offloader(LateStreams(prompt=True), forced_buffers=2)
    kept = [offload.save([pack(5, number)]) for number in range(8)]
    taken = [one.restore()[0] for one in reversed(kept)]
    assert all(
        torch.equal(tensor, pack(5, number)) for tensor, number in zip(taken, reversed(range(8)))
    )


def test_host_memory_follows_the_largest_micro_batch_and_not_the_history():
    streams = LateStreams(prompt=True)
    offload = offloader(streams)
    for rows in (64, 200, 100, 300, 50):
        kept = [offload.save([pack(rows, number)]) for number in range(4)]
        while kept:
            kept.pop().restore()
        offload.join()
        streams.drain()
    largest = -(-300 * D * 4 // 512) * 512
    assert streams.host_bytes == offload.pool.num_bytes == 4 * largest


@pytest.mark.parametrize("how", ["reset", "close"])
def test_everything_is_given_back(how):
    streams = LateStreams(prompt=True)
    offload, model = offloader(streams, forced_buffers=2), Model()
    model.save = offload.save
    loss = model(pack(9))
    model(pack(5)).backward()
    getattr(offload, how)()
    # One forward pass still needs its host blocks; they are freed after its backward pass.
    assert streams.host_bytes == LAYERS * 1024 and streams.device_bytes == 0
    model(pack(5)).backward()
    assert streams.copies["out"] == LAYERS * (9 + 5 + (5 if how == "reset" else 0)) * OF_A_ROW
    loss.backward()
    del loss
    if how == "reset":
        offload.reset()
    assert streams.host_bytes == streams.device_bytes == offload.pool.num_bytes == 0
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_block_is_unpinned_only_when_its_last_copy_is_done():
    streams = LateStreams()
    offload = offloader(streams)
    kept = offload.save([streams.tensor(pack(5))])
    offload.join()
    streams.drain()
    kept.restore()
    kept = offload.save([streams.tensor(pack(128))])  # a copy still reads the small block
    assert streams.host_bytes == offload.pool.num_bytes == 512 + 2048
    del kept
    streams.drain()
    other = offload.save([streams.tensor(pack(256))])  # replaces the larger block
    assert other is not None and streams.host_bytes == offload.pool.num_bytes == 512 + 4096


@pytest.mark.parametrize("how", ["reset", "close"])
def test_blocks_are_given_up_only_when_all_copies_are_done(how, monkeypatch):
    offload, seen = offloader(streams := LateStreams()), []
    kept = [offload.save([streams.tensor(pack(5, number))]) for number in range(3)]
    kept.pop().restore(), kept.pop().restore()
    give_up = offload.pool.reset

    def all_done():
        return all(streams.position[name] == len(queue) for name, queue in streams.queues.items())

    monkeypatch.setattr(offload.pool, "reset", lambda: (seen.append(all_done()), give_up()))
    assert not all_done()
    getattr(offload, how)()
    assert seen and all(seen)


def test_blocks_of_dropped_tensors_are_reused_and_blocks_of_graphs_are_not():
    offload = offloader()
    for rows in (300, 200, 100):
        kept = [offload.save([pack(rows, number)]) for number in range(2)]
        offload.join()
        del kept
    offload.join()
    pool = offload.pool
    assert pool.pinned == 2
    pool.allocate(600), pool.free(small := pool._pin(1024), None)
    assert pool.allocate(600) is small  # the smallest block that is large enough
    pool = PinnedHostPool(
        lambda num_bytes: torch.empty(num_bytes, dtype=torch.uint8), lambda used: True
    )
    for _ in range(3):  # graphs are captured again and again
        blocks = [pool.allocate(512) for _ in range(3)]
        assert all(block.data_ptr() not in pool._of_graphs for block in blocks)
        for block in blocks:
            pool.free(block, None)
        pool.reserve_for_graphs()
        captured = [pool.allocate(512, captured=True) for _ in range(3)]
        with pytest.raises(torch.OutOfMemoryError, match="needs more host memory than"):
            pool.allocate(512, captured=True)
        for block in captured:
            pool.free(block, None)
        assert pool.num_bytes == 3 * 512
