"""Tables of a report page about quality: validations, and answers to sample prompts."""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping, Sequence

from megatron_packed.config import flag_names as flags
from megatron_packed.reporting.curves import Record, Run, number_in
from megatron_packed.reporting.html_page import folded, table
from megatron_packed.reporting.run_overview import best_validation, perplexity_text

QUALITY_STYLE = """
.answers > tbody > tr > td { min-width: 9em; max-width: 34em }
.answers p { margin: 0; white-space: pre-wrap; max-height: 24em; overflow-y: auto } .same { color: var(--good) }
"""
_SHOWN = 12
"""Largest number of validations in the table that is not folded."""
_PROMPTS, _EARLIER = 20, 10
"""Largest numbers of prompts with their answers, and of earlier answers to each."""


def validations(run: Run) -> str:
    """Return a table of the validations; earlier rows of a long table are folded."""
    if not run.validations:
        return (
            f"<p class='muted'>The log has no validation; {flags.EVAL_INTERVAL} asks for them.</p>"
        )
    rows = list(_validation_rows(run))
    page = table(rows[-_SHOWN:], left=0)
    earlier = rows[:-_SHOWN]
    if earlier:
        noun = "validation" if len(earlier) == 1 else "validations"
        page = folded(f"{len(earlier):,} earlier {noun}", table(earlier, left=0)) + page
    return page


def _validation_rows(run: Run) -> Iterator[dict[str, str]]:
    """Yield a row for each validation, and for each evaluation on the test data."""
    best, previous_loss = best_validation(run.validations), None
    metrics = _metrics(run.validations)
    for record in run.validations:
        step, loss = int(number_in(record, "iteration")), number_in(record, "valid_loss")
        row = {
            "step": f"{step:,}",
            "loss": f"{loss:.4f}",
            "change": "" if previous_loss is None else f"{loss - previous_loss:+.4f}",
            "perplexity": perplexity_text(loss),
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


def sample_answers(run: Run) -> str:
    """Return the last answers to sample prompts, with earlier answers folded; empty without any."""
    records = run.answers
    if not records:
        return ""
    step = int(number_in(records[-1], "iteration"))
    return answer_table(f"Answers at step {step:,}", _samples(records[-1]), records[:-1])


def answer_table(
    heading: str, samples: Sequence[Mapping[str, object]], earlier_records: Sequence[Record] = ()
) -> str:
    """Return a table of prompts with their answers and the expected answers; empty without any.

    Args:
        heading: heading of the section.
        samples: prompts with answers.
        earlier_records: records with answers to the same prompts.
    """
    if not samples:
        return ""
    shown = samples[:_PROMPTS]
    names = ["prompt", "answer"] + ["expected"] * any("expected" in sample for sample in shown)
    head = "".join(f"<th>{name}</th>" for name in names)
    rows = "".join(
        _row(place, sample, names, earlier_records) for place, sample in enumerate(shown)
    )
    hidden = len(samples) - len(shown)
    hidden_text = (
        f"<p class='muted'>There are answers to {hidden:,} more prompts.</p>" if hidden else ""
    )
    return (
        f"<h2>{html.escape(heading)}</h2><div class='wide'><table class='answers'><thead><tr>{head}</tr></thead>"
        f"<tbody>{rows}</tbody></table></div>{hidden_text}"
    )


def _samples(record: Record) -> list[dict[str, object]]:
    samples = record["samples"]
    assert isinstance(samples, list)
    return [sample for sample in samples if isinstance(sample, dict)]


def _row(
    place: int,
    sample: Mapping[str, object],
    names: Sequence[str],
    earlier_records: Sequence[Record],
) -> str:
    """Return the row of a prompt: its last answer with earlier answers, and the expected answer.

    Args:
        place: number of the prompt in each record.
        sample: prompt, answer and perhaps the expected answer.
        names: names of the columns.
        earlier_records: records with answers.
    """
    cells = {name: _text(sample[name]) for name in names if name in sample}
    if "expected" in sample and sample["expected"] == sample.get("answer"):
        cells["expected"] = "<p class='same'>as expected</p>"
    earlier = _earlier(place, sample.get("prompt"), earlier_records)
    if earlier:
        folded_rows = folded("Earlier answers", table(earlier[-_EARLIER:], left=2))
        cells["answer"] = cells.get("answer", "") + folded_rows
    return f"<tr>{''.join(f'<td>{cells.get(name, str())}</td>' for name in names)}</tr>"


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


def _text(value: object) -> str:
    return f"<p>{html.escape(str(value))}</p>"
