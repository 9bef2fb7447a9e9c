"""Charts drawn by matplotlib, as inline SVG for a page and as PNG.

Only this module imports matplotlib. It does so when the first chart is drawn, since a training run
needs no chart before its report. Figures are created as objects, so ``pyplot`` has no global state
to change.
"""

from __future__ import annotations

import io
import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from megatron_packed.files.written_files import replacing, resolve_output

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#2166ac", "#b2182b", "#1b7837", "#e08214", "#762a83", "#35978f", "#c51b7d", "#4d4d4d")
DARK_COLOURS = (
    "#6cb2f0",
    "#ff7b72",
    "#56d364",
    "#f0a94a",
    "#c297ff",
    "#4fd1c5",
    "#f778ba",
    "#b1bac4",
)
"""`COLOURS` on a dark page. A page defines both as CSS variables: ``var(--c0)``, ``var(--c1)``, ..."""
DASHES = ("", "6 3", "2 2", "8 2 2 2")
"""Lengths of dashes and gaps, in line widths; an empty pattern is a solid line."""

_STRONGEST = 0.7
"""Opacity of a cell with the largest load; the number in the cell must stay readable."""

MOST_POINTS = 500
"""Largest number of points of a line.

A longer line shows means, in a band from smallest to largest value.
"""
GRID, _MARK, INK, _PAPER = "#888888", "#dd0000", "#000000", "#ffffff"
_TEXT = "#111111"
"""Text with the colour of the page's text. matplotlib leaves out black, the colour of labels."""
_VARIABLES = {
    **{colour: f"var(--c{number})" for number, colour in enumerate(COLOURS)},
    GRID: "var(--muted)",
    _MARK: "var(--bad)",
    INK: "var(--text)",
    _TEXT: "var(--text)",
    _PAPER: "var(--paper)",
}
"""Colour of a figure -> colour of the page, so that inline charts follow light and dark mode."""

_WIDTH, _HEIGHT = 6.0, 2.9
"""Size of a chart on a page, in inches. At 72 SVG units per inch, text is readable on a phone."""

Points = Sequence[tuple[float, float]]
ChartOfPage = dict[str, object]
"""Variables of a chart in the template of a page: title, remark, names of runs, and SVG."""


@dataclass(frozen=True)
class Line:
    """Curve of a chart. A legend that lines of several colours share shows a black line."""

    points: Points
    colour: str
    legend: str = ""
    dash: str = ""
    dots: bool = False
    pale: bool = False
    """Draw the line thin and pale, below a smoothed line of the same values."""
    smoothed: bool = False
    """The points are means of neighbouring steps, so a band around them would show too little."""


@dataclass(frozen=True)
class Frame:
    """Limits and marks of a chart."""

    steps: tuple[float, float] | None = None
    """First and last step of the x axis; None for limits from the lines."""
    low: float | None = None
    """Lowest value of the y axis; None for a limit from the values."""
    high: float | None = None
    """Highest value of the y axis; None for a limit from the values."""
    levels: Sequence[tuple[str, float]] = ()
    """(name, y) of horizontal lines."""
    marks: Sequence[float] = ()
    """Steps that get a red mark at the bottom: steps without an update."""
    restarts: Sequence[float] = ()
    """Steps after which the run was started again; each gets a vertical line."""
    names_restarts: bool = False
    """Explain the vertical lines in the legend."""
    logarithmic: bool = False
    """The y axis is logarithmic; all values are above 0."""


def grid(count: int, width: float, row_height: float, head: float = 0.0) -> tuple[Figure, Any]:
    """Return a figure and the axes of ``count`` charts, two charts per row.

    Args:
        count: number of charts.
        width, row_height, head: inches; ``head`` is the space above the first row.
    """
    from matplotlib.figure import Figure

    rows = -(-count // 2)
    figure = Figure(figsize=(width, row_height * rows + head), layout="constrained")
    axes = figure.subplots(rows, 2, squeeze=False).ravel()
    for unused in axes[count:]:
        unused.remove()
    return figure, axes[:count]


def line_chart(lines: Sequence[Line], frame: Frame = Frame()) -> Figure:
    """Return a figure with one chart of lines over the steps; for arguments see `draw_lines`."""
    figure, axes = one_chart(_HEIGHT)
    draw_lines(axes, lines, frame)
    return figure


def one_chart(height: float, left: float = 0.12) -> tuple[Figure, Axes]:
    """Return a figure with one chart and fixed margins, equal for all charts of a page.

    Fixed margins avoid matplotlib's layout engine, which draws everything once just to measure.

    Args:
        height: height of the figure in inches.
        left: space for the labels at the left, as a share of the width.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH, height))
    return figure, figure.add_axes((left, 0.5 / height, 0.98 - left, 1 - 0.6 / height))


def draw_lines(axes: Axes, lines: Sequence[Line], frame: Frame) -> None:
    """Draw lines over the steps, with a grid and abbreviated numbers.

    Args:
        axes: the axes of the chart.
        lines: at least one line, each with at least one point.
        frame: limits and marks.
    """
    from matplotlib.ticker import MaxNLocator

    if frame.logarithmic:
        axes.set_yscale("log")
    for line in lines:
        _draw_line(axes, line)
    for name, level in frame.levels:
        axes.axhline(level, color=GRID, linestyle=_style("4 3"), linewidth=1)
        right = axes.get_yaxis_transform()
        axes.text(0.99, level, f"{name} {level:.2f}", transform=right, ha="right", va="bottom")
    _set_limits(axes, frame)
    bottom = axes.get_xaxis_transform()
    if frame.marks:
        axes.vlines(frame.marks, 0, 0.04, color=_MARK, linewidth=2, transform=bottom)
    if frame.restarts:
        places = [step + 0.5 for step in frame.restarts]
        axes.vlines(places, 0, 1, color=GRID, linestyle=_style("1 2"), transform=bottom)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    _set_y_ticks(axes, frame)
    axes.set_xlabel("step")
    axes.tick_params(length=0)
    axes.spines[["left", "top", "right"]].set_visible(False)
    axes.spines["bottom"].set_color(GRID)
    axes.grid(axis="y", color=GRID, alpha=0.25)
    _draw_legend(axes, lines, frame)


def _set_y_ticks(axes: Axes, frame: Frame) -> None:
    """Set the ticks of the y axis; a logarithmic axis says so."""
    from matplotlib.ticker import LogLocator, MaxNLocator

    if frame.logarithmic:
        low, high = axes.get_ylim()
        # Powers of ten alone would be two ticks of an axis over a factor of 100.
        subs = (1, 2, 5) if high < 1000 * low else (1,)
        axes.yaxis.set_major_locator(LogLocator(subs=subs, numticks=8))
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.minorticks_off()
        axes.set_ylabel("logarithmic", labelpad=0)
        return
    axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_formatter(lambda value, _: _number(value, _tick_distance(axes)))


def _set_limits(axes: Axes, frame: Frame) -> None:
    """Set the limits of both axes, with air above the highest value."""
    axes.margins(0.04)
    if frame.steps is not None:
        first, last = frame.steps
        air = 0.04 * (last - first) or 0.5
        axes.set_xlim(first - air, last + air)
    low, high = axes.dataLim.intervaly
    low = low if frame.low is None else frame.low
    high = high if frame.high is None else frame.high
    if frame.logarithmic:
        air = (high / low) ** 0.05
        axes.set_ylim(low / air, high * air)
        return
    air = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    axes.set_ylim(low - air if frame.low is None else low, high + air)


def _draw_line(axes: Axes, line: Line) -> None:
    xs, means, low, high = zip(*thinned(line.points, MOST_POINTS))
    if line.pale:
        axes.plot(xs, means, color=line.colour, linewidth=0.8, alpha=0.35)
    if len(xs) < len(line.points) and (line.pale or not line.smoothed):
        axes.fill_between(xs, low, high, color=line.colour, alpha=0.18, linewidth=0)
    if not line.pale:
        axes.plot(xs, means, **_look(line.colour, line.dash, line.dots or len(xs) == 1))


def _draw_legend(axes: Axes, lines: Sequence[Line], frame: Frame) -> None:
    from matplotlib.lines import Line2D

    keys = {}
    names = dict.fromkeys(line.legend for line in lines if line.legend)
    # A single curve is named by the heading of its chart.
    for name in names if len(names) > 1 else ():
        named = [line for line in lines if line.legend == name]
        colour = named[0].colour if len(named) == 1 else INK
        keys[name] = Line2D([], [], **_look(colour, named[0].dash, named[0].dots))
    if frame.marks:
        keys["no update"] = Line2D([], [], color=_MARK, marker="|", linestyle="")
    if frame.restarts and frame.names_restarts:
        keys["restart"] = Line2D([], [], color=GRID, linestyle=_style("1 2"))
    if keys:
        axes.legend(
            list(keys.values()),
            list(keys),
            fontsize=9,
            framealpha=0.7,
            facecolor=_PAPER,
            edgecolor="none",
        )


def name_runs(figure: Figure, names: Sequence[str]) -> None:
    """Write the names of runs above the charts, each with the colour of its lines."""
    from matplotlib.lines import Line2D

    keys = [Line2D([], [], **_look(COLOURS[at % len(COLOURS)])) for at in range(len(names))]
    figure.legend(keys, list(names), loc="outside upper left", frameon=False)


def heat_map(rows: Sequence[Sequence[float]], *, row: str, column: str) -> Figure:
    """Return a figure with one cell per value: blue below 1, red above 1, transparent at 1.

    The cells are transparent so that values near 1 have the colour of the page.

    Args:
        rows: values, whose ideal is 1; full colours are at 0 and 2. Rows may differ in length.
        row, column: labels of a row and of a column.
    """
    from matplotlib.collections import PolyCollection
    from matplotlib.colors import to_rgba
    from matplotlib.ticker import MaxNLocator

    columns = max(map(len, rows))
    high = min(0.33, max(0.08, 2.3 / len(rows)))
    figure, axes = one_chart(high * len(rows) + 0.6)
    cells = [(i, j, value) for i, values in enumerate(rows) for j, value in enumerate(values)]
    corners = ((-0.5, -0.5), (0.5, -0.5), (0.5, 0.5), (-0.5, 0.5))
    shown = PolyCollection(
        [[(j + x, i + y) for x, y in corners] for i, j, _ in cells],
        facecolors=[to_rgba(COLOURS[int(value > 1)], _opacity(value)) for _, _, value in cells],
        linewidths=0,
        clip_on=False,
        # matplotlib has no tooltips for SVG. It writes a link around each cell, and `_slim` turns
        # each link into a title, which a browser shows under the mouse.
        urls=[f"{row} {i}, {column} {j}: {value:.2f}" for i, j, value in cells],
    )
    axes.add_collection(shown)
    axes.set(xlim=(-0.5, columns - 0.5), ylim=(len(rows) - 0.5, -0.5), xlabel=column)
    if columns <= 10 and high >= 0.2:
        for i, j, value in cells:
            axes.text(j, i, f"{value:.2f}", ha="center", va="center", color=_TEXT)
    for axis, count in ((axes.xaxis, columns), (axes.yaxis, len(rows))):
        if count <= 8:
            axis.set_ticks(range(count))
        else:
            axis.set_major_locator(MaxNLocator(8, integer=True, steps=[1, 2, 4, 5, 8, 10]))
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    return figure


def _opacity(load: float) -> float:
    """Return the opacity of a cell; never 0, because an invisible cell has no tooltip."""
    return round(max(_STRONGEST * min(abs(load - 1), 1), 0.01), 3)


def as_svg(figure: Figure, title: str) -> str:
    """Return a figure as an SVG element for an HTML page, which sets its width.

    The same figure always gives the same text. Ids of elements depend on the title, so that charts
    of one page do not share ids.

    Args:
        figure: the figure.
        title: text for screen readers.
    """
    import matplotlib

    written = io.BytesIO()
    no_metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": title}):
        figure.savefig(written, format="svg", metadata=no_metadata, transparent=True)
    root = ElementTree.fromstring(written.getvalue())  # noqa: S314 (matplotlib wrote it just now)
    _slim(root)
    view = root.attrib["viewBox"]
    root.attrib = {"viewBox": view, "role": "img", "aria-label": title}
    root[0].tag = "title"
    root[0].text = title
    return ElementTree.tostring(root, encoding="unicode")


def for_page(
    figure: Figure, title: str, remark: str = "", names: Sequence[tuple[str, str]] = ()
) -> ChartOfPage:
    """Return a figure as a chart for the templates of pages; ``names`` are colours and runs."""
    return {"title": title, "remark": remark, "names": names, "svg": as_svg(figure, title)}


def write_png(figure: Figure, image: str | os.PathLike[str]) -> Path:
    """Write a figure as an image and return its path.

    Raises:
        OSError: the image cannot be written, or the path is a device.
    """
    image = Path(image)
    image.parent.mkdir(parents=True, exist_ok=True)
    with replacing(resolve_output(image)) as file:
        figure.savefig(file, format="png")
    return image


def _slim(root: ElementTree.Element) -> None:
    """Remove parts of a matplotlib SVG that a page does not need, about three quarters of its size."""
    # The first element holds CSS that would apply to the whole page. `as_svg` reuses the element
    # for the title.
    root[0].clear()
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
        if not (element.text or "").strip():
            element.text = None
        element.tail = None
        at = {name.rpartition("}")[2]: value for name, value in element.attrib.items()}
        if element.tag == "g":
            at.pop("id", None)
        elif element.tag == "a":
            element.tag = "g"
            ElementTree.SubElement(element, "title").text = at["href"]
            at = {}
        elif element.tag == "text":
            at["style"] = re.sub(r"font-family:[^;]*; ?", "", at["style"])
        if "style" in at:
            at["style"] = re.sub(
                r"#\w{6}", lambda match: _VARIABLES.get(match[0], match[0]), at["style"]
            )
        if at.get("transform", "").startswith("rotate(-0 "):
            del at["transform"]
        for name in ("d", "x", "y"):
            if name in at:
                at[name] = re.sub(r"-?\d+\.\d+", lambda match: _rounded(match[0]), at[name])
        if "d" in at:
            at["d"] = re.sub(r"\s*([A-Za-z])\s*", r"\1", at["d"]).strip()
        element.attrib = at


def _rounded(number: str) -> str:
    return f"{float(number):.1f}".removesuffix(".0")


def thinned(points: Points, most: int) -> list[tuple[float, float, float, float]]:
    """Merge neighbouring points and return at most ``most`` tuples (x, mean, smallest, largest y).

    Example:
        ``[(1, 5), (2, 7), (3, 9)]`` with ``most`` 2: ``[(1.5, 6, 5, 7), (3, 9, 9, 9)]``.
    """
    together = -(-len(points) // most) or 1
    merged = []
    for first in range(0, len(points), together):
        xs, ys = zip(*points[first : first + together])
        merged.append((sum(xs) / len(xs), sum(ys) / len(ys), min(ys), max(ys)))
    return merged


def _look(colour: str, dash: str = "", dots: bool = False) -> dict[str, Any]:
    """Return matplotlib's arguments for the appearance of a line."""
    return {
        "color": colour,
        "linestyle": _style(dash),
        "linewidth": 1.4,
        "marker": "o" if dots else "",
        "markersize": 4,
    }


def _style(dash: str) -> Any:
    return (0, tuple(map(float, dash.split()))) if dash else "-"


def _tick_distance(axes: Axes) -> float:
    first, second = axes.get_yticks()[:2]
    return float(second - first)


def _number(value: float, unit: float) -> str:
    """Return the label of a tick, with enough digits to distinguish it from its neighbours.

    Example:
        1,500,000 among multiples of 500,000: ``1.5 M``.
    """
    if max(abs(value), unit) < 1e-3:
        return f"{value:.2g}" if unit >= 0.1 * abs(value) else f"{value:.4g}"
    if max(abs(value), unit) >= 1e15:
        return f"{value:.2g}"
    power, letter = next(
        ((p, s) for p, s in ((12, " T"), (9, " G"), (6, " M")) if abs(value) >= 10**p), (0, "")
    )
    return f"{value / 10**power:,.{max(0, power - math.floor(math.log10(unit)))}f}{letter}"
