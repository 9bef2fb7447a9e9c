"""Page of `megatron-packed tune`: charts of document lengths, packs, and capacities with their cost.

The page loads nothing from the network.
"""

from __future__ import annotations

import html
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from megatron_packed.data.packing.sizing import Expected, Packing
from megatron_packed.reporting import charts
from megatron_packed.reporting.html_page import write_html

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_STYLE = """
td, th { text-align: right; white-space: nowrap }
.flags { white-space: pre-wrap }
.wide > svg { display: block; width: 100%; min-width: 720px; height: auto }
"""


def figure(
    lengths: NDArray[np.int64] | None,
    packings: Sequence[Packing],
    choice: Expected,
    prices: Sequence[Expected],
) -> Figure:
    """Return a figure with up to four charts.

    Args:
        lengths: tokens of each document; None if unknown.
        packings: results of the packing methods.
        choice: the recommendation; the charts mark its capacities.
        prices: expected cost of runs with a single capacity; entries without milliseconds are left
            out.
    """
    priced = [one for one in prices if one.step_ms is not None]
    made, every = charts.grid(2 + (lengths is not None) + bool(priced), 11, 4)
    axes = iter(every)
    if lengths is not None:
        _draw_lengths(next(axes), lengths)
    _draw_packings(next(axes), next(axes), packings, choice)
    if priced:
        _draw_prices(next(axes), priced, choice)
    for axis in every:
        axis.grid(alpha=0.3)
    return made


def _draw_lengths(axis: Any, lengths: NDArray[np.int64]) -> None:
    edges = np.unique(np.geomspace(lengths.min(), lengths.max() + 1, 60))
    axis.hist(lengths, bins=edges, color="tab:gray")
    axis.set(title="Documents by length", xlabel="tokens", ylabel="documents", xscale="log")
    axis.xaxis.set_major_formatter("{x:,.0f}")


def _draw_packings(
    counts: Any, covered: Any, packings: Sequence[Packing], choice: Expected
) -> None:
    """Draw the number of packs by documents per pack, and the share that each capacity covers."""
    for packing in packings:
        top = packing.percentiles()
        values, packs = np.unique(packing.documents, return_counts=True)
        counts.step(values, packs, where="mid", label=packing.method)
        label = f"{packing.method}: P50 {top['p50']}, P90 {top['p90']}, P99 {top['p99']}, most {top['max']}"
        covered.step(values, 100 * np.cumsum(packs) / packs.sum(), where="post", label=label)
    counts.set(
        title="Packs by documents", xlabel="documents in a pack", ylabel="packs", yscale="log"
    )
    covered.set(title="Packs that a capacity covers", xlabel="capacity", ylabel="% of packs")
    for axis in (counts, covered):  # 1, 2, 4, 8 ...
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter("{x:,.0f}")
    counts.yaxis.set_major_formatter("{x:,.0f}")
    for number, capacity in enumerate(choice.capacities):
        label = None if number else "recommended"
        covered.axvline(capacity, color="black", linestyle="--", linewidth=1, label=label)
    counts.legend(fontsize=8)
    covered.legend(fontsize=8)


def _draw_prices(axis: Any, priced: Sequence[Expected], choice: Expected) -> None:
    """Draw step times expected with each single capacity, and with the recommended capacities."""
    times = [one.step_ms for one in priced]
    axis.plot([one.capacities[-1] for one in priced], times, marker="o")
    axis.axhline(choice.step_ms, color="black", linestyle="--", linewidth=1, label="recommended")
    axis.set(
        title=f"Expected step time with one capacity ({priced[0].method})",
        xlabel="capacity",
        ylabel="ms",
    )
    axis.legend(fontsize=8)


def write_page(
    made: Figure,
    path: str | os.PathLike[str],
    *,
    title: str,
    flags: str,
    tables: Mapping[str, Sequence[Mapping[str, Any]]],
    text: Sequence[str],
) -> None:
    """Write the page as one self-contained HTML file.

    Args:
        made: the charts, from `figure`.
        path: file to write.
        title: title and heading of the page.
        flags: the recommended flags, to be copied by the user.
        tables: heading -> rows; a row maps the name of a column to its cell.
        text: lines of the console output.
    """
    blocks = "".join(
        f"<h2>{html.escape(name)}</h2>{_table(rows)}" for name, rows in tables.items() if rows
    )
    write_html(
        path,
        title,
        f"<h2>Recommended</h2><pre class='flags'>{html.escape(flags)}</pre>{blocks}"
        f"<h2>Charts</h2><div class='wide'>{charts.as_svg(made, title)}</div>"
        f"<h2>Console output</h2><pre>{html.escape(chr(10).join(text))}</pre>",
        _STYLE,
    )


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    names = list(rows[0])
    head = "".join(f"<th>{html.escape(name)}</th>" for name in names)
    body = "".join(
        "<tr>"
        + "".join(f"<td>{html.escape(str(row.get(name, '')))}</td>" for name in names)
        + "</tr>"
        for row in rows
    )
    return f"<div class='wide'><table><tr>{head}</tr>{body}</table></div>"
