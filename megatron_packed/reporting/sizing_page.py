"""Charts of `megatron-packed tune`: document lengths, packs, and capacities with their cost."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import cycle
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_packed.data.packing.sizing import Expected, Packing
from megatron_packed.packed.array_types import Int64Array
from megatron_packed.reporting import charts
from megatron_packed.reporting.charts import COLOURS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_HEIGHT = 3.4
"""Height of a chart on the page, in inches."""
Drawing = tuple[str, Callable[[Any], None]]
"""Title and function that draws one chart on axes."""


def drawings(
    lengths: Int64Array | None,
    packings: Sequence[Packing],
    choice: Expected,
    prices: Sequence[Expected],
) -> list[Drawing]:
    """Return up to four charts.

    Args:
        lengths: tokens of each document; None if unknown.
        packings: results of the packing methods.
        choice: the recommendation; the charts mark its capacities.
        prices: expected cost of runs with a single capacity; entries without milliseconds are left
            out.
    """
    drawn: list[Drawing] = []
    if lengths is not None:
        drawn.append(("Documents by length", partial(_draw_lengths, lengths)))
    drawn += [
        ("Packs by documents", partial(_draw_packs, packings)),
        ("Packs that a capacity covers", partial(_draw_covered, packings, choice)),
    ]
    priced = [expected for expected in prices if expected.step_ms is not None]
    if priced:
        title = f"Expected step time with one capacity ({priced[0].method})"
        drawn.append((title, partial(_draw_prices, priced, choice)))
    return drawn


def figure(drawn: Sequence[Drawing]) -> Figure:
    """Return all charts as one figure, for an image."""
    made, every = charts.grid(len(drawn), 11, 4)
    for axis, (title, draw) in zip(every, drawn):
        draw(axis)
        _finish(axis)
        axis.set_title(title)
    return made


def _draw_lengths(lengths: Int64Array, axis: Any) -> None:
    edges = np.unique(np.geomspace(lengths.min(), lengths.max() + 1, 60))
    axis.hist(lengths, bins=edges, color=COLOURS[0])
    axis.set(xlabel="tokens", ylabel="documents")
    _scale(axis, "x", lengths, 10)


def _draw_packs(packings: Sequence[Packing], axis: Any) -> None:
    """Draw the number of packs by documents per pack."""
    numbers: list[int] = []
    for look, values, packs in _counts(packings):
        axis.step(values, packs, where="mid", **look)
        numbers += packs.tolist()
    axis.set(xlabel="documents in a pack", ylabel="packs")
    _scale(axis, "x", _documents(packings), 2)
    _scale(axis, "y", numbers, 10)


def _draw_covered(packings: Sequence[Packing], choice: Expected, axis: Any) -> None:
    """Draw the share of packs that each capacity covers, and the recommended capacities."""
    for look, values, packs in _counts(packings):
        axis.step(values, 100 * np.cumsum(packs) / packs.sum(), where="post", **look)
    axis.set(xlabel="capacity", ylabel="% of packs", ylim=(0, 105))
    for number, capacity in enumerate(choice.capacities):
        label = "" if number else "recommended"
        axis.axvline(capacity, color=charts.INK, linestyle="--", linewidth=1, label=label)
    _scale(axis, "x", _documents(packings), 2)


def _draw_prices(priced: Sequence[Expected], choice: Expected, axis: Any) -> None:
    """Draw step times expected with each single capacity, and with the recommended capacities."""
    times = [expected.step_ms for expected in priced]
    axis.plot([expected.capacities[-1] for expected in priced], times, marker="o", color=COLOURS[0])
    axis.axhline(choice.step_ms, color=charts.INK, linestyle="--", linewidth=1, label="recommended")
    axis.set(xlabel="capacity", ylabel="ms")
    axis.set_ylim(bottom=0)


def _counts(packings: Sequence[Packing]) -> Iterator[tuple[dict[str, str], Int64Array, Int64Array]]:
    """Yield the label and colour of each packing, its numbers of documents, and the packs of each."""
    for colour, packing in zip(cycle(COLOURS), packings):
        values, packs = np.unique(packing.documents, return_counts=True)
        yield {"label": packing.method, "color": colour}, values, packs


def _documents(packings: Sequence[Packing]) -> list[int]:
    """Return the largest and smallest number of documents of all packs."""
    return [int(end(packing.documents)) for packing in packings for end in (np.min, np.max)]


def _scale(axis: Any, name: str, values: Sequence[int] | Int64Array, base: int) -> None:
    """Make the axis ``name`` logarithmic if the values span a power of the base.

    A shorter logarithmic axis would have few labels, or labels in mathtext between the powers.
    """
    if max(values) < base * min(values):
        return
    getattr(axis, f"set_{name}scale")("log", base=base)
    which = getattr(axis, f"{name}axis")
    which.set_major_formatter("{x:,.0f}")
    which.set_minor_formatter("")
    which.set_label_text(f"{which.get_label_text()} (log scale)")


def _finish(axis: Any) -> None:
    """Draw grid and legend."""
    axis.grid(color=charts.GRID, alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    axis.spines[["left", "bottom"]].set_color(charts.GRID)
    axis.tick_params(color=charts.GRID)
    if axis.get_legend_handles_labels()[0]:
        axis.legend(fontsize=8, framealpha=0.7, facecolor="#ffffff", edgecolor="none")


def chart_of_page(title: str, draw: Callable[[Any], None]) -> charts.ChartOfPage:
    """Return one of `drawings` as a chart for the template of the page."""
    # Labels at the left are wider than those of the charts of a run.
    made, axis = charts.one_chart(_HEIGHT, left=0.14)
    draw(axis)
    _finish(axis)
    return charts.for_page(made, title)
