"""Offload with short memory, failing passes, growing buffers, and reasons to turn offload off."""

import pytest
import torch

from megatron_packed.config.sections.memory import MemoryConfig
from megatron_packed.memory.activation_offload import Offload
from megatron_packed.memory.pinned_host_pool import PinnedHostPool
from megatron_packed.memory.saved_tensors import SavedByAutograd
from support.late_streams import ORDERS, LateStreams
from support.offloaded_layers import LAYERS, OF_A_ROW, D, Model, gradients, offloader, pack


@pytest.fixture(scope="module")
def plain():
    model = Model()
    for rows in range(4, 8):
        model(pack(rows)).backward()
    return [parameter.grad for parameter in model.parameters()]


def test_running_out_of_memory_at_any_allocation_changes_nothing(plain):
    _, offload, said = gradients(free := LateStreams(prompt=True))
    assert free.allocations["device"] > 10 and offload.buffer_count.now == 3
    assert said == [
        "offload: 2 device buffer(s) of 0.0 MiB",
        "offload: 3 device buffer(s) of 0.0 MiB",
    ]
    for number in range(free.allocations["device"]):
        found, offload, said = gradients(LateStreams(prompt=True, fail_device=[number]))
        assert all(map(torch.equal, found, plain)), number
        assert offload.buffer_count.now < 3 and any(
            "device memory is short" in sentence for sentence in said
        )
    for number in range(free.allocations["host"]):
        found, offload, said = gradients(LateStreams(prompt=True, fail_host=[number]))
        assert all(map(torch.equal, found, plain)), number
        assert (
            offload.buffer_count.now == 3
            and sum("stay on the device" in sentence for sentence in said) == 1
        )


def test_what_cannot_be_pinned_is_tried_once_a_step_and_costs_no_other_block():
    tried = []

    def pin(num_bytes):
        tried.append(num_bytes)
        if num_bytes > 1024:
            raise torch.OutOfMemoryError("short of memory")
        return torch.empty(num_bytes, dtype=torch.uint8)

    pool = PinnedHostPool(pin, lambda used: True)
    for _ in range(3):
        small = [pool.allocate(512) for _ in range(2)]
        for block in small:
            pool.free(block, None)
        for num_bytes in (2048, 4096, 2048):
            with pytest.raises(torch.OutOfMemoryError):
                pool.allocate(num_bytes)
        pool.end_step()
    assert tried == [512, 512, 2048, 2048, 2048] and pool.num_bytes == 2 * 512
    pool.free(pool.allocate(1024), None)
    assert pool.num_bytes == 512 + 1024  # replaces a block that was too small


@pytest.mark.parametrize(
    ("kind", "number"), [("fail_device", 3), ("fail_device", 14), ("fail_host", 3)]
)
def test_other_errors_are_not_swallowed(kind, number):
    """Errors other than out of memory are raised, also in a prefetch (device allocation 14)."""
    with pytest.raises(RuntimeError, match="of another kind"):
        gradients(LateStreams(prompt=True, **{kind: {number: RuntimeError("of another kind")}}))


def test_without_any_device_memory_the_error_is_raised():
    with pytest.raises(torch.OutOfMemoryError):
        gradients(LateStreams(prompt=True, fail_device=range(100)))


class Tight(LateStreams):
    """Streams of a device with a memory of ``room`` bytes."""

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
    """If memory is short, prefetched buffers and sources are released, and the number shrinks."""
    size = 5 * D * 4
    offload = offloader(streams := Tight(3 * size), forced_buffers=forced)
    offload.buffer_count.now = 6
    first, second = ([offload.save([pack(5, number)]) for number in range(8)] for _ in range(2))
    offload.join()
    used = second.pop().restore()
    assert (
        offload._num_prefetched == 2 and streams.device_bytes == 3 * size and streams.attempts == 4
    )
    assert offload.buffer_count.now == (forced or 3)
    assert torch.equal(first.pop().restore()[0], used[0]) and offload.buffer_count.now == (
        forced or 1
    )
    del used
    offload.join()
    offload.buffer_count.now = 6
    third = [offload.save([streams.tensor(pack(5, number))]) for number in range(3)]
    assert streams.device_bytes == 3 * size
    assert torch.equal(first.pop().restore()[0], pack(5, 6))
    assert torch.equal(third.pop().restore()[0], pack(5, 2))


def test_buffers_grow_one_a_step_when_there_is_room_beside_the_headroom():
    """Buffers grow by one per step while memory is free, and again some steps after a shortage."""
    size, counts = 4 * OF_A_ROW, []
    streams = LateStreams(prompt=True, free=size + 2**20)
    _, offload, _ = gradients(streams, steps=1, headroom_mib=1, max_buffers=8)
    assert (
        offload.buffer_count.now == 1
    )  # free memory must exceed, not equal, the buffer and the headroom
    streams.free += 1
    for _ in range(3):
        offload.end_step()
        counts.append(offload.buffer_count.now)
    offload.buffer_count.shrink(2)
    for _ in range(10):
        offload.end_step()
        counts.append(offload.buffer_count.now)
    offload.buffer_count.shrink(1)
    for _ in range(17):
        offload.end_step()
        counts.append(offload.buffer_count.now)
    assert counts == [2, 3, 4, *[2] * 7, 3, 4, 5, *[1] * 15, 2, 3]


def test_a_failed_pass_leaves_no_copies_and_pending_ones_are_right():
    streams = LateStreams(prompt=True)
    offload, model, plain = offloader(streams, forced_buffers=3), Model(), Model()
    model.save = offload.save
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
    assert not offload._offloaded and not offload._with_sources and offload._num_prefetched == 0


@pytest.mark.parametrize("order", ORDERS[::3])
def test_memory_of_a_pass_that_fails_is_free_when_its_copies_are_done(order, monkeypatch):
    """Memory of a failed pass is reused only after its copies, and the host does not wait for them.

    A collective that no other rank joins may be queued before the copies, so the host must not wait.
    """
    streams = LateStreams(order)
    monkeypatch.setattr(streams, "synchronize", None)
    offload = offloader(streams, forced_buffers=3)
    with pytest.raises(KeyError), offload.whole_pass():
        kept = [offload.save([streams.tensor(pack(5, number))]) for number in range(8)]
        for _ in range(4):
            kept.pop().restore()
        kept += [offload.save([streams.tensor(pack(6, number))]) for number in range(2)]
        raise KeyError
    assert not offload._with_sources and offload._num_prefetched == 0
    del kept
    streams.drain()
    assert not streams.strayed


def test_graphs_get_a_number_of_buffers_that_stays():
    size = 4 * OF_A_ROW
    for free, number in ((size, 1), (size + 1, 2), (2 * size + 1, 3), (9 * size, 4)):
        _, offload, _ = gradients(
            LateStreams(prompt=True, free=0), steps=1, headroom_mib=0, max_buffers=4
        )
        offload.streams.free = free
        offload.prepare_for_capture()
        offload.buffer_count.shrink(1)
        offload.end_step()
        assert offload.buffer_count.now == number
        blocks = offload.pool.num_bytes
        kept = [offload.save([pack(600, n)]) for n in range(2)]
        del kept
        assert (
            offload.pool.num_bytes > blocks + 600 * 16
        )  # new blocks, because graphs own the other blocks


def test_what_is_forced_and_what_cannot_gain():
    for forced in (3, 1):
        _, offload, _ = gradients(None, forced_buffers=forced, max_buffers=2)
        assert offload.buffer_count.now == forced and offload.pool.pinned > 0

    class Unified(LateStreams):
        def shares_host_memory(self):
            return True

    for streams, options, reason in (
        (None, {"forced_buffers": 0}, "MEGATRON_PACKED_OFFLOAD_BUFFERS"),
        (Unified(), {}, "share their memory"),
    ):
        offload = offloader(streams, **options)
        said = offload.messages()
        assert isinstance(offload.save([pack(5)]), SavedByAutograd)
        assert len(said) == 1 and reason in said[0] and reason in offload.off_reason


class Clocked(LateStreams):
    """Fake streams with a simulated clock: a copy takes ``copy`` ms, an allocation ``compute`` ms.

    The time of an allocation represents the computation before each restore.
    """

    def __init__(self, copy, compute, **options):
        super().__init__(prompt=True, **options)
        self.copy_ms, self.compute_ms, self.now = copy, compute, dict.fromkeys(self.queues, 0.0)

    def timing_event(self):
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
    _, offload, _ = gradients(streams, steps=1, forced_buffers=1)
    assert offload.figures is None
    offload.end_step()
    figures = offload.figures
    assert figures.buffers == 1 and figures.moved_mib == LAYERS * 4 * OF_A_ROW / 2**20
    assert figures.loaded_mib == (LAYERS - 1) * 4 * OF_A_ROW / 2**20
    assert figures.put_ms == figures.load_ms == 4.0  # two tensors of 2 ms each
    assert (
        figures.load_gb_per_s == pytest.approx(4 * OF_A_ROW / 4e-3 / 1e9) and figures.hidden == 1.0
    )
    assert figures.compute_ms == 10.0 and figures.cannot_pay is None and offload.off_reason is None
    offload.save([pack(5)]).restore()
    offload.prepare_for_capture()  # discards the times of the warm-up
    for _ in range(2):
        offload.end_step()
        assert offload.figures is None  # steps without a copy


def test_it_is_off_where_copies_take_longer_than_what_they_hide_under_if_there_is_room_without_it():
    # Bytes copied in the step after which the first figures are known.
    needed = LAYERS * 5 * OF_A_ROW
    for headroom, more in ((0, 0), (0, 1), (1, 0), (1, 1)):
        streams, off = (
            Clocked(copy=9.0, compute=0.1, free=needed + headroom * 2**20 + more),
            more > 0,
        )
        _, offload, said = gradients(streams, headroom_mib=headroom)
        assert (offload.off_reason is not None) == off and off == any(
            "a copy back takes 18.00 ms" in one for one in said
        )


def test_limits_are_those_of_the_options():
    config = MemoryConfig(
        fine_grained_activation_offloading=True,
        offload_modules=("mlp_act",),
        offload_buffers=5,
        offload_headroom_mib=7,
        min_offloaded_tensor_size=9,
    )
    offload = Offload.from_config(config, "cpu")
    count = offload.buffer_count
    assert (count.most, count.headroom_bytes, offload.min_elements) == (5, 7 * 2**20, 9)
