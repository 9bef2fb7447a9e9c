"""Replay equals eager with a fake of TransformerEngine's ``make_graphed_callables``."""

import ast
import gc
import importlib.util
import inspect
import sys
import types
from pathlib import Path

import pytest
import torch

from megatron_packed.cuda_graphs import transformer_engine
from megatron_packed.cuda_graphs.audit import AuditMismatchError
from megatron_packed.cuda_graphs.slots import StaleMetadataError
from support.foreign_chain import FIRST, ONE, SECOND, Beside, Chain, Foreign, hidden_states
from support.slot_schedules import parsed, run
from support.stand_in import RecordingBackend
from support.te_stand_in import make_graphed_callables, stand_in
from support.tiny_graph_jobs import Job, T, assert_equal, pack, random_packs, tiny_model


def by_transformer_engine(*modules, made=None, kind=Chain, **options):
    return kind(*modules, made_by=made or stand_in()[0], **options).capture()


@pytest.mark.shows("graphs: transformer_engine", of=lambda: (1, {"hybrid_layer_pattern": "M*-EG*"}))
def test_replay_equals_eager_and_gradients_reach_main_grad_once():
    """Losses and gradients equal eager, with dirty graph memory; ``grad`` stays None.

    The layers include experts, which return several tensors.
    """
    eager, graphed = (
        Job(tiny_model()),
        Job(tiny_model(), graphs=True, made_by=stand_in()[0]).capture(),
    )
    assert graphed.backend.lendings == graphed.backend.stream_taken == 3
    assert graphed.runner.counters.captures == 3 * (1 + 2 * 6), graphed.said
    for number, lengths in enumerate(random_packs(15)):
        graphed.backend.scramble()
        micro_batch = pack(lengths, seed=number)
        assert_equal(graphed.step(micro_batch), eager.step(micro_batch))
        assert all(parameter.grad is None for parameter in graphed.model.parameters())
    assert graphed.runner.counters.hit_rate == 1.0 and not graphed.runner.counters.module_fallbacks


def test_what_is_derived_from_metadata_is_there_before_modules_run(monkeypatch):
    """The graph of the tables is replayed before TransformerEngine captures, for each capture size.

    On a GPU a capture computes nothing, and TransformerEngine's warm-up reads the tables.
    """
    seen = []
    true = RecordingBackend.library_capture
    monkeypatch.setattr(
        RecordingBackend, "library_capture", lambda self: seen.append(list(self.log)) or true(self)
    )
    job = Job(tiny_model("M*"), graphs=True, made_by=stand_in()[0]).capture()
    tables = list(job.runner.graphs[job.runner.slot].tables.values())
    assert [log[-1] for log in seen] == tables and len(tables) == 3


def test_gradients_of_several_micro_batches_add_up():
    eager, graphed = (
        Job(tiny_model("M*-")),
        Job(tiny_model("M*-"), graphs=True, made_by=stand_in()[0]).capture(),
    )
    for job, place in ((eager, lambda micro_batch: micro_batch), (graphed, graphed.runner.place)):
        job.buffers.zero_grad()
        for seed, lengths in enumerate([[T], [5] * 9, [1] * 40]):
            job.drive(place(pack(lengths, seed=seed)))
    assert torch.equal(eager.buffers.grads, graphed.buffers.grads)


def test_every_module_reads_in_a_place_of_its_own():
    chain = by_transformer_engine(Foreign(), Foreign(), Foreign())
    inputs = {module.forward.captured[ONE.sizes[0]].input.data_ptr() for module in chain.modules}
    assert len(inputs) == 3
    chain.check()
    chain.modules[0].register_forward_hook(lambda module, inputs, output: output * 2)
    chain.check()  # copying another tensor to a static input overwrites nothing


def test_evaluation_replays_in_inference_mode_too():
    eager, graphed = (
        Job(tiny_model("M*-")),
        Job(tiny_model("M*-"), graphs=True, made_by=stand_in()[0]).capture(),
    )
    graphed.step(pack(FIRST))
    before = graphed.buffers.grads.clone()
    for context in (torch.no_grad, torch.inference_mode):
        graphed.model.eval(), eager.model.eval()
        with context():
            assert_equal(graphed.model(graphed.runner.place(pack(FIRST))), eager.model(pack(FIRST)))
        graphed.model.train(), eager.model.train()
    assert (
        torch.equal(graphed.buffers.grads, before) and not graphed.runner.counters.module_fallbacks
    )
    assert_equal(graphed.step(pack(SECOND)), eager.step(pack(SECOND)))


def test_stale_late_and_repeated_backwards_are_errors():
    chain = by_transformer_engine(Foreign(), Foreign())
    output = chain.forward(hidden_states(), chain.place(FIRST))
    chain.place(SECOND)
    with pytest.raises(StaleMetadataError, match="before its slot is filled again"):
        output.sum().backward()
    beside = by_transformer_engine(Foreign(), Foreign(), kind=Beside)
    packed = beside.place()
    results = [module(hidden_states() * 1, packed) for module in beside.modules]
    results[0].sum().backward()
    with pytest.raises(RuntimeError, match="after the backward pass of an earlier module"):
        results[1].sum().backward()


def test_a_leaf_keeps_a_gradient_of_its_own():
    chain = by_transformer_engine(Foreign())
    leaves = []
    for lengths in (FIRST, SECOND):
        hidden = hidden_states(len(lengths))
        chain.modules[0](hidden, chain.place(lengths)).sum().backward()
        leaves.append((hidden.grad, hidden.grad.clone()))
    assert all(torch.equal(*both) for both in leaves) and not torch.equal(
        leaves[0][0], leaves[1][0]
    )


@pytest.mark.parametrize("text", ["F1 F2 B1 B2", "F1 F2 B2 F3 B1 F4 B4 F5 B3 B5"])
def test_two_micro_batches_in_flight(text):
    chain = by_transformer_engine(Foreign(), Foreign(), num_slots=2)
    found = run(chain, parsed(text), chain.runner.place)
    assert not chain.runner.counters.module_fallbacks and chain.runner.counters.hit_rate == 1.0
    chain.runner.close()
    assert_equal(found, run(chain, parsed(text), lambda micro_batch: micro_batch))


def test_the_audit_compares_and_finds():
    chain = by_transformer_engine(Foreign(), Foreign())
    assert chain.audit(FIRST).largest_difference == 0
    captured = chain.modules[1].forward.captured[ONE.sizes[0]]
    captured.callable._function = lambda hidden: torch.tanh(hidden @ chain.modules[1].weight) * 2
    with pytest.raises(AuditMismatchError, match="module 1"):
        chain.audit(FIRST)


# -- modules that TransformerEngine cannot capture --------------------------------------------------


def raises_under_capture(self, hidden, computed, packed):
    if type(packed).__name__ == "StaticPackedSeqParams":
        raise RuntimeError("operation not permitted when stream is capturing")
    return computed


class _FailsBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, fails):
        ctx.fails = fails
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        if ctx.fails:
            raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB")
        return grad, None


def raises_in_captured_backward(self, hidden, computed, packed):
    return _FailsBackward.apply(computed, type(packed).__name__ == "StaticPackedSeqParams")


TROUBLES = {
    "its forward": (raises_under_capture, "RuntimeError: operation not permitted"),
    "its backward": (raises_in_captured_backward, "OutOfMemoryError: Tried to allocate"),
    "its strides": (
        lambda self, hidden, computed, packed: computed.t().contiguous().t(),
        "does not preserve strides",
    ),
    "no dependence": (
        lambda self, hidden, computed, packed: computed.detach(),
        "must depend on its input",
    ),
}


@pytest.mark.parametrize("trouble", TROUBLES)
def test_a_module_that_cannot_be_captured_runs_eagerly_and_alone(trouble):
    result, reason = TROUBLES[trouble]
    made, told = stand_in()
    middle = Foreign(result)
    if trouble == "no dependence":  # so that gradients bypass the module in the warm-up
        middle.register_forward_hook(lambda module, inputs, output: output + inputs[0] * 1)
    chain = by_transformer_engine(Foreign(), middle, Foreign(), made=made)
    assert (
        chain.said[0].startswith("module 1 not captured for up to 4 documents: ")
        and reason in chain.said[0]
    )
    assert chain.runner.counters.captures == 1 + 2 * 2 and told == [1]
    assert gc.isenabled() and "__call__" not in vars(transformer_engine._Closed)
    assert all(parameter.grad is None for parameter in chain.modules.parameters())
    chain.check(replays=False)
    assert {key.split(":")[0] for key in chain.runner.counters.module_fallbacks} == {"module 1"}


def test_the_remains_of_a_failed_capture_are_removed():
    """After a failed capture, garbage collection is enabled again and no ``grad`` remains."""

    def fails(callables, samples, **options):
        options["post_warmup_hook"]()
        options["capture_time_hooks"][0]["forward_pre_hooks"][0](callables[0])
        gc.disable()
        for parameter in callables[0].parameters():
            parameter.grad = torch.ones_like(parameter)
        raise RuntimeError("operation failed")

    try:
        chain = by_transformer_engine(Foreign(), made=transformer_engine.Maker(fails, lambda: None))
        assert gc.isenabled()
    finally:
        gc.enable()
    assert "operation failed" in chain.said[0]
    assert all(parameter.grad is None for parameter in chain.modules.parameters())


@pytest.mark.parametrize("passes_wait", [False, True])
def test_a_pass_of_its_own_that_finds_no_memory_ends_a_run_whose_other_ranks_wait_in_it(
    passes_wait,
):
    """Out of memory in TransformerEngine's eager pass ends the run if other ranks wait in this pass.

    Ranks inside the pass could not receive a message. Out of memory in a capture only refuses a
    module.
    """
    failing = Foreign(lambda self, hidden, computed, packed: raises_no_memory(computed, packed))
    if passes_wait:
        with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
            by_transformer_engine(Foreign(), failing, passes_wait=True)
    else:
        assert "module 1 not captured" in by_transformer_engine(Foreign(), failing).said[0]
    made, _ = stand_in()
    chain = Chain(Foreign(), Foreign(), made_by=made, passes_wait=passes_wait)
    chain.backend.fail_at = {2}
    assert "module 1 not captured" in chain.capture().said[0]


def raises_no_memory(computed, packed):
    if type(packed).__name__ == "StaticPackedSeqParams":
        raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB")
    return computed


def test_a_parameter_whose_gradient_would_come_back_is_refused():
    """A module is refused if a replay would write the gradient of a parameter to ``grad``.

    The parameter has ``main_grad``, but no hook that adds the gradient to it.
    """
    chain = Chain(Foreign(), Foreign(), made_by=stand_in()[0])
    parameter = chain.modules[1].weight
    parameter._post_accumulate_grad_hooks.clear()
    chain.capture()
    assert (
        "module 1 not captured" in chain.said[0]
        and "no hook that adds their gradient to main_grad" in chain.said[0]
    )
    assert chain.runner.counters.captures == 1 + 2 * 1


def test_without_transformer_engine_it_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    with pytest.raises(
        ValueError, match=r"TransformerEngine does not import .*; pip install .*, or use local"
    ):
        transformer_engine.maker()


def test_a_version_that_does_not_fit_torch_is_refused_too(monkeypatch, tmp_path):
    (tmp_path / "transformer_engine.py").write_text("raise AttributeError")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "transformer_engine", raising=False)
    with pytest.raises(
        ValueError, match=r"TransformerEngine does not import \(AttributeError:\); pip install"
    ):
        transformer_engine.maker()


@pytest.mark.parametrize(
    "lacking", [(), ("_order",), ("pool", "capture_time_hooks"), ("set_capture_end",)]
)
def test_a_transformer_engine_without_an_option_is_refused_by_its_version(monkeypatch, lacking):
    def capture(modules, sample_args, **options): ...

    signature = inspect.signature(make_graphed_callables)
    kept = [parameter for name, parameter in signature.parameters.items() if name not in lacking]
    capture.__signature__ = signature.replace(parameters=kept)
    graph = types.ModuleType("transformer_engine.pytorch.graph")
    graph.make_graphed_callables = capture
    if "set_capture_end" not in lacking:
        graph.set_capture_end = print
    package, pytorch = (
        types.ModuleType("transformer_engine"),
        types.ModuleType("transformer_engine.pytorch"),
    )
    package.__version__, package.pytorch, pytorch.graph = "2.3.0", pytorch, graph
    for module in (package, pytorch, graph):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    if not lacking:
        assert transformer_engine.maker() == (capture, print)
        return
    named = " and no ".join(lacking)
    with pytest.raises(
        ValueError,
        match=f"TransformerEngine 2.3.0 has no {named}; install a newer version, or use local",
    ):
        transformer_engine.maker()


def test_the_stand_in_has_the_signature_of_the_original():
    found = importlib.util.find_spec("transformer_engine")
    if found is None or found.origin is None:
        pytest.skip("TransformerEngine is not installed")
    tree = ast.parse((Path(found.origin).parent / "pytorch" / "graph.py").read_text())
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    (original,) = (node for node in functions if node.name == "make_graphed_callables")
    given = [ast.literal_eval(default) for default in original.args.defaults]
    names = [argument.arg for argument in original.args.args]
    mine = inspect.signature(make_graphed_callables).parameters
    assert names == list(mine)
    assert given == [mine[name].default for name in names[len(names) - len(given) :]]
    assert any(node.name == "set_capture_end" and not node.args.args for node in functions)
