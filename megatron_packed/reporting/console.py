"""Console output of a run, printed by rank 0: coloured in a terminal, plain in a file.

``--log-interval`` decides which steps get a line. Between these lines, a terminal shows the newest
step in one line that the next step overwrites.
"""

from __future__ import annotations

import sys
from datetime import timedelta

from rich.console import Console as RichConsole
from rich.markup import escape

from megatron_packed.config.errors import escaped
from megatron_packed.config.sections.logging import LoggingConfig
from megatron_packed.reporting.step_record import StepRecord


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
