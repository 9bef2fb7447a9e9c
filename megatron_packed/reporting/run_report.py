"""Report page: one self-contained HTML file with numbers and curves of one or several runs.

The page is made from the runs' logs, and needs only a browser.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_packed.config import flag_names as flags
from megatron_packed.reporting.curves import Run, numbers_in, read_run, steady
from megatron_packed.reporting.html_page import render, write_page
from megatron_packed.reporting.loss_warnings import best_validation
from megatron_packed.reporting.run_charts import curves
from megatron_packed.reporting.run_numbers import numbers_of
from megatron_packed.reporting.run_overview import outcome, seconds_since_start
from megatron_packed.reporting.run_quality import sample_answers, validation_rows
from megatron_packed.reporting.run_warnings import warnings_of


def write_runs_page(
    runs: Sequence[Run],
    page: str | os.PathLike[str],
    *,
    title: str,
    levels: Mapping[str, float] | None = None,
    answers: Sequence[Mapping[str, str]] = (),
) -> Path:
    """Write a page about runs and return its path.

    One run has a summary, warnings, curves, validations and a description. Several runs have a
    column of numbers each, and share the curves.

    Args:
        runs: runs, each with at least one step.
        page: file to write.
        title: title and heading of the page.
        levels: horizontal lines in the chart of the loss, name -> nats; for example, the unigram
            entropy of the data.
        answers: objects with ``prompt``, ``answer`` and perhaps ``expected``, which are shown like
            those of the log.
    Raises:
        OSError: the page cannot be written.
        ValueError: a field of a log has a wrong value.
    """
    try:
        html = render("run_page.html", title=title, **_values(runs, levels or {}), given=answers)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise ValueError(
            f"{', '.join(run.name for run in runs)}: a field of the log has a wrong value ({error!r}); give a file "
            f"that {flags.LOG_JSONL} wrote."
        ) from error
    return write_page(page, html)


def _values(runs: Sequence[Run], levels: Mapping[str, float]) -> dict[str, object]:
    """Return the variables of a page about runs."""
    values: dict[str, object] = {"runs": runs, "rows": _rows(runs), **curves(runs, levels)}
    if len(runs) > 1:
        return values
    run = runs[0]
    return {
        **values,
        "verdict": outcome(run),
        "warnings": warnings_of(run),
        "targets": sum(numbers_in(run.steps, "target_tokens")),
        "rate": statistics.median(numbers_in(steady(run.steps), "tokens_per_second")),
        "seconds_in_steps": sum(numbers_in(run.steps, "step_time_ms")) / 1e3,
        "seconds_since_start": seconds_since_start(run),
        "validations": list(validation_rows(run)),
        "best": best_validation(run.validation_losses),
        "eval_interval": flags.EVAL_INTERVAL,
        "answers_of_log": sample_answers(run.answers),
        "saved_steps": sorted(set(map(int, numbers_in(run.checkpoints, "iteration")))),
    }


def _rows(runs: Sequence[Run]) -> dict[str, list[str]]:
    """Return the rows of the table of numbers: name -> value of each run."""
    columns = [dict(numbers_of(run)) for run in runs]
    names = dict.fromkeys(name for column in columns for name in column)
    if len(runs) == 1 and runs[0].facts:  # the description of the run has the kernels
        names.pop("kernels", None)
    return {name: [column.get(name, "") for column in columns] for name in names}


def write_report(
    log: str | os.PathLike[str],
    page: str | os.PathLike[str],
    *,
    title: str = "megatron_packed run",
    levels: Mapping[str, float] | None = None,
    answers: Sequence[Mapping[str, str]] = (),
) -> Path:
    """Write the page about one run from its ``--log-jsonl`` file; for arguments see `write_runs_page`.

    Raises:
        OSError: the log cannot be read, or the page not written.
        ValueError: the log holds no step, or a field has a wrong value.
    """
    return write_runs_page([read_run(log)], page, title=title, levels=levels, answers=answers)
