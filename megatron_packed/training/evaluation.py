"""Loss over validation and test data: all packs of a finite plan, on all ranks."""

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
    """Return the loss in nats per target token over a finite plan, and its target tokens.

    A collective of all ranks.

    Args:
        load: returns this rank's micro-batches of a step of the plan.
        garbage: collects before and after, where that is asked for.
        wait_for_device: called before the host reads the sum.
    """
    targets = 0
    # In place: captured validation passes add to this address.
    step.validation_loss.zero_()
    with garbage.in_validation():
        for number in range(stream.plan.num_steps):
            targets += stream.plan.step(number).global_targets
            for micro_batch in load(stream, number):
                step.validate(micro_batch)
    # A whole validation may be queued by now, and `item` would wait for it without a heartbeat.
    wait_for_device()
    loss = all_reduce_sum(step.validation_loss, groups.dp_cp_group).item()
    return (loss / targets if targets else float("nan")), targets
