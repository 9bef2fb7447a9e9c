"""Console output of a run, printed by rank 0: coloured in a terminal, plain in a file.

``--log-interval`` decides which steps get a line. Between these lines, a terminal shows the newest
step in one line that the next step overwrites.
"""

from __future__ import annotations

import sys
import time
from array import array
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console as RichConsole
from rich.markup import escape

from megatron_packed.checkpoint.directory import step_name
from megatron_packed.checkpoint.run_metadata import RunProgress
from megatron_packed.config import flag_names as flags
from megatron_packed.config.errors import escaped
from megatron_packed.config.run import RunConfig
from megatron_packed.config.sections.logging import LoggingConfig
from megatron_packed.reporting.step_record import StepRecord

Sample = dict[str, str]
"""Texts ``prompt`` and ``answer``, and ``expected`` if the file of prompts has an answer."""
SAMPLES = "samples"
"""Field of the log: a list of `Sample`."""
_MOST_SHOWN = 4
"""Largest number of answers that the console shows at a time."""
_WIDTH = 100
"""Largest number of characters of a prompt or an answer on the console."""


class Console:
    """Console of a run, which prints on rank 0 only.

    Args:
        rank: global rank of this process.
        total_steps: number of the run's last step, for progress and ETA. A run sets it when the
            number is known.
        log_interval: steps from one printed line to the next.
        brief: leaves out the details before the first step.
        quiet: prints nothing.
    """

    def __init__(
        self,
        rank: int,
        total_steps: int = 0,
        log_interval: int = 1,
        *,
        brief: bool = False,
        quiet: bool = False,
    ) -> None:
        self.silent = quiet or rank != 0
        """True if this console prints nothing."""
        self._brief = brief
        self.total_steps = total_steps
        self._interval = log_interval
        self._rich = RichConsole(highlight=False, soft_wrap=True) if sys.stdout.isatty() else None
        self._recent_seconds: list[float] = []
        self._shows_step = False
        """True while the terminal shows a line that the next text overwrites."""

    @classmethod
    def of_run(cls, rank: int, options: LoggingConfig, *, quiet: bool = False) -> Console:
        """Return the console of one rank of a run."""
        return cls(rank, log_interval=options.log_interval, brief=options.brief_start, quiet=quiet)

    def say(self, text: str, *, style: str = "") -> None:
        """Print a line of text.

        Control characters, which may come from data or paths, are escaped.
        """
        if self.silent:
            return
        if not text.isprintable():
            text = escaped(text)
        if self._rich is not None:
            self._erase_step()
            self._rich.print(escape(text), style=style)
        else:
            print(text, flush=True)

    def detail(self, text: str) -> None:
        """Print a line that ``--brief-start`` leaves out."""
        if not self._brief:
            self.say(text)

    def warn(self, text: str) -> None:
        self.say(f"WARNING: {text}", style="bold yellow")

    def step(self, record: StepRecord) -> None:
        self._recent_seconds = [*self._recent_seconds[-19:], record.step_time_ms / 1e3]
        line = self._step_line(record)
        if record.iteration % self._interval == 0 or record.iteration == self.total_steps:
            self.say(line, style="red" if record.skipped else "")
        elif self._rich is not None and not self.silent:
            self._erase_step()
            # A longer line would wrap, and the next step could erase only its last row.
            print(line[: self._rich.width - 1], end="\r", flush=True)
            self._shows_step = True

    def _erase_step(self) -> None:
        """Remove the line of the newest step from the terminal, so that a text can take its place."""
        if self._shows_step:
            print("\033[K", end="")
            self._shows_step = False

    def _step_line(self, record: StepRecord) -> str:
        # The median, not the mean: the first step compiles kernels and is far slower.
        seconds = sorted(self._recent_seconds)[len(self._recent_seconds) // 2]
        eta = timedelta(seconds=round(seconds * (self.total_steps - record.iteration)))
        parts = [
            f"step {record.iteration:>{len(str(self.total_steps))}}/{self.total_steps}",
            f"ETA {eta}",
            f"loss {record.lm_loss:.4f}",
            f"lr {record.learning_rate:.2e}",
            f"grad norm {record.grad_norm:.3f}",
        ]
        if record.mtp_losses:
            parts.insert(3, "mtp loss " + " ".join(f"{loss:.4f}" for loss in record.mtp_losses))
        if record.params_norm is not None:
            parts.append(f"params norm {record.params_norm:.3f}")
        if record.num_zeros is not None:
            parts.append(f"{record.num_zeros:,} zero gradients")
        parts += [
            f"{record.step_time_ms:,.0f} ms",
            f"{record.tokens_per_second:,.0f} tok/s",
        ]
        if record.mfu is not None:
            parts.append(f"{record.tflops_per_gpu:.1f} TFLOP/s/GPU, MFU {100 * record.mfu:.1f} %")
        parts += [
            f"fill {100 * record.pack_fill:.1f} %",
            f"{record.docs_per_pack:.1f} docs/pack",
            f"{record.memory_gib:.1f} GiB",
        ]
        if record.offload is not None:
            hidden = (
                "" if record.offload.hidden is None else f", {record.offload.hidden:.0%} hidden"
            )
            parts.append(f"offloaded {record.offload.moved_mib:,.0f} MiB{hidden}")
        if record.experts is not None and record.experts.dropped_share:
            parts.append(f"expert assignments dropped {100 * record.experts.dropped_share:.3g} %")
        if record.graphs is not None:
            parts.append(
                f"replayed {record.graphs.replays}/{record.graphs.replays + record.graphs.fallbacks}"
            )
        parts += [f"{name} {value:.4g}" for name, value in record.callback_metrics.items()]
        if record.skipped:
            parts.append(f"SKIPPED: {record.skip_reason}")
        return " | ".join(parts)


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

    def write(self, record: dict[str, Any]) -> None:
        self._metric = _last_metric(record) or self._metric
        if "lm_loss" not in record:
            return
        self._steps = [*self._steps[:1], record["iteration"]]
        self._tokens += record["real_tokens"]
        self._targets += record["target_tokens"]
        self._rates.append(record["tokens_per_second"])

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


def _last_metric(record: dict[str, Any]) -> str:
    """Return the task metric of a validation's record as text; empty without one."""
    share = record.get("valid_exact_match")
    if share is None:
        return ""
    text = metric_text("exact_match", share, record["valid_exact_match_count"])
    return f"{text.removeprefix(', ')} at step {record['iteration']:,}"


def _best(config: RunConfig, progress: RunProgress) -> list[str]:
    """Return the lowest validation loss, its step, and its checkpoint if that is still there."""
    if not progress.best_at:
        return []
    save = config.checkpoint.save
    place = None if save is None else Path(save) / step_name(progress.best_at)
    checkpoint = f" ({place})" if place is not None and place.is_dir() else ""
    loss = f"{progress.best_loss:.4f}"
    return [f"lowest validation loss {loss} at step {progress.best_at:,}{checkpoint}"]


def answer_lines(iteration: int, samples: Sequence[Sample]) -> list[str]:
    """Return short lines with the first answers to sample prompts."""
    lines = [
        f"answer at step {iteration}: {_short(sample['prompt'])} -> {_short(sample['answer'])}"
        for sample in samples[:_MOST_SHOWN]
    ]
    omitted = len(samples) - _MOST_SHOWN
    return [*lines, f"and {omitted} more answers in the log"] if omitted > 0 else lines


def _short(text: str) -> str:
    """Return a text as one line, without its middle if it is long."""
    line = " ".join(text.split())
    half = _WIDTH // 2 - 2
    return line if len(line) <= _WIDTH else f"{line[:half]} ... {line[-half:]}"
