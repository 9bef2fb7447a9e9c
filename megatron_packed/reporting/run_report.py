"""Report page: one self-contained HTML file with numbers and curves of one or several runs.

The page is made from the runs' logs, and needs only a browser.
"""

from __future__ import annotations

import html
import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from megatron_packed.reporting import run_charts
from megatron_packed.reporting.curves import NO_TARGETS, NON_FINITE, SPIKE, Record, Run, read_run
from megatron_packed.reporting.html_page import write_html

_LISTED = 5
"""Largest number of steps of one kind that are listed by number."""
_STYLE = """
.runs td, .runs th { min-width: 6.5em; overflow-wrap: anywhere }
"""


def _number(record: Record, name: str) -> float:
    """Return a field as a number; non-finite numbers are text in the log, since JSON lacks them."""
    return float(record[name])  # type: ignore[arg-type]


def _steps_skipped(steps: Sequence[Record], reason: str) -> str:
    """Return the number of steps skipped for a reason, and the first of them; empty for none.

    Logs of older versions lack the reason; all their skipped steps were non-finite.
    """
    found = [
        step for step in steps if step["skipped"] and step.get("skip_reason", NON_FINITE) == reason
    ]
    return _listed(found)


def _listed(steps: Sequence[Record]) -> str:
    """Return the count of steps and the first of them: ``12 (7, 9, 30, ...)``; empty for none."""
    if not steps:
        return ""
    numbers = [f"{step['iteration']:,}" for step in steps[:_LISTED]]
    return f"{len(steps):,} ({', '.join(numbers)}{', ...' if len(steps) > _LISTED else ''})"


def _summary(records: Sequence[Record]) -> list[tuple[str, str]]:
    """Return the rows of a run's column in the table: name and value."""
    steps = [r for r in records if "lm_loss" in r]
    # Medians leave out the first steps, which compile kernels and warm up.
    steady = steps[min(5, len(steps) - 1) :]
    last = steps[-1]

    def median(name: str) -> float:
        return statistics.median(_number(r, name) for r in steady)

    fill = statistics.fmean(_number(r, "pack_fill") for r in steps)
    rows = [
        ("steps", f"{last['iteration']:,}"),
        ("tokens consumed", f"{last['consumed_tokens']:,}"),
        *_loss_rows(records, steps),
        ("median step time", f"{median('step_time_ms'):,.1f} ms"),
        ("median throughput", f"{median('tokens_per_second'):,.0f} real tokens/s"),
        ("mean pack fill", f"{100 * fill:.2f} %"),
        ("peak memory", f"{max(_number(r, 'memory_gib') for r in steps):.2f} GiB"),
        ("steps skipped as non-finite", _steps_skipped(steps, NON_FINITE) or "0"),
        ("plan hash", str(last["plan_hash"])),
        *_skipped_rows(steps),
    ]
    if last.get("mfu") is not None:
        validated = any("valid_loss" in r for r in records)
        tested = any("test_loss" in r for r in records)
        rows.insert(5 + validated + tested, ("median MFU", f"{100 * median('mfu'):.1f} %"))
    rows += _machine_rows(steps, steady)
    kernels = [r["kernels"] for r in records if isinstance(r.get("kernels"), dict)]
    if kernels:
        rows.append(("kernels", " · ".join(f"{op} {name}" for op, name in kernels[-1].items())))  # type: ignore[attr-defined]
    return rows + _target_rows(records)


def _loss_rows(records: Sequence[Record], steps: Sequence[Record]) -> list[tuple[str, str]]:
    """Return rows of the first and last training and validation losses, and of the test loss."""
    first, last = (_number(steps[at], "lm_loss") for at in (0, -1))
    rows = [("first and last training loss", f"{first:.4f} → {last:.4f}")]
    losses = [_number(r, "valid_loss") for r in records if "valid_loss" in r]
    if losses:
        rows.append(("first and last validation loss", f"{losses[0]:.4f} → {losses[-1]:.4f}"))
    tests = [r for r in records if "test_loss" in r]
    if tests:
        text = f"{_number(tests[-1], 'test_loss'):.4f} at step {tests[-1]['iteration']:,}"
        rows.append(("test loss", text))
    return rows


def _skipped_rows(steps: Sequence[Record]) -> list[tuple[str, str]]:
    """Return rows about steps without targets and about spikes; empty if there were none."""
    rows = []
    without_targets = _steps_skipped(steps, NO_TARGETS)
    if without_targets:
        rows.append(("steps skipped without target tokens", without_targets))
    spikes = [step for step in steps if "loss_median" in step or "grad_norm_median" in step]
    if spikes:
        left_out = _steps_skipped(steps, SPIKE)
        rows.append(("steps with a spike of loss or gradient norm", _listed(spikes)))
        rows.append(("steps skipped for a spike", left_out or "0"))
    return rows


def _machine_rows(steps: Sequence[Record], steady: Sequence[Record]) -> list[tuple[str, str]]:
    """Return rows about imbalance, data waits, CUDA graphs and dropped assignments, if logged."""
    rows = []
    imbalances = sorted(_number(r, "dp_imbalance") for r in steps if "dp_imbalance" in r)
    if imbalances and imbalances[-1] > 1:
        text = f"median {statistics.median(imbalances):.3f}, largest {imbalances[-1]:.3f}"
        rows.append(("work of the busiest data-parallel rank, relative to the mean", text))
    waits = [r for r in steady if "data_wait_ms" in r]
    if waits:
        waited = sum(_number(r, "data_wait_ms") for r in waits)
        share = waited / sum(_number(r, "step_time_ms") for r in waits)
        rows.append(("waiting for data", f"{100 * share:.1f} % of step time"))
    graphed = [r for r in steps if "graph_replays" in r]
    if graphed:
        replays = sum(int(_number(r, "graph_replays")) for r in graphed)
        fallbacks = sum(int(_number(r, "graph_fallbacks")) for r in graphed)
        share = 100 * replays / max(replays + fallbacks, 1)
        text = f"{replays:,} micro-batches replayed, {fallbacks:,} eager (hit rate {share:.1f} %)"
        rows.append(
            ("CUDA graphs in steps", f"{text}, {_number(graphed[-1], 'graph_memory_mib'):,.0f} MiB")
        )
    capped = [r for r in steps if "expert_dropped_share" in r]
    if capped:
        rows.append(("expert assignments dropped by capacity", _dropped(capped)))
    return rows


def _target_rows(records: Sequence[Record]) -> list[tuple[str, str]]:
    """Return rows of each data set's target counts, from the log's first line; empty for old logs."""
    accounts = next(
        (record["data"] for record in records if isinstance(record.get("data"), dict)), {}
    )
    return [
        (
            f"{name} targets",
            f"{of['targets_kept']:,} of {of['targets_in']:,} kept; {of['documents_without_targets']:,} of "
            f"{of['documents_in']:,} documents have none left",
        )
        for name, of in accounts.items()  # type: ignore[attr-defined]
        if "targets_in" in of
    ]


def _dropped(steps: Sequence[Record]) -> str:
    """Return the share of expert assignments dropped in ``steps``, in all and in the worst layer."""
    tokens = sum(_number(r, "real_tokens") for r in steps)

    def mean(values: Iterable[float]) -> float:
        return sum(value * _number(r, "real_tokens") for value, r in zip(values, steps)) / max(
            tokens, 1
        )

    layers: list[tuple[float, ...]] = list(zip(*(r["expert_dropped_by_layer"] for r in steps)))  # type: ignore[arg-type]
    most, number = max((mean(shares), number) for number, shares in enumerate(layers))
    count = sum(int(_number(r, "expert_dropped")) for r in steps)
    total = mean(_number(r, "expert_dropped_share") for r in steps)
    return f"{100 * total:.3g} % ({count:,}); most in E layer {number}: {100 * most:.3g} %"


def write_page(
    runs: Sequence[Run],
    page: str | os.PathLike[str],
    *,
    title: str,
    levels: Mapping[str, float] | None = None,
    notes: Sequence[tuple[str, str]] = (),
) -> Path:
    """Write a page with a column of numbers for each run, and the runs' curves; return its path.

    Args:
        runs: runs, each with at least one step.
        page: file to write.
        title: title and heading of the page.
        levels: horizontal lines in the chart of the loss, name -> nats; for example, the unigram
            entropy of the data.
        notes: (heading, text) of blocks below the curves; the text is shown unchanged.
    Raises:
        OSError: the page cannot be written.
    """
    columns = [dict(_summary(run.records)) for run in runs]
    names = list(dict.fromkeys(name for column in columns for name in column))
    head = "<tr><td></td>" + "".join(f"<th>{html.escape(run.name)}</th>" for run in runs) + "</tr>"
    rows = ["" if len(runs) == 1 else head]
    for name in names:
        cells = "".join(f"<td>{html.escape(column.get(name, ''))}</td>" for column in columns)
        rows.append(f"<tr><th>{html.escape(name)}</th>{cells}</tr>")
    blocks = "".join(f"<h2>{html.escape(k)}</h2><pre>{html.escape(v)}</pre>" for k, v in notes)
    table = f"<div class='wide'><table class='runs'>{''.join(rows)}</table></div>"
    curves = run_charts.curves_html(runs, levels)
    body = f"{table}<h2>Curves</h2>{curves}{blocks}"
    return write_html(page, title, body, _STYLE + run_charts.STYLE)


def write_report(
    log: str | os.PathLike[str],
    page: str | os.PathLike[str],
    *,
    title: str = "megatron_packed run",
    levels: Mapping[str, float] | None = None,
    notes: Sequence[tuple[str, str]] = (),
) -> Path:
    """Write the page about one run from its ``--log-jsonl`` file; for arguments see `write_page`.

    Raises:
        OSError: the log cannot be read, or the page not written.
        ValueError: the log holds no step.
    """
    return write_page([read_run(log)], page, title=title, levels=levels, notes=notes)
