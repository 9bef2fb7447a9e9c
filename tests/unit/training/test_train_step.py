"""A pack that is all tail is a normal micro-batch: it changes no result of its step."""

import numpy as np
import pytest
import torch

from megatron_packed.distributed.flat_buffers import FlatBuffers
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.models.hybrid_model import HybridModel
from megatron_packed.models.metrics_layout import MetricsLayout, StepValues
from megatron_packed.optim.optimizer import Optimizer
from megatron_packed.packed.micro_batch import MicroBatch
from megatron_packed.training.train_step import TrainStep
from support.process_pools import run_distributed
from support.step_jobs import CONFIG, SLOTS, VOCAB, step_values


def new_step(groups: ParallelGroups) -> TrainStep:
    model = HybridModel(CONFIG, vocab_size=VOCAB, max_positions=SLOTS, seed=1).train()
    layout = MetricsLayout.from_model(model, groups)
    buffers = FlatBuffers(model, extras=layout.extras, counters=layout.counters)
    return TrainStep(model, buffers, Optimizer(buffers), groups)


def one_step(
    groups: ParallelGroups, packs: list[list[list[int]]]
) -> tuple[StepValues, dict[str, torch.Tensor]]:
    """Return metrics of a step and the model after it.

    ``packs[rank]`` holds the document lengths of each micro-batch.
    """
    rng = np.random.default_rng(3)
    drawn = [
        [[(rng.integers(0, VOCAB, n), None) for n in pack] for pack in of_rank] for of_rank in packs
    ]
    lengths = [n for of_rank in packs for pack in of_rank for n in pack]
    count = max(1, sum(bool(pack) for of_rank in packs for pack in of_rank))
    main, later = (sum(max(n - ahead, 0) for n in lengths) for ahead in (1, 2))
    scales = (1 / main if main else 0.0, 1 / count, 1 / later if later else 0.0)
    step = new_step(groups)
    vector = step(
        [MicroBatch.build(pack, SLOTS, scales=scales) for pack in drawn[groups.rank]], 1e-2
    )
    # Each token has topk assignments, and again in the depth if it is not the last of its document.
    routed = sum(n + max(n - 1, 0) for n in lengths)
    assert step.numbers[vector.numel() :].sum() == routed * CONFIG.moe_router_topk
    return step_values(vector.tolist()), {
        name: value.clone() for name, value in step.model.state_dict().items()
    }


@pytest.fixture(scope="module")
def expected() -> tuple[StepValues, dict[str, torch.Tensor]]:
    """Return the result of one process with two micro-batches, none of them empty."""
    return one_step(ParallelGroups.single(), [[[20, 9, 3], [41]]])


def assert_same_step(found: tuple[StepValues, dict[str, torch.Tensor]], expected) -> None:
    values, state = found
    assert not values.nonfinite and values.bad_micro_batches == {}
    assert values.loss == pytest.approx(expected[0].loss, rel=1e-5) and values.loss > 1
    assert (
        values.mtp_losses == pytest.approx(expected[0].mtp_losses, rel=1e-5) and values.mtp_losses
    )
    assert values.aux_loss == pytest.approx(expected[0].aux_loss, rel=1e-5) and values.aux_loss > 0
    assert values.grad_norm == pytest.approx(expected[0].grad_norm, rel=1e-5)
    # Adam's first step changes a weight by the learning rate, whatever the size of the gradient. So
    # rounding errors of gradients hardly affect the weights.
    torch.testing.assert_close(state, expected[1], rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    "packs", [[[], [20, 9, 3], [41]], [[20, 9, 3], [], [41], []]], ids=["first", "between"]
)
def test_among_the_micro_batches_that_accumulate(packs: list[list[int]], expected) -> None:
    assert_same_step(one_step(ParallelGroups.single(), [packs]), expected)


def test_on_a_rank_that_has_nothing_else(expected) -> None:
    """Both ranks end with the weights and expert biases of a run in one process."""
    ranks = run_distributed(one_step, 2, [[[20, 9, 3], [41]], [[], []]])
    for found in ranks:
        assert_same_step(found, expected)
    assert all(value.equal(ranks[1][1][name]) for name, value in ranks[0][1].items())


def test_nothing_but_empty_packs() -> None:
    values, state = one_step(ParallelGroups.single(), [[[], []]])
    assert values == StepValues(0.0, 0.0, 0.0, False, False, {}, no_targets=True, mtp_losses=(0.0,))
    assert all(value.isfinite().all() for value in state.values())


def test_a_rehearsal_leaves_the_outcome_of_the_last_update() -> None:
    """A capture runs held steps, and a callback still reads whether the real step was applied."""
    step = new_step(ParallelGroups.single())
    pack = MicroBatch.build([(np.arange(9), None)], SLOTS)
    step([pack], 1e-2)
    weights = {name: weight.clone() for name, weight in step.model.state_dict().items()}
    with step.rehearsing():
        step.finish()
        assert step.optimizer.skipped == 1
    assert step.optimizer.skipped == 0
    assert all(weight.equal(weights[name]) for name, weight in step.model.state_dict().items())
