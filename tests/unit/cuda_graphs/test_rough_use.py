"""What users do to captured modules: other calls, other contexts, strange results, interruptions. Right, or refused."""

import copy
import pickle

import pytest
import torch
from stand_in import RecordingEngine
from test_runner import LADDER, Job, T, assert_equal, full_of, pack, tiny_model
from torch import nn

from megatron_packed.cuda_graphs.audit import audit
from megatron_packed.cuda_graphs.capture import same_memory
from megatron_packed.cuda_graphs.counters import GraphFallbackError
from megatron_packed.cuda_graphs.runner import GraphRunner
from megatron_packed.cuda_graphs.slots import StaleMetadataError
from megatron_packed.distributed.flat_buffers import FlatBuffers
from megatron_packed.packed.capacity import Ladder

D = 8
ONE = Ladder.of([4], T)
FIRST, SECOND = [10, 20], [5, 6, 7]


class Foreign(nn.Module):
    """Returns what ``result(self, hidden, computed, packed)`` makes of it."""

    def __init__(self, result=lambda self, hidden, computed, packed: computed):
        super().__init__()
        torch.manual_seed(3)
        self.weight, self.result = nn.Parameter(torch.randn(D, D) / D), result
        self.register_buffer("scale", torch.ones(D))
        self.skipped = False

    def forward(self, hidden, packed=None):
        computed = torch.tanh(hidden @ self.weight) * self.scale
        if packed is not None:
            computed = computed * (packed.seq_idx[0, :, None] + 1)
        return self.result(self, hidden, computed, packed)


def hidden_states(seed=0):
    torch.manual_seed(seed)
    return torch.randn(T, D, requires_grad=True)


def first_of(result):
    return result[0] if isinstance(result, tuple) else result


class Chain:
    """Foreign modules, one behind the other, with graphs."""

    def __init__(self, *modules, call=lambda module, hidden, packed: module(hidden, packed), **options):
        self.modules, self.call = nn.ModuleList(modules), call
        self.buffers, self.said, self.engine = FlatBuffers(self.modules), [], RecordingEngine()
        named = {f"module {number}": module for number, module in enumerate(modules)}
        self.runner = GraphRunner(named, **{"total_tokens": T, "ladder": ONE, "device": torch.device("cpu"),
                                            "engine": self.engine, "say": self.said.append} | options)  # fmt: skip

    def capture(self):
        self.runner.capture(self.drive, full_of)
        return self

    def forward(self, hidden, packed):
        hidden = hidden * 1
        for module in self.modules:
            hidden = first_of(self.call(module, hidden, packed))
        return hidden

    def drive(self, micro_batch):
        hidden = hidden_states()
        output = self.forward(hidden, micro_batch.packed)
        output.square().sum().backward()
        return output.detach().clone(), hidden.grad

    def results(self, micro_batch):
        self.buffers.zero_grad()
        return [*self.drive(micro_batch), self.buffers.grads.clone()]

    def check(self, replays=True):
        """Placed micro-batches give what eager ones give."""
        before = dict(self.runner.counters.module_fallbacks)
        for lengths in (FIRST, [T], SECOND):
            self.engine.scramble()
            placed = self.results(self.runner.place(pack(lengths, ladder=self.runner.ladder)))
            self.runner.slot.vacate()
            assert_equal(placed, self.results(pack(lengths)))
        assert not replays or dict(self.runner.counters.module_fallbacks) == before

    def place(self, lengths=FIRST):
        return self.runner.place(pack(lengths, ladder=self.runner.ladder)).packed


# ------------------------------------------------------------------------------------------------------ what it returns

RETURNED = {
    "the same twice": lambda self, hidden, computed, packed: (computed, computed),
    "a view of it": lambda self, hidden, computed, packed: (computed, computed[:, ::2]),
    "integers": lambda self, hidden, computed, packed: (computed, computed.argmax(1)),
    "nothing in it": lambda self, hidden, computed, packed: (computed, computed[:0]),
    "another layout": lambda self, hidden, computed, packed: computed.t().contiguous().t(),
    "a dictionary": lambda self, hidden, computed, packed: (computed, {"sum": computed.sum()}),
}
NOT_ITS_OWN = {
    "its input": lambda self, hidden, computed, packed: hidden,
    "a view of its input": lambda self, hidden, computed, packed: (computed, hidden[1:]),
    "a parameter": lambda self, hidden, computed, packed: (computed, self.weight),
    "a buffer": lambda self, hidden, computed, packed: (computed, self.scale),
    "the metadata": lambda self, hidden, computed, packed: (computed, packed.valid),
}


@pytest.mark.parametrize("result", RETURNED.values(), ids=RETURNED)
def test_unusual_results_are_replayed(result):
    chain = Chain(Foreign(result), Foreign(result)).capture()
    assert chain.runner.counters.captures == 5, chain.said
    chain.check()
    assert audit(chain.runner, pack(FIRST, ladder=ONE), deterministic=True).largest_difference == 0


def test_several_elements_in_one_place_become_writable():
    """Outputs and gradients behind ``expand`` cannot be static: others are copied to their place."""
    result = lambda self, hidden, computed, packed: computed.sum(0).expand(T, D)  # noqa: E731
    chain = Chain(Foreign(), Foreign(result), Foreign()).capture()
    chain.check()
    packed = chain.place()
    with torch.no_grad():
        hidden = torch.randn(T, D)
        assert torch.equal(chain.modules[2](hidden, packed), chain.modules[2].forward.forward(hidden, packed))


@pytest.mark.parametrize("result", NOT_ITS_OWN.values(), ids=NOT_ITS_OWN)
def test_memory_that_is_not_the_modules_own_is_refused(result):
    chain = Chain(Foreign(), Foreign(result), Foreign()).capture()
    assert "module 1 not captured for up to 4 documents: it returns memory that is not its own" in chain.said[0]
    assert chain.runner.counters.captures == 1 + 2 * 2
    chain.check(replays=False)
    audit(chain.runner, pack(FIRST, ladder=ONE), deterministic=True)
    chain.check(replays=False)


@pytest.mark.parametrize("extra, named", [(None, "NoneType"), (3, "int"), ("text", "str")])
def test_what_is_no_tensor_is_refused(extra, named):
    chain = Chain(Foreign(lambda self, hidden, computed, packed: (computed, extra))).capture()
    assert f"it returns {named}, and a graph can refresh tensors only" in chain.said[0]
    chain.check(replays=False)


def test_a_result_that_does_not_depend_on_the_input_is_refused():
    constant = Foreign(lambda self, hidden, computed, packed: self.weight.sum() * torch.ones(T, D))
    chain = Chain(Foreign(), constant)
    chain.runner.capture(chain.drive, full_of)
    assert "module 1 not captured" in chain.said[0] and "must depend on its input" in chain.said[0]
    assert chain.runner.counters.captures == 3


# ------------------------------------------------------------------------------------------------- how it is called


def test_keywords_are_refused_and_still_work():
    keywords = Chain(Foreign(), call=lambda module, hidden, packed: module(hidden=hidden, packed=packed)).capture()
    assert "with keywords" in keywords.said[0]
    keywords.check(replays=False)


def test_a_module_called_without_its_metadata_does_not_take_the_slots():
    chain = Chain(Foreign()).capture()
    chain.place()
    module, hidden = chain.modules[0], hidden_states()
    assert torch.equal(module(hidden), module.forward.forward(hidden))
    assert chain.runner.counters.module_fallbacks == {"module 0: called with other arguments than in the warm-up": 1}


def test_metadata_made_from_the_slots_is_refused_by_its_name():
    call = lambda module, hidden, packed: module(hidden, packed.with_tables(mine=1))  # noqa: E731
    chain = Chain(Foreign(), call=call).capture()
    assert "it is given metadata made from the slot's" in chain.said[0]
    chain.check(replays=False)


def test_a_pack_that_nobody_placed_is_no_fallback():
    """Generation or a look at hidden states between steps, strict or not."""
    chain = Chain(Foreign(), strict=True).capture()
    chain.place()
    other, hidden = pack([30, 34]).packed, hidden_states()
    module = chain.modules[0]
    assert torch.equal(module(hidden, other), module.forward.forward(hidden, other))
    assert not chain.runner.counters.module_fallbacks


def test_after_the_capture_nothing_lies_in_the_slot():
    chain = Chain(Foreign(), strict=True).capture()
    hidden = hidden_states()
    assert chain.modules[0](hidden).shape == (T, D)


def test_a_module_that_the_warm_up_did_not_run():
    chain = Chain(Foreign(), Foreign(), call=lambda m, hidden, packed: hidden if m.skipped else m(hidden, packed))
    chain.modules[1].skipped = True
    chain.capture()
    chain.modules[1].skipped = False
    chain.check(replays=False)
    assert set(chain.runner.counters.module_fallbacks) == {"module 1: the warm-up did not run it"}


@pytest.mark.parametrize("between", [torch.enable_grad, torch.no_grad])
def test_running_again_before_the_backward_keeps_the_activations(between):
    chain = Chain(Foreign(), Foreign()).capture()
    packed, hidden = chain.place(), hidden_states()
    output = chain.forward(hidden, packed)
    with between():
        chain.forward(hidden_states(1), packed)
    output.sum().backward()
    found, hidden.grad = hidden.grad, None
    chain.runner.slot.vacate()
    chain.forward(hidden, pack(FIRST).packed).sum().backward()
    assert torch.equal(found, hidden.grad)
    assert sum(chain.runner.counters.module_fallbacks.values()) == 2


def test_graphs_are_captured_in_the_order_of_calls_whatever_the_order_of_names():
    """Else a replay would write over activations: graphs share memory by the order of their captures."""

    class Backwards(Chain):
        def forward(self, hidden, packed):
            hidden = hidden * 1
            for module in reversed(self.modules):
                hidden = module(hidden, packed)
            return hidden

    chain = Backwards(Foreign(), Foreign(), Foreign()).capture()
    chain.check()
    numbers = [chain.engine.graphs.index(graph) for graph in chain.engine.log[-7:]]
    assert numbers == list(range(7))
    last, middle, first = (module.forward.captured[ONE.cells[0]] for module in chain.modules)
    assert same_memory(first.outputs[0], middle.input) and same_memory(middle.outputs[0], last.input)


class Beside(Chain):
    """Modules that do not follow each other."""

    def forward(self, hidden, packed):
        return sum(module(hidden * 1, packed) for module in self.modules)


OUT_OF_TURN = "it runs again in this micro-batch, or in another order than in the warm-up"


def test_another_order_of_calls_runs_eagerly():
    chain = Beside(Foreign(), Foreign()).capture()
    chain.check()
    packed, hidden = chain.place(), hidden_states()
    for module in reversed(chain.modules):
        assert torch.equal(module(hidden, packed), module.forward.forward(hidden, packed))
    assert chain.runner.counters.module_fallbacks == {f"module 0: {OUT_OF_TURN}": 1}


def test_forward_after_a_backward_has_begun_runs_eagerly():
    chain = Beside(Foreign(), Foreign()).capture()
    packed, hidden = chain.place(), hidden_states()
    chain.modules[0](hidden * 1, packed).sum().backward()
    chain.modules[1](hidden * 1, packed)
    assert chain.runner.counters.module_fallbacks == {f"module 1: {OUT_OF_TURN}": 1}


def test_backwards_in_another_order_are_an_error():
    chain = Beside(Foreign(), Foreign()).capture()
    packed, hidden = chain.place(), hidden_states()
    results = [module(hidden * 1, packed) for module in chain.modules]
    results[0].sum().backward()
    with pytest.raises(RuntimeError, match=r"after that of a module in front of it.*one backward, of all losses"):
        results[1].sum().backward()


def test_a_step_that_broke_off_leaves_nothing_behind():
    chain = Chain(Foreign(), Foreign()).capture()
    chain.forward(hidden_states(1), chain.place([T]))  # no backward came
    chain.check()


def test_a_hook_that_came_later_does_not_spoil_the_module_before():
    """The second input was the first output; now it is not, and its place holds what a backward needs."""
    squared = lambda self, hidden, computed, packed: computed.exp()  # noqa: E731 - saves its output
    chain = Chain(Foreign(squared), Foreign(squared)).capture()
    first, second = (module.forward.captured[ONE.cells[0]] for module in chain.modules)
    assert same_memory(first.outputs[0], second.input)
    chain.modules[0].register_forward_hook(lambda module, inputs, output: output * 2)
    chain.check(replays=False)
    assert set(chain.runner.counters.module_fallbacks) == {
        "module 1: its input is no longer what the module before it returned"
    }


def test_two_ways_from_one_output_add_their_gradients():
    class Fork(Chain):
        def forward(self, hidden, packed):
            first = self.modules[0](hidden * 1, packed)
            return self.modules[1](first, packed) + self.modules[2](first, packed) * first

    Fork(Foreign(), Foreign(), Foreign()).capture().check()


@pytest.mark.parametrize("shaped", [lambda leaf: leaf, lambda leaf: leaf.view(T, D), lambda leaf: leaf.t().t()])
def test_a_leaf_keeps_its_gradient_over_micro_batches(shaped):
    """Autograd would take the static gradient itself for ``leaf.grad``, and the next replay would write over it."""
    chain, leaf = Chain(Foreign()), nn.Parameter(hidden_states().detach())
    module = chain.modules[0]

    def drive(micro_batch):
        module(shaped(leaf), micro_batch.packed).square().sum().backward()

    chain.runner.capture(drive, full_of)
    sums = []
    for place in (lambda lengths: chain.runner.place(pack(lengths, ladder=ONE)), pack):
        chain.runner.slot.vacate()
        leaf.grad = None
        for lengths in (FIRST, SECOND):
            drive(place(lengths))
        sums.append(leaf.grad)
    assert torch.equal(*sums)


# ------------------------------------------------------------------------------------------------------------- contexts


def test_autocast_runs_eagerly():
    chain = Chain(Foreign()).capture()
    packed, hidden, module = chain.place(), hidden_states(), chain.modules[0]
    with torch.autocast("cpu", torch.bfloat16):
        found, wanted = module(hidden, packed), module.forward.forward(hidden, packed)
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
    """Graphs are those of training mode; without gradients the outputs are what counts, and are the same."""
    modal = Foreign(lambda self, hidden, computed, packed: computed * (2 if self.training else 3))
    chain = Chain(modal).capture()
    modal.eval()
    chain.check(replays=False)
    assert chain.runner.counters.module_fallbacks.total() == 3
    chain.capture()
    assert "module 0 not captured for up to 4 documents: it is in evaluation mode" in chain.said[-2]


def test_a_frozen_beginning_is_refused():
    """What comes first gets hidden states without a gradient, and its graphs would compute one."""

    class Frozen(Chain):
        def forward(self, hidden, packed):
            return super().forward(hidden.detach(), packed)

        def drive(self, micro_batch):
            output = self.forward(hidden_states(), micro_batch.packed)
            output.sum().backward()
            return output, self.buffers.grads.clone()

    chain = Frozen(Foreign(), Foreign()).capture()
    assert "module 0 not captured for up to 4 documents: its input asks for no gradient" in chain.said[0]
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
    chain.engine.random_state = lambda device: torch.zeros(1)  # of the device, where nothing was drawn
    chain.capture()
    assert "it draws random numbers" in chain.said[0]


def test_moving_the_generator_on_and_using_nothing_of_it_is_no_reason_to_refuse():
    def idle(self, hidden, computed, packed):
        torch.rand(())
        return computed

    chain = Chain(Foreign(idle)).capture()
    chain.check()
    assert chain.runner.counters.captures == 1 + 2


# ---------------------------------------------------------------------------------------------------------- life cycle


def test_an_interrupted_capture_leaves_everything_eager():
    for number in range(2 * 5):
        chain = Chain(Foreign(), Foreign(), ladder=Ladder.of([4, 12], T))
        true, calls = chain.engine.capture, []

        def capture(function, true=true, calls=calls, number=number):
            calls.append(function)
            if len(calls) > number:
                raise KeyboardInterrupt
            return true(function)

        chain.engine.capture = capture
        with pytest.raises(KeyboardInterrupt):
            chain.capture()
        chain.check()
        assert chain.runner.counters.fallbacks == {"no graphs": 3} and all(graph.gone for graph in chain.engine.graphs)
        chain.engine.capture = true
        chain.capture().check()
        assert chain.runner.counters.replays == 3


def test_warm_ups_come_before_all_captures_and_once():
    """An eager pass has no room beside graphs' memory; a refusal does not repeat it."""
    chain = Chain(Foreign(), Foreign(lambda self, hidden, computed, packed: (computed, None)), Foreign(),
                  ladder=Ladder.of([4, 12], T), warmup_steps=2)  # fmt: skip
    graphs_at_pass = []
    chain.engine.fail_at = {2}
    chain.runner.capture(lambda m: graphs_at_pass.append(len(chain.engine.graphs)) or chain.drive(m), full_of)
    assert graphs_at_pass == [0] * 4
    assert sum("module 1 not captured" in line for line in chain.said) == 1  # one reason, said once
    assert sum("module 2 not captured for up to 12 documents: OutOfMemoryError" in line for line in chain.said) == 1
    chain.check(replays=False)


def test_a_module_has_the_graphs_of_one_runner():
    chain = Chain(Foreign()).capture()
    with pytest.raises(ValueError, match="module 0 has the graphs of another runner; close that one first"):
        Chain(chain.modules[0])
    chain.check()
    chain.runner.close()
    Chain(chain.modules[0]).capture().check()


def test_a_module_and_its_part_are_not_both_captured():
    outer = nn.Sequential(Foreign())
    options = {"total_tokens": T, "ladder": ONE, "device": torch.device("cpu"), "engine": RecordingEngine()}
    for modules in ({"outer": outer, "inner": outer[0]}, {"inner": outer[0], "outer": outer}):
        with pytest.raises(ValueError, match=r"inner is \(a part of\) outer; capture one of the two"):
            GraphRunner(modules, **options)
    with pytest.raises(ValueError, match=r"two is \(a part of\) one"):
        GraphRunner({"one": outer, "two": outer}, **options)
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


def test_without_a_gpu_the_engine_says_so():
    with pytest.raises(ValueError, match="CUDA graphs need a GPU, and the device is cpu"):
        GraphRunner({"module": Foreign()}, total_tokens=T, ladder=ONE, device=torch.device("cpu"))


def test_a_gradient_that_moved_is_noticed():
    chain = Chain(Foreign()).capture()
    weight = chain.modules[0].weight
    weight.main_grad = torch.zeros(D, D)
    assert chain.runner.moved
    chain.drive(chain.runner.place(pack(FIRST, ladder=ONE)))
    assert weight.main_grad.norm() > 0


def test_a_buffer_that_is_gone_or_new_is_noticed():
    module = Foreign(lambda self, hidden, computed, packed: computed if self.shift is None else computed + self.shift)
    module.register_buffer("shift", None)
    chain = Chain(module).capture()
    module.shift = torch.ones(D)
    assert chain.runner.moved
    chain.check()
    chain.capture().check()
    assert chain.runner.counters.replays == 3 and chain.runner.counters.fallbacks.total() == 3
    module.shift = None
    assert chain.runner.moved
    chain.check()


def test_an_overwritten_micro_batch_is_not_placed_again():
    """Its bytes are those of the next one by now."""
    chain = Chain(Foreign()).capture()
    placed = chain.runner.place(pack(FIRST, ladder=ONE))
    again = chain.runner.place(placed)
    chain.runner.place(pack(SECOND, ladder=ONE))
    for old in (placed, again):
        with pytest.raises(StaleMetadataError, match="micro-batch"):
            chain.runner.place(old)


def test_the_reason_of_a_fallback_is_the_true_one_and_so_is_the_advice():
    chain = Chain(Foreign()).capture()
    chain.runner.place(pack(FIRST))  # of the cells of another ladder
    chain.runner.place(pack(SECOND, capacity=None, max_seqlen=None))
    assert chain.runner.counters.fallbacks == {"built in the size of no cell": 1}
    strict = Chain(Foreign(), strict=True).capture()
    strict.modules[0].weight.data = strict.modules[0].weight.data.clone()
    with pytest.raises(GraphFallbackError, match=r"forbids: weights have moved to other memory\.$"):
        strict.place()


@pytest.mark.parametrize("names", [{3}, {2, 3}])
def test_the_router_alone_with_a_bias_that_moves(names):
    """Its forward takes no metadata, and the bias of its experts changes between steps, in place."""
    options = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
    jobs = [Job(tiny_model("M*-E", **options)), Job(tiny_model("M*-E", **options))]
    model = jobs[1].model
    modules = {f"layers.{n}": model.layers[n].mixer.router if n == 3 else model.layers[n] for n in sorted(names)}
    jobs[1].runner = GraphRunner(modules, total_tokens=T, ladder=LADDER, device=torch.device("cpu"),
                                 tables=model.tables, check=model.check, engine=jobs[1].engine)  # fmt: skip
    jobs[1].capture()
    for lengths in (FIRST, [T], [5] * 12, FIRST):
        jobs[1].engine.scramble()
        results = [job.step(pack(lengths)) for job in jobs]
        assert_equal(*results)
        for job, values in zip(jobs, results):
            job.model.update_expert_bias(values[4])
    assert not jobs[1].runner.counters.module_fallbacks and jobs[1].runner.counters.replays == 4


class Counting(Foreign):
    """Counts its calls in a buffer, which graphs write as they write anything, and lets the count into its result."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, hidden, packed):
        result = super().forward(hidden, packed) * (self.calls + 1)
        with torch.no_grad():
            self.calls += 1
        return result


class CountingEngine(RecordingEngine):
    """As on a GPU: a capture computes nothing."""

    def capture(self, function):
        before = [module.calls.clone() for module in self.counting]
        captured = super().capture(function)
        for module, calls in zip(self.counting, before):
            module.calls.copy_(calls)
        return captured


def test_what_a_module_counts_is_neither_capture_nor_audit():
    modules = [Counting(), Counting()]
    engine = CountingEngine()
    engine.counting = modules
    chain = Chain(*modules, engine=engine).capture()
    assert [module.calls.item() for module in modules] == [0, 0]
    for wanted in (1, 2):
        chain.drive(chain.runner.place(pack(FIRST, ladder=ONE)))
        assert [module.calls.item() for module in modules] == [wanted, wanted]
        assert audit(chain.runner, pack(SECOND, ladder=ONE), deterministic=True).modules == 2
    assert not chain.runner.counters.module_fallbacks


def test_a_micro_batch_that_is_placed_again_replays_again():
    chain = Chain(Foreign(), Foreign()).capture()
    placed = chain.runner.place(pack(FIRST, ladder=ONE))
    once = chain.results(placed)
    again = chain.results(chain.runner.place(placed))
    assert_equal(once, again)
    assert chain.runner.counters.replays == 2 and not chain.runner.counters.module_fallbacks
