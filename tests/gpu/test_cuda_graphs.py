"""Graphs on a GPU: replay equals eager on changing packs, without waits, with isolated
documents.
"""

import time
from itertools import combinations, pairwise

import pytest
import torch

from megatron_packed.cuda_graphs.audit import AuditMismatchError
from megatron_packed.layers.backends import Backends
from megatron_packed.packed.capture_sizes import CaptureSizes
from megatron_packed.packed.micro_batch import MicroBatch
from support.gpu_capture import assert_ends
from support.graph_jobs import (  # the import sets variables that make libraries deterministic
    CAPTURE_SIZES,
    DEVICE,
    RESULTS,
    SCALES,
    VOCAB,
    Job,
    T,
    different,
    documents,
    new_backend,
    pack,
    packings,
    pinned,
    released,
)
from support.graph_slots import (
    FAULTS,
    IN_FLIGHT,
    scheduled,
)
from support.host_waits import watched

pytestmark = pytest.mark.gpu

REPEATS = 5
"""Number of eager runs whose spread is the tolerance for kernels that are not deterministic."""
FACTOR = 3.0
"""Largest difference of a replay from an eager run, as a multiple of the largest difference between
two of `REPEATS` eager runs.
"""
FLOOR = 1e-3
"""Difference of a gradient, relative to its norm, that is always allowed. A few runs of a small sum
may agree by chance. Wrong metadata changes gradients by 1e-1 and more.
"""


@pytest.fixture(scope="module")
def deterministic():
    job = Job("M*-EG*", Backends(deterministic=True)).capture()
    yield job
    job.runner.close()


@pytest.fixture(scope="module")
def fastest():
    job = Job("M*-EG", Backends()).capture()
    yield job
    job.runner.close()


@pytest.fixture(scope="module")
def dense():
    """Return a job without experts, which couple documents by design."""
    job = Job(
        "M*-G*", Backends(deterministic=True), CaptureSizes.from_capacities([64], T)
    ).capture()
    yield job
    job.runner.close()


# Replay equals eager execution.


@pytest.mark.shows("graphs: local", of=lambda: (1, {"hybrid_layer_pattern": "M*-EG"}))
def test_replay_equals_eager_bit_for_bit_over_a_hundred_packings(deterministic):
    """Replay equals eager bit for bit over a hundred packs, with graphs for three capacities.

    All static tensors are NaN before each micro-batch.
    """
    micro_batches = [pack(lengths, seed) for seed, lengths in enumerate(packings(100))]
    first = micro_batches[0]
    assert different(deterministic.eager(first), deterministic.eager(first)) == [], (
        "eager itself differs run to run"
    )
    for number, micro_batch in enumerate(micro_batches):
        wanted = deterministic.eager(micro_batch)
        deterministic.poison_statics()
        found = deterministic.replay(micro_batch)
        facts = f"pack {number}: {micro_batch.packed.num_seqs} documents, capacity {micro_batch.layout.capacity}"
        assert all(value.isfinite().all() for value in wanted.values()), facts
        assert different(found, wanted) == [], facts
    assert {batch.layout.capacity for batch in micro_batches} == set(CAPTURE_SIZES.capacities)


def test_replay_needs_nothing_of_what_lay_in_the_graphs_memory(deterministic):
    for seed, lengths in enumerate(packings(6, seed=1)):
        micro_batch = pack(lengths, seed)
        wanted = deterministic.eager(micro_batch)
        deterministic.poison_pool()
        assert different(deterministic.replay(micro_batch), wanted) == [], lengths[:8]


def test_the_comparison_sees_metadata_that_was_not_refreshed(deterministic):
    lengths, others = [127, 400, 3, 200], [400, 127, 3, 200]
    wanted = deterministic.eager(pack(lengths))
    placed = deterministic.runner.place(pack(lengths))
    placed.packed.seq_idx.copy_(pack(others).packed.seq_idx)
    placed.packed.cu_seqlens.copy_(pack(others).packed.cu_seqlens)
    found = deterministic._results(placed)
    assert {"per_token_loss", "hidden_gradient"} <= set(different(found, wanted))
    # States of a gated delta net that the stale tables leave unwritten may be NaN.
    assert not relative(found["hidden_gradient"], wanted["hidden_gradient"]) <= 100 * FLOOR


def test_room_for_more_documents_changes_no_bit(deterministic):
    """A replay at a larger capacity equals an eager run at exactly the pack's size."""
    for seed, lengths in enumerate([[T], [500, 24, 300], [127, 128, 129, 1, 2, 3], [3] * 70]):
        exact = pinned(MicroBatch.build(documents(lengths, seed), T, scales=SCALES))
        assert exact.layout.capacity == len(lengths)
        assert (
            different(deterministic.replay(pack(lengths, seed)), deterministic.eager(exact)) == []
        ), lengths[:8]


def test_gradients_of_several_micro_batches_add_up(deterministic):
    job = deterministic
    batches = [pack(lengths, seed) for seed, lengths in enumerate([[T], [9] * 50, [500, 24, 500]])]
    sums = []
    for place in (job.runner.place, lambda micro_batch: micro_batch.to(DEVICE)):
        job.runner.slot.vacate()
        job.buffers.zero_grad()
        for micro_batch in batches:
            job.drive(place(micro_batch))
        sums.append(job.buffers.grads.clone())
    assert torch.equal(*sums) and sums[0].norm() > 0


def relative(found, wanted):
    return (
        (found.double() - wanted.double()).norm() / wanted.double().norm().clamp(min=1e-30)
    ).item()


def test_with_the_fastest_kernels_replay_is_as_near_as_eager_is_to_itself(fastest):
    """Outputs have equal bits; gradients differ by at most `FACTOR` times their eager spread."""
    outputs = [name for name in RESULTS if name != "hidden_gradient"]
    worst = 0.0
    for seed, lengths in enumerate(
        [[T], [127, 128, 129, 1, 2, 3], [500, 24, 500], [16] * 64, [9] * 100]
    ):
        micro_batch = pack(lengths, seed)
        eager = [fastest.eager(micro_batch) for _ in range(REPEATS)]
        fastest.poison_statics()
        replayed = fastest.replay(micro_batch)
        assert [
            name for name in outputs if not torch.equal(replayed[name], eager[0][name])
        ] == [], lengths[:8]
        for name in [name for name in replayed if name not in outputs]:
            apart = max(relative(one[name], other[name]) for one, other in combinations(eager, 2))
            away = max(relative(replayed[name], one[name]) for one in eager)
            worst = max(worst, away / max(apart, FLOOR))
            assert away <= FACTOR * apart + FLOOR, (
                f"{name}, {lengths[:8]}: {away:.1e} from eager, eager {apart:.1e}"
            )
    print(f"farthest replay: {worst:.2f} times as far from eager as eager from itself (or {FLOOR})")


# Two micro-batches in flight.


@pytest.fixture(scope="module")
def two_slots():
    job = Job("M*-EG*", Backends(deterministic=True)).capture(num_slots=2)
    yield job
    job.runner.close()


@pytest.mark.parametrize("text", IN_FLIGHT)
def test_two_micro_batches_in_flight_equal_eager(two_slots, text):
    runner = two_slots.runner
    wanted = scheduled(two_slots, text, lambda micro_batch: micro_batch.to(DEVICE))
    before = runner.counters.replays
    for _ in range(2):  # each micro-batch uses both slots
        two_slots.poison_statics()
        found = scheduled(two_slots, text, runner.place)
        assert different(found, wanted) == []
        runner.place(pack([T]))
        runner.slots.vacate()
    assert (
        runner.counters.replays == before + 2 * (text.count("F") + 1)
        and not runner.counters.module_fallbacks
    )


def test_slots_have_memory_of_their_own(deterministic, two_slots):
    one, two = deterministic.runner.counters, two_slots.runner.counters
    print(f"graphs of one slot hold {one.memory_mib:,.0f} MiB, of two {two.memory_mib:,.0f} MiB")
    assert (
        two.captures == 2 * one.captures
        and 1.5 * one.memory_mib <= two.memory_mib <= 2.2 * one.memory_mib
    )


# Isolation.


@pytest.mark.shows("isolation", of=lambda: (1, {"hybrid_layer_pattern": "M*-G"}))
@pytest.mark.parametrize(
    "lengths, victim, replays",
    [([300, 1, 200, 129, 100], 2, True), ([14] * 70, 33, False)],
    ids=["replay", "fallback"],
)
def test_documents_do_not_touch_each_other(dense, lengths, victim, replays):
    """After one document changed, losses and input gradients of the others have the same bits."""
    capture_sizes = dense.capture_sizes
    base = documents(lengths)
    changed = list(base)
    changed[victim] = ((base[victim][0] + 1) % VOCAB, None)
    rows = slice(sum(lengths[:victim]), sum(lengths[: victim + 1]))
    others = torch.ones(T, dtype=torch.bool, device=DEVICE)
    others[rows] = False
    capacity = capture_sizes.largest if replays else None
    results = []
    for contents in (base, changed):
        counters = dense.runner.counters
        before = counters.replays
        micro_batch = pinned(
            MicroBatch.build(contents, T, capacity, SCALES, T if replays else None)
        )
        results.append(dense._results(dense.runner.place(micro_batch)))
        assert counters.replays - before == int(replays)
    assert replays or dense.runner.counters.fallbacks == {"more than 64 documents": 2}
    for name in ("per_token_loss", "hidden_gradient"):
        one, other = (result[name] for result in results)
        assert not torch.equal(one[rows], other[rows]), f"{name}: the change had no effect"
        assert torch.equal(one[others], other[others]), f"{name} of other documents changed"


# Audit.


def state_of(job):
    """Return everything that the next step depends on, as bytes on the host."""
    tensors = [
        *job.model.state_dict().values(),
        *job.model.buffers(),
        job.buffers.storage,
        job.buffers.grads,
    ]
    tensors += [torch.cuda.get_rng_state(DEVICE), torch.get_rng_state()]
    return [
        tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).clone() for tensor in tensors
    ]


@pytest.mark.parametrize("fixture, exactly", [("deterministic", True), ("fastest", False)])
def test_a_sound_replay_passes_the_audit_which_touches_nothing(request, fixture, exactly):
    job = request.getfixturevalue(fixture)
    job.buffers.grads.fill_(0.5)
    before, counters = (
        state_of(job),
        (job.runner.counters.replays, dict(job.runner.counters.fallbacks)),
    )
    for seed, lengths in enumerate([[T], [1] * T, [300, 1, 200, 129, 100], [16] * 64, [3] * 70]):
        began = time.perf_counter()
        found = job.runner.audit(pack(lengths, seed), deterministic=exactly, seed=seed)
        print(f"{fixture}, {len(lengths)} documents: {found}, {time.perf_counter() - began:.3f} s")
        assert found.compared == len(job.model.layers) and (
            found.largest_difference == 0 or not exactly
        )
    assert all(map(torch.equal, state_of(job), before))
    assert (job.runner.counters.replays, dict(job.runner.counters.fallbacks)) == counters


@pytest.mark.parametrize("exactly", [True, False])
@pytest.mark.parametrize("fault", FAULTS)
def test_the_audit_finds_seeded_faults(request, monkeypatch, fault, exactly):
    job = request.getfixturevalue("deterministic" if exactly else "fastest")
    job.replay(pack([400, 300, 200]))
    FAULTS[fault](job, monkeypatch)
    with pytest.raises(AuditMismatchError, match=r"layers\.\d"):
        job.runner.audit(pack([170, 250, 50, 120]), deterministic=exactly)


# No waits of the host.


def test_a_replayed_micro_batch_waits_for_nothing(fastest):
    job, count = fastest, 10
    batches = [pack(lengths, seed) for seed, lengths in enumerate(packings(count, seed=2))]

    def steps():
        for micro_batch in batches:
            job.buffers.zero_grad()
            job.drive(job.runner.place(micro_batch))

    steps()
    before = job.runner.counters.replays
    torch.cuda.synchronize()
    found = watched(steps)
    assert job.runner.counters.replays == before + 2 * count
    assert found["launches"] == count * (1 + 2 * len(job.model.layers))  # the profile has all steps
    assert found["waits"] == [] and found["pageable"] == [] and found["to_host"] == 0, found


# Memory.


def peak(job, capture_sizes, place):
    """Return the largest reserved and the largest allocated memory in two steps, in MiB."""
    tokens = job.tokens
    batches = [
        pack(lengths, seed, capture_sizes, tokens)
        for seed, lengths in enumerate([[tokens // 2] * 2, [100] * 16])
    ]
    for micro_batch in batches:
        job.drive(place(micro_batch))
    released()
    torch.cuda.reset_peak_memory_stats()
    for micro_batch in batches:
        job.drive(place(micro_batch))
    torch.cuda.synchronize()
    return torch.cuda.max_memory_reserved() / 2**20, torch.cuda.max_memory_allocated() / 2**20


def test_memory_of_graphs():
    """Four capacities hold at most 1.15 times the memory of one; a step needs at most 5 % more."""
    tokens, hidden = 8192, 1024
    released()
    found = {}
    for name, capacities in {"one": [256], "four": [16, 64, 128, 256]}.items():
        capture_sizes = CaptureSizes.from_capacities(capacities, tokens)
        job = Job("M*-" * 4, Backends(), capture_sizes, hidden, tokens)
        eager = peak(job, capture_sizes, lambda micro_batch: micro_batch.to(DEVICE))
        job.capture()
        found[name] = job.runner.counters.memory_mib
        graphs = peak(job, capture_sizes, job.runner.place)
        print(
            f"{name}: graphs hold {found[name]:,.0f} MiB; reserved and allocated at the peak: eager {eager[0]:,.0f}, "
            f"{eager[1]:,.0f} MiB, graphs {graphs[0]:,.0f}, {graphs[1]:,.0f} MiB (theirs not counted as allocated)"
        )
        assert job.runner.counters.hit_rate == 1.0 and found[name] > 100
        assert graphs[0] <= 1.05 * eager[0], (
            f"{name}: {graphs[0]:,.0f} MiB, eager {eager[0]:,.0f} MiB"
        )
        job.runner.close()
        del job
        released()
    assert found["four"] <= 1.15 * found["one"], found


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float32, torch.int32, torch.int64, torch.bool, torch.uint8]
)
def test_borrowed_memory_is_the_same_bytes(dtype):
    backend = new_backend()
    whole = torch.arange(6 * 10 * 14, device=DEVICE).view(6, 10, 14).to(dtype)
    views = [
        whole,
        whole[2:5, :, 3:9],
        whole.transpose(0, 2),
        whole[1, 2, 3],
        whole[:, 4, 5],
        whole[3:3],
        whole[:, :1].expand(6, 10, 14),
    ]
    for view in views:
        borrowed = backend.without_ownership(view)
        assert (borrowed.dtype, borrowed.shape, borrowed.stride()) == (
            view.dtype,
            view.shape,
            view.stride(),
        )
        assert view.numel() == 0 or borrowed.data_ptr() == view.data_ptr()
        assert torch.equal(borrowed, view)
    target = backend.without_ownership(whole[2:5, :, 3:9])
    target.fill_(1)
    assert (whole[2:5, :, 3:9] == 1).all() and not (whole[0] == 1).all()


def test_borrowing_does_not_own():
    """The state of the block is read, since memory of earlier tests may be freed meanwhile."""
    tensor = torch.zeros(1 << 20, device=DEVICE)
    address = tensor.data_ptr()

    def is_allocated():
        blocks = [block for segment in torch.cuda.memory_snapshot() for block in segment["blocks"]]
        return (address, "active_allocated") in [(one["address"], one["state"]) for one in blocks]

    borrowed = new_backend().without_ownership(tensor)
    assert is_allocated() and borrowed.data_ptr() == address
    del tensor
    assert not is_allocated() and borrowed.shape == (1 << 20,)


def test_neighbours_and_capacities_use_the_same_memory(deterministic):
    modules = deterministic.runner.modules
    for size in CAPTURE_SIZES.sizes:
        for one, following in pairwise(module.captured[size] for module in modules):
            assert one.outputs[0].data_ptr() == following.input.data_ptr()
            assert one.grad_outputs[0].data_ptr() == following.grad_input.data_ptr()
    assert len({modules[0].captured[size].input.data_ptr() for size in CAPTURE_SIZES.sizes}) == 1


# End of the process.

EXIT = """
import sys
import torch
from torch import distributed, nn
from megatron_packed.cuda_graphs.layer_graphs import LayerGraphs
from megatron_packed.distributed.flat_buffers import FlatBuffers
from megatron_packed.packed.capture_sizes import CaptureSizes
from megatron_packed.packed.micro_batch import MicroBatch

class Reduced(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64, 64, device="cuda"))

    def forward(self, hidden, packed):
        result = hidden @ self.weight
        total = result.detach().clone()
        distributed.all_reduce(total)
        return result * (packed.seq_idx[0, :, None] + 1) + total

torch.cuda.set_device(0)
distributed.init_process_group("nccl", init_method="file://" + sys.argv[1], rank=0, world_size=1)
module = Reduced()
FlatBuffers(module)

def drive(micro_batch):
    module(torch.ones(256, 64, device="cuda", requires_grad=True), micro_batch.packed).sum().backward()

def pack(size):
    return MicroBatch.build([(torch.arange(100).numpy(), None)], 256, size.capacity, (1.0, 1.0), size.max_seqlen)

capture_sizes = CaptureSizes.from_capacities([4], 256)
runner = LayerGraphs(
    {"reduced": module}, drive, total_tokens=256, capture_sizes=capture_sizes, device=torch.device("cuda", 0)
)
runner.capture(pack)
drive(runner.place(pack(capture_sizes.sizes[0]).pin_memory()))
assert runner.counters.replays == 1 and runner.counters.captures == 3 and not runner.counters.module_fallbacks
runner.close()
distributed.destroy_process_group()
print("the end", flush=True)
"""


def test_a_closed_runner_lets_the_process_exit(tmp_path):
    """A process ends after a runner with a captured collective is closed.

    Graphs that still exist would prevent the destruction of the process group.
    """
    assert_ends(EXIT, tmp_path)
