"""Evaluations of a run on validation and test data, and the lowest validation loss so far.

Every function except `early_stop` is a collective of all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from megatron_packed.checkpoint.run_metadata import RunProgress
from megatron_packed.distributed.collectives import all_gather_json, all_reduce_sum
from megatron_packed.inputs.open_documents import TEST, VALIDATION
from megatron_packed.inputs.run_data import Stream
from megatron_packed.reporting.console import SAMPLES, answer_lines, metric_text

if TYPE_CHECKING:
    from megatron_packed.data.packing.evaluation_plan import EvaluationPlan
    from megatron_packed.training.answers import TrainingAnswers
    from megatron_packed.training.trainer import Trainer


def evaluate_validation(trainer: Trainer) -> tuple[dict[str, Any], bool]:
    """Print and log the validation loss, the task metric and sample answers.

    With several validation sets, the loss of each is printed and logged, too. The validation loss is
    then the mean over the targets of all sets.

    Returns:
        The record of the log, and True if the loss is the lowest so far.
    """
    record = _evaluate(trainer, trainer.data.validations, VALIDATION, "valid")
    trainer.progress.validated_at = trainer.progress.iteration
    _sample(trainer)
    return record, trainer.progress.count_validation(record["valid_loss"])


def evaluate_end(trainer: Trainer, *, complete: bool) -> None:
    """Print and log the last sample answers, and the loss over the test data.

    Args:
        complete: the run is complete; a run that stops before is not tested.
    """
    # A validation of this step has already printed the answers.
    progress = trainer.progress
    if not trainer.data.validations or progress.validated_at != progress.iteration:
        _sample(trainer)
    if complete and trainer.data.test is not None:
        _evaluate(trainer, {TEST: trainer.data.test}, TEST, "test")


def early_stop(patience: int | None, progress: RunProgress) -> str | None:
    """Return why validations stop the run, or None; see ``--early-stopping-patience``."""
    if patience is None or progress.validations_since_best < patience:
        return None
    best = "finite"
    if progress.best_at:
        best = f"lower than {progress.best_loss:.4f} at step {progress.best_at}"
    return (
        f"early stop at step {progress.iteration}: no loss of the last {progress.validations_since_best} "
        f"validations is {best} (--early-stopping-patience {patience})."
    )


def _sample(trainer: Trainer) -> None:
    """Print and log the answers to ``--sample-prompts``, if it is given."""
    if trainer.data.samples is None:
        return
    samples, iteration = _answers(trainer).sample(), trainer.progress.iteration
    if samples:
        for line in answer_lines(iteration, samples):
            trainer.console.say(line)
        trainer.log.write({"iteration": iteration, SAMPLES: samples})


def _answers(trainer: Trainer) -> TrainingAnswers:
    from megatron_packed.training.answers import TrainingAnswers

    data = trainer.data
    return TrainingAnswers(
        step=trainer.step,
        groups=trainer.groups,
        tokenizer=data.tokenizer,
        hang_detector=trainer.hang_detector,
        samples=data.samples,
        metric=data.metric,
    )


def _evaluate(
    trainer: Trainer, streams: Mapping[str, Stream[EvaluationPlan]], name: str, field: str
) -> dict[str, Any]:
    """Print the loss over finite plans, log it as ``{field}_loss``, and return the record."""
    iteration, total, targets = trainer.progress.iteration, 0.0, 0
    losses: dict[str, float] = {}
    for set_name, stream in streams.items():
        set_loss, set_targets = sum_loss(trainer, stream)
        total, targets = total + set_loss, targets + set_targets
        if set_name != name:
            mean = _mean(set_loss, set_targets)
            losses[f"{field}_loss_{set_name.removeprefix(name)[2:-1]}"] = mean
            trainer.console.say(
                f"{set_name} at step {iteration}: loss {mean:.4f} over {set_targets:,.0f} tokens"
            )
    loss = _mean(total, targets)
    metric, metric_clause = _metric(trainer) if name == VALIDATION else ({}, "")
    trainer.console.say(
        f"{name} at step {iteration}: loss {loss:.4f} over {targets:,.0f} tokens{metric_clause}"
    )
    record = {
        "iteration": iteration,
        f"{field}_loss": loss,
        f"{field}_target_tokens": targets,
        **losses,
        **metric,
        "plan_hash": " ".join(stream.plan.hash for stream in streams.values()),
    }
    trainer.log.write(record)
    return record


def _metric(trainer: Trainer) -> tuple[dict[str, float], str]:
    """Return the fields of ``--valid-metric`` for the log, and its text for the console."""
    questions, name = trainer.data.metric, trainer.config.training.valid_metric
    if questions is None or name is None:
        return {}, ""
    share, count = _answers(trainer).matches(), len(questions.prompts)
    fields = {f"valid_{name}": share, f"valid_{name}_count": count}
    return fields, metric_text(name, share, count)


def sum_loss(trainer: Trainer, stream: Stream[EvaluationPlan]) -> tuple[float, int]:
    """Return the sum of the losses over a finite plan in nats, and the number of targets."""
    loss, overflow, targets = _pass(trainer, stream)
    # The sum of a pack that overflowed cannot be taken back, so all packs run again.
    if overflow:
        with trainer.step.room_for_experts():
            loss, _, targets = _pass(trainer, stream)
    return loss, targets


def _pass(trainer: Trainer, stream: Stream[EvaluationPlan]) -> tuple[float, float, int]:
    """Run a validation; return its loss, the overflows of expert buffers, and the targets."""
    step, targets = trainer.step, 0
    # In place, because captured validation passes add to these addresses.
    step.validation_loss.zero_()
    step.validation_overflow.zero_()
    with trainer.garbage.in_validation():
        for number in range(stream.plan.num_steps):
            targets += stream.plan.step(number).global_targets
            for micro_batch in trainer.micro_batches(stream, number):
                step.validate(micro_batch)
    # A whole validation may be queued by now. `tolist` would wait for it without a heartbeat, and
    # the hang detector would end the run.
    trainer.hang_detector.beat()
    trainer.hang_detector.wait()
    sums_2 = torch.stack([step.validation_loss, step.validation_overflow.double()])
    sums = all_reduce_sum(sums_2, trainer.groups.dp_cp.group).tolist()
    # All ranks take the values of rank 0: they must agree on the best checkpoint and on the end.
    loss, overflow = all_gather_json(sums, trainer.groups)[0]
    return float(loss), float(overflow), targets


def _mean(loss: float, targets: int) -> float:
    return loss / targets if targets else float("nan")
