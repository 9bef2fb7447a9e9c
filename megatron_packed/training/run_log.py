"""Log of a run: records of finished steps, validations and checkpoints, and warnings."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron_packed.checkpoint.run_metadata import RunProgress
from megatron_packed.config.exit_codes import ExitCode
from megatron_packed.config.run import RunConfig
from megatron_packed.config.sections.training import TrainingConfig
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.models.flops import peak_flops
from megatron_packed.models.metrics_layout import ASSIGNED, DROPPED, ROWS, StepValues, most_rows
from megatron_packed.reporting.console import Console
from megatron_packed.reporting.loss_warnings import (
    NO_TARGETS,
    NON_FINITE,
    SPIKE,
    rising_validation,
    step_warnings,
    validation_without_loss,
    zero_loss,
)
from megatron_packed.reporting.run_writers import Writer, note
from megatron_packed.reporting.step_record import (
    ExpertFigures,
    MemoryFigures,
    StepFacts,
    StepRecord,
    step_record,
)
from megatron_packed.training.late_metrics import Arrived
from megatron_packed.training.train_step import TrainStep

if TYPE_CHECKING:
    from megatron_packed.checkpoint.save import SavedCheckpoint


@dataclass
class RunLog:
    """Log of a run on one rank: console lines, writers, and warnings."""

    config: RunConfig
    groups: ParallelGroups
    step: TrainStep
    progress: RunProgress
    """Progress of the run; its counts of skipped steps and spikes are updated."""
    console: Console
    writers: list[Writer]
    """Writers of this rank."""

    def __post_init__(self) -> None:
        self._peak = peak_flops(self.groups.device)
        self._complained: list[Writer] = []
        self._validations: list[tuple[int, float]] = []
        self._warned: set[str] = set()

    def finish(
        self, record: StepRecord, fields: dict[str, object], values: StepValues
    ) -> ExitCode | None:
        """Log a finished step; return the exit code if it is a reason to stop.

        See [Note: when a run may stop].

        Args:
            record: the record of the step.
            fields: ``record.as_dict()``.
            values: values that the step has reported.
        """
        training = self.config.training
        self.console.step(record)
        self.write(fields)
        if record.skipped or values.spikes:
            self._warn_of_step(record, values)
        if record.lm_loss == 0 and not record.skipped:
            self._warn_once("zero loss", zero_loss(record.iteration))
        if values.nonfinite and training.on_nonfinite == "stop":
            self.console.say(
                "Stopping because of --on-nonfinite stop; --on-nonfinite skip would continue."
            )
            return ExitCode.NONFINITE
        return ExitCode.PREEMPTED if values.stop_requested else None

    def _warn_of_step(self, record: StepRecord, values: StepValues) -> None:
        """Count a skipped step or a spike, as checkpoints store it, and warn of it."""
        training, progress, reason = self.config.training, self.progress, record.skip_reason
        # Update the counts before the warnings, which include this step in their counts.
        progress.skipped_steps += reason == NON_FINITE
        progress.steps_without_targets += reason == NO_TARGETS
        progress.spikes += bool(values.spikes)
        progress.skipped_spikes += reason == SPIKE
        for sentence in step_warnings(
            record.iteration, values, reason, progress, training, self.groups.tp_cp.size
        ):
            self.console.warn(sentence)

    def _look_at_validation(self, record: Mapping[str, Any]) -> None:
        """Warn once of a validation without a finite loss, and once of a rising validation loss."""
        iteration, loss = record["iteration"], record["valid_loss"]
        self._validations.append((iteration, loss))
        if not math.isfinite(loss):
            sentence = validation_without_loss(iteration, record["valid_target_tokens"] > 0)
            self._warn_once("no loss", sentence)
        self._warn_once("rise", rising_validation(self._validations))

    def _warn_once(self, kind: str, sentence: str) -> None:
        if sentence and kind not in self._warned:
            self._warned.add(kind)
            self.console.warn(sentence)

    def write(self, record: dict[str, object]) -> None:
        """Pass a record to all writers; a writer that fails costs one warning, not the run."""
        if "valid_loss" in record:
            self._look_at_validation(record)
        for writer in self.writers:
            try:
                writer.write(record)
            except OSError as error:  # for example, the disk is full
                if writer not in self._complained:
                    self.console.warn(
                        f"metrics cannot be written: {error}; the run continues without them."
                    )
                    self._complained.append(writer)

    def saved(self, checkpoint: SavedCheckpoint) -> None:
        """Write a saved checkpoint to the log."""
        record: dict[str, object] = {
            "iteration": checkpoint.step,
            "checkpoint": str(checkpoint.path),
            "checkpoint_mib": round(checkpoint.num_bytes / 2**20, 1),
            "checkpoint_seconds": round(checkpoint.seconds, 2),
        }
        note(record, self.writers, self.console)

    def record(
        self,
        arrived: Arrived[StepFacts],
        values: StepValues,
        counts: Mapping[str, Sequence[float]],
    ) -> StepRecord:
        """Return the record of a finished step, from its values and counters."""
        logging = self.config.logging
        medians = {spike.name: spike.median for spike in values.spikes}
        experts = self._experts(counts, arrived.facts.iteration)
        return step_record(
            arrived.facts,
            loss=values.loss,
            aux_loss=values.aux_loss,
            grad_norm=values.grad_norm,
            skip_reason=_skip_reason(values, self.config.training),
            mtp_losses=values.mtp_losses,
            medians=medians,
            # A coarse clock may give 0 seconds, and rates are divided by the time.
            seconds=max(arrived.seconds, 1e-9),
            world_size=self.groups.world_size,
            peak=self._peak,
            memory=MemoryFigures.now(self.groups.device),
            experts=experts,
            params_norm=values.params_norm if logging.log_params_norm else None,
            num_zeros=values.grad_zeros if logging.log_num_zeros_in_grad else None,
        )

    def _experts(
        self, counts: Mapping[str, Sequence[float]], iteration: int
    ) -> ExpertFigures | None:
        model = self.step.model
        figures = ExpertFigures.from_counts(
            counts[ASSIGNED], model.num_moe_layers, iteration, counts.get(DROPPED)
        )
        if figures is None or ROWS not in counts:
            return figures
        rows, room = most_rows(counts[ROWS]), model.expert_room
        load = room.load_of(rows)
        room.see(load)
        return figures.in_room(room, load)


def _skip_reason(values: StepValues, training: TrainingConfig) -> str | None:
    """Return the reason why the update of a step was not applied; None if it was applied."""
    # Checked first: a non-finite loss cannot be compared with a median.
    if values.nonfinite:
        return NON_FINITE
    if values.no_targets:
        return NO_TARGETS
    return SPIKE if values.spikes and training.loss_spike_policy == "skip" else None
