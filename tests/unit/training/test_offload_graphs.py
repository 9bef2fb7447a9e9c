"""Offload with a graph for each layer: freed memory of hidden states, and replays of some
graphs.
"""

import dataclasses
from contextlib import contextmanager

import pytest
import torch

from megatron_packed.config.sections.memory import MemoryConfig
from megatron_packed.cuda_graphs.layer_graphs import LayerGraphs
from megatron_packed.cuda_graphs.module_graphs import TorchModuleGraphs
from megatron_packed.memory import activation_offload as offload_module
from megatron_packed.memory.offload_streams import CpuStreams
from megatron_packed.packed.capture_sizes import CaptureSizes
from megatron_packed.training.build_graphs import audit_graphs, capture_graphs
from support.recomputed_steps import EACH_INPUT, INPUTS, LAYERS, STEPS, TRAVELLERS, Run
from support.stand_in import RecordingBackend
from support.step_jobs import GROUPS, SLOTS, config_of, micro_batch
from support.step_jobs import state_hash as digest_of


class BorrowingBackend(RecordingBackend):
    """Stand-in for capture whose `without_ownership` returns an alias of the tensor, as on a GPU."""

    def without_ownership(self, tensor):
        return torch.empty(0, dtype=tensor.dtype).set_(
            tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride()
        )


class GraphStreams(CpuStreams):
    """Streams that enforce the rules of a CUDA capture.

    A wait is for an event of the same graph. A stream joins a graph by waiting for one of its events,
    and must be waited for at the graph's end. Memory cannot be pinned during a capture.
    """

    def __init__(self):
        self.graph, self.graphs, self.current = 0, 0, "compute"
        self.copied, self.waited, self.joined = {}, {}, set()
        self.copies_in_graphs = 0

    @contextmanager
    def one_graph(self):
        self.graphs += 1
        self.graph, self.copied, self.waited, self.joined = self.graphs, {}, {}, {"compute"}
        yield
        assert {name: n for name, n in self.copied.items() if name != "compute"} == self.waited, (
            "not joined"
        )
        self.graph = 0

    def capturing(self):
        return self.graph > 0

    def record_event(self):
        return self.graph, self.current, self.copied.get(self.current, 0)

    def wait_event(self, mark):
        graph, name, number = mark
        assert graph == self.graph, "a wait across the border of a graph"
        if self.current == "compute":
            self.waited[name] = max(number, self.waited.get(name, 0))
        elif name == "compute":
            self.joined.add(self.current)

    @contextmanager
    def _on(self, name):
        self.current = name
        yield
        self.current = "compute"

    def offload_stream(self):
        return self._on("out")

    def prefetch_stream(self):
        return self._on("in")

    def copy(self, target, source):
        assert not self.graph or self.current in self.joined
        self.copied[self.current] = self.copied.get(self.current, 0) + 1
        self.copies_in_graphs += self.graph > 0
        super().copy(target, source)

    def pinned(self, num_bytes):
        assert not self.graph
        return super().pinned(num_bytes)


class GraphStreamsBackend(BorrowingBackend):
    streams = None

    def capture(self, function):
        def one_graph():
            with self.streams.one_graph():
                return function()

        return super().capture(one_graph)


@pytest.fixture
def backend(monkeypatch):
    """Stand-in for capture whose streams also serve the offload."""
    made = GraphStreamsBackend()
    made.streams = GraphStreams()
    monkeypatch.setattr(offload_module, "streams_of", lambda device: made.streams)
    return made


@pytest.mark.parametrize(
    ("impl", "memory"),
    [
        ("local", EACH_INPUT),
        ("local", TRAVELLERS),
        ("full_iteration", INPUTS),
        ("full_iteration", TRAVELLERS),
    ],
    ids=["layers, inputs", "layers, parts", "steps, inputs", "steps, parts"],
)
@pytest.mark.parametrize("buffers", [1, 3])
def test_copies_begin_and_end_in_the_graph_that_they_are_in(
    impl, memory, buffers, eager_steps, backend
):
    run = Run(
        config_of(cuda_graph_impl=impl),
        dataclasses.replace(memory, offload_buffers=buffers),
        backend,
    )
    run_all(run, eager_steps)
    offload = run.job.model.offload
    said = offload.messages()
    assert backend.streams.copies_in_graphs and said[0].startswith(
        f"offload: {buffers} device buffer(s) of "
    )
    # The reference kernels save tensors of different sizes for each pack. A replay of the stand-in
    # runs the kernels again, so offload may print more messages.
    assert memory is TRAVELLERS or said[1:] == []
    assert_audited(run)


@pytest.mark.parametrize("impl", ["local", "full_iteration"])
def test_graphs_that_are_captured_again_copy_to_blocks_of_their_own(impl, eager_steps, backend):
    """A second capture frees the old graphs' blocks; blocks of eager runs go to the new graphs."""
    run = Run(config_of(cuda_graph_impl=impl), EACH_INPUT, backend)
    pool = run.job.model.offload.pool
    first, num_bytes = set(pool._of_graphs), pool.num_bytes
    run_all(run, eager_steps)
    eager = len(pool._free)  # blocks of the micro-batch that fits no graph
    capture_graphs(run.graphs, run.job.step, 3, GROUPS)
    assert not run.graphs.refusals and not first & pool._of_graphs
    assert (
        eager == len(run.config.model.layer_types)
        and pool.num_bytes == num_bytes
        and pool._free == []
    )
    metrics = [run.step(number) for number in range(len(STEPS))]
    other = Run(config_of(cuda_graph_impl="none"), MemoryConfig())
    wanted = [other.step(number % len(STEPS)) for number in range(2 * len(STEPS))][len(STEPS) :]
    assert all(map(torch.equal, metrics, wanted)) and digest_of(run.job) == digest_of(other.job)


@pytest.fixture
def released(monkeypatch):
    """Captured modules that free their input, which is overwritten after their forward graph."""
    found = []
    release, replay = TorchModuleGraphs._release_input, TorchModuleGraphs.replay_forward

    def releasing(self, before):
        release(self, before)
        found.append(self)

    def replaying(self, hidden):
        outputs = replay(self, hidden)
        if self in found:
            with torch.no_grad():
                self.input.fill_(float("nan"))
        return outputs

    monkeypatch.setattr(TorchModuleGraphs, "_release_input", releasing)
    monkeypatch.setattr(TorchModuleGraphs, "replay_forward", replaying)
    return found


def assert_audited(run):
    batch = micro_batch([20, 9, 3])
    assert audit_graphs(run.graphs, run.job.step, batch, deterministic=True, seed=1) is not None


def run_all(run, eager_steps):
    for number, (metrics, digest) in enumerate(eager_steps):
        assert torch.equal(run.step(number), metrics) and digest_of(run.job) == digest, number


NORMS = dataclasses.replace(TRAVELLERS, offload_modules=("attn_norm", "mamba_norm"))


@pytest.mark.parametrize(
    ("memory", "layers"),
    [(EACH_INPUT, [1, 2, 3, 5]), (TRAVELLERS, [1, 2, 3, 5]), (NORMS, [1])],
    ids=["inputs", "parts", "two norms"],
)
def test_hidden_states_that_left_may_be_overwritten(memory, layers, eager_steps, released):
    """Only inputs that are offloaded can be overwritten; all other tensors keep their memory.

    No graph produces the input of layer 4, the first layer of a depth of multi-token prediction.
    """
    run = Run(config_of(cuda_graph_impl="local"), memory, BorrowingBackend())
    sizes = [module.captured for module in run.graphs.modules]
    assert {id(captured) for captured in released} == {
        id(one) for n in layers for one in sizes[n].values()
    }
    run_all(run, eager_steps)
    assert not run.graphs.counters.module_fallbacks


def test_without_offload_none_is_given_up(released):
    Run(config_of(cuda_graph_impl="local"), LAYERS, BorrowingBackend())
    Run(config_of(cuda_graph_impl="local"), MemoryConfig(), BorrowingBackend())
    assert released == []


def test_what_a_neighbour_should_have_copied_is_copied_where_it_did_not(eager_steps):
    run = Run(config_of(cuda_graph_impl="local"), EACH_INPUT, BorrowingBackend())
    largest = run.graphs.capture_sizes.sizes[-1]
    layers = [module.captured[largest] for module in run.graphs.modules]
    loads = [captured._missing_copies for captured in layers]
    # The last layer loads its own tensors.
    assert [load is not None for load in loads] == [True] * 5 + [False]
    run_all(run, eager_steps)
    assert not any(load is not None and load.replays for load in loads)
    run.job.buffers.zero_grad()
    assert_audited(run)
    assert all(load is None or load.replays for load in loads)
    before = loads[1].replays
    run.graphs.modules[2].forget()  # from now on this layer runs eagerly among replayed layers
    run.step(0)
    assert run.graphs.counters.module_fallbacks and loads[1].replays > before
    plain = Run(config_of(cuda_graph_impl="none"), MemoryConfig())
    for number in (*range(len(STEPS)), 0):
        plain.step(number)
    assert digest_of(run.job) == digest_of(plain.job)


def test_a_layer_that_runs_eagerly_among_others_gets_memory_of_its_own(eager_steps, released):
    """The input of an eager layer is not in memory that the next graph may overwrite."""
    run = Run(config_of(cuda_graph_impl="local"), EACH_INPUT, BorrowingBackend())
    module, addresses = run.graphs.modules[2], set()
    given_up = {
        captured.input.data_ptr() for captured in module.captured.values() if captured in released
    }
    forward = module.original_forward

    def watching(hidden, packed):
        addresses.add(hidden.data_ptr())
        return forward(hidden, packed)

    module.original_forward = watching
    for number, (metrics, digest) in enumerate(eager_steps):
        module.module.eval()  # evaluation mode does not change the results of an MLP
        assert torch.equal(run.step(number), metrics) and digest_of(run.job) == digest, number
    assert run.graphs.counters.module_fallbacks and given_up and not given_up & addresses


def test_a_capture_that_fails_leaves_nothing_of_itself(eager_steps):
    for fail_at in (3, 7, 9):
        run = Run(
            config_of(cuda_graph_impl="local"), EACH_INPUT, BorrowingBackend(fail_at=[fail_at])
        )
        offload = run.job.model.offload
        assert not offload._with_sources and offload._num_prefetched == 0 and run.graphs.refusals
        run_all(run, eager_steps)


def test_slots_would_share_host_memory():
    run = Run(config_of(cuda_graph_impl="none"), EACH_INPUT)
    with pytest.raises(ValueError, match="must be 1 if graphs copy tensors to the host"):
        LayerGraphs(
            {},
            lambda micro_batch: None,
            total_tokens=SLOTS,
            capture_sizes=CaptureSizes.from_capacities([2], SLOTS),
            device=torch.device("cpu"),
            num_slots=2,
            backend=RecordingBackend(),
            copies=run.job.model.offload,
        )
