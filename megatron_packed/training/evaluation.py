"""Evaluations of a run on validation and test data, and the lowest validation loss so far."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property

import torch

from megatron_packed.checkpoint.run_metadata import RunProgress
from megatron_packed.config.run import RunConfig
from megatron_packed.data.packing.evaluation_plan import EvaluationPlan
from megatron_packed.distributed.collectives import all_gather_json, all_reduce_sum
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.inputs.run_data import RunData, Stream
from megatron_packed.inputs.run_documents import TEST, VALIDATION
from megatron_packed.packed.micro_batch import MicroBatch
from megatron_packed.reporting.closing_lines import metric_text
from megatron_packed.reporting.console import Console
from megatron_packed.reporting.sample_answers import SAMPLES, console_lines
from megatron_packed.training.answers import TrainingAnswers
from megatron_packed.training.garbage_collection import GarbageCollection
from megatron_packed.training.train_step import TrainStep


@dataclass(kw_only=True)
class Evaluations:
    """Evaluations between the steps of a run; every method except `stop_sentence` is a collective
    of all ranks.
    """

    config: RunConfig
    groups: ParallelGroups
    step: TrainStep
    """The training step, whose model is evaluated."""
    progress: RunProgress
    """Progress of the run; it records validations and the lowest loss."""
    console: Console
    write: Callable[[dict[str, object]], None]
    """Writes a record to the logs."""
    load: Callable[[Stream[EvaluationPlan], int], Sequence[MicroBatch]]
    """Returns this rank's micro-batches of a step of a plan."""
    garbage: GarbageCollection
    wait_for_device: Callable[[], None]
    """Called before the host reads a sum."""
    idle: Callable[[], AbstractContextManager[None]]
    """Returns a block in which the device may be waited for."""
    data: RunData

    @cached_property
    def _answers(self) -> TrainingAnswers:
        data = self.data
        return TrainingAnswers(
            step=self.step,
            groups=self.groups,
            tokenizer=data.tokenizer,
            idle=self.idle,
            samples=data.samples,
            metric=data.metric,
        )

    def validate(self) -> bool:
        """Print and log the validation loss, the task metric and sample answers.

        With several validation sets, the loss of each is printed and logged, too. The validation
        loss is then the mean over the targets of all sets.

        Returns:
            True if the loss is the lowest so far.
        """
        loss = self._evaluate(self.data.validations, VALIDATION, "valid")
        self.progress.validated_at = self.progress.iteration
        self.sample()
        return self.progress.count_validation(loss)

    def sample(self) -> None:
        """Print and log the answers to ``--sample-prompts``, if it is given."""
        samples, iteration = self._answers.sample(), self.progress.iteration
        if samples:
            for line in console_lines(iteration, samples):
                self.console.say(line)
            self.write({"iteration": iteration, SAMPLES: samples})

    def end(self, *, complete: bool) -> None:
        """Print and log the last sample answers, and the loss over the test data.

        Args:
            complete: the run is complete; a run that stops before is not tested.
        """
        # A validation of this step has already printed the answers.
        if not self.data.validations or self.progress.validated_at != self.progress.iteration:
            self.sample()
        if complete and self.data.test is not None:
            self._evaluate({TEST: self.data.test}, TEST, "test")

    def stop_sentence(self) -> str | None:
        """Return why validations stop the run, or None; see ``--early-stopping-patience``."""
        patience, done = self.config.training.early_stopping_patience, self.progress
        if patience is None or done.validations_since_best < patience:
            return None
        best = (
            f"lower than {done.best_loss:.4f} at step {done.best_at}" if done.best_at else "finite"
        )
        return (
            f"early stop at step {done.iteration}: no loss of the last {done.validations_since_best} "
            f"validations is {best} (--early-stopping-patience {patience})."
        )

    def _evaluate(
        self, streams: Mapping[str, Stream[EvaluationPlan]], name: str, field: str
    ) -> float:
        """Print the loss over finite plans, and write it as ``{field}_loss``."""
        iteration, total, targets = self.progress.iteration, 0.0, 0
        of_sets: dict[str, float] = {}
        for its_name, stream in streams.items():
            its_loss, its_targets = self._sum_loss(stream)
            total, targets = total + its_loss, targets + its_targets
            if its_name != name:
                of_set = _mean(its_loss, its_targets)
                of_sets[f"{field}_loss_{its_name.removeprefix(name)[2:-1]}"] = of_set
                self.console.say(
                    f"{its_name} at step {iteration}: loss {of_set:.4f} over {its_targets:,.0f} tokens"
                )
        loss = _mean(total, targets)
        metric, said = self._metric() if name == VALIDATION else ({}, "")
        self.console.say(
            f"{name} at step {iteration}: loss {loss:.4f} over {targets:,.0f} tokens{said}"
        )
        self.write(
            {
                "iteration": iteration,
                f"{field}_loss": loss,
                f"{field}_target_tokens": targets,
                **of_sets,
                **metric,
                "plan_hash": " ".join(stream.plan.hash for stream in streams.values()),
            }
        )
        return loss

    def _metric(self) -> tuple[dict[str, float], str]:
        """Return the fields of ``--valid-metric`` for the log, and its text for the console."""
        asked, name = self._answers.metric, self.config.training.valid_metric
        if asked is None or name is None:
            return {}, ""
        share, count = self._answers.matches(), len(asked.prompts)
        return {f"valid_{name}": share, f"valid_{name}_count": count}, metric_text(
            name, share, count
        )

    def _sum_loss(self, stream: Stream[EvaluationPlan]) -> tuple[float, int]:
        """Return the sum of the losses over a finite plan in nats, and the number of targets."""
        loss, overflow, targets = self._passes(stream)
        # The sum of a pack that overflowed cannot be taken back, so all packs run again.
        if overflow:
            with self.step.room_for_experts():
                loss, _, targets = self._passes(stream)
        return loss, targets

    def _passes(self, stream: Stream[EvaluationPlan]) -> tuple[float, float, int]:
        """Run a validation; return its loss, the overflows of expert buffers, and the targets."""
        step, targets = self.step, 0
        # In place, because captured validation passes add to these addresses.
        step.validation_loss.zero_()
        step.validation_overflow.zero_()
        with self.garbage.in_validation():
            for number in range(stream.plan.num_steps):
                targets += stream.plan.step(number).global_targets
                for micro_batch in self.load(stream, number):
                    step.validate(micro_batch)
        # A whole validation may be queued by now. `item` would wait for it without a heartbeat, and
        # the hang detector would end the run.
        self.wait_for_device()
        sums_2 = torch.stack([step.validation_loss, step.validation_overflow.double()])
        sums = all_reduce_sum(sums_2, self.groups.dp_cp.group).tolist()
        # All ranks take the values of rank 0: they must agree on the best checkpoint and on the end.
        loss, overflow = all_gather_json(sums, self.groups)[0]
        return float(loss), float(overflow), targets


def _mean(loss: float, targets: int) -> float:
    return loss / targets if targets else float("nan")
