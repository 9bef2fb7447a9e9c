"""Whole steps in graphs: k micro-batches are k + 1 replays, with the same results as eager steps.

These tests use the stand-in for capture, whose replay calls the captured function again.
`tests/gpu/test_full_iteration_gpu.py` has the tests on a GPU.
"""

import hashlib
import math
import re
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from megatron_packed.cuda_graphs.audit import AuditMismatchError
from megatron_packed.cuda_graphs.fallback_reasons import ALL, GraphFallbackError
from megatron_packed.cuda_graphs.slots import HostFactError
from megatron_packed.cuda_graphs.whole_step_graphs import FullIterationGraphs, StaticMicroBatch
from megatron_packed.packed.micro_batch import NO_LABEL, MicroBatch
from megatron_packed.packed.params import NO_TABLES
from megatron_packed.resume.held_state import held_state
from megatron_packed.training.build_graphs import audit_graphs, build_graphs, capture_graphs
from support.stand_in import RecordingBackend
from support.step_jobs import (
    CAPTURE_SIZES,
    GROUPS,
    config_of,
    job_of,
    micro_batch,
    state_hash,
    step_values,
)

STEPS = [
    [[48]],
    [[20, 9, 3], [1] * 5],
    [[48], [20, 9, 3], [1] * 9, [2] * 5],
    [[]],
    [[5] * 5, [1] * 48],
    [[30, 2]],
]
"""Document lengths of each pack of each step. More than 5 documents fit no capture size."""
PARTS = 1
"""Number of parts that are captured in one process without validation: only the micro-batch."""


class Job:
    """Job whose steps are captured, unless ``backend`` is None."""

    def __init__(self, backend=None, **graphs):
        self.config = config_of(cuda_graph_impl="full_iteration", **graphs)
        self.job, self.backend, self.said = job_of(self.config), backend, []
        self.step = self.job.step
        self.graphs = None
        if backend is not None:
            self.graphs = build_graphs(
                self.config, self.job, CAPTURE_SIZES, GROUPS, self.said.append, backend
            )
            self.step.graphs = self.graphs

    def capture(self):
        capture_graphs(self.graphs, self.step, 3, GROUPS, first=True)
        return self

    def run(self, packs, number=0):
        batches = [micro_batch(lengths, seed) for seed, lengths in enumerate(packs)]
        return self.step(batches, 1e-2 / (1 + number)).clone()


def captured(backend=None, **graphs):
    return Job(backend or RecordingBackend(), **graphs).capture()


def audit(job, lengths=(20, 9, 3), *, deterministic=True):
    return audit_graphs(
        job.graphs, job.step, micro_batch(lengths), deterministic=deterministic, seed=1
    )


def assert_same_steps(found, expected, steps=STEPS, *, moved=False):
    for number, packs in enumerate(steps):
        values, wanted = (step_values(job.run(packs, number).tolist()) for job in (found, expected))
        assert values == wanted._replace(weights_moved=moved), number
        # The state includes the flag of moved weights.
        assert moved or state_hash(found.job) == state_hash(expected.job), number


def test_a_capture_changes_nothing_of_the_job():
    job = Job(RecordingBackend())
    job.run([[20, 9, 3]])  # moments, expert biases and statistics that are not zero
    job.job.buffers.zero_grad()
    before, finish, ends = state_hash(job.job), job.graphs._finish, []
    job.graphs._finish = lambda: [ends.append(len(job.backend.graphs)), finish()]
    job.capture()
    assert state_hash(job.job) == before
    # The end of the step runs twice while no graph exists yet: first as a warm-up, which allocates
    # workspaces and connects communicators, then in its capture.
    assert ends == [0, 0]
    assert job.graphs.counters.captures == len(CAPTURE_SIZES.sizes) * PARTS + 1
    assert job.graphs.counters.replays == 0 and job.backend.log == []
    job.run([[20, 9, 3]])
    assert state_hash(job.job) != before


@pytest.mark.shows("graphs: full_iteration", of=lambda: (1, config_of()))
def test_steps_are_those_without_graphs_and_k_micro_batches_are_k_and_one_replays():
    """A step of k micro-batches takes k + 1 replays; packs that fit no graph run eagerly
    between.
    """
    graphed = captured()
    assert_same_steps(graphed, Job())
    beyond = sum(len(lengths) > 5 for packs in STEPS for lengths in packs)
    counters = graphed.graphs.counters
    assert counters.fallbacks == {"more than 5 documents": beyond} and beyond == 2
    assert counters.replays == sum(map(len, STEPS)) - beyond
    assert len(graphed.backend.log) == counters.replays + len(STEPS)
    graphed.backend.log.clear()
    for k in (1, 2, 4):
        values = step_values(graphed.run([[9] * 3] * k).tolist())
        # The graph of the end of a step computes these statistics.
        assert values.params_norm > 1 and values.grad_zeros > 100
        assert len(graphed.backend.log) == k + 1 and len(set(graphed.backend.log)) == 2
        graphed.backend.log.clear()


@pytest.mark.parametrize("runs", [0, 2])
def test_the_number_of_warm_up_runs_does_not_change_the_steps(runs):
    """With 0 runs nothing is tuned before the capture, and graphs are replayed all the same."""
    graphed, passes = Job(RecordingBackend(), cuda_graph_warmup_steps=runs), []
    eager_pass = graphed.graphs._eager_pass
    graphed.graphs._eager_pass = lambda batch: [passes.append(batch), eager_pass(batch)]
    graphed.capture()
    assert len(passes) == runs * len(CAPTURE_SIZES.sizes)
    assert_same_steps(graphed, Job())
    assert graphed.graphs.counters.replays == sum(map(len, STEPS)) - 2


def test_the_comparison_sees_another_micro_batch_in_the_slot():
    graphed, expected = captured(), Job()
    fill = graphed.graphs.slot.fill
    graphed.graphs.slot.fill = lambda _, size: fill(micro_batch([3, 9, 9]), size)
    assert not torch.equal(graphed.run([[9] * 3]), expected.run([[9] * 3]))


@pytest.mark.parametrize("bad", [0, 1, 3])
def test_a_nan_in_one_micro_batch_is_named_and_its_step_changes_nothing(bad):
    graphed, eager = captured(), Job()
    graphed.run([[9, 9]]), eager.run([[9, 9]])
    before = state_hash_of_weights(graphed)
    found = []
    for job in (graphed, eager):
        batches = [micro_batch([20, 9, 3], seed) for seed in range(4)]
        for number in {bad, 3}:  # the first bad micro-batch is reported
            batches[number].scales[0] = float("nan")
        found.append(job.step(batches, 1e-2).clone())
    assert state_hash_of_weights(graphed) == before
    values = step_values(found[0].tolist())
    assert values.nonfinite and values.bad_micro_batches == {0: bad}
    assert torch.equal(found[0].nan_to_num(), found[1].nan_to_num())
    assert_same_steps(graphed, eager)  # also after the bad step


@pytest.mark.parametrize(
    ("extra", "factor"), [(float("inf"), 1.0), (0.0, float("inf"))], ids=["loss", "gradient"]
)
def test_either_a_loss_or_a_gradient_beyond_all_numbers_is_enough_to_be_named(extra, factor):
    """A non-finite loss or a non-finite gradient in the second micro-batch is reported."""
    eager = Job()
    model, before, numbers = eager.job.model, state_hash_of_weights(eager), iter(range(3))
    forward_backward = model.forward_backward

    def overflowing(batch):
        if next(numbers) != 1:
            return forward_backward(batch)
        watched = model.final_norm.register_forward_hook(scale_gradient)
        output = forward_backward(batch)
        watched.remove()
        return output._replace(loss=output.loss + extra, loss_sum=output.loss_sum + extra)

    def scale_gradient(_module, _inputs, output):
        output.register_hook(lambda grad: grad * factor)

    model.forward_backward = overflowing
    values = step_values(eager.run([[20, 9, 3]] * 3).tolist())
    assert values.nonfinite and values.bad_micro_batches == {0: 1}
    assert math.isfinite(values.loss) == (extra == 0) and math.isfinite(values.grad_norm) == (
        factor == 1
    )
    assert state_hash_of_weights(eager) == before


def without_targets(lengths, seed=3):
    """Return a micro-batch as `micro_batch` does, with documents that have no targets."""
    found = micro_batch(lengths, seed)
    found.loss_mask.zero_()
    found.labels.fill_(NO_LABEL)
    return replace(found, num_target_tokens=0)


def test_a_step_without_targets_is_not_taken_though_its_auxiliary_losses_have_gradients():
    """A step without targets changes no weight, moment, step count or expert bias, in both
    modes.
    """
    graphed, eager = captured(), Job()
    assert_same_steps(graphed, eager, [[[20, 9, 3]], [[9, 9], [5] * 5]])
    before, steps = state_hash_of_weights(graphed), graphed.job.optimizer.steps.item()
    found = [
        job.step([without_targets([20, 9, 3]), without_targets([41])], 1e-2).clone()
        for job in (graphed, eager)
    ]
    values = step_values(found[0].tolist())
    assert torch.equal(*found) and values.no_targets and not values.nonfinite
    # If the step were applied, the gradients of the auxiliary loss would change the weights.
    assert values.aux_loss > 0 and values.grad_norm > 0
    assert graphed.job.optimizer.steps.item() == steps == 2
    assert state_hash_of_weights(graphed) == before == state_hash_of_weights(eager)
    # One target in one micro-batch is enough for the step to be applied.
    found = [
        job.step([without_targets([20, 9]), micro_batch([2])], 1e-2).clone()
        for job in (graphed, eager)
    ]
    assert torch.equal(*found) and not step_values(found[0].tolist()).no_targets
    assert state_hash_of_weights(graphed) != before and graphed.job.optimizer.steps.item() == 3


def spike(job):
    """Run a step in which one micro-batch has a hundred times the usual loss and gradient."""
    batches = [micro_batch([20, 9, 3]), micro_batch([9, 9])]
    batches[1].scales[0] *= 100
    return step_values(job.step(batches, 1e-2).tolist())


def test_a_spike_is_skipped_by_replay_as_eagerly():
    """A skipped spike changes no weight, moment, step count or bias.

    Its loss and gradient norm still enter the spike window.
    """
    graphed, eager = captured(), Job()
    assert_same_steps(graphed, eager, [[[20, 9, 3], [9, 9]]] * 4)
    before = [weights(job) for job in (graphed, eager)]
    found = [spike(job) for job in (graphed, eager)]
    assert found[0] == found[1] and [name for name, _ in found[0].spikes] == ["loss", "grad_norm"]
    assert [weights(job) for job in (graphed, eager)] == before
    assert (
        graphed.job.optimizer.spikes.recent[0, -1]
        == found[0].loss
        > 10 * graphed.job.optimizer.spikes.recent[0, 0]
    )
    assert state_hash(graphed.job) == state_hash(eager.job)
    assert_same_steps(graphed, eager, [[[20, 9, 3], [9, 9]]])
    assert weights(graphed) != before[0]


def test_a_warning_changes_no_bit():
    jobs = [Job(), Job(), Job()]
    jobs[1].job.optimizer.spikes.skip = False
    jobs[2].job.optimizer.spikes = None
    for job in jobs:
        for _ in range(4):
            job.run([[20, 9, 3], [9, 9]])
    skipped, warned, off = (spike(job) for job in jobs)
    assert warned.spikes == skipped.spikes != () and off == warned._replace(spikes=off.spikes)
    assert weights(jobs[1]) == weights(jobs[2]) != weights(jobs[0])


def test_a_held_step_is_no_observation_and_is_compared_when_it_is_done_again():
    job = Job()
    for _ in range(4):
        job.run([[20, 9, 3], [9, 9]])
    spikes, before = job.job.optimizer.spikes, job.job.optimizer.spikes.recent.clone()
    job.step._held.fill_(1.0)
    assert spike(job).spikes == () and torch.equal(spikes.recent, before)
    batches = [micro_batch([20, 9, 3])]
    batches[0].scales[0] *= 100
    assert step_values(job.step.redo(batches, 1e-2).tolist()).spikes
    assert torch.equal(spikes.recent[:, :-1], before[:, 1:])


def weights(job):
    """Return a hash of each tensor that an update changes."""
    states = {
        held.shard.name: held.shard.tensor for held in held_state(job.job.model, job.job.optimizer)
    }
    parts = {name: tensor.view(-1).view(torch.uint8).numpy() for name, tensor in states.items()}
    return {name: hashlib.sha256(part).hexdigest() for name, part in parts.items()}


def state_hash_of_weights(job):
    """Return the hash of the state without gradients and metrics."""
    job.job.buffers.zero_grad()
    job.step.metrics.zero_()
    return state_hash(job.job)


def test_the_stop_flag_and_the_rate_are_those_of_the_step():
    graphed, eager = captured(), Job()
    for stop, lr in ((False, 1e-2), (True, 1e-3), (False, 3e-3)):
        found = [
            job.step([micro_batch([9, 9])], lr, stop_requested=stop).clone()
            for job in (graphed, eager)
        ]
        assert torch.equal(*found) and step_values(found[0].tolist()).stop_requested == stop
        assert state_hash(graphed.job) == state_hash(eager.job)


def test_a_step_that_is_done_again_runs_eagerly(monkeypatch):
    graphed, eager = captured(), Job()
    monkeypatch.setattr(type(graphed.job.model), "bounds_expert_buffers", True)
    for job in (graphed, eager):
        job.step._held.fill_(1.0)
        job.run([[9, 9]])
    replays = graphed.graphs.counters.replays
    batches = [[micro_batch([9, 9])] for _ in range(2)]
    found = graphed.step.redo(batches[0], 1e-2).clone()
    assert (
        torch.equal(found, eager.step.redo(batches[1], 1e-2))
        and not step_values(found.tolist()).held
    )
    assert state_hash(graphed.job) == state_hash(eager.job)
    assert graphed.graphs.counters.replays == replays
    assert graphed.graphs.counters.fallbacks == {
        "it needs an expert buffer for all rows, and its graphs have a smaller buffer": 1
    }
    assert_same_steps(graphed, eager)
    assert graphed.graphs.counters.replays > replays


def test_memory_that_moved_makes_steps_eager_until_the_next_capture():
    graphed, eager = captured(), Job()
    for job in (graphed, eager):
        router = job.job.model.moe_layers[0].mixer.router
        router.expert_bias = router.expert_bias.clone()
    assert graphed.graphs.addresses_changed
    assert_same_steps(graphed, eager, STEPS[:2], moved=True)
    assert (
        graphed.graphs.counters.fallbacks == {"weights have moved to other memory": 3}
        and not graphed.backend.log
    )
    graphed.capture()
    assert not graphed.graphs.addresses_changed
    assert_same_steps(graphed, eager, STEPS[:2])
    assert len(graphed.backend.log) == 3 + 2


def test_all_that_graphs_use_is_watched():
    """A new address of any tensor that graphs use is detected, until the old address is back."""
    graphed = captured()
    job, optimizer = graphed.job, vars(graphed.job.optimizer)
    parameter = job.buffers.parameters["embedding.weight"]
    names = ("exp_avg", "exp_avg_sq", "lr", "steps", "weight_decay")
    places = [(optimizer, name) for name in names]
    places += [(vars(parameter), "main_grad"), (vars(job.buffers), "storage")]
    places += [(vars(job.optimizer.spikes), name) for name in ("recent", "medians")]
    places.append((job.model.embedding._parameters, "weight"))
    places.append((job.model.moe_layers[0].mixer.router._buffers, "expert_bias"))
    for place, name in places:
        tensor, place[name] = place[name], place[name].detach().clone()
        assert graphed.graphs.addresses_changed, name
        place[name] = tensor
        assert not graphed.graphs.addresses_changed, name


def test_a_size_that_cannot_be_captured_runs_eagerly_and_says_why():
    """Captures run in the order: end of the step, largest capture size, other sizes."""
    graphed = captured(RecordingBackend(fail_at=(1,)))
    assert graphed.said[0].startswith(
        "no graphs for up to 5 documents: micro-batch: OutOfMemoryError: capture 1"
    )
    assert graphed.said[0].endswith("it runs eagerly")
    assert graphed.said[1].startswith("captured whole steps for up to 2") and graphed.said[
        1
    ].endswith("(2 of 2)")
    assert_same_steps(graphed, Job())
    counters = graphed.graphs.counters
    assert counters.captures == 2 and counters.replays == 4
    [reason] = [reason for reason in counters.fallbacks if "capacity" in reason]
    assert "capture 1 has no memory" in reason and counters.fallbacks[reason] == 5


def test_a_validation_that_cannot_be_captured_leaves_the_model_in_training(monkeypatch):
    """After a failed capture of a validation pass, the model is in training mode again."""
    graphed, expected = Job(RecordingBackend()), Job()
    graphed.graphs.parts["validation"] = graphed.step.validation_micro_batch
    loss = graphed.job.model.forward

    def no_memory(micro_batch, **options):
        if isinstance(micro_batch, StaticMicroBatch) and not graphed.job.model.training:
            raise torch.OutOfMemoryError("no memory for logits")
        return loss(micro_batch, **options)

    monkeypatch.setattr(graphed.job.model, "forward", no_memory)
    graphed.capture()
    assert (
        "no graphs for up to 5 documents: validation: OutOfMemoryError: no memory for logits"
        in graphed.said[0]
    )
    assert_same_steps(graphed, expected)


def test_tuning_that_takes_long_says_how_far_it_is(monkeypatch):
    monkeypatch.setattr("megatron_packed.cuda_graphs.step_graphs._QUIET_SECONDS", -1.0)
    five, two, *captures = captured().said
    assert re.fullmatch(r"tuned kernels for up to 5 documents \(1 of 2, about \d+ s left\)", five)
    assert two == "tuned kernels for up to 2 documents (2 of 2)" and len(captures) == 2


@pytest.mark.parametrize("fail_at", [(0,), (1, 2)], ids=["the end", "every capture size"])
def test_without_its_end_or_any_size_a_step_is_eager_as_a_whole(fail_at):
    graphed = captured(RecordingBackend(fail_at))
    assert "no graphs" in graphed.said[0]
    assert_same_steps(graphed, Job())
    assert graphed.backend.log == [] and graphed.graphs.counters.replays == 0
    assert all(graph.gone for graph in graphed.backend.graphs)
    assert graphed.graphs.counters.memory_mib == 0
    # Without a graph nothing depends on an address, so ranks need not capture again.
    vars(graphed.job.optimizer)["lr"] = graphed.job.optimizer.lr.clone()
    assert not graphed.graphs.addresses_changed
    whole = micro_batch([20, 9, 3])
    assert "no memory" in graphed.graphs.why_eager(whole)
    graphed.graphs.forget()
    assert graphed.graphs.refusals == [] and graphed.graphs.why_eager(whole) == "no graphs"


def test_several_slots_are_refused():
    nothing = {"parts": {}, "finish": lambda: None, "rehearsing": nullcontext, "places": list}
    with pytest.raises(ValueError, match=r"num_slots \(2\) must be 1 .* use LayerGraphs"):
        FullIterationGraphs(**nothing, num_slots=2)


def test_what_one_rank_cannot_capture_none_keeps():
    """If another rank fails in its first or second capture, this rank drops the same graphs."""
    for failing, said in (
        (0, "because the end of a step"),
        (1, "up to 5 documents: micro-batch: rank 1 cannot"),
    ):
        job, asked = Job(RecordingBackend()), []

        def agree(failed, asked=asked, failing=failing):
            asked.append(failed)
            return {ALL: "rank 1 cannot"} if len(asked) - 1 == failing else {}

        job.graphs._agree = agree
        job.capture()
        assert asked and not any(asked) and said in job.said[0]
        assert sum(not graph.gone for graph in job.backend.graphs) == (0 if failing == 0 else 2)


@pytest.mark.parametrize(
    "answers", [0, 1, 2], ids=["the end", "one capture size", "two capture sizes"]
)
def test_what_is_captured_when_the_other_ranks_are_lost_is_given_up(answers):
    job, asked = Job(RecordingBackend()), []

    def agree(failed):
        asked.append(failed)
        if len(asked) > answers:
            raise RuntimeError("connection reset by peer")
        return failed

    job.graphs._agree = agree
    with pytest.raises(RuntimeError, match="connection reset"):
        job.capture()
    assert len(job.backend.graphs) == answers + 1 and all(
        graph.gone for graph in job.backend.graphs
    )


def test_strict():
    with pytest.raises(GraphFallbackError, match=r"no graphs for up to 2 documents: .* forbids"):
        captured(RecordingBackend(fail_at=(2,)), cuda_graph_strict=True)
    graphed = captured(cuda_graph_strict=True)
    with pytest.raises(
        GraphFallbackError, match="more than 5 documents; raise --cuda-graph-max-packed-seqs"
    ):
        graphed.run([[1] * 9])


def test_nothing_lives_between_graphs():
    """Graphs keep no results in the pool, and a static micro-batch raises for host numbers."""
    graphed = captured()
    assert all(graph.result is None for graph in graphed.backend.graphs)
    static = graphed.graphs._static(CAPTURE_SIZES.sizes[0])
    assert isinstance(static, StaticMicroBatch) and static.tokens.shape == (48,)
    for name in ("num_real_tokens", "num_target_tokens"):
        with pytest.raises(HostFactError, match=name):
            getattr(static, name)
    with pytest.raises(HostFactError, match="num_seqs"):
        static.packed.num_seqs  # noqa: B018
    assert graphed.graphs.slot.static(CAPTURE_SIZES.sizes[0]).tables is NO_TABLES


def test_what_a_graph_cannot_ask_is_checked_before_its_replay():
    graphed = captured()
    # The capacity of this micro-batch fits a capture size, but its number of tokens does not.
    shorter = MicroBatch.build([], 24, 5, max_seqlen=48)
    assert (
        graphed.graphs.why_eager(shorter)
        == "the micro-batch does not have the 48 tokens for which the graphs were captured"
    )

    def refuse(packed):
        raise ValueError(f"no room for a document of {packed.document_lengths.max()} tokens")

    graphed.graphs._check = refuse
    with pytest.raises(ValueError, match="document of 20 tokens"):
        graphed.run([[20, 9, 3]])
    assert graphed.backend.log == []


def test_given_up_on_close():
    graphed = captured()
    graphed.graphs.close()
    assert (
        all(graph.gone for graph in graphed.backend.graphs)
        and graphed.graphs.counters.memory_mib == 0
    )
    assert_same_steps(graphed, Job(), STEPS[:2])


def test_validation_is_replayed_too_and_leaves_the_model_in_training():
    graphed, eager = Job(RecordingBackend()), Job()
    assert isinstance(graphed.graphs, FullIterationGraphs)
    graphed.graphs.parts["validation"] = graphed.step.validation_micro_batch
    graphed.capture()
    assert graphed.graphs.counters.captures == 2 * len(CAPTURE_SIZES.sizes) + 1
    for job in (graphed, eager):
        job.run([[9, 9]])
        job.step.validation_loss.zero_()
        for lengths in ([30, 10], [1] * 9, [2] * 5):
            job.step.validate(micro_batch(lengths))
        assert job.job.model.training
    assert graphed.step.validation_loss > 0 and graphed.step.validation_loss.equal(
        eager.step.validation_loss
    )
    assert graphed.graphs.counters.replays == 1 + 2 and len(graphed.backend.log) == 2 + 2
    assert_same_steps(graphed, eager)


@pytest.mark.parametrize(("eval_iters", "captured"), [(0, False), (3, True)])
def test_a_test_set_alone_is_replayed_too(eval_iters, captured):
    config = config_of(cuda_graph_impl="full_iteration")
    data, training = (
        replace(config.data, test_data_path=("t",)),
        replace(config.training, eval_iters=eval_iters),
    )
    config = replace(config, data=data, training=training)
    graphs = build_graphs(config, job_of(config), CAPTURE_SIZES, GROUPS, print, RecordingBackend())
    assert ("validation" in graphs.parts) == captured


def test_an_audit_finds_nothing_and_changes_nothing():
    graphed = captured()
    graphed.run([[9, 9]])
    graphed.job.buffers.zero_grad()
    before, counters = state_hash(graphed.job), repr(graphed.graphs.counters)
    sentence = "whole steps (micro-batch) replay what they compute (largest difference 0.0e+00)"
    assert audit(graphed) == sentence
    assert state_hash(graphed.job) == before and repr(graphed.graphs.counters) == counters
    assert audit(graphed, [1] * 9) is None


def test_an_audit_finds_what_no_longer_comes_with_the_micro_batch():
    """An audit detects a tensor that `Slot.fill` fails to copy, even if the slot holds its old
    value.
    """
    graphed = captured()
    slot = graphed.graphs.slot
    fill = slot.fill

    def without_scales(given, size):
        kept = graphed.graphs._static(size).scales.clone()
        placed = fill(given, size)
        placed.scales.copy_(kept)
        return placed

    graphed.run([[20, 9, 3]])
    slot.fill = without_scales
    with pytest.raises(
        AuditMismatchError, match="the replay of the micro-batch differs from its eager pass"
    ):
        audit(graphed)


@pytest.mark.parametrize("deterministic", [True, False])
def test_an_audit_names_the_worst_parameter(deterministic):
    graphed = captured()
    run = graphed.graphs.replay

    def spoil(*args):
        run(*args)
        graphed.job.buffers.parameters["layers.2.mixer.fc1.weight"].main_grad[0, 0] += 1
        graphed.job.buffers.parameters["embedding.weight"].main_grad[0, 0] += 1e-6

    graphed.graphs.replay = spoil
    with pytest.raises(
        AuditMismatchError, match=r"gradients of layers\.2\.mixer\.fc1\.weight differ by"
    ):
        audit(graphed, deterministic=deterministic)
