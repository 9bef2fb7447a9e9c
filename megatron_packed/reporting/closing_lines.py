"""The two console lines at the end of a run: what was trained, and where its results are."""

from __future__ import annotations

import time
from array import array
from datetime import timedelta
from pathlib import Path
from statistics import median

from megatron_packed.checkpoint.directory import step_name
from megatron_packed.checkpoint.run_metadata import RunProgress
from megatron_packed.config import flag_names as flags
from megatron_packed.config.run import RunConfig


class ClosingLines:
    """Writer that counts the steps of this process for the last lines of a run.

    The wall time begins when the object is created.
    """

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._steps: list[int] = []
        """First and last step of this process."""
        self._tokens = 0
        self._targets = 0
        self._rates = array("d")
        self._metric = ""
        """Task metric of the last validation."""

    def write(self, record: dict[str, object]) -> None:
        self._metric = _last_metric(record) or self._metric
        if "lm_loss" not in record:
            return
        step, tokens, targets, rate = (
            record[name]
            for name in ("iteration", "real_tokens", "target_tokens", "tokens_per_second")
        )
        assert isinstance(step, int) and isinstance(tokens, int) and isinstance(targets, int)
        assert isinstance(rate, float)
        self._steps = [*self._steps[:1], step]
        self._tokens += tokens
        self._targets += targets
        self._rates.append(rate)

    def close(self, *, failed: bool = False) -> None:
        """Do nothing: the lines are printed after all writers are closed."""

    def lines(
        self,
        config: RunConfig,
        progress: RunProgress,
        last_step: int,
        checkpoint: Path | None,
        report: str | None,
    ) -> tuple[str, str]:
        """Return the two lines.

        Args:
            config: configuration of the run.
            progress: progress of the run at its end.
            last_step: number of the step at which the run is complete.
            checkpoint: the last checkpoint that this process saved.
            report: the report page, if it was written.
        """
        places = (
            ("checkpoint", checkpoint),
            ("log", config.logging.log_jsonl),
            ("report", report),
        )
        outputs = [f"{name}: {path}" for name, path in places if path is not None]
        if not outputs and config.checkpoint.save is None:
            outputs = [f"no {flags.SAVE}, {flags.LOG_JSONL} or {flags.REPORT} was given"]
        elif not outputs:
            outputs = ["nothing new was saved"]
        line = " | ".join([*_best(config, progress), *self._metric.splitlines(), *outputs])
        return self._trained(last_step, config.data.sft), line[0].upper() + line[1:]

    def _trained(self, last_step: int, sft: bool) -> str:
        seconds = time.perf_counter() - self._began
        wall = f"{seconds:.1f} s" if seconds < 60 else timedelta(seconds=round(seconds))
        if not self._steps:
            return f"Trained no step; the run took {wall}."
        first, last = self._steps[0], self._steps[-1]
        steps = f"steps {first:,} to {last:,}" if last > first else f"step {last:,}"
        of = f" of {last_step:,}" if last < last_step else ""
        targets = f", {self._targets:,} targets" if sft else ""
        return (
            f"Trained {steps}{of} in {wall}: {self._tokens:,} tokens{targets}, "
            f"median {median(self._rates):,.0f} tokens/s."
        )


def metric_text(name: str, share: float, count: int) -> str:
    """Return a task metric as text, to be appended to other text."""
    return f", {name.replace('_', ' ')} {100 * share:.1f} % of {count:,} answers"


def _last_metric(record: dict[str, object]) -> str:
    """Return the task metric of a validation's record as text; empty without one."""
    share, count = record.get("valid_exact_match"), record.get("valid_exact_match_count")
    if not isinstance(share, float) or not isinstance(count, int):
        return ""
    text = metric_text("exact_match", share, count).removeprefix(", ")
    return f"{text} at step {record['iteration']:,}"


def _best(config: RunConfig, progress: RunProgress) -> list[str]:
    """Return the lowest validation loss, its step, and its checkpoint if that is still there."""
    if not progress.best_at:
        return []
    save = config.checkpoint.save
    place = None if save is None else Path(save) / step_name(progress.best_at)
    checkpoint = f" ({place})" if place is not None and place.is_dir() else ""
    loss = f"{progress.best_loss:.4f}"
    return [f"lowest validation loss {loss} at step {progress.best_at:,}{checkpoint}"]
