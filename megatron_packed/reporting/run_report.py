"""Report page: one self-contained HTML file with numbers and curves of one or several runs.

The page is made from the runs' logs, and needs only a browser.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from megatron_packed.config import flag_names as flags
from megatron_packed.config.exit_codes import ExitCode
from megatron_packed.reporting.curves import Record, Run, number_in, numbers_in, read_run, steady
from megatron_packed.reporting.html_page import counted, moment, perplexity, render, write_page
from megatron_packed.reporting.loss_warnings import best_validation
from megatron_packed.reporting.run_charts import curves
from megatron_packed.reporting.run_numbers import numbers_of
from megatron_packed.reporting.run_warnings import warnings_of

_MANY = 0.1
"""Share of skipped steps above which a finished run is not called good."""


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


def outcome(run: Run) -> tuple[str, str]:
    """Return a kind (``good``, ``bad`` or ``open``) and the sentence that says how the run ended."""
    last, planned = int(number_in(run.steps[-1], "iteration")), run.facts.get("last_iteration")
    place = f"step {last:,} of {planned:,}" if isinstance(planned, int) else f"step {last:,}"
    if not run.end:
        return "open", _without_end(last, planned, place)
    code = run.end.get("exit_code")
    if code == ExitCode.NONFINITE:
        return "bad", f"Stopped at {place} by a non-finite loss or gradient."
    if code == ExitCode.PREEMPTED:
        return "open", f"Stopped on request after {place}. The same command continues the run."
    if code != ExitCode.DONE:
        return "bad", f"Ended after {place} with exit code {code}."
    if run.end.get("stopped_early"):
        return "good", f"Finished: validations stopped the run early at {place}."
    if isinstance(planned, int) and last < planned:
        return "open", f"Stopped after {place}. The same command continues the run."
    skipped = sum(bool(step["skipped"]) for step in run.steps)
    without = f", {skipped:,} of them without an update" if skipped else ""
    kind = "bad" if skipped > _MANY * len(run.steps) else "good"
    return kind, f"Finished: {counted(last, 'step')}{without}."


def _without_end(last: int, planned: object, place: str) -> str:
    """Return the verdict about a log without an end."""
    if not isinstance(planned, int):  # the log of an older version
        return f"The log ends at {place}."
    if last >= planned:
        return f"All {planned:,} steps are done, but the log has no end: the run may still save."
    return (
        f"Not finished: the log ends at {place}. The run still goes on, or it was killed or failed."
    )


def seconds_since_start(run: Run) -> float | None:
    """Return the seconds between the last start and the end of a run; None if one is unknown."""
    begun = moment(run.starts[-1].get("time")) if run.starts else None
    ended = moment(run.end.get("time"))
    return (ended - begun).total_seconds() if begun and ended else None


def validation_rows(run: Run) -> Iterator[dict[str, str]]:
    """Yield a row for each validation, and for each evaluation on the test data."""
    best, previous_loss = best_validation(run.validation_losses), None
    metrics = _metrics(run.validations)
    for record, (step, loss) in zip(run.validations, run.validation_losses):
        row = {
            "step": f"{step:,}",
            "loss": f"{loss:.4f}",
            "change": "" if previous_loss is None else f"{loss - previous_loss:+.4f}",
            "perplexity": perplexity(loss),
            "targets": f"{int(number_in(record, 'valid_target_tokens')):,}"
            if "valid_target_tokens" in record
            else "",
        }
        row |= {_words(name): _metric(record, name) for name in metrics}
        row[""] = "best" if best == (step, loss) else ""
        previous_loss = loss
        yield row


def _metrics(records: list[Record]) -> list[str]:
    """Return the fields of task metrics; a field with the number of answers is none."""
    names = {
        name
        for record in records
        for name, value in record.items()
        if name.startswith("valid_") and isinstance(value, (int, float))
    }
    others = {"valid_loss", "valid_target_tokens", *(f"{name}_count" for name in names)}
    return sorted(names - others)


def _words(name: str) -> str:
    return name.removeprefix("valid_").replace("_", " ")


def _metric(record: Record, name: str) -> str:
    """Return a task metric as text; with a number of answers it is a share of them."""
    value, count = record.get(name), record.get(f"{name}_count")
    if not isinstance(value, (int, float)):
        return ""
    return f"{100 * value:.1f} % of {count:,}" if isinstance(count, int) else f"{value:.4g}"


def sample_answers(records: Sequence[Record]) -> list[Record]:
    """Return the last answers to sample prompts, each with its ``earlier`` answers.

    Args:
        records: records with answers, in order.
    """
    if not records:
        return []
    *earlier_records, last = records
    return [
        {**sample, "earlier": _earlier(place, sample.get("prompt"), earlier_records)}
        for place, sample in enumerate(_samples(last))
    ]


def _samples(record: Record) -> list[Record]:
    samples = record["samples"]
    assert isinstance(samples, list)
    return [sample for sample in samples if isinstance(sample, dict)]


def _earlier(place: int, prompt: object, records: Sequence[Record]) -> list[dict[str, str]]:
    """Return rows of earlier answers to a prompt; the same answer at several steps is one row."""
    rows: list[dict[str, str]] = []
    first = ""
    for record in records:
        samples = _samples(record)
        if len(samples) <= place or samples[place].get("prompt") != prompt:
            continue
        step, answer = f"{int(number_in(record, 'iteration')):,}", str(samples[place].get("answer"))
        if rows and rows[-1]["answer"] == answer:
            rows[-1]["steps"] = f"{first} to {step}"
        else:
            first = step
            rows.append({"steps": step, "answer": answer})
    return rows
