"""Periodic work of a run, as callbacks in the order in which they follow a step.

Work that needs the weights of the last step, or the device, calls `Trainer.pause` first. A run that
stops does none of this work, because `Trainer.pause` then returns False.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from megatron_packed.config.exit_codes import ExitCode
from megatron_packed.config.run import RunConfig
from megatron_packed.config.sections.training import TrainingConfig
from megatron_packed.training.callback import Callback

if TYPE_CHECKING:
    from megatron_packed.reporting.profiling import StepProfiler
    from megatron_packed.training.trainer import Trainer


def run_callbacks(
    config: RunConfig,
    garbage: GarbageCollection,
    profiler: StepProfiler | None,
    user_callbacks: Sequence[Callback] = (),
) -> list[Callback]:
    """Return the callbacks of a run in their order.

    The callbacks of the user come before a validation and a save, which read what they have changed.
    Weights are compared before a save, because a checkpoint must not hold weights that differ
    between replicas. A validation runs before the save of the same step, because the checkpoint
    records the last validation.
    """
    training, checkpoint = config.training, config.checkpoint
    work: tuple[tuple[Callback, object], ...] = (
        (garbage, training.manual_gc and training.manual_gc_interval),
        (ReportSaves(), checkpoint.async_save),
        *((callback, True) for callback in user_callbacks),
        (CompareWeights(), training.check_weight_hash_across_dp_replicas_interval),
        (Validate(), config.validation_interval),
        (Save(), checkpoint.save_interval),
        (CaptureAgain(), config.cuda_graph.enabled),
        (AuditGraphs(), config.cuda_graph.cuda_graph_audit_interval),
        (Profile(), profiler),
        (ExitInterval(), training.exit_interval),
    )
    return [callback for callback, has_work in work if has_work]


class GarbageCollection(Callback):
    """Garbage collection at the steps set by ``options``; does nothing without ``manual_gc``.

    A collection takes tens of milliseconds in a large program. If the ranks collect at different
    steps, all other ranks wait for the collecting rank each time.
    """

    def __init__(self, options: TrainingConfig) -> None:
        self._manual = options.manual_gc
        self._interval = options.manual_gc_interval
        self._around_validation = options.manual_gc and options.manual_gc_eval

    @contextmanager
    def in_training(self) -> Iterator[None]:
        """Collect once, and disable Python's automatic collection inside the block."""
        if not self._manual or not gc.isenabled():
            yield
            return
        gc.disable()
        gc.collect()
        try:
            yield
        finally:
            gc.enable()

    def on_step_end(self, trainer: Trainer, step: int) -> None:
        """Collect after every ``manual_gc_interval``-th step."""
        if self._manual and self._interval and step % self._interval == 0:
            gc.collect()

    @contextmanager
    def in_validation(self) -> Iterator[None]:
        """Collect before and after a validation, so that training's garbage takes no memory in it."""
        if self._around_validation:
            gc.collect()
        yield
        if self._around_validation:
            gc.collect()


class ReportSaves(Callback):
    """Report of a checkpoint that a background thread has published; also when the run stops."""

    def on_step_end(self, trainer: Trainer, step: int) -> None:
        trainer.report_saved(trainer.state.saved())


class CompareWeights(Callback):
    """Comparison of the weights of replicas."""

    def on_step_end(self, trainer: Trainer, step: int) -> None:
        interval = trainer.config.training.check_weight_hash_across_dp_replicas_interval
        if trainer.is_multiple(interval) and trainer.pause():
            assert trainer.replicas is not None
            trainer.replicas.weights()


class Validate(Callback):
    """Validation at its interval and after the last step."""

    def on_train_start(self, trainer: Trainer) -> None:
        progress = trainer.progress
        # A run that was stopped saved at once and left out the validation of its last step.
        due = trainer.is_multiple(trainer.config.validation_interval)
        if due and 0 < progress.iteration != progress.validated_at:
            trainer.validate()

    def on_step_end(self, trainer: Trainer, step: int) -> None:
        # Validate after the last step, too. The last checkpoint is written after the validation, so
        # that it records the result.
        due = trainer.is_multiple(trainer.config.validation_interval)
        if (due or step == trainer.last_iteration) and trainer.pause():
            trainer.validate()


class Save(Callback):
    """Checkpoint at ``--save-interval``."""

    def on_step_end(self, trainer: Trainer, step: int) -> None:
        if trainer.is_multiple(trainer.config.checkpoint.save_interval) and trainer.pause():
            trainer.save_once()


class CaptureAgain(Callback):
    """New capture of all graphs after weights have moved to other addresses."""

    def on_step_end(self, trainer: Trainer, step: int) -> None:
        if not trainer.weights_moved or not trainer.pause():
            return
        from megatron_packed.training.build_graphs import capture_graphs

        assert trainer.step.graphs is not None
        trainer.console.say("weights have moved to other memory, so CUDA graphs are captured again")
        # All ranks capture at the same step, even if weights have moved on one rank only, because
        # captures contain collectives.
        packs = trainer.config.packs_per_step()
        capture_graphs(trainer.step.graphs, trainer.step, packs, trainer.groups)
        trainer.weights_moved = False


class AuditGraphs(Callback):
    """Comparison of a replay with an eager run of the next step's first micro-batch that fits a graph."""

    def on_step_end(self, trainer: Trainer, step: int) -> None:
        interval = trainer.config.cuda_graph.cuda_graph_audit_interval
        if not trainer.is_multiple(interval) or not trainer.pause():
            return
        if trainer.step.graphs is None:
            return
        from megatron_packed.training.build_graphs import audit_first_replay

        finding = audit_first_replay(
            trainer.step.graphs,
            trainer.step,
            # Data of the next step, which is loaded anyway. The audit does not change that step.
            trainer.data.train.loader.micro_batches(step),
            deterministic=trainer.config.training.deterministic_mode,
            seed=step,
        )
        trainer.console.say(f"audit at step {step}: {finding}")


class Profile(Callback):
    """Begin and end of the profiled steps."""

    def on_train_start(self, trainer: Trainer) -> None:
        self._turn(trainer)

    def on_step_end(self, trainer: Trainer, step: int) -> None:
        assert trainer.profiler is not None
        if trainer.profiler.turns_at(step) and trainer.pause():
            self._turn(trainer)

    def _turn(self, trainer: Trainer) -> None:
        assert trainer.profiler is not None
        if trainer.profiler.turns_at(trainer.progress.iteration):
            with trainer.hang_detector.resting():
                trainer.profiler.turn(trainer.progress.iteration)


class ExitInterval(Callback):
    """End of the run at ``--exit-interval``."""

    def on_step_end(self, trainer: Trainer, step: int) -> None:
        if trainer.exit_code is None and trainer.is_multiple(trainer.config.training.exit_interval):
            trainer.console.say(f"Iteration {step} is a multiple of --exit-interval: stopping.")
            trainer.stop(ExitCode.DONE)
