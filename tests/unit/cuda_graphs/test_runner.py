"""Replay equals eager over changing packs, with a fake capture on the CPU."""

from itertools import pairwise

import pytest
import torch
from torch import nn

from megatron_packed.cuda_graphs.fallback_reasons import GraphFallbackError
from megatron_packed.cuda_graphs.layer_graphs import LayerGraphs
from megatron_packed.cuda_graphs.module_graphs import TorchModuleGraphs
from megatron_packed.cuda_graphs.slots import (
    HostFactError,
    StaleMetadataError,
    StaticPackedSeqParams,
    same_memory,
)
from megatron_packed.distributed.flat_buffers import FlatBuffers
from megatron_packed.packed.capture_sizes import CaptureSize, CaptureSizes
from support.stand_in import RecordingBackend
from support.tiny_graph_jobs import (
    CAPTURE_SIZES,
    Job,
    T,
    assert_equal,
    full_of,
    pack,
    random_packs,
    tiny_model,
)


@pytest.fixture(scope="module")
def jobs():
    """Return two jobs with the same model: an eager job, and a job with graphs."""
    return Job(tiny_model()), Job(tiny_model(), graphs=True).capture()


@pytest.fixture(scope="module")
def eager_steps():
    """Return the results of twelve eager steps of a model with the weights of all these tests."""
    job = Job(tiny_model())
    return [job.step(pack(lengths, seed=i)) for i, lengths in enumerate(random_packs(12))]


@pytest.mark.shows("graphs: local", of=lambda: (1, {"hybrid_layer_pattern": "M*-EG*"}))
def test_replay_equals_eager_over_fifty_packings_in_random_order_with_dirty_memory(jobs):
    eager, graphed = jobs
    for number, lengths in enumerate(random_packs(50)):
        graphed.backend.scramble()
        micro_batch = pack(lengths, seed=number)
        before = len(graphed.backend.log)
        assert_equal(graphed.step(micro_batch), eager.step(micro_batch))
        assert (
            len(graphed.backend.log) - before == 1 + 2 * 6
        )  # graphs: tables, and forward and backward of six layers
    counters = graphed.runner.counters
    assert counters.replays >= 50 and counters.hit_rate == 1.0 and not counters.module_fallbacks


@pytest.mark.parametrize("router_alone", [False, True])
def test_random_routes_of_a_benchmark_are_the_same_in_replay(router_alone):
    forced = {"pattern": "M*E", "moe_router_force_load_balancing": True}
    eager, graphed, learned = (
        Job(tiny_model(**forced)),
        Job(tiny_model(**forced), graphs=True, routers_alone=router_alone).capture(),
        Job(tiny_model("M*E")),
    )
    for number, lengths in enumerate(random_packs(12)):
        micro_batch = pack(lengths, seed=number)
        found, wanted = graphed.step(micro_batch), eager.step(micro_batch)
        assert_equal(found, wanted)
    assert graphed.runner.counters.hit_rate == 1.0 and not graphed.runner.counters.module_fallbacks
    assert not torch.equal(found[-1], learned.step(micro_batch)[-1])


def test_losses_per_sample_are_the_same_in_replay():
    eager, graphed, per_pack = (Job(tiny_model("ME"), graphs=n == 1) for n in range(3))
    for job in (eager, graphed):
        job.model.pack_tables.sample_shape = (4, 16)
    graphed.capture()
    for number, lengths in enumerate(random_packs(12)):
        micro_batch = pack(lengths, seed=number)
        found = graphed.step(micro_batch)
        assert_equal(found, eager.step(micro_batch))
    assert graphed.runner.counters.hit_rate == 1.0
    assert not torch.equal(found[2], per_pack.step(micro_batch)[2])


def test_the_comparison_sees_what_a_replay_does_not_refresh(jobs):
    """Wrong document boundaries in the slot change the loss, so the comparison would detect them."""
    eager, graphed = jobs
    wanted = eager.step(pack([10, 20, 34]))
    placed = graphed.runner.place(pack([10, 20, 34]))
    placed.packed.seq_idx.copy_(pack([30, 34]).packed.seq_idx)
    assert not torch.equal(graphed.drive(placed).loss, wanted[0])


def test_each_pack_replays_the_smallest_size_that_holds_it(jobs):
    runner = jobs[1].runner
    for lengths, capacity in (
        ([T], 4),
        ([16] * 4, 4),
        ([5] * 5, 12),
        ([5] * 12, 12),
        ([1] * 13, T),
        ([1] * T, T),
    ):
        assert runner.place(pack(lengths)).packed.capture_size == CaptureSize(capacity, T)
    sizes = [
        runner.place(pack(lengths)).packed.cu_seqlens.shape[0]
        for lengths in ([T], [5] * 5, [1] * 30)
    ]
    assert sizes == [6, 14, T + 2]


def test_all_capacities_and_layers_read_the_same_memory(jobs):
    job = jobs[1]
    seen = set()
    for lengths in ([T], [5] * 9, [1] * 40):
        packed = job.runner.place(pack(lengths)).packed
        seen.add(
            tuple(
                getattr(packed, name).data_ptr()
                for name in ("seq_idx", "position_ids", "valid", "cu_seqlens")
            )
        )
    assert len(seen) == 1
    slot = job.runner.slot.buffer
    addresses = next(iter(seen))
    assert all(slot.data_ptr() <= address < slot.data_ptr() + slot.numel() for address in addresses)


def test_neighbours_share_memory_and_nothing_is_copied_between_them(jobs):
    runner = jobs[1].runner
    for capture_size in CAPTURE_SIZES.sizes:
        captured = [module.captured[capture_size] for module in runner.modules]
        for one, following in pairwise(captured):
            assert same_memory(one.outputs[0], following.input)
            assert same_memory(one.grad_outputs[0], following.grad_input)
    inputs = {
        module.captured[capture_size].input.data_ptr()
        for capture_size in CAPTURE_SIZES.sizes
        for module in runner.modules[:1]
    }
    assert len(inputs) == 1  # all capture sizes share the first module's input buffer


def test_order_of_replays_is_the_order_of_captures(jobs):
    job = jobs[1]
    job.step(pack([5] * 9))
    replayed = job.backend.log[-13:]
    numbers = [job.backend.graphs.index(graph) for graph in replayed]
    assert numbers == list(range(numbers[0], numbers[0] + 13))


def test_a_pack_beyond_the_largest_size_runs_eagerly_with_identical_results():
    capture_sizes = CaptureSizes.from_capacities([2, 5], T)
    eager, graphed = (
        Job(tiny_model()),
        Job(tiny_model(), graphs=True, capture_sizes=capture_sizes).capture(),
    )
    lists = [[10] * 6, [30, 34], [1] * 60, [5] * 5, [8] * 8]
    for number, lengths in enumerate(lists):
        micro_batch = pack(lengths, seed=number, capture_sizes=capture_sizes)
        assert_equal(graphed.step(micro_batch), eager.step(micro_batch))
    counters = graphed.runner.counters
    assert counters.replays == 2 and counters.fallbacks == {"more than 5 documents": 3}
    assert counters.hit_rate == pytest.approx(0.4)
    assert "3 x eager: more than 5 documents" in "\n".join(counters.sentences())


@pytest.fixture
def strict_job():
    """Return a captured job that may not run eagerly, and a micro-batch that it replays."""
    sizes = CaptureSizes.from_capacities([2], T)
    job = Job(tiny_model("M*"), graphs=True, capture_sizes=sizes, strict=True).capture()
    return job, pack([30, 34], capture_sizes=sizes)


def test_strict_makes_a_fallback_an_error(strict_job):
    job, replayed = strict_job
    job.step(replayed)
    with pytest.raises(
        GraphFallbackError, match=r"more than 2 documents.*--cuda-graph-max-packed-seqs"
    ):
        job.step(pack([1, 2, 3], capture_sizes=CaptureSizes.from_capacities([2], T)))


@pytest.mark.parametrize("names", [{0, 1, 4}, {2, 3}, {5}, set()])
def test_captured_modules_among_eager_ones(names, eager_steps):
    graphed = Job(tiny_model(), graphs=True, names=names).capture()
    for number, lengths in enumerate(random_packs(9)):
        graphed.backend.scramble()
        assert_equal(graphed.step(pack(lengths, seed=number)), eager_steps[number])
    assert graphed.runner.counters.captures == (3 * (1 + 2 * len(names)) if names else 0)


@pytest.mark.parametrize("number", [0, 1, 7, 12, 20])
def test_a_failed_capture_costs_one_module_its_graph_and_nothing_else(number, eager_steps):
    """One failed capture makes only its module, or its capture size, run eagerly.

    Capture 0 is the tables of the first capture size, 1 to 6 are its forwards, 7 to 12 its
    backwards. Capture 20 belongs to the second capture size.
    """
    graphed = Job(tiny_model(), graphs=True, backend=RecordingBackend({number})).capture()
    for seed, lengths in enumerate(random_packs(12)):
        graphed.backend.scramble()
        assert_equal(graphed.step(pack(lengths, seed=seed)), eager_steps[seed])
    assert any("OutOfMemoryError" in line for line in graphed.said)
    counters = graphed.runner.counters
    if number == 0:
        assert counters.fallbacks == {"no graphs for this capacity": counters.fallbacks.total()}
        assert counters.fallbacks.total() > 0 and counters.replays > 0
    else:
        assert (
            counters.fallbacks.total() == 0
            and len({key.split(":")[0] for key in counters.module_fallbacks}) == 1
        )


def test_strict_makes_a_failed_capture_an_error():
    with pytest.raises(
        GraphFallbackError, match=r"layers.1 not captured.*OutOfMemoryError.*--cuda-graph-strict"
    ):
        Job(tiny_model(), graphs=True, backend=RecordingBackend({2}), strict=True).capture()


def test_tables_that_can_never_be_captured_leave_everything_eager():
    """If the tables cannot be captured for any size, all micro-batches run eagerly."""
    model = tiny_model("M*")
    job = Job(model, graphs=True)
    derive = job.runner.tables

    def tables(packed):
        if type(packed) is StaticPackedSeqParams:
            raise RuntimeError("operation not permitted when stream is capturing")
        return derive(packed)

    job.runner.tables = tables
    job.capture()
    assert sum("no module captured" in line for line in job.said) == 3
    assert_equal(job.step(pack([30, 34])), Job(tiny_model("M*")).step(pack([30, 34])))
    assert job.runner.counters.fallbacks == {"no graphs": 1}


def test_strict_makes_a_module_that_runs_eagerly_an_error(strict_job):
    job, replayed = strict_job
    job.runner.place(replayed)
    with pytest.raises(GraphFallbackError, match=r"layers\.1: called with other arguments.*"):
        job.runner.modules[1](torch.randn(T, 32, requires_grad=True), "something else")


def test_what_tables_cannot_ask_is_checked_before_a_replay(jobs, monkeypatch):
    def refuse(packed):
        raise ValueError(f"no room for a document of {packed.document_lengths.max()} tokens")

    runner = jobs[1].runner
    monkeypatch.setattr(runner, "_check", refuse)
    before = runner.counters.replays
    with pytest.raises(ValueError, match="document of 9 tokens"):
        runner.place(pack([5, 9]))
    assert runner.counters.replays == before


def test_a_warm_up_without_memory_costs_a_size_its_graphs_and_nothing_else():
    eager, graphed = Job(tiny_model("M*")), Job(tiny_model("M*"), graphs=True)

    def drive(micro_batch):
        if micro_batch.packed.capacity == 12:
            raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB")
        return graphed.drive(micro_batch)

    graphed.runner.forward_backward = drive
    graphed.runner.capture(full_of)
    assert (
        "no module captured for up to 12 documents: the warm-up ran out of memory: Tried to allocate"
        in graphed.said[1]
    )
    for lengths in ([5] * 9, [30, 34], [1] * 40):
        assert_equal(graphed.step(pack(lengths)), eager.step(pack(lengths)))
    counters = graphed.runner.counters
    assert counters.replays == 2 and counters.fallbacks == {"no graphs for this capacity": 1}


def test_only_the_ends_of_a_chain_have_memory_of_their_own(jobs):
    """Only the first input and the last gradient of a chain have memory outside the graph pool.

    All other inputs and gradients are outputs of a neighbour's graph. Gradients of the losses of E
    layers are also outside, and are left out of the comparison.
    """
    names = {(key[0], *key[1:-3]) for key in jobs[1].runner.graphs[jobs[1].runner.slot].outside}
    dense = {name for name in names if name[1:] in (("input",), ("grad", 0))}
    assert dense == {("layers.0", "input"), (f"layers.{len(jobs[1].model.layers) - 1}", "grad", 0)}


def test_what_only_graphs_read_is_given_back_and_what_a_caller_may_keep_is_not(monkeypatch):
    """Captures free tensors that only graphs read, and keep tensors that callers may read.

    Callers may read the hidden states of the last captured module even after the backward pass.
    """
    job = Job(tiny_model("M*-E"), graphs=True, capture_sizes=CaptureSizes.from_capacities([4], T))
    given_back, at_the_end = set(), []
    true = TorchModuleGraphs.adopt_forward
    monkeypatch.setattr(
        job.backend, "without_ownership", lambda tensor: given_back.add(tensor.data_ptr()) or tensor
    )
    monkeypatch.setattr(
        TorchModuleGraphs,
        "adopt_forward",
        lambda self: at_the_end.append(set(given_back)) or true(self),
    )
    job.capture()
    captured = [module.captured[job.runner.capture_sizes.sizes[0]] for module in job.runner.modules]
    outputs = [one.outputs[0].data_ptr() for one in captured]
    assert [pointer in at_the_end[0] for pointer in outputs] == [True, True, True, False]
    assert all(one.grad_input.data_ptr() in at_the_end[0] for one in captured[1:])
    reports = [tensor.data_ptr() for tensor in captured[-1].outputs[1:]]
    assert reports and not at_the_end[0].intersection(reports)


def test_dropout_is_refused_by_name():
    model = tiny_model(hidden_dropout=0.1)
    job = Job(
        model, graphs=True, names={1}, capture_sizes=CaptureSizes.from_capacities([4], T)
    ).capture()
    assert job.said[0].startswith(
        "layers.1 not captured for up to 4 documents: it draws random numbers"
    )
    assert job.runner.counters.captures == 0


def test_tuning_and_capture_leave_random_states_alone():
    """Kernels may advance a generator without using its numbers, as cuDNN's attention does."""
    model = tiny_model("M*")
    for layer in model.layers:
        layer.forward = lambda *args, true=layer.forward: (torch.rand(1), true(*args))[1]
    before, states = torch.get_rng_state(), []
    job = Job(model, graphs=True)
    states.append(torch.get_rng_state())
    job.runner.tune(lambda size: full_of(size))
    states.append(torch.get_rng_state())
    assert job.capture().runner.counters.captures > 0
    states.append(torch.get_rng_state())
    assert all(torch.equal(state, before) for state in states)


def test_two_micro_batches_in_flight_are_an_error(jobs):
    job = jobs[1]
    layer = job.runner.modules[2]
    first = layer(torch.randn(T, 32, requires_grad=True), job.runner.place(pack([T])).packed)
    layer(torch.randn(T, 32, requires_grad=True), job.runner.place(pack([30, 34])).packed)
    with pytest.raises(StaleMetadataError, match="before its slot is filled again"):
        first.sum().backward()
    whole = job.model(job.runner.place(pack([T])))
    job.runner.place(pack([30, 34]))
    with pytest.raises(
        RuntimeError, match=r"modified by an inplace operation|before its slot is filled again"
    ):
        whole.loss.backward()


def test_an_old_micro_batch_cannot_be_read_through_the_slot(jobs):
    runner = jobs[1].runner
    old = runner.place(pack([T])).packed
    assert old.num_seqs == 1 and old.seq_idx.shape == (1, T)
    runner.place(pack([30, 34]))
    assert repr(old).startswith(f"SlotPackedSeqParams(1 documents in {T} slots, ")
    with pytest.raises(StaleMetadataError, match="seq_idx of micro-batch"):
        old.seq_idx  # noqa: B018
    assert old.num_seqs == 1


def test_backward_twice_is_an_error(jobs):
    job = jobs[1]
    hidden = torch.randn(T, 32, requires_grad=True)
    job.runner.place(pack([T]))
    layer = job.runner.modules[2]
    output = layer(hidden, job.runner.slot.current)
    output.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="ran twice"):
        output.sum().backward()


def test_evaluation_has_no_auxiliary_loss_in_replay_either():
    """Replays compute what a layer computed in training mode, when its graphs were captured."""
    model = tiny_model("M*E", moe_aux_loss_coeff=0.5).eval()
    model.moe_layers[0].mixer.train()  # as in a replay
    micro_batch = pack([20, 30])
    with torch.no_grad():
        assert not model(micro_batch).aux_loss
        assert model.train()(micro_batch).aux_loss > 0


def test_evaluation_replays_and_leaves_gradients_alone(jobs):
    eager, graphed = jobs
    micro_batch = pack([20, 30])
    before = graphed.buffers.grads.clone()
    replays = graphed.runner.counters.replays
    graphed.model.eval(), eager.model.eval()
    with torch.no_grad():
        found, wanted = graphed.model(graphed.runner.place(micro_batch)), eager.model(micro_batch)
    graphed.model.train(), eager.model.train()
    assert_equal(found, wanted)
    assert (
        graphed.runner.counters.replays == replays + 1
        and not graphed.runner.counters.module_fallbacks
    )
    assert torch.equal(graphed.buffers.grads, before)


def test_loading_in_place_keeps_graphs_and_moved_storage_is_noticed():
    eager, graphed = Job(tiny_model("M*")), Job(tiny_model("M*"), graphs=True).capture()
    with torch.no_grad():
        for job in (eager, graphed):
            for number, parameter in enumerate(job.model.parameters()):
                torch.manual_seed(number)
                parameter.copy_(0.1 * torch.randn_like(parameter))
    micro_batch = pack([20, 30])
    assert_equal(graphed.step(micro_batch), eager.step(micro_batch))
    assert not graphed.runner.addresses_changed
    weight = graphed.model.layers[0].mixer.in_proj.weight
    weight.data = weight.data.clone()
    assert graphed.runner.addresses_changed
    assert_equal(graphed.step(micro_batch), eager.step(micro_batch))
    assert graphed.runner.counters.fallbacks == {"weights have moved to other memory": 1}
    graphed.capture()
    assert_equal(graphed.step(micro_batch), eager.step(micro_batch))
    assert graphed.runner.counters.fallbacks.total() == 1


def test_a_buffer_that_was_replaced_is_noticed():
    """A replaced buffer counts as a reallocation, because ``nn.Module.to`` replaces buffers."""
    options = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
    job = Job(
        tiny_model("E", **options), graphs=True, capture_sizes=CaptureSizes.from_capacities([4], T)
    ).capture()
    router = job.model.layers[0].mixer.router
    assert not job.runner.addresses_changed
    kept, router.expert_bias = router.expert_bias, router.expert_bias.clone()
    assert job.runner.addresses_changed
    router.expert_bias = kept
    assert not job.runner.addresses_changed


def test_close_gives_everything_back():
    job = Job(tiny_model("M*"), graphs=True).capture()
    eager = Job(tiny_model("M*"))
    job.runner.close()
    assert all(graph.gone for graph in job.backend.graphs)
    assert "forward" not in vars(job.model.layers[0])
    job.runner = None
    assert_equal(job.step(pack([20, 30])), eager.step(pack([20, 30])))


class Foreign(nn.Module):
    """Module of a library user, whose forward takes hidden states and metadata."""

    def __init__(self, asks=False):
        super().__init__()
        self.weight, self.asks = nn.Parameter(torch.randn(8, 8)), asks

    def forward(self, hidden, packed):
        if self.asks:
            hidden = hidden * packed.num_seqs
        return torch.tanh(hidden @ self.weight) * (packed.seq_idx[0, :, None] + 1)


def foreign_job(module, **options):
    FlatBuffers(module)
    said = []

    def drive(micro_batch):
        hidden = torch.ones(T, 8, requires_grad=True)
        output = module(hidden, micro_batch.packed)
        output.square().sum().backward()
        return output.detach().clone(), hidden.grad, module.weight.main_grad.clone()

    runner = LayerGraphs(
        {"theirs": module},
        drive,
        total_tokens=T,
        capture_sizes=CAPTURE_SIZES,
        device=torch.device("cpu"),
        backend=RecordingBackend(),
        say=said.append,
        **options,
    )
    runner.capture(full_of)
    return runner, drive, said


def test_a_foreign_module_is_captured():
    module = Foreign()
    runner, drive, _ = foreign_job(module)
    for lengths in random_packs(8):
        found = []
        for place in (runner.place, lambda micro_batch: micro_batch):
            module.weight.main_grad.zero_()
            runner.slot.vacate()
            found.append(drive(place(pack(lengths))))
        assert_equal(*found)
    assert runner.counters.replays == 8 and not runner.counters.module_fallbacks


def test_a_module_that_asks_for_a_fact_of_one_pack_is_not_captured():
    runner, drive, said = foreign_job(Foreign(asks=True))
    assert f"{HostFactError.__name__}: num_seqs differs from pack to pack" in said[0]
    assert runner.counters.captures == 0
    drive(runner.place(pack([20, 30])))
    assert runner.counters.fallbacks.total() == 1


def test_parameters_without_main_grad_are_refused():
    module = Foreign()
    said = []
    runner = LayerGraphs(
        {"theirs": module},
        lambda m: module(torch.ones(T, 8, requires_grad=True), m.packed).sum().backward(),
        total_tokens=T,
        capture_sizes=CAPTURE_SIZES,
        device=torch.device("cpu"),
        backend=RecordingBackend(),
        say=said.append,
    )
    runner.capture(full_of)
    assert (
        "theirs not captured for up to 64 documents: it has parameters without main_grad" in said[0]
    )
