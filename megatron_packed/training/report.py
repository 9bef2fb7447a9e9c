"""One self-contained HTML page about a run, from its JSONL: what was trained, the curves, the numbers.

``write_report(jsonl, html)`` needs matplotlib (extra ``plot``) for the curves, and nothing from the network to be read.
"""

from __future__ import annotations

import html
import io
import json
import os
import statistics
from collections.abc import Sequence
from pathlib import Path

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1080px; margin: 2em auto; color: #222 }
h1 { font-size: 1.5em } h2 { font-size: 1.15em; margin-top: 2em }
table { border-collapse: collapse }
td, th { padding: .25em .9em .25em 0; text-align: left; vertical-align: top }
pre { background: #f5f5f5; padding: 1em; overflow-x: auto }
svg { max-width: 100%; height: auto }
"""

# title, y label, [(field of the JSONL, legend)]
_CURVES: list[tuple[str, str, list[tuple[str, str]]]] = [
    ("Loss", "nats per target token", [("lm_loss", "training"), ("valid_loss", "validation")]),
    ("Gradient norm", "before clipping", [("grad_norm", "")]),
    ("Learning rate", "", [("learning_rate", "")]),
    ("Throughput", "real tokens per second", [("tokens_per_second", "")]),
    ("Pack fill", "share of slots with a real token", [("pack_fill", "")]),
    ("Documents per pack", "mean of the step", [("docs_per_pack", "")]),
]


def read_jsonl(path: str | os.PathLike[str]) -> list[dict[str, object]]:
    """The records of a run's log; a line that a killed run cut off is passed over."""
    records = []
    for line in Path(path).read_text().splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            records.append(record)
    return records


def _points(records: Sequence[dict[str, object]], name: str) -> tuple[list[int], list[float]]:
    pairs = [(r["iteration"], r[name]) for r in records if isinstance(r.get(name), (int, float))]
    return [x for x, _ in pairs], [y for _, y in pairs]  # type: ignore[misc]


def _curves_svg(records: Sequence[dict[str, object]], reference_losses: dict[str, float]) -> str:
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 10), layout="constrained")
    axes = figure.subplots(3, 2).ravel()
    for axis, (title, label, fields) in zip(axes, _CURVES):
        for name, legend in fields:
            steps, values = _points(records, name)
            if steps:
                axis.plot(steps, values, marker="o" if name == "valid_loss" else "", markersize=4, label=legend or None)
        if title == "Loss":
            for text, value in reference_losses.items():
                axis.axhline(value, linestyle="--", linewidth=1, color="gray", label=f"{text} {value:.2f}")
            axis.legend()
        axis.set(title=title, ylabel=label, xlabel="step")
        axis.grid(alpha=0.3)
    target = io.StringIO()
    FigureCanvasSVG(figure).print_svg(target)
    svg = target.getvalue()
    return svg[svg.index("<svg") :]


def _number(record: dict[str, object], name: str) -> float:
    """A field as a number; non-finite ones stand as text in the log, since JSON has none."""
    return float(record[name])  # type: ignore[arg-type]


def _summary(records: Sequence[dict[str, object]]) -> list[tuple[str, str]]:
    steps = [r for r in records if "lm_loss" in r]
    validations = [r for r in records if "valid_loss" in r]
    if not steps:
        return [("steps", "0")]
    last = steps[-1]
    # The first steps compile and warm up.
    steady = steps[min(5, len(steps) - 1) :]

    def median(name: str) -> float:
        return statistics.median(_number(r, name) for r in steady)

    rows = [
        ("steps", f"{last['iteration']:,}"),
        ("tokens consumed", f"{last['consumed_tokens']:,}"),
        ("first and last training loss", f"{_number(steps[0], 'lm_loss'):.4f} → {_number(last, 'lm_loss'):.4f}"),
        ("median step time", f"{median('step_time_ms'):,.1f} ms"),
        ("median throughput", f"{median('tokens_per_second'):,.0f} real tokens/s"),
        ("mean pack fill", f"{100 * statistics.fmean(_number(r, 'pack_fill') for r in steps):.2f} %"),
        ("peak memory", f"{max(_number(r, 'memory_gib') for r in steps):.2f} GiB"),
        ("steps skipped as non-finite", str(sum(bool(r["skipped"]) for r in steps))),
        ("plan hash", str(last["plan_hash"])),
    ]
    if last.get("mfu") is not None:
        rows.insert(5, ("median MFU", f"{100 * median('mfu'):.1f} %"))
    imbalances = sorted(_number(r, "dp_imbalance") for r in steps if "dp_imbalance" in r)
    if imbalances and imbalances[-1] > 1:
        text = f"median {statistics.median(imbalances):.3f}, largest {imbalances[-1]:.3f}"
        rows.append(("work of the busiest data-parallel rank over the mean", text))
    graphed = [r for r in steps if "graph_replays" in r]
    if graphed:
        replays = sum(int(_number(r, "graph_replays")) for r in graphed)
        fallbacks = sum(int(_number(r, "graph_fallbacks")) for r in graphed)
        share = 100 * replays / max(replays + fallbacks, 1)
        text = f"{replays:,} micro-batches replayed, {fallbacks:,} eager (hit rate {share:.1f} %)"
        rows.append(("CUDA graphs in steps", f"{text}, {_number(graphed[-1], 'graph_memory_mib'):,.0f} MiB"))
    if validations:
        losses = [_number(r, "valid_loss") for r in validations]
        rows.insert(3, ("first and last validation loss", f"{losses[0]:.4f} → {losses[-1]:.4f}"))
    return rows


def write_report(
    jsonl: str | os.PathLike[str],
    page: str | os.PathLike[str],
    *,
    title: str = "megatron_packed run",
    reference_losses: dict[str, float] | None = None,
    notes: Sequence[tuple[str, str]] = (),
) -> Path:
    """Writes the page and returns its path.

    Args:
        jsonl: the run's ``--log-jsonl`` file.
        page: where the HTML goes.
        reference_losses: horizontal lines of the loss plot, name -> nats, such as the unigram entropy of the data.
        notes: (heading, text) blocks below the curves, shown as they are.
    Raises:
        ValueError: matplotlib is not installed, or the log holds no step.
    """
    records = read_jsonl(jsonl)
    if not any("lm_loss" in record for record in records):
        raise ValueError(f"{jsonl} holds no training step; a report needs at least one.")
    try:
        svg = _curves_svg(records, reference_losses or {})
    except ImportError as error:
        cure = "pip install 'megatron-packed[plot]'"
        raise ValueError(f"the report's curves need matplotlib: {cure} ({error}).") from error
    rows = "".join(f"<tr><th>{html.escape(k)}</th><td>{html.escape(v)}</td></tr>" for k, v in _summary(records))
    blocks = "".join(f"<h2>{html.escape(k)}</h2><pre>{html.escape(v)}</pre>" for k, v in notes)
    page = Path(page)
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(
        f"<!doctype html><html lang='en'><meta charset='utf-8'><title>{html.escape(title)}</title>"
        f"<style>{_STYLE}</style><h1>{html.escape(title)}</h1><table>{rows}</table><h2>Curves</h2>{svg}{blocks}</html>\n"
    )
    return page
