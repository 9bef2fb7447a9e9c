"""Finished steps: their record for the log and the console, their warnings, a reason to stop."""

from __future__ import annotations

from megatron_packed.config.run import RunConfig
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.training.checkpoint_metadata import RunProgress
from megatron_packed.training.console import Console
from megatron_packed.training.exit_codes import ExitCode
from megatron_packed.training.late_metrics import Arrived
from megatron_packed.training.loss_spikes_and_skipped_steps import (
    count_incidents,
    sentences,
    skip_reason,
)
from megatron_packed.training.metric_writers import Writer
from megatron_packed.training.metrics import (
    ExpertFigures,
    MemoryFigures,
    StepFacts,
    StepRecord,
    peak_flops,
    step_record,
)
from megatron_packed.training.metrics_layout import StepValues
from megatron_packed.training.train_step import TrainStep


class StepResults:
    """Log of finished steps.

    Args:
        progress: its counts of skipped steps and spikes are advanced.
        writers: of this rank; the console's and theirs are the only outputs.
    """

    def __init__(
        self,
        config: RunConfig,
        groups: ParallelGroups,
        step: TrainStep,
        progress: RunProgress,
        console: Console,
        writers: list[Writer],
    ) -> None:
        self._config = config
        self._groups = groups
        self._step = step
        self._progress = progress
        self._console = console
        self._writers = writers
        self._peak = peak_flops(groups.device)
        self._complained: list[Writer] = []

    def take(self, arrived: Arrived[StepFacts], values: StepValues) -> ExitCode | None:
        """Log a finished step; return the exit code if it is a reason to stop.

        See [Note: when a run may stop].
        """
        training, progress = self._config.training, self._progress
        record = self._record(arrived, values)
        self._console.step(record)
        self.write(record.as_dict())
        # After the line of the log: sentences tell the count with this step in it.
        count_incidents(progress, values, training)
        for sentence in sentences(
            record.iteration, values, progress, training, self._groups.tp_cp_size
        ):
            self._console.warn(sentence)
        if values.nonfinite and training.on_nonfinite == "stop":
            self._console.say(
                "Stopping, as --on-nonfinite stop asks; --on-nonfinite skip would go on."
            )
            return ExitCode.NONFINITE
        return ExitCode.PREEMPTED if values.stop_requested else None

    def write(self, record: dict[str, object]) -> None:
        """Give a record to all writers."""
        for writer in self._writers:
            try:
                writer.write(record)
            except OSError as error:  # a full disk is worth one warning, not the run
                if writer not in self._complained:
                    self._console.warn(
                        f"the numbers of this run cannot be written: {error}; it goes on without them."
                    )
                    self._complained.append(writer)

    def _record(self, arrived: Arrived[StepFacts], values: StepValues) -> StepRecord:
        logging, counts = self._config.logging, self._step.layout.counts_of(arrived.values)
        return step_record(
            arrived.facts,
            loss=values.loss,
            aux_loss=values.aux_loss,
            grad_norm=values.grad_norm,
            skip_reason=skip_reason(values, self._config.training),
            medians={spike.name: spike.median for spike in values.spikes},
            # A coarse clock may give 0, and rates divide by it.
            seconds=max(arrived.seconds, 1e-9),
            world_size=self._groups.world_size,
            peak=self._peak,
            memory=MemoryFigures.now(self._groups.device),
            experts=ExpertFigures.of(
                counts["expert_counts"],
                self._step.model.num_moe_layers,
                arrived.facts.iteration,
                counts.get("dropped_assignments"),
            ),
            params_norm=values.params_norm if logging.log_params_norm else None,
            num_zeros=values.grad_zeros if logging.log_num_zeros_in_grad else None,
        )
