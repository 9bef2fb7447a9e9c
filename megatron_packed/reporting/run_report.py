"""Report page: one self-contained HTML file with numbers and curves of one or several runs.

The page is made from the runs' logs, and needs only a browser.
"""

from __future__ import annotations

import html
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_packed.config import flag_names as flags
from megatron_packed.reporting import run_charts, run_overview, run_quality
from megatron_packed.reporting.curves import Run, read_run
from megatron_packed.reporting.html_page import CHARTS_STYLE, write_html
from megatron_packed.reporting.run_details import folded_parts, what_was_run
from megatron_packed.reporting.run_numbers import numbers_of
from megatron_packed.reporting.run_quality import answer_table, sample_answers, validations

_STYLE = """
.runs td, .runs th, .named td { min-width: 6.5em; overflow-wrap: anywhere } .named th { min-width: 8em }
"""
_HASH = 12
"""Number of digits of a plan hash that are shown; the others are in a tooltip."""


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
        body = _body(runs, levels, answer_table("Answers", answers))
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise ValueError(
            f"{', '.join(run.name for run in runs)}: a field of the log has a wrong value ({error!r}); give a file "
            f"that {flags.LOG_JSONL} wrote."
        ) from error
    return write_html(
        page,
        title,
        body,
        _STYLE + run_overview.OVERVIEW_STYLE + run_quality.QUALITY_STYLE + CHARTS_STYLE,
    )


def _body(runs: Sequence[Run], levels: Mapping[str, float] | None, answers: str) -> str:
    """Return the HTML of a page below its heading."""
    curves = f"<h2>Curves</h2>{run_charts.curves_html(runs, levels)}"
    if len(runs) > 1:
        return f"{_numbers(runs)}{curves}{answers}"
    run = runs[0]
    return (
        f"{run_overview.overview(run)}{curves}<h2>Validation</h2>{validations(run)}{sample_answers(run)}{answers}"
        f"<h2>What was run</h2>{what_was_run(run)}<h2>Numbers</h2>{_numbers(runs)}"
        f"<h2>Details</h2>{folded_parts(run)}"
    )


def _numbers(runs: Sequence[Run]) -> str:
    """Return a table with a row per number and a column per run."""
    columns = [dict(numbers_of(run)) for run in runs]
    names = list(dict.fromkeys(name for column in columns for name in column))
    if len(runs) == 1 and runs[0].facts:  # the description of the run has the kernels
        names = [name for name in names if name != "kernels"]
    head = "<tr><td></td>" + "".join(f"<th>{html.escape(run.name)}</th>" for run in runs) + "</tr>"
    rows = ["" if len(runs) == 1 else head]
    for name in names:
        cells = "".join(f"<td>{_cell(name, column.get(name, ''))}</td>" for column in columns)
        rows.append(f"<tr><th>{html.escape(name)}</th>{cells}</tr>")
    return f"<div class='wide'><table class='runs'>{''.join(rows)}</table></div>"


def _cell(name: str, value: str) -> str:
    """Return the HTML of a value; a plan hash is short, and complete after a click or in a tooltip."""
    text = html.escape(value)
    if name != "plan hash" or len(value) <= _HASH:
        return text
    short = html.escape(value[:_HASH])
    return f"<details title='{text}'><summary>{short}...</summary>{text}</details>"


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
