"""Captured modules with unusual calls or results: results are correct, or the module is refused."""

import pytest
import torch
from torch import nn

from megatron_packed.cuda_graphs.layer_graphs import LayerGraphs
from megatron_packed.cuda_graphs.slots import same_memory
from megatron_packed.packed.params import NO_TABLES
from support.foreign_chain import FIRST, ONE, SECOND, Beside, Chain, D, Foreign, hidden_states
from support.tiny_graph_jobs import T, full_of, pack

# -- results of modules -----------------------------------------------------------------------------

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
    assert chain.audit(FIRST).largest_difference == 0


def test_several_elements_in_one_place_become_writable():
    """Outputs and gradients of ``expand`` are made contiguous, because graphs must write to them."""
    result = lambda self, hidden, computed, packed: computed.sum(0).expand(T, D)  # noqa: E731
    chain = Chain(Foreign(), Foreign(result), Foreign()).capture()
    chain.check()
    packed = chain.place()
    with torch.no_grad():
        hidden = torch.randn(T, D)
        assert torch.equal(
            chain.modules[2](hidden, packed),
            chain.modules[2].forward.original_forward(hidden, packed),
        )


@pytest.mark.parametrize("result", NOT_ITS_OWN.values(), ids=NOT_ITS_OWN)
def test_memory_that_is_not_the_modules_own_is_refused(result):
    chain = Chain(Foreign(), Foreign(result), Foreign()).capture()
    assert (
        "module 1 not captured for up to 4 documents: it returns its input, a parameter, a buffer or the metadata"
        in chain.said[0]
    )
    assert chain.runner.counters.captures == 1 + 2 * 2
    chain.check(replays=False)
    chain.audit(FIRST)
    chain.check(replays=False)


@pytest.mark.parametrize("extra, named", [(None, "NoneType"), (3, "int"), ("text", "str")])
def test_what_is_no_tensor_is_refused(extra, named):
    chain = Chain(Foreign(lambda self, hidden, computed, packed: (computed, extra))).capture()
    assert f"it returns {named}, and a graph can update only tensors" in chain.said[0]
    chain.check(replays=False)


def test_a_result_that_does_not_depend_on_the_input_is_refused():
    constant = Foreign(lambda self, hidden, computed, packed: self.weight.sum() * torch.ones(T, D))
    chain = Chain(Foreign(), constant)
    chain.runner.capture(full_of)
    assert "module 1 not captured" in chain.said[0] and "must depend on its input" in chain.said[0]
    assert chain.runner.counters.captures == 3


# -- calls of modules -------------------------------------------------------------------------------


def test_keywords_are_refused_and_still_work():
    keywords = Chain(
        Foreign(), call=lambda module, hidden, packed: module(hidden=hidden, packed=packed)
    ).capture()
    assert "with keywords" in keywords.said[0]
    keywords.check(replays=False)


def test_a_module_called_without_its_metadata_does_not_take_the_slots():
    chain = Chain(Foreign()).capture()
    chain.place()
    module, hidden = chain.modules[0], hidden_states()
    assert torch.equal(module(hidden), module.forward.original_forward(hidden))
    assert chain.runner.counters.module_fallbacks == {
        "module 0: called with other arguments than in the warm-up": 1
    }


def test_metadata_made_from_the_slots_is_refused_by_its_name():
    call = lambda module, hidden, packed: module(hidden, packed.with_tables(NO_TABLES))  # noqa: E731
    chain = Chain(Foreign(), call=call).capture()
    assert "its metadata is a modified copy of the slot's" in chain.said[0]
    chain.check(replays=False)


def test_a_pack_that_was_not_placed_is_no_fallback():
    """A pack that was never placed (as in generation) runs eagerly without a fallback or error."""
    chain = Chain(Foreign(), strict=True).capture()
    chain.place()
    other, hidden = pack([30, 34]).packed, hidden_states()
    module = chain.modules[0]
    assert torch.equal(module(hidden, other), module.forward.original_forward(hidden, other))
    assert not chain.runner.counters.module_fallbacks


def test_after_the_capture_the_slot_is_empty():
    chain = Chain(Foreign(), strict=True).capture()
    hidden = hidden_states()
    assert chain.modules[0](hidden).shape == (T, D)


def test_a_module_that_the_warm_up_did_not_run():
    chain = Chain(
        Foreign(),
        Foreign(),
        call=lambda m, hidden, packed: hidden if m.skipped else m(hidden, packed),
    )
    chain.modules[1].skipped = True
    chain.capture()
    chain.modules[1].skipped = False
    chain.check(replays=False)
    assert set(chain.runner.counters.module_fallbacks) == {
        "module 1: it did not run in the warm-up"
    }


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
    """Graphs are captured in the order of calls, although the names have the reverse order.

    Graphs share memory by the order of captures, so another order would overwrite activations.
    """

    class Backwards(Chain):
        def forward(self, hidden, packed):
            hidden = hidden * 1
            for module in reversed(self.modules):
                hidden = module(hidden, packed)
            return hidden

    chain = Backwards(Foreign(), Foreign(), Foreign()).capture()
    chain.check()
    numbers = [chain.backend.graphs.index(graph) for graph in chain.backend.log[-7:]]
    assert numbers == list(range(7))
    last, middle, first = (module.forward.captured[ONE.sizes[0]] for module in chain.modules)
    assert same_memory(first.outputs[0], middle.input) and same_memory(
        middle.outputs[0], last.input
    )


OUT_OF_TURN = "it runs again in this micro-batch, or in another order than in the warm-up"


def test_another_order_of_calls_runs_eagerly():
    chain = Beside(Foreign(), Foreign()).capture()
    chain.check()
    packed, hidden = chain.place(), hidden_states()
    for module in reversed(chain.modules):
        assert torch.equal(module(hidden, packed), module.forward.original_forward(hidden, packed))
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
    with pytest.raises(
        RuntimeError, match=r"after the backward pass of an earlier module.*Call backward once"
    ):
        results[1].sum().backward()


def test_an_interrupted_step_leaves_no_micro_batch_in_its_slot():
    chain = Chain(Foreign(), Foreign()).capture()
    chain.forward(hidden_states(1), chain.place([T]))  # without a backward pass
    chain.check()


def test_a_hook_that_came_later_does_not_spoil_the_module_before():
    """A hook that replaces the input of the second module makes that module run eagerly.

    A copy to its static input would overwrite the first module's output, which backward needs.
    """
    squared = lambda self, hidden, computed, packed: computed.exp()  # noqa: E731 - saves its output
    chain = Chain(Foreign(squared), Foreign(squared)).capture()
    first, second = (module.forward.captured[ONE.sizes[0]] for module in chain.modules)
    assert same_memory(first.outputs[0], second.input)
    chain.modules[0].register_forward_hook(lambda module, inputs, output: output * 2)
    chain.check(replays=False)
    assert set(chain.runner.counters.module_fallbacks) == {
        "module 1: its input is not the tensor that the module before it returned"
    }


def test_two_ways_from_one_output_add_their_gradients():
    class Fork(Chain):
        def forward(self, hidden, packed):
            first = self.modules[0](hidden * 1, packed)
            return self.modules[1](first, packed) + self.modules[2](first, packed) * first

    Fork(Foreign(), Foreign(), Foreign()).capture().check()


@pytest.mark.parametrize(
    "shaped", [lambda leaf: leaf, lambda leaf: leaf.view(T, D), lambda leaf: leaf.t().t()]
)
def test_a_leaf_keeps_its_gradient_over_micro_batches(shaped):
    """The gradient of a leaf input adds up over micro-batches.

    If the replay returned its static gradient, autograd could store that tensor as ``leaf.grad``,
    and the next replay would overwrite it.
    """
    chain, leaf = Chain(Foreign()), nn.Parameter(hidden_states().detach())
    module = chain.modules[0]

    def drive(micro_batch):
        module(shaped(leaf), micro_batch.packed).square().sum().backward()

    chain.runner.forward_backward = drive
    chain.runner.capture(full_of)
    sums = []
    for place in (lambda lengths: chain.runner.place(pack(lengths, capture_sizes=ONE)), pack):
        chain.runner.slot.vacate()
        leaf.grad = None
        for lengths in (FIRST, SECOND):
            drive(place(lengths))
        sums.append(leaf.grad)
    assert torch.equal(*sums)


# -- host reads, found on a CPU ----------------------------------------------------------------------


class Reading(nn.Module):
    """Module whose forward reads a value on the host."""

    def forward(self, hidden, packed):
        return hidden * float(hidden.sum()) * packed.valid[:, None]


def test_a_module_that_reads_on_the_host_is_named_on_a_cpu():
    """One sentence at the first call, with the line; the next calls are those of the module."""
    said, reading, plain = [], Reading(), Foreign()
    runner = LayerGraphs(
        {"reads": reading, "plain": plain},
        lambda micro_batch: None,
        total_tokens=T,
        capture_sizes=ONE,
        device="cpu",
        say=said.append,
    )
    assert len(said) == 1 and "CUDA graphs need a GPU" in said[0]
    packed = runner.place(pack(FIRST, capture_sizes=ONE)).packed
    hidden = torch.randn(T, D)
    first = reading(hidden, packed)
    plain(hidden, packed)
    place = f"{__file__}:{Reading.forward.__code__.co_firstlineno + 1}"
    assert said[1:] == [
        f"reads reads values on the host: float() in {place} (return hidden * float(hidden.sum()) * "
        "packed.valid[:, None]). A CUDA graph cannot repeat that, so on a GPU this module would run eagerly. Keep the "
        "values in tensors."
    ]
    assert reading.forward.original_forward == Reading.forward.__get__(reading)
    assert torch.equal(reading(hidden, packed), first) and len(said) == 2
    runner.close()
    assert "forward" not in vars(reading)


def test_a_module_that_is_closed_before_its_first_call_is_as_before():
    said, reading = [], Reading()
    mine = reading.forward = reading.forward
    runner = LayerGraphs(
        {"reads": reading},
        lambda micro_batch: None,
        total_tokens=T,
        capture_sizes=ONE,
        device="cpu",
        say=said.append,
    )
    runner.close()
    assert reading.forward is mine


def test_graphs_with_a_backend_check_no_host_reads():
    """The capture itself reports a read, so calls are not checked."""
    chain = Chain(Foreign())
    assert chain.modules[0].forward.original_forward == Foreign.forward.__get__(chain.modules[0])
