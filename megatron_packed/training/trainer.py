"""Training loop of a run: steps, late metrics, validation, checkpoints, and reasons to stop."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from megatron_packed.checkpoint.save import SavedCheckpoint
from megatron_packed.config.exit_codes import ExitCode
from megatron_packed.config.run import RunConfig
from megatron_packed.distributed.failure_watch import FailureWatch
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.distributed.hang_detection import HangDetector
from megatron_packed.inputs.run_data import AnyPlan, RunData, Stream
from megatron_packed.models.flops import FlopCounter
from megatron_packed.models.metrics_layout import StepValues
from megatron_packed.optim.lr_schedule import Schedule
from megatron_packed.optim.weight_decay_schedule import WeightDecaySchedule
from megatron_packed.packed.micro_batch import MicroBatch
from megatron_packed.reporting.console import Console
from megatron_packed.reporting.metric_writers import Writer
from megatron_packed.reporting.profiling import StepProfiler
from megatron_packed.reporting.progress_log import ProgressLog
from megatron_packed.reporting.step_record import StepFacts
from megatron_packed.resume.run_and_random_state import RunState
from megatron_packed.training.build_graphs import audit_first_replay, capture_graphs
from megatron_packed.training.evaluation import Evaluations
from megatron_packed.training.garbage_collection import GarbageCollection
from megatron_packed.training.late_metrics import Arrived
from megatron_packed.training.periodic_actions import PeriodicAction, after_every_step
from megatron_packed.training.replica_checks import ReplicaCheck, StepChecks
from megatron_packed.training.signals import SignalFlag
from megatron_packed.training.step_queue import StepQueue
from megatron_packed.training.step_results import StepResults
from megatron_packed.training.train_step import TrainStep

_RESUME = "Run the same command again to resume."
_NOT_SAVED = "Nothing was saved, because --save is not given."


@dataclass(kw_only=True)
class Trainer:
    """Training loop of a job that is already built; every rank runs the same loop.

    [Note: when a run may stop]
    All ranks must take some decisions together: to stop after a signal, to stop after a non-finite
    step, to capture graphs again. These decisions depend on the all-reduced metrics of the previous
    step, which every rank reads at the same place of the loop. A time limit that any rank's clock
    has reached is sent in the same way as a signal.
    """

    config: RunConfig
    groups: ParallelGroups
    step: TrainStep
    state: RunState
    schedule: Schedule
    weight_decay: WeightDecaySchedule
    last_iteration: int
    """Iteration after which the run ends."""
    data: RunData
    flops: FlopCounter
    console: Console
    writers: list[Writer]
    signal: SignalFlag
    watch: FailureWatch
    hang_detector: HangDetector | None = None
    """Detector of hangs; None if the device does not wait for other devices."""
    profiler: StepProfiler | None = None
    progress_log: ProgressLog | None = None

    def __post_init__(self) -> None:
        if self.hang_detector is not None:
            self.step.beat = self.hang_detector.beat
        self._garbage = GarbageCollection(self.config.training)
        self._results = StepResults(
            self.config, self.groups, self.step, self.state.progress, self.console, self.writers
        )
        self._evaluations = Evaluations(
            config=self.config,
            groups=self.groups,
            step=self.step,
            progress=self.state.progress,
            console=self.console,
            write=self._results.write,
            load=self._loaded,
            garbage=self._garbage,
            wait_for_device=self._wait_for_device,
            idle=self._idle,
            data=self.data,
        )
        self.steps = StepQueue(
            config=self.config,
            groups=self.groups,
            step=self.step,
            progress=self.state.progress,
            schedule=self.schedule,
            weight_decay=self.weight_decay,
            train=self.data.train,
            flops=self.flops,
            console=self.console,
            watch=self.watch,
            load=self._loaded,
            checks=self._checks,
            stop_requested=self._stop_requested,
            waits=(lambda: None) if self.hang_detector is None else self.hang_detector.waits,
        )
        self.last_checkpoint: Path | None = None
        """Checkpoint that this process saved last."""
        self._weights_moved = False
        self.stopped_early = False
        """True if validations have stopped the run."""
        self._started = time.perf_counter()
        # The checkpoint from which the run resumes need not be saved again.
        self._saved_at = self.state.progress.iteration or None

    def run(self) -> ExitCode:
        """Train until the last iteration or a reason to stop, save, and return the exit code."""
        with self._garbage.in_training():
            return self._run()

    def _run(self) -> ExitCode:
        if self.config.training.skip_train:
            self.validate()
            self._evaluations.end(complete=True)
            return ExitCode.DONE
        exit_code, actions = self._begin(), self._periodic_actions()
        while self.state.progress.iteration < self.last_iteration and exit_code is None:
            exit_code = self._settle(self.steps.queue_next())
            for action in actions:
                if (exit_code is None or action.also_when_stopping) and action.due():
                    reason = self._pause(action.run) if action.pauses else action.run()
                    exit_code = exit_code if reason is None else reason
        return self._end(exit_code)

    def _periodic_actions(self) -> tuple[PeriodicAction, ...]:
        """Return the actions that may follow a step, in their order.

        Weights are compared before a save, because a checkpoint must not hold weights that differ
        between replicas. A validation runs before the save of the same step, because the checkpoint
        records the last validation.
        """
        training = self.config.training
        hashed = training.check_weight_hash_across_dp_replicas_interval
        audited = self.config.cuda_graph.cuda_graph_audit_interval
        # The first action does not wait for the device, so it needs no pause.
        return (
            PeriodicAction(after_every_step, self._after_step, False, True),
            PeriodicAction(self._every(hashed), lambda: self._replicas.weights()),
            PeriodicAction(self._validation_due, self.validate),
            PeriodicAction(self._every(self.config.checkpoint.save_interval), self._save_once),
            PeriodicAction(lambda: self._weights_moved, self._capture_again),
            PeriodicAction(self._every(audited), self.audit),
            PeriodicAction(self._profiler_turns, self._turn_profiler),
            PeriodicAction(self._every(training.exit_interval), self._exit_early, False),
        )

    def _begin(self) -> ExitCode | None:
        """Run the actions that were due after the step at which the run resumes.

        Returns:
            A reason to stop: the run has already stopped early.
        """
        progress, stopped = self.state.progress, None
        validates = self._due(self.config.validation_interval)
        # A run that was stopped saved at once and left out the validation of its last step.
        if validates and 0 < progress.iteration != progress.validated_at:
            stopped = self.validate()
        if self._profiler_turns():
            self._turn_profiler()
        self.steps.restart()
        if stopped is not None:
            return stopped
        return self._stop_early(
            "Nothing is trained, because the run had an ", " Raise it or leave it out to go on."
        )

    def _end(self, exit_code: ExitCode | None) -> ExitCode:
        """Finish the last step, save, and evaluate a complete run on the test data."""
        # The loop ends with a step still queued. Its metrics are read before a save.
        progress = self.state.progress
        late = self._settle(self.steps.flush())
        self.step.buffers.wait_params()
        if self.profiler is not None:
            with self._resting():
                self.profiler.end(progress.iteration)
        # The last step may give a reason to stop that the loop has not seen.
        if late is not None and exit_code in (None, ExitCode.DONE):
            exit_code = late
        if (
            exit_code is None
            and self.config.validation_interval
            and progress.validated_at != progress.iteration
        ):
            self.validate()
        # Save after a non-finite step, too: its update was not applied, so weights and moments are
        # valid, and the steps since the last save are not lost.
        self._save_once()
        with self._resting():
            self._say_saved(self.state.saved(wait=True))
        if exit_code == ExitCode.PREEMPTED:
            hint = _NOT_SAVED if self.config.checkpoint.save is None else _RESUME
            self.console.say(f"Stopped on request. {hint}")
        complete = progress.iteration >= self.last_iteration or self.stopped_early
        if exit_code in (None, ExitCode.DONE):
            self._evaluations.end(complete=complete)
        return ExitCode.DONE if exit_code is None else exit_code

    def _after_step(self) -> None:
        """Collect garbage if it is due, and report a checkpoint that is published by now."""
        self._garbage.after_step(self.state.progress.iteration)
        self._say_saved(self.state.saved())

    def _exit_early(self) -> ExitCode:
        iteration = self.state.progress.iteration
        self.console.say(f"Iteration {iteration} is a multiple of --exit-interval: stopping.")
        return ExitCode.DONE

    def validate(self) -> ExitCode | None:
        """Print and log the loss over the validation data, if the run has any; a collective.

        Returns:
            A reason to stop: too many validations had no lower loss.
        """
        if not self.data.validations:
            return None
        improved = self._evaluations.validate()
        self._saved_at = None  # save again, so that a checkpoint records this validation
        if improved and self.config.checkpoint.save_best and not self.config.training.skip_train:
            self.save()
        return self._stop_early("Stopping: ")

    def _stop_early(self, begin: str, end: str = "") -> ExitCode | None:
        """Print why validations stop the run, and return its exit code; None if they do not."""
        sentence = self._evaluations.stop_sentence()
        if sentence is None or self.state.progress.iteration >= self.last_iteration:
            return None
        self.stopped_early = True
        self.console.say(f"{begin}{sentence}{end}")
        return ExitCode.DONE

    def audit(self) -> None:
        """Compare a replay with an eager run of the next step's first micro-batch that fits a graph.

        Raises:
            AuditMismatchError: the results differ.
        """
        graphs, iteration = self.step.graphs, self.state.progress.iteration
        if graphs is None:
            return
        found = audit_first_replay(
            graphs,
            self.step,
            # Data of the next step, which is loaded anyway. The audit does not change that step.
            self.data.train.loader.micro_batches(iteration),
            deterministic=self.config.training.deterministic_mode,
            seed=iteration,
        )
        self.console.say(f"audit at step {iteration}: {found}")

    def _profiler_turns(self) -> bool:
        return self.profiler is not None and self.profiler.turns_at(self.state.progress.iteration)

    def _turn_profiler(self) -> None:
        assert self.profiler is not None
        with self._resting():
            self.profiler.turn(self.state.progress.iteration)

    def _save_once(self) -> None:
        """Save, unless the checkpoint of this iteration is already saved."""
        if self._saved_at != self.state.progress.iteration:
            self.save()

    def save(self) -> None:
        """Write a checkpoint, if ``--save`` is given; with ``--async-save`` only begin to write."""
        if self.config.checkpoint.save is None:
            return
        with self._resting():
            saved = self.state.save(self.config.checkpoint)
        # With ``--async-save``, the checkpoint is not complete yet, but it needs no second save.
        self._saved_at = self.state.progress.iteration
        self._say_saved(saved)
        if self.progress_log is not None:
            self.progress_log.saved(self.state.progress, beside=self.config.checkpoint.async_save)

    def _resting(self) -> AbstractContextManager[None]:
        return nullcontext() if self.hang_detector is None else self.hang_detector.resting()

    def _say_saved(self, saved: SavedCheckpoint | None) -> None:
        if saved is None:
            return
        self.last_checkpoint = saved.path
        self.console.say(
            f"saved {saved.path} ({saved.num_bytes / 2**20:,.1f} MiB in {saved.seconds:.1f} s)"
        )
        self._results.saved(saved)
        for warning in saved.warnings:
            self.console.warn(warning)
        if self.progress_log is not None and self.config.checkpoint.async_save:
            self.progress_log.published(saved.step)

    def _loaded(self, stream: Stream[AnyPlan], number: int) -> list[MicroBatch]:
        # The loader may have to pack an epoch first. Resting keeps the hang detector from taking
        # this wait for a hang.
        with self._resting():
            return stream.loader.micro_batches(number)

    @cached_property
    def _replicas(self) -> ReplicaCheck:
        return ReplicaCheck(self.step.model, self.step.optimizer, self.groups, self._idle)

    def _checks(self, iteration: int) -> StepChecks:
        """Return the checks that run inside a step."""
        training = self.config.training
        weights = training.check_weight_hash_across_dp_replicas_interval
        gradients = training.check_grad_hash_across_dp_replicas_interval
        return StepChecks(
            weights=self._replicas.weights if weights and iteration % weights == 0 else None,
            gradients=self._replicas.gradients
            if gradients and iteration % gradients == 0
            else None,
        )

    def _wait_for_device(self) -> None:
        """Wait for all queued work, watched by the hang detector.

        A later wait inside CUDA would not be watched.
        """
        if self.hang_detector is not None:
            self.step.beat()
            self.hang_detector.wait()

    @contextmanager
    def _idle(self) -> Iterator[None]:
        """Wait for the device, and pause the hang detector inside the block."""
        self._wait_for_device()
        with self._resting():
            yield

    def _capture_again(self) -> None:
        assert self.step.graphs is not None
        self.console.say("weights have moved to other memory, so CUDA graphs are captured again")
        # All ranks capture at the same step, even if weights have moved on one rank only, because
        # captures contain collectives.
        capture_graphs(self.step.graphs, self.step, self.config.packs_per_step(), self.groups)
        self._weights_moved = False

    def _settle(self, arrived: Arrived[StepFacts] | None) -> ExitCode | None:
        """Log a finished step, or run a held step again.

        A held step changed nothing, because an expert buffer overflowed.

        Returns:
            The exit code if the step is a reason to stop; otherwise None.
        """
        if arrived is None:
            return None
        values = StepValues.from_list(
            arrived.values[: self.step.metrics.numel()], self.step.layout.depths
        )
        if values.held:
            return self.steps.redo(arrived.facts, self._settle)
        self.steps.forget(arrived.facts)
        self._weights_moved |= values.weights_moved
        return self._results.take(arrived, values)

    def _stop_requested(self) -> bool:
        limit = self.config.training.exit_duration_in_mins
        # Each rank reads its own clock. The flags of all ranks are summed, so all ranks stop
        # together.
        timed_out = limit is not None and time.perf_counter() - self._started > 60 * limit
        return self.signal.received is not None or timed_out

    def _due(self, interval: int | None) -> bool:
        return bool(interval and self.state.progress.iteration % interval == 0)

    def _every(self, interval: int | None) -> Callable[[], bool]:
        return lambda: self._due(interval)

    def _validation_due(self) -> bool:
        # Validate after the last step, too. The last checkpoint is written after the validation, so
        # that it records the result.
        interval = self.config.validation_interval
        return self._due(interval) or (
            bool(interval) and self.state.progress.iteration == self.last_iteration
        )

    def _pause(self, run: Callable[[], ExitCode | None]) -> ExitCode | None:
        """Run an action between steps, after the last step's metrics are logged.

        The time of the action does not count as step time.
        """
        exit_code = self._settle(self.steps.flush())
        self.step.buffers.wait_params()  # gathers of parameters may still run on the device
        if exit_code is None:
            exit_code = run()
        self.steps.restart()
        return exit_code
