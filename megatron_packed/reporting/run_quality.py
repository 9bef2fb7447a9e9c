"""Tables of a report page about quality: validations, and answers to sample prompts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megatron_packed.reporting.curves import Record, Run, number_in
from megatron_packed.reporting.loss_warnings import best_validation
from megatron_packed.reporting.page_filters import perplexity


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
