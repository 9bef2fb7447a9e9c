"""Two micro-batches in flight, each in a separate slot, equal eager passes in every order."""

import pytest
import torch

from megatron_packed.cuda_graphs.layer_graphs import LayerGraphs
from megatron_packed.cuda_graphs.slots import InFlightError, Slot, StaleMetadataError
from megatron_packed.packed.capture_sizes import CaptureSizes
from support.foreign_chain import ONE, Chain, Foreign, hidden_states
from support.slot_schedules import PACKS, parsed, run
from support.stand_in import RecordingBackend
from support.tiny_graph_jobs import CAPTURE_SIZES, Job, T, assert_equal, full_of, pack, tiny_model


def schedules(count, left=None, in_flight=()):
    """Yield all orders of forward and backward of ``count`` micro-batches, with two in flight at most.

    Forwards are in order.
    """
    left = range(count) if left is None else left
    if not left and not in_flight:
        yield []
    if left and len(in_flight) < 2:
        yield from (
            [("F", left[0]), *rest] for rest in schedules(count, left[1:], (*in_flight, left[0]))
        )
    for number in in_flight:
        others = tuple(other for other in in_flight if other != number)
        yield from ([("B", number), *rest] for rest in schedules(count, left, others))


@pytest.fixture
def dirty(monkeypatch):
    """Return a function that makes every fill of a runner's slots set the graphs' memory to NaN."""
    backends = {}
    true = Slot.fill

    def fill(self, micro_batch, size):
        if self in backends:
            backends[self].scramble()
        return true(self, micro_batch, size)

    monkeypatch.setattr(Slot, "fill", fill)
    return lambda runner: backends.update(
        {slot: graphs.backend for slot, graphs in runner.graphs.items()}
    )


def without_metadata(*positions):
    """Return a function that calls modules at ``positions`` of the chain without metadata."""

    def call(module, hidden, packed):
        return module(hidden) if module.number in positions else module(hidden, packed)

    return call


def chain_of(count, positions=(), **options):
    modules = [Foreign() for _ in range(count)]
    for number, module in enumerate(modules):
        module.number = number
    chain = Chain(*modules, call=without_metadata(*positions), **{"num_slots": 2} | options)
    return chain.capture()


@pytest.mark.parametrize(
    "positions", [(), (1,), (0, 2)], ids=["all with metadata", "middle without", "ends without"]
)
def test_every_order_of_five_micro_batches_equals_eager(dirty, positions):
    chain, eager = chain_of(3, positions), chain_of(3, positions, num_slots=1)
    eager.runner.close()
    dirty(chain.runner)
    tried = list(schedules(5))
    assert len(tried) == 81 and parsed("F1 F2 B1 B2 F3 B3 F4 F5 B5 B4") in tried
    for schedule in tried:
        assert_equal(
            run(chain, schedule, chain.runner.place),
            run(eager, schedule, lambda micro_batch: micro_batch),
        )
    counters = chain.runner.counters
    assert (
        counters.replays == 5 * len(tried)
        and not counters.module_fallbacks
        and counters.fallbacks.total() == 0
    )


@pytest.mark.parametrize("text", ["F1 F2 B1 B2", "F1 F2 B2 B1", "F1 F2 B1 F3 B2 F4 B4 F5 B5 B3"])
def test_a_model_with_two_micro_batches_in_flight_equals_eager(dirty, text):
    """Losses and gradients of a model with experts equal eager, over several capture sizes."""
    eager = Job(tiny_model("M*-E"))
    graphed = Job(tiny_model("M*-E"), graphs=True, num_slots=2).capture()
    dirty(graphed.runner)
    lists = [[10, 20], [5] * 9, [1] * T, [T], [3] * 13]
    results = []
    for job, place in ((graphed, graphed.runner.place), (eager, lambda micro_batch: micro_batch)):
        job.buffers.zero_grad()
        losses, found = {}, []
        for what, number in parsed(text):
            if what == "F":
                output = job.model(place(pack(lists[number], seed=number)))
                losses[number] = output.loss
                found += [
                    output.loss_sum.clone(),
                    output.per_token_loss_T.clone(),
                    output.tokens_per_expert.clone(),
                ]
            else:
                losses.pop(number).backward()
        results.append([*found, job.buffers.grads.clone()])
    assert_equal(*results)
    assert graphed.runner.counters.hit_rate == 1.0 and not graphed.runner.counters.module_fallbacks


def test_one_slot_has_no_room_for_two():
    chain = chain_of(2, num_slots=1)
    with pytest.raises(StaleMetadataError, match="before its slot is filled again"):
        run(chain, parsed("F1 F2 B1 B2"), chain.runner.place)


def test_three_in_flight_overwrite_the_oldest_and_that_is_an_error():
    chain = chain_of(2)
    found = run(chain, parsed("F1 F2 F3 B2 B3"), chain.runner.place)
    assert_equal(found, run(chain, parsed("F2 F3 B2 B3"), chain.runner.place))
    with pytest.raises(StaleMetadataError, match="before its slot is filled again"):
        run(chain, parsed("F1 F2 F3 B1"), chain.runner.place)


def test_both_may_be_placed_before_either_runs():
    """Two micro-batches may be placed before either of them runs.

    The middle module takes no metadata, so its micro-batch follows from its hidden states.
    """
    chain = chain_of(3, (1,))
    wanted = run(chain, parsed("F1 F2 B1 B2"), chain.runner.place)
    first, second = (
        chain.runner.place(pack(PACKS[number], seed=number, capture_sizes=ONE)) for number in (0, 1)
    )
    placed = iter([first, second])
    assert_equal(run(chain, parsed("F1 F2 B1 B2"), lambda _: next(placed)), wanted)
    assert not chain.runner.counters.module_fallbacks


def test_two_forwards_module_by_module():
    """A module without metadata uses the slot of its hidden states, not the slot placed last."""
    chain = chain_of(3, (1,))
    wanted = run(chain, parsed("F1 F2 B1 B2"), chain.runner.place)
    chain.buffers.zero_grad()
    hidden = [hidden_states(number) for number in (0, 1)]
    packed = [chain.runner.place(pack(PACKS[n], seed=n, capture_sizes=ONE)).packed for n in (0, 1)]
    outputs = [one * 1 for one in hidden]
    for module in chain.modules:
        outputs = [chain.call(module, *both) for both in zip(outputs, packed, strict=True)]
    found = []
    for one, output in zip(hidden, outputs):
        output.square().sum().backward()
        found += [output.detach(), one.grad]
    assert_equal([*found, chain.buffers.grads], wanted)
    assert not chain.runner.counters.module_fallbacks


def test_a_micro_batch_that_has_not_run_yet_keeps_its_slot():
    chain = chain_of(2)
    wanted = run(chain, parsed("F2 B2 F3 B3 F1 B1"), chain.runner.place)
    waiting = chain.runner.place(pack(PACKS[0], seed=0, capture_sizes=ONE))

    def place(micro_batch):
        return waiting if micro_batch.packed.num_seqs == 2 else chain.runner.place(micro_batch)

    assert_equal(run(chain, parsed("F2 B2 F3 B3 F1 B1"), place), wanted)


def test_a_first_module_without_metadata_cannot_tell_and_the_next_one_says_so():
    chain = chain_of(2, (0,))
    first, _ = (chain.runner.place(pack(lengths, capture_sizes=ONE)) for lengths in PACKS[:2])
    with pytest.raises(
        InFlightError,
        match=r"metadata of .* in slot 0 and with hidden states .* in slot 1.*place each",
    ):
        chain.forward(hidden_states(), first.packed)


def test_hidden_states_of_another_micro_batch_are_an_error():
    chain = chain_of(2)
    first, second = (
        chain.runner.place(pack(lengths, capture_sizes=ONE)).packed for lengths in PACKS[:2]
    )
    hidden = chain.modules[0](hidden_states(), first)
    with pytest.raises(InFlightError, match="hidden states of another micro-batch in slot 0"):
        chain.modules[1](hidden, second)


@pytest.mark.parametrize("text", ["F1 F2 B1 B2", "F1 F2 B2 F3 B3 B1", "F2 F1 B2 B1"])
def test_a_micro_batch_that_runs_eagerly_leaves_the_ones_in_flight_alone(text):
    """An eager micro-batch does not affect the micro-batches in flight.

    Micro-batch 2 runs eagerly, because it is larger than the largest capture size.
    """
    chain = chain_of(3, (0, 2), capture_sizes=CaptureSizes.from_capacities([2], T))
    schedule = parsed(text)
    found = run(chain, schedule, chain.runner.place)
    assert chain.runner.counters.fallbacks == {"more than 2 documents": 1}
    assert not chain.runner.counters.module_fallbacks
    chain.runner.close()
    assert_equal(found, run(chain, schedule, lambda micro_batch: micro_batch))


def test_evaluation_between_a_forward_and_its_backward_takes_the_other_slot():
    chain = chain_of(2)
    wanted = run(chain, parsed("F1 B1"), chain.runner.place)
    chain.buffers.zero_grad()
    hidden = hidden_states(0)
    output = chain.forward(
        hidden, chain.runner.place(pack(PACKS[0], seed=0, capture_sizes=ONE)).packed
    )
    for lengths in PACKS[1:]:
        with torch.no_grad():
            chain.forward(
                hidden_states(1), chain.runner.place(pack(lengths, capture_sizes=ONE)).packed
            )
    output.square().sum().backward()
    assert_equal([output.detach(), hidden.grad, chain.buffers.grads], wanted)


def test_slots_share_neither_memory_nor_pool_and_the_counters_show_both():
    one, two = (
        chain_of(2, num_slots=1, capture_sizes=CAPTURE_SIZES),
        chain_of(2, capture_sizes=CAPTURE_SIZES),
    )
    assert two.runner.counters.captures == 2 * one.runner.counters.captures == 2 * 3 * 5
    assert two.runner.counters.memory_mib == 2 * one.runner.counters.memory_mib
    slots = two.runner.slots.slots
    for size in CAPTURE_SIZES.sizes:
        first, second = (
            [module.forward.in_slot(slot)[size] for module in two.modules] for slot in slots
        )
        addresses = [
            {t.data_ptr() for one in graphs for t in (one.input, *one.outputs, one.grad_input)}
            for graphs in (first, second)
        ]
        assert not addresses[0] & addresses[1]
    assert two.runner.graphs[slots[0]].backend is not two.runner.graphs[slots[1]].backend
    two.runner.close()
    assert all(
        graph.gone for backend in (two.backend, *two.backend.others) for graph in backend.graphs
    )


def test_a_capture_that_fails_in_one_slot_leaves_the_other_its_graphs(monkeypatch):
    monkeypatch.setattr(RecordingBackend, "another", lambda self: RecordingBackend({2}))
    chain = chain_of(2)
    assert (
        any("module 1 not captured" in line for line in chain.said)
        and "in slot 1" in chain.said[-1]
    )
    found = run(chain, parsed("F1 F2 B1 B2"), chain.runner.place)
    assert sum(chain.runner.counters.module_fallbacks.values()) == 1
    chain.runner.close()
    assert_equal(found, run(chain, parsed("F1 F2 B1 B2"), lambda micro_batch: micro_batch))


def test_the_audit_looks_at_every_slot(monkeypatch):
    chain = chain_of(2)
    found = chain.audit(PACKS[0])
    assert found is not None and found.compared == 4 and found.largest_difference == 0
    assert found.finding == "2 modules replay what they compute in each of 2 slots"


def test_a_runner_without_a_slot_is_refused():
    with pytest.raises(ValueError, match=r"num_slots \(0\) must be 1 or more"):
        LayerGraphs(
            {},
            lambda micro_batch: None,
            total_tokens=T,
            capture_sizes=ONE,
            device=torch.device("cpu"),
            backend=RecordingBackend(),
            num_slots=0,
        )


def test_graphs_are_captured_again_in_every_slot():
    chain = chain_of(2)
    wanted = run(chain, parsed("F1 F2 B1 B2"), chain.runner.place)
    chain.runner.capture(full_of)
    assert_equal(run(chain, parsed("F1 F2 B1 B2"), chain.runner.place), wanted)
