"""Captured modules in unusual contexts: results are correct, or the module is refused."""

import copy
import pickle

import pytest
import torch
from torch import nn

from megatron_packed.cuda_graphs.fallback_reasons import GraphFallbackError
from megatron_packed.cuda_graphs.layer_graphs import LayerGraphs
from megatron_packed.cuda_graphs.slots import StaleMetadataError
from megatron_packed.cuda_graphs.whole_step_graphs import FullIterationGraphs
from megatron_packed.packed.capture_sizes import CaptureSizes
from support.foreign_chain import FIRST, ONE, SECOND, Chain, D, Foreign, hidden_states
from support.stand_in import RecordingBackend
from support.tiny_graph_jobs import CAPTURE_SIZES, Job, T, assert_equal, full_of, pack, tiny_model

# -- contexts ---------------------------------------------------------------------------------------


def test_autocast_runs_eagerly():
    chain = Chain(Foreign()).capture()
    packed, hidden, module = chain.place(), hidden_states(), chain.modules[0]
    with torch.autocast("cpu", torch.bfloat16):
        found, wanted = module(hidden, packed), module.forward.original_forward(hidden, packed)
    assert found.dtype == wanted.dtype and torch.equal(found, wanted)
    with torch.autocast("cpu", torch.bfloat16):
        chain = Chain(Foreign()).capture()
    assert "module 0 not captured for up to 4 documents: it runs under autocast" in chain.said[0]


def test_inference_mode_replays_and_leaves_training_possible():
    chain = Chain(Foreign(), Foreign()).capture()
    with torch.inference_mode():
        found = chain.forward(hidden_states(), chain.place())
        chain.runner.slot.vacate()
        assert torch.equal(found, chain.forward(hidden_states(), pack(FIRST).packed))
    assert not chain.runner.counters.module_fallbacks
    chain.check()


def test_evaluation_with_gradients_runs_eagerly():
    """A module in evaluation mode that computes gradients runs eagerly, and is not captured.

    Graphs are captured in training mode, where this module computes other values.
    """
    modal = Foreign(lambda self, hidden, computed, packed: computed * (2 if self.training else 3))
    chain = Chain(modal).capture()
    modal.eval()
    chain.check(replays=False)
    assert chain.runner.counters.module_fallbacks.total() == 3
    chain.capture()
    assert "module 0 not captured for up to 4 documents: it is in evaluation mode" in chain.said[-2]


def test_a_frozen_beginning_is_refused():
    """A first module whose input requires no gradient is refused; its graphs would compute one."""

    class Frozen(Chain):
        def forward(self, hidden, packed):
            return super().forward(hidden.detach(), packed)

        def drive(self, micro_batch):
            output = self.forward(hidden_states(), micro_batch.packed)
            output.sum().backward()
            return output, self.buffers.grads.clone()

    chain = Frozen(Foreign(), Foreign()).capture()
    assert (
        "module 0 not captured for up to 4 documents: its input does not require a gradient"
        in chain.said[0]
    )
    assert chain.runner.counters.captures == 3
    chain.check(replays=False)
    assert chain.modules[1].forward.name not in str(chain.runner.counters.module_fallbacks)


def test_frozen_weights_within_captured_modules_stay_out():
    modules = [Foreign(), Foreign()]
    modules[0].weight.requires_grad_(False)
    chain = Chain(*modules).capture()
    chain.check()
    assert not hasattr(modules[0].weight, "main_grad")


def test_weights_tied_to_an_eager_module_get_both_gradients():
    class Tied(Chain):
        def forward(self, hidden, packed):
            return super().forward(hidden, packed) @ self.modules[0].weight

    Tied(Foreign(), Foreign()).capture().check()


def test_numbers_drawn_on_the_host_are_refused_too():
    noisy = Foreign(lambda self, hidden, computed, packed: computed * torch.rand(()))
    chain = Chain(noisy)
    chain.backend.random_state = lambda device: torch.zeros(
        1
    )  # state of the device's generator, which does not change
    chain.capture()
    assert "it draws random numbers" in chain.said[0]


def test_moving_the_generator_on_and_using_nothing_of_it_is_no_reason_to_refuse():
    def idle(self, hidden, computed, packed):
        torch.rand(())
        return computed

    chain = Chain(Foreign(idle)).capture()
    chain.check()
    assert chain.runner.counters.captures == 1 + 2


# -- life cycle -------------------------------------------------------------------------------------


def test_an_interrupted_capture_leaves_everything_eager():
    for number in range(2 * 5):
        chain = Chain(Foreign(), Foreign(), capture_sizes=CaptureSizes.from_capacities([4, 12], T))
        true, calls = chain.backend.capture, []

        def capture(function, true=true, calls=calls, number=number):
            calls.append(function)
            if len(calls) > number:
                raise KeyboardInterrupt
            return true(function)

        chain.backend.capture = capture
        with pytest.raises(KeyboardInterrupt):
            chain.capture()
        chain.check()
        assert chain.runner.counters.fallbacks == {"no graphs": 3} and all(
            graph.gone for graph in chain.backend.graphs
        )
        chain.backend.capture = true
        chain.capture().check()
        assert chain.runner.counters.replays == 3


@pytest.mark.parametrize(("warmup_steps", "passes"), [(0, 2), (1, 2), (2, 4)])
def test_warm_ups_come_before_all_captures_and_once(warmup_steps, passes):
    """All warm-up passes run before the first capture, and a refused module repeats none of them.

    An eager pass may not fit in device memory together with graphs.
    """
    chain = Chain(
        Foreign(),
        Foreign(lambda self, hidden, computed, packed: (computed, None)),
        Foreign(),
        capture_sizes=CaptureSizes.from_capacities([4, 12], T),
        warmup_steps=warmup_steps,
    )
    graphs_at_pass = []
    chain.backend.fail_at = {2}
    chain.runner.forward_backward = lambda m: (
        graphs_at_pass.append(len(chain.backend.graphs)) or chain.drive(m)
    )
    chain.runner.capture(full_of)
    assert graphs_at_pass == [0] * passes
    assert sum("module 1 not captured" in line for line in chain.said) == 1  # reported only once
    assert (
        sum(
            "module 2 not captured for up to 12 documents: OutOfMemoryError" in line
            for line in chain.said
        )
        == 1
    )
    chain.check(replays=False)


def test_a_module_has_the_graphs_of_one_runner():
    chain = Chain(Foreign()).capture()
    with pytest.raises(
        ValueError,
        match="module 0 has the graphs of another LayerGraphs; close that LayerGraphs first",
    ):
        Chain(chain.modules[0])
    chain.check()
    chain.runner.close()
    Chain(chain.modules[0]).capture().check()


def test_a_module_and_its_part_are_not_both_captured():
    outer = nn.Sequential(Foreign())
    options = {
        "total_tokens": T,
        "capture_sizes": ONE,
        "device": torch.device("cpu"),
        "backend": RecordingBackend(),
    }
    for modules in ({"outer": outer, "inner": outer[0]}, {"inner": outer[0], "outer": outer}):
        with pytest.raises(ValueError, match=r"inner is, or is a part of, outer; capture only one"):
            LayerGraphs(modules, lambda micro_batch: None, **options)
    with pytest.raises(ValueError, match=r"two is, or is a part of, one"):
        LayerGraphs({"one": outer, "two": outer}, lambda micro_batch: None, **options)
    with pytest.raises(TypeError, match=r"modules is of type list; pass a dictionary of names"):
        LayerGraphs([outer], lambda micro_batch: None, **options)
    with pytest.raises(TypeError, match="outer is of type int; pass a torch"):
        LayerGraphs({"outer": 1}, lambda micro_batch: None, **options)
    runner = LayerGraphs({"outer": outer}, lambda micro_batch: None, **options)
    with pytest.raises(TypeError, match="micro_batch is of type NoneType; pass a MicroBatch"):
        runner.place(None)
    runner.close()
    assert "forward" not in vars(outer) and "forward" not in vars(outer[0])


def test_two_runners_in_one_process_do_not_meet():
    one, other = Chain(Foreign(), Foreign()).capture(), Chain(Foreign()).capture()
    packed, hidden = one.place(), hidden_states()
    output = one.forward(hidden, packed)
    other.check()
    output.sum().backward()
    one.check()


def test_close_gives_a_replaced_forward_back():
    module = Foreign()
    mine = module.forward = lambda hidden, packed, true=module.forward: 2 * true(hidden, packed)
    chain = Chain(module).capture()
    chain.check()
    chain.runner.close()
    assert module.forward is mine


def test_copies_and_pickles_are_refused_until_the_graphs_are_closed():
    chain = Chain(nn.Linear(D, D), call=lambda module, hidden, packed: module(hidden)).capture()
    for make in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=r"module 0 has CUDA graphs.*state_dict\(\), or close"):
            make(chain.modules[0])
    chain.runner.close()
    assert torch.equal(copy.deepcopy(chain.modules[0]).weight, chain.modules[0].weight)


def test_without_a_gpu_everything_runs_eagerly_and_one_sentence_says_so():
    """Nothing is captured on a CPU: the modules compute as before, and the reason is counted."""
    chain = Chain(Foreign(), Foreign(), backend=None, num_slots=2)
    runner, reason = chain.runner, "CUDA graphs need a GPU, and the device is cpu"
    runner.tune(lambda size: pytest.fail("no pass is needed"))
    runner.capture(lambda size: pytest.fail("no pass is needed"))
    chain.check()
    assert chain.said == [f"{reason}: every micro-batch runs eagerly."]
    micro_batch = pack(FIRST, capture_sizes=ONE)
    assert runner.off_reason == runner.why_eager(micro_batch) == reason
    assert runner.counters.fallbacks == {reason: 3} and not runner.counters.module_fallbacks
    assert runner.audit(micro_batch, deterministic=True) is None
    runner.close()
    assert "forward" not in vars(chain.modules[0])
    with pytest.raises(GraphFallbackError, match=f"{reason}; --cuda-graph-strict"):
        Chain(Foreign(), backend=None, strict=True)
    assert Chain(Foreign()).capture().runner.off_reason is None


def test_a_gradient_that_moved_is_noticed():
    chain = Chain(Foreign()).capture()
    weight = chain.modules[0].weight
    weight.main_grad = torch.zeros(D, D)
    assert chain.runner.addresses_changed
    chain.drive(chain.runner.place(pack(FIRST, capture_sizes=ONE)))
    assert weight.main_grad.norm() > 0


def test_a_buffer_that_is_gone_or_new_is_noticed():
    module = Foreign(
        lambda self, hidden, computed, packed: (
            computed if self.shift is None else computed + self.shift
        )
    )
    module.register_buffer("shift", None)
    chain = Chain(module).capture()
    module.shift = torch.ones(D)
    assert chain.runner.addresses_changed
    chain.check()
    chain.capture().check()
    assert chain.runner.counters.replays == 3 and chain.runner.counters.fallbacks.total() == 3
    module.shift = None
    assert chain.runner.addresses_changed
    chain.check()


def test_an_overwritten_micro_batch_is_not_placed_again():
    """A placed micro-batch cannot be placed again after its slot was filled with another one."""
    chain = Chain(Foreign()).capture()
    placed = chain.runner.place(pack(FIRST, capture_sizes=ONE))
    again = chain.runner.place(placed)
    chain.runner.place(pack(SECOND, capture_sizes=ONE))
    for old in (placed, again):
        with pytest.raises(StaleMetadataError, match="micro-batch"):
            chain.runner.place(old)


def test_the_reason_of_a_fallback_is_the_true_one_and_so_is_the_advice():
    chain = Chain(Foreign()).capture()
    chain.runner.place(pack(FIRST))  # built for capture sizes of another runner
    chain.runner.place(pack(SECOND, capacity=None, max_seqlen=None))
    assert chain.runner.counters.fallbacks == {
        "padded to a size for which no graph was captured": 1
    }
    strict = Chain(Foreign(), strict=True).capture()
    strict.modules[0].weight.data = strict.modules[0].weight.data.clone()
    with pytest.raises(GraphFallbackError, match=r"forbids: weights have moved to other memory\.$"):
        strict.place()


@pytest.mark.parametrize("names", [{3}, {2, 3}])
def test_the_router_alone_with_a_bias_that_moves(names):
    """A captured router without metadata reads the expert bias, which changes in place each step."""
    options = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
    jobs = [Job(tiny_model("M*-E", **options)), Job(tiny_model("M*-E", **options))]
    model = jobs[1].model
    modules = {
        f"layers.{n}": model.layers[n].mixer.router if n == 3 else model.layers[n]
        for n in sorted(names)
    }
    jobs[1].runner = LayerGraphs(
        modules,
        jobs[1].drive,
        total_tokens=T,
        capture_sizes=CAPTURE_SIZES,
        device=torch.device("cpu"),
        tables=model.pack_tables.derive,
        check=model.pack_tables.check,
        backend=jobs[1].backend,
    )
    jobs[1].capture()
    for lengths in (FIRST, [T], [5] * 12, FIRST):
        jobs[1].backend.scramble()
        results = [job.step(pack(lengths)) for job in jobs]
        assert_equal(*results)
        for job, values in zip(jobs, results):
            job.model.update_expert_bias(values[4])
    assert not jobs[1].runner.counters.module_fallbacks and jobs[1].runner.counters.replays == 4


class Counting(Foreign):
    """Module that counts its calls in a buffer and multiplies its result by the count.

    Replays of its graph also increment the buffer.
    """

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, hidden, packed):
        result = super().forward(hidden, packed) * (self.calls + 1)
        with torch.no_grad():
            self.calls += 1
        return result


class CountingBackend(RecordingBackend):
    """Backend that restores ``calls`` of all modules after a capture.

    On a GPU a capture computes nothing, so ``calls`` would not change.
    """

    def capture(self, function):
        before = [module.calls.clone() for module in self.counting]
        captured = super().capture(function)
        for module, calls in zip(self.counting, before):
            module.calls.copy_(calls)
        return captured


def test_what_a_module_counts_is_neither_capture_nor_audit():
    modules = [Counting(), Counting()]
    backend = CountingBackend()
    backend.counting = modules
    chain = Chain(*modules, backend=backend).capture()
    assert [module.calls.item() for module in modules] == [0, 0]
    for wanted in (1, 2):
        chain.drive(chain.runner.place(pack(FIRST, capture_sizes=ONE)))
        assert [module.calls.item() for module in modules] == [wanted, wanted]
        assert chain.audit(SECOND).compared == 2
    assert not chain.runner.counters.module_fallbacks


def test_a_micro_batch_that_is_placed_again_replays_again():
    chain = Chain(Foreign(), Foreign()).capture()
    placed = chain.runner.place(pack(FIRST, capture_sizes=ONE))
    once = chain.results(placed)
    again = chain.results(chain.runner.place(placed))
    assert_equal(once, again)
    assert chain.runner.counters.replays == 2 and not chain.runner.counters.module_fallbacks


def test_without_a_gpu_whole_steps_run_eagerly():
    """Without a GPU, the parts and the end of a step run eagerly, and nothing is captured."""
    calls, said = [], []
    runner = FullIterationGraphs(
        {"part": lambda micro_batch: calls.append("part")},
        lambda: calls.append("finish"),
        rehearsing=lambda: pytest.fail("nothing is rehearsed"),
        places=tuple,
        total_tokens=T,
        capture_sizes=ONE,
        device=torch.device("cpu"),
        say=said.append,
    )
    runner.tune(full_of)
    runner.capture(full_of)
    runner.run("part", runner.parts["part"], pack(FIRST, capture_sizes=ONE))
    runner.finish_step(lambda: calls.append("finish"))
    runner.close()
    assert calls == ["part", "finish"] and runner.off_reason in said[0] and len(said) == 1
