"""Pictures of a sizing: lengths of documents, documents per pack, what capacities cover, what they cost.

Needs matplotlib (extra ``plot``). The page needs nothing from the network to be read.
"""

from __future__ import annotations

import html
import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from megatron_packed.data.sizing import Expected, Packing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1080px; margin: 2em auto; color: #222 }
h1 { font-size: 1.5em } h2 { font-size: 1.15em; margin-top: 2em }
table { border-collapse: collapse } td, th { padding: .25em .9em .25em 0; text-align: right }
pre { background: #f5f5f5; padding: 1em; white-space: pre-wrap } svg { max-width: 100%; height: auto }
"""


def figure(
    lengths: NDArray[np.int64] | None, packings: Sequence[Packing], choice: Expected, prices: Sequence[Expected]
) -> Figure:
    """Up to four charts.

    Args:
        lengths: tokens of the documents; None where they are not known.
        choice: the recommendation, whose capacities are marked.
        prices: expected cost of single capacities; those without milliseconds are left out.
    """
    from matplotlib.figure import Figure

    priced = [one for one in prices if one.step_ms is not None]
    charts = [lengths is not None, True, True, bool(priced)]
    made = Figure(figsize=(11, 8 if sum(charts) > 2 else 4), layout="constrained")
    axes = iter(made.subplots((sum(charts) + 1) // 2, 2, squeeze=False).ravel())
    if lengths is not None:
        axis = next(axes)
        edges = np.unique(np.geomspace(lengths.min(), lengths.max() + 1, 60))
        axis.hist(lengths, bins=edges, color="tab:gray")
        axis.set(title="Documents by length", xlabel="tokens", ylabel="documents", xscale="log")
    counts, covered = next(axes), next(axes)
    for packing in packings:
        top = packing.percentiles()
        values, packs = np.unique(packing.documents, return_counts=True)
        counts.step(values, packs, where="mid", label=packing.method)
        label = f"{packing.method}: P50 {top['p50']}, P90 {top['p90']}, P99 {top['p99']}, most {top['max']}"
        covered.step(values, 100 * np.cumsum(packs) / packs.sum(), where="post", label=label)
    counts.set(title="Packs by documents", xlabel="documents in a pack", ylabel="packs", xscale="log", yscale="log")
    covered.set(title="Packs that a capacity covers", xlabel="capacity", ylabel="% of packs", xscale="log")
    for capacity in choice.capacities:
        covered.axvline(capacity, color="black", linestyle="--", linewidth=1)
    counts.legend(fontsize=8)
    covered.legend(fontsize=8)
    if priced:
        axis = next(axes)
        times = [one.step_ms for one in priced]
        axis.plot([one.capacities[-1] for one in priced], times, marker="o")
        axis.axhline(choice.step_ms, color="black", linestyle="--", linewidth=1, label="recommended")
        axis.set(title=f"Expected step by one capacity ({priced[0].method})", xlabel="capacity", ylabel="ms")
        axis.legend(fontsize=8)
    for axis in axes:
        axis.set_axis_off()
    for axis in made.axes:
        axis.grid(alpha=0.3)
    return made


def write_png(made: Figure, path: str | os.PathLike[str]) -> None:
    """The charts alone."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    Path(path).parent.mkdir(parents=True, exist_ok=True)
    FigureCanvasAgg(made).print_png(str(path))


def write_page(
    made: Figure, path: str | os.PathLike[str], *, title: str, flags: str,
    tables: Mapping[str, Sequence[Mapping[str, Any]]], text: Sequence[str],
) -> None:  # fmt: skip
    """One HTML file with all in it.

    Args:
        flags: the recommendation, to be copied.
        tables: rows of cells by name of their column, by heading.
        text: what the console says.
    """
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    target = io.StringIO()
    FigureCanvasSVG(made).print_svg(target)
    svg = target.getvalue()
    blocks = "".join(f"<h2>{html.escape(name)}</h2>{_table(rows)}" for name, rows in tables.items() if rows)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(
        f"<!doctype html><html lang='en'><meta charset='utf-8'><title>{html.escape(title)}</title>"
        f"<style>{_STYLE}</style><h1>{html.escape(title)}</h1><h2>Recommended</h2><pre>{html.escape(flags)}</pre>"
        f"{blocks}<h2>Charts</h2>{svg[svg.index('<svg') :]}"
        f"<h2>As on the console</h2><pre>{html.escape(chr(10).join(text))}</pre></html>\n"
    )


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    names = list(rows[0])
    head = "".join(f"<th>{html.escape(name)}</th>" for name in names)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(str(row.get(name, '')))}</td>" for name in names) + "</tr>" for row in rows
    )
    return f"<table><tr>{head}</tr>{body}</table>"
