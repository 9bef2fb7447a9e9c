"""Inputs of recomputed functions in host memory: the same gradients to the bit, and memory as sizes of tensors say."""

import weakref
from functools import partial

import pytest
import torch
from late_streams import ORDERS, LateStreams
from torch import nn

from megatron_packed.memory.host_pool import HostPool
from megatron_packed.memory.offload import Offload
from megatron_packed.memory.recompute import SavedByAutograd, checkpoint

CPU, D, LAYERS = torch.device("cpu"), 4, 6
OF_A_ROW = D * 4 + 2
"""Bytes of a layer's inputs."""


class Layer(nn.Module):
    """Two inputs, of two dtypes; dropout when told."""

    def __init__(self, number):
        super().__init__()
        generator = torch.Generator().manual_seed(number)
        self.weight = nn.Parameter(torch.randn(D, D, generator=generator))
        self.dropout = 0.0

    def forward(self, x_TD, scale_T1, weights):
        hidden = torch.tanh(x_TD @ self.weight) * scale_T1.float()
        return x_TD + nn.functional.dropout(hidden, self.dropout, self.training) * weights


class Model(nn.Module):
    """Layers that are recomputed, each from inputs that ``keep`` has; None: nothing is recomputed."""

    def __init__(self, seed=0):
        super().__init__()
        self.layers = nn.ModuleList(Layer(10 * seed + number) for number in range(LAYERS))
        self.keep, self.fail_at, self.watch = None, None, lambda number: None

    def forward(self, x_TD):
        scale_T1 = x_TD.detach().abs().mean(dim=1, keepdim=True).bfloat16()
        for number, layer in enumerate(self.layers):
            if number == self.fail_at:
                raise KeyError("in mid-forward")
            self.watch(number)
            run = layer if self.keep is None else partial(checkpoint, layer, rewind=True, keep=self.keep)
            x_TD = run(x_TD, scale_T1.detach() * (1 + number), 0.5)
        return x_TD.square().sum()


def pack(rows, seed=0):
    return torch.randn(rows, D, generator=torch.Generator().manual_seed(100 * rows + seed))


def train(models):
    """Steps as trainers have them, of two models in turns; all gradients and losses."""
    found = []

    def backward(loss):
        loss.backward()
        found.append(loss.detach())

    for step, rows in enumerate((5, 8, 3, 9, 9, 2)):
        for model in models:
            for layer in model.layers:
                layer.dropout = 0.3 if step == 3 else 0.0
            torch.manual_seed(step)
            backward(model(pack(rows)))  # accumulation: the gradients of all micro-batches of all steps add up
            with torch.no_grad():
                found.append(model.eval()(pack(rows + 1)))
            in_flight = [model.train()(pack(rows, seed)) for seed in range(3)]
            model.fail_at = step % LAYERS
            with pytest.raises(KeyError):
                model(pack(rows, 7))
            model.fail_at = None
            for number in (1, 0, 2)[: 3 - step % 2]:  # one is dropped without its backward pass
                backward(in_flight[number])
            del in_flight
        losses = [model(pack(rows, 5)) for model in models]
        for loss in losses:
            backward(loss)
        for model in models:
            if model.keep is not None:
                model.keep.__self__.end_step()
    return [*found, *(parameter.grad for model in models for parameter in model.parameters())]


@pytest.fixture(scope="module")
def expected():
    return train([Model(1), Model(2)])


def offloader(streams=None, **options):
    return Offload(CPU, **{"min_elements": 1, "streams": streams, **options})


@pytest.mark.parametrize("buffers", [1, 2, 4])
@pytest.mark.parametrize("order", [None, *ORDERS[::3]], ids=lambda order: "host" if order is None else order[0])
def test_gradients_are_those_of_none(buffers, order, expected):
    """Over growing, shrinking and changing sizes, accumulation, evaluation between, exceptions, several passes in
    flight, two models in turns; with copies that are as late as they may be."""
    models = [Model(1), Model(2)]
    offloads = [offloader(None if order is None else LateStreams(order, prompt=True), buffers=buffers) for _ in models]
    for model, offload in zip(models, offloads):
        model.keep = offload.keep
    found = train(models)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert [offload.buffers.now for offload in offloads] == [buffers] * 2


def test_small_tensors_and_others_of_the_same_bundle():
    offload = offloader(min_elements=20)
    small, large = pack(4), pack(5)
    kept = offload.keep([small, large, small])
    assert isinstance(offload.keep([small]), SavedByAutograd)
    taken = kept.take()
    assert taken[0] is small and taken[2] is small and torch.equal(taken[1], large)
    assert offload.pool.num_bytes == 512


def test_what_comes_back_is_as_well_aligned_as_it_was():
    """Kernels, and those who choose among them, ask for it."""
    offload, base = offloader(), torch.randn(300)
    for offset in (0, 3, 64, 77):
        view = base[offset : offset + 200].view(20, 10)
        kept = offload.keep([view])
        offload.join()
        (taken,) = kept.take()
        assert torch.equal(taken, view) and taken.storage_offset() == offset % 64


def test_that_nothing_is_large_enough_is_said_once():
    _, offload, said = gradients(LateStreams(prompt=True), min_elements=1000)
    assert said == ["offload has moved nothing: no tensor that it is for has 1,000 elements "
                    "(--min-offloaded-tensor-size)"]  # fmt: skip
    assert offload.off is None and offload.pool.pinned == 0


def test_writing_to_what_was_put_away_is_an_error_for_who_asks_for_it():
    """As autograd has it. Nobody else hears of it: not the next bundle, and none if it is dropped."""
    for then in ("take", "keep", "stays"):
        offload, tensor, other = offloader(min_elements=20), pack(5 if then != "stays" else 1), pack(6)
        kept = offload.keep([tensor, other])
        tensor.add_(1)
        if then == "keep":
            assert torch.equal(offload.keep([other]).take()[0], other)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            kept.take()
        assert not offload._away and not offload._held
    kept = offload.keep([other])
    del kept
    other.add_(1)
    offload.keep([pack(7)])


def test_what_cannot_be_loaded_may_be_asked_for_again():
    offload = offloader(streams := LateStreams(prompt=True, fail_device=[0, 1]))
    kept = [offload.keep([pack(5, number)]) for number in range(3)]
    offload.join()
    with pytest.raises(torch.OutOfMemoryError):
        kept[2].take()
    assert torch.equal(kept[2].take()[0], pack(5, 2))
    del kept
    offload.reset()
    assert streams.host_bytes == offload.pool.num_bytes == 0


# ---------------------------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize("buffers", [1, 2, 4])
def test_so_many_inputs_are_on_the_device_and_no_more(buffers):
    """Of the forward pass: those whose copies nobody has waited for. Of the backward pass: one in use, others ahead."""
    streams = LateStreams(prompt=True)
    offload = offloader(streams, forced=buffers)
    rows, kept, sources, most = 7, [], [], 0
    size = rows * D * 4
    for number in range(8):
        source = pack(rows, number)
        sources.append(weakref.ref(source))
        kept.append(offload.keep([source]))
        del source
        assert sum(source() is not None for source in sources) == min(buffers, number + 1)
    assert streams.host_bytes == offload.pool.num_bytes == 8 * 512 and offload.pool.pinned == 8
    for number in reversed(range(8)):
        (tensor,) = kept.pop().take()
        assert torch.equal(tensor, pack(rows, number))
        held = sum(source() is not None for source in sources)
        del tensor
        most = max(most, streams.device_bytes + held * size)
    # What was still there is never loaded.
    assert streams.allocations["device"] == 8 - buffers
    assert streams.most_device_bytes == min(buffers, 8 - buffers) * size
    assert most <= buffers * size
    for number in range(8):  # the same blocks again
        kept.append(offload.keep([pack(rows, number)]))
    assert offload.pool.pinned == 8


def test_a_buffer_that_somebody_holds_is_not_written_to():
    offload = offloader(LateStreams(prompt=True), forced=2)
    kept = [offload.keep([pack(5, number)]) for number in range(8)]
    taken = [one.take()[0] for one in reversed(kept)]
    assert all(torch.equal(tensor, pack(5, number)) for tensor, number in zip(taken, reversed(range(8))))


def test_host_memory_follows_the_largest_micro_batch_and_not_the_history():
    streams = LateStreams(prompt=True)
    offload = offloader(streams)
    for rows in (64, 200, 100, 300, 50):
        kept = [offload.keep([pack(rows, number)]) for number in range(4)]
        while kept:
            kept.pop().take()
        offload.join()
        streams.drain()
    largest = -(-300 * D * 4 // 512) * 512
    assert streams.host_bytes == offload.pool.num_bytes == 4 * largest


@pytest.mark.parametrize("how", ["reset", "close"])
def test_everything_is_given_back(how):
    streams = LateStreams(prompt=True)
    offload, model = offloader(streams, forced=2), Model()
    model.keep = offload.keep
    loss = model(pack(9))
    model(pack(5)).backward()
    getattr(offload, how)()
    # One forward pass waits for its backward pass: that much stays, and goes when it is dropped.
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
    kept = offload.keep([streams.tensor(pack(5))])
    offload.join()
    streams.drain()
    kept.take()
    kept = offload.keep([streams.tensor(pack(128))])  # the small block is being read
    assert streams.host_bytes == offload.pool.num_bytes == 512 + 2048
    del kept
    streams.drain()
    other = offload.keep([streams.tensor(pack(256))])  # in place of the larger one
    assert other is not None and streams.host_bytes == offload.pool.num_bytes == 512 + 4096


def test_blocks_of_what_was_dropped_serve_again_and_those_of_graphs_nobody_else():
    offload = offloader()
    for rows in (300, 200, 100):
        kept = [offload.keep([pack(rows, number)]) for number in range(2)]
        offload.join()
        del kept
    offload.join()
    pool = offload.pool
    assert pool.pinned == 2
    pool.lend(600), pool.give_back(small := pool._pin(1024), None)
    assert pool.lend(600) is small  # the smallest that will do
    pool = HostPool(lambda num_bytes: torch.empty(num_bytes, dtype=torch.uint8), lambda used: True)
    for _ in range(3):  # graphs are captured again and again
        blocks = [pool.lend(512) for _ in range(3)]
        assert all(block.data_ptr() not in pool._of_graphs for block in blocks)
        for block in blocks:
            pool.give_back(block, None)
        pool.set_apart()
        captured = [pool.lend(512, captured=True) for _ in range(3)]
        with pytest.raises(torch.OutOfMemoryError, match="than the capture needs"):
            pool.lend(512, captured=True)
        for block in captured:
            pool.give_back(block, None)
        assert pool.num_bytes == 3 * 512


# ------------------------------------------------------------------------------------------------------ no memory


def gradients(streams, buffers=3, steps=4, **options):
    model, offload = Model(), offloader(streams, buffers=buffers, **options)
    model.keep, said = offload.keep, []
    for rows in range(4, 4 + steps):
        model(pack(rows)).backward()
        offload.join()
        offload.end_step()
        said += offload.news()
    return [parameter.grad for parameter in model.parameters()], offload, said


@pytest.fixture(scope="module")
def plain():
    model = Model()
    for rows in range(4, 8):
        model(pack(rows)).backward()
    return [parameter.grad for parameter in model.parameters()]


def test_running_out_of_memory_at_any_allocation_changes_nothing(plain):
    _, offload, said = gradients(free := LateStreams(prompt=True))
    assert free.allocations["device"] > 10 and offload.buffers.now == 3
    assert said == ["offload: 2 device buffer(s) of 0.0 MiB", "offload: 3 device buffer(s) of 0.0 MiB"]
    for number in range(free.allocations["device"]):
        found, offload, said = gradients(LateStreams(prompt=True, fail_device=[number]))
        assert all(map(torch.equal, found, plain)), number
        assert offload.buffers.now < 3 and any("device memory is short" in sentence for sentence in said)
    for number in range(free.allocations["host"]):
        found, offload, said = gradients(LateStreams(prompt=True, fail_host=[number]))
        assert all(map(torch.equal, found, plain)), number
        assert offload.buffers.now == 3 and sum("stay on the device" in sentence for sentence in said) == 1


@pytest.mark.parametrize("kind", ["fail_device", "fail_host"])
def test_other_errors_are_not_swallowed(kind):
    with pytest.raises(RuntimeError, match="of another kind"):
        gradients(LateStreams(prompt=True, **{kind: {3: RuntimeError("of another kind")}}))


def test_without_any_device_memory_the_error_is_told():
    with pytest.raises(torch.OutOfMemoryError):
        gradients(LateStreams(prompt=True, fail_device=range(100)))


class Tight(LateStreams):
    """Has room for so many bytes."""

    def __init__(self, room):
        super().__init__(prompt=True)
        self.room, self.attempts = room, 0

    def empty(self, count, dtype):
        self.attempts += 1
        if self.device_bytes + count * dtype.itemsize > self.room:
            raise torch.OutOfMemoryError("no room")
        return super().empty(count, dtype)


@pytest.mark.parametrize("forced", [None, 6])
def test_there_are_as_many_buffers_as_there_was_room_for_and_all_others_make_way(forced):
    """What was loaded ahead, and what is still there from the forward pass."""
    size = 5 * D * 4
    offload = offloader(streams := Tight(3 * size), forced=forced)
    offload.buffers.now = 6
    first, second = ([offload.keep([pack(5, number)]) for number in range(8)] for _ in range(2))
    offload.join()
    used = second.pop().take()
    assert offload._loaded == 2 and streams.device_bytes == 3 * size and streams.attempts == 4
    assert offload.buffers.now == (forced or 3)
    assert torch.equal(first.pop().take()[0], used[0]) and offload.buffers.now == (forced or 1)
    del used
    offload.join()
    offload.buffers.now = 6
    third = [offload.keep([streams.tensor(pack(5, number))]) for number in range(3)]
    assert streams.device_bytes == 3 * size
    assert torch.equal(first.pop().take()[0], pack(5, 6))
    assert torch.equal(third.pop().take()[0], pack(5, 2))


def test_buffers_grow_one_a_step_when_there_is_room_beside_the_headroom():
    """And come back some steps after memory was short."""
    size, counts = 4 * OF_A_ROW, []
    streams = LateStreams(prompt=True, free=size + 2**20)
    _, offload, _ = gradients(streams, steps=1, headroom_mib=1, buffers=8)
    assert offload.buffers.now == 1  # it must exceed
    streams.free += 1
    for _ in range(3):
        offload.end_step()
        counts.append(offload.buffers.now)
    offload.buffers.shrink(2)
    for _ in range(10):
        offload.end_step()
        counts.append(offload.buffers.now)
    offload.buffers.shrink(1)
    for _ in range(17):
        offload.end_step()
        counts.append(offload.buffers.now)
    assert counts == [2, 3, 4, *[2] * 7, 3, 4, 5, *[1] * 15, 2, 3]


def test_a_pass_that_fails_leaves_nothing_behind_and_what_waits_is_right():
    streams = LateStreams(prompt=True)
    offload, model, plain = offloader(streams, forced=3), Model(), Model()
    model.keep = offload.keep
    before = model(pack(7))
    model.fail_at = 4
    with pytest.raises(KeyError), offload.whole_pass():
        model(pack(5))
    model.fail_at = None
    with offload.whole_pass():
        model(pack(6)).backward()
    before.backward()
    plain(pack(6)).backward(), plain(pack(7)).backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters()))
    assert not offload._away and not offload._held and offload._loaded == 0


@pytest.mark.parametrize("order", ORDERS[::3])
def test_memory_of_a_pass_that_fails_is_free_when_its_copies_are_done(order, monkeypatch):
    """And the host waits for nothing meanwhile: a collective that no other rank comes to may be queued before them."""
    streams = LateStreams(order)
    monkeypatch.setattr(streams, "synchronize", None)
    offload = offloader(streams, forced=3)
    with pytest.raises(KeyError), offload.whole_pass():
        kept = [offload.keep([streams.tensor(pack(5, number))]) for number in range(8)]
        for _ in range(4):
            kept.pop().take()
        kept += [offload.keep([streams.tensor(pack(6, number))]) for number in range(2)]
        raise KeyError
    assert not offload._held and offload._loaded == 0
    del kept
    streams.drain()
    assert not streams.strayed


def test_graphs_get_a_number_of_buffers_that_stays():
    size = 4 * OF_A_ROW
    for free, number in ((size, 1), (size + 1, 2), (2 * size + 1, 3), (9 * size, 4)):
        _, offload, _ = gradients(LateStreams(prompt=True, free=0), steps=1, headroom_mib=0, buffers=4)
        offload.streams.free = free
        offload.settle()
        offload.buffers.shrink(1)
        offload.end_step()
        assert offload.buffers.now == number
        blocks = offload.pool.num_bytes
        kept = [offload.keep([pack(600, n)]) for n in range(2)]
        del kept
        assert offload.pool.num_bytes > blocks + 600 * 16  # graphs copy to the others


def test_what_is_forced_and_what_cannot_gain():
    for forced in (3, 1):
        _, offload, _ = gradients(None, forced=forced, buffers=2)
        assert offload.buffers.now == forced and offload.pool.pinned > 0

    class Unified(LateStreams):
        def unified(self):
            return True

    for streams, options, reason in ((None, {"forced": 0}, "MEGATRON_PACKED_OFFLOAD_BUFFERS"),
                                     (Unified(), {}, "share their memory")):  # fmt: skip
        offload = offloader(streams, **options)
        said = offload.news()
        assert isinstance(offload.keep([pack(5)]), SavedByAutograd)
        assert len(said) == 1 and reason in said[0] and reason in offload.off


class Clocked(LateStreams):
    """A copy takes ``copy`` ms of its stream, and what is computed before something is loaded ``compute`` of its."""

    def __init__(self, copy, compute, **options):
        super().__init__(prompt=True, **options)
        self.copy_ms, self.compute_ms, self.now = copy, compute, dict.fromkeys(self.queues, 0.0)

    def clock(self):
        return self.current, self.now[self.current]

    def copy(self, target, source):
        super().copy(target, source)
        self.now[self.current] += self.copy_ms

    def empty(self, count, dtype):
        self.now[self.current] += self.compute_ms
        return super().empty(count, dtype)

    def done(self, mark):
        return True

    def milliseconds(self, begin, end):
        return end[1] - begin[1]


def test_what_is_measured_is_known_one_step_late():
    streams = Clocked(copy=2.0, compute=5.0)
    _, offload, _ = gradients(streams, steps=1, forced=1)
    assert offload.figures is None
    offload.end_step()
    figures = offload.figures
    assert figures.buffers == 1 and figures.moved_mib == LAYERS * 4 * OF_A_ROW / 2**20
    assert figures.loaded_mib == (LAYERS - 1) * 4 * OF_A_ROW / 2**20
    assert figures.put_ms == figures.load_ms == 4.0  # of two tensors each
    assert figures.load_gb_per_s == pytest.approx(4 * OF_A_ROW / 4e-3 / 1e9) and figures.hidden == 1.0
    assert figures.compute_ms == 10.0 and figures.cannot_pay is None and offload.off is None
    offload.keep([pack(5)]).take()
    offload.settle()  # that was a rehearsal
    for _ in range(2):
        offload.end_step()
        assert offload.figures is None  # steps without a copy


def test_it_is_off_where_copies_take_longer_than_what_they_hide_under_if_there_is_room_without_it():
    needed = LAYERS * 5 * OF_A_ROW  # when the first step's figures are there
    for free, off in ((needed, False), (needed + 1, True)):
        _, offload, said = gradients(Clocked(copy=9.0, compute=0.1, free=free), headroom_mib=0)
        assert (offload.off is not None) == off and off == any("a copy back takes 18.00 ms" in one for one in said)
