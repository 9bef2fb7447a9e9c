"""Loss over validation and test data."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megatron_packed.distributed.collectives import all_reduce_sum
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.packed.micro_batch import MicroBatch
from megatron_packed.training.garbage_collection import GarbageCollection
from megatron_packed.training.run_data import Stream
from megatron_packed.training.train_step import TrainStep


def mean_loss(
    stream: Stream,
    step: TrainStep,
    groups: ParallelGroups,
    *,
    load: Callable[[Stream, int], Sequence[MicroBatch]],
    garbage: GarbageCollection,
    wait_for_device: Callable[[], None],
) -> tuple[float, int]:
    """Return the mean loss over a finite plan, in nats per target token, and the number of targets.

    A collective of all ranks.

    Args:
        stream: documents and their plan.
        step: the training step, whose model is evaluated.
        groups: process groups of this rank.
        load: returns this rank's micro-batches of a step of the plan.
        garbage: runs Python's garbage collection before and after, if the options request it.
        wait_for_device: called before the host reads the sum.
    """
    targets = 0
    # In place, because captured validation passes add to this address.
    step.validation_loss.zero_()
    with garbage.in_validation():
        for number in range(stream.plan.num_steps):
            targets += stream.plan.step(number).global_targets
            for micro_batch in load(stream, number):
                step.validate(micro_batch)
    # A whole validation may be queued by now. `item` would wait for it without a heartbeat, and the
    # hang detector would end the run.
    wait_for_device()
    loss = all_reduce_sum(step.validation_loss, groups.dp_cp_group).item()
    return (loss / targets if targets else float("nan")), targets
