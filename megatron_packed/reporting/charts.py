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

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#2166ac", "#b2182b", "#1b7837", "#e08214", "#762a83", "#35978f", "#c51b7d", "#4d4d4d")
DASHES = ("", "6 3", "2 2", "8 2 2 2")
"""Lengths of dashes and gaps, in line widths; an empty pattern is a solid line."""

MOST_POINTS = 500
"""Largest number of points of a line.

A longer line shows means, in a band from smallest to largest value.
"""

_WIDTH, _HEIGHT = 6.0, 2.9
"""Size of a chart on a page, in inches. At 72 SVG units per inch, text is readable on a phone."""

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Line:
    """Curve of a chart. A legend that lines of several colours share shows a black line."""

    points: Points
    colour: str
    legend: str = ""
    dash: str = ""
    dots: bool = False


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


def line_chart(
    lines: Sequence[Line], *, levels: Sequence[tuple[str, float]] = (), marks: Sequence[float] = ()
) -> Figure:
    """Return a figure with one chart of lines over the steps; for arguments see `draw_lines`."""
    figure, axes = _one_chart(_HEIGHT)
    draw_lines(axes, lines, levels=levels, marks=marks)
    return figure


def _one_chart(height: float) -> tuple[Figure, Axes]:
    """Return a figure with one chart and fixed margins, equal for all charts of a page.

    Fixed margins avoid matplotlib's layout engine, which draws everything once just to measure.

    Args:
        height: height of the figure in inches.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH, height))
    left, bottom, top = 0.12, 0.5 / height, 1 - 0.1 / height
    return figure, figure.add_axes((left, bottom, 0.98 - left, top - bottom))


def draw_lines(
    axes: Axes,
    lines: Sequence[Line],
    *,
    levels: Sequence[tuple[str, float]] = (),
    marks: Sequence[float] = (),
) -> None:
    """Draw lines over the steps, with a grid and abbreviated numbers.

    Args:
        axes: the axes of the chart.
        lines: at least one line, each with at least one point.
        levels: (name, y) of horizontal lines.
        marks: steps that get a red mark at the bottom.
    """
    from matplotlib.ticker import MaxNLocator

    for line in lines:
        _draw_line(axes, line)
    for name, level in levels:
        axes.axhline(level, color="#888888", linestyle=_style("4 3"), linewidth=1)
        right = axes.get_yaxis_transform()
        axes.text(0.99, level, f"{name} {level:.2f}", transform=right, ha="right", va="bottom")
    if marks:
        bottom = axes.get_xaxis_transform()
        axes.vlines(marks, 0, 0.04, color="#dd0000", linewidth=2, transform=bottom)
    axes.margins(0.04)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_formatter(lambda value, _: _number(value, _tick_distance(axes)))
    axes.set_xlabel("step")
    axes.tick_params(length=0)
    axes.spines[["left", "top", "right"]].set_visible(False)
    axes.spines["bottom"].set_color("#999999")
    axes.grid(axis="y", color="#888888", alpha=0.25)
    _draw_legend(axes, lines)


def _draw_line(axes: Axes, line: Line) -> None:
    xs, means, low, high = zip(*thinned(line.points, MOST_POINTS))
    if len(xs) < len(line.points):
        axes.fill_between(xs, low, high, color=line.colour, alpha=0.18, linewidth=0)
    axes.plot(xs, means, **_look(line.colour, line.dash, line.dots or len(xs) == 1))


def _draw_legend(axes: Axes, lines: Sequence[Line]) -> None:
    from matplotlib.lines import Line2D

    keys = {}
    for name in dict.fromkeys(line.legend for line in lines if line.legend):
        named = [line for line in lines if line.legend == name]
        colour = named[0].colour if len(named) == 1 else "black"
        keys[name] = Line2D([], [], **_look(colour, named[0].dash, named[0].dots))
    if keys:
        axes.legend(list(keys.values()), list(keys), fontsize=9, framealpha=0.6)


def name_runs(figure: Figure, names: Sequence[str]) -> None:
    """Write the names of runs above the charts, each with the colour of its lines."""
    from matplotlib.lines import Line2D

    keys = [Line2D([], [], **_look(COLOURS[at % len(COLOURS)])) for at in range(len(names))]
    figure.legend(keys, list(names), loc="outside upper left", frameon=False)


def heat_map(rows: Sequence[Sequence[float]], *, row: str, column: str) -> Figure:
    """Return a figure with one cell per value: white for 1, blue below 1, red above 1.

    Args:
        rows: values, whose ideal is 1; full colours are at 0 and 2. Rows may differ in length.
        row, column: labels of a row and of a column.
    """
    from matplotlib.collections import PolyCollection
    from matplotlib.colors import LinearSegmentedColormap, Normalize
    from matplotlib.ticker import MaxNLocator

    columns = max(map(len, rows))
    high = min(0.33, max(0.08, 2.3 / len(rows)))
    figure, axes = _one_chart(high * len(rows) + 0.6)
    cells = [(i, j, value) for i, values in enumerate(rows) for j, value in enumerate(values)]
    corners = ((-0.5, -0.5), (0.5, -0.5), (0.5, 0.5), (-0.5, 0.5))
    shown = PolyCollection(
        [[(j + x, i + y) for x, y in corners] for i, j, _ in cells],
        array=[value for _, _, value in cells],
        cmap=LinearSegmentedColormap.from_list("load", ["#3333ff", "#ffffff", "#ff3333"], N=257),
        norm=Normalize(0, 2, clip=True),
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
            axes.text(j, i, f"{value:.2f}", ha="center", va="center")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(8, integer=True, steps=[1, 2, 4, 5, 8, 10]))
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    return figure


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


def write_png(figure: Figure, image: str | os.PathLike[str]) -> Path:
    """Write a figure as an image and return its path.

    Raises:
        OSError: the image cannot be written.
    """
    image = Path(image)
    image.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(image, format="png")
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
        if at.get("transform", "").startswith("rotate(-0 "):
            del at["transform"]
        for name in ("d", "x", "y"):
            if name in at:
                at[name] = re.sub(r"-?\d+\.\d+", lambda found: _rounded(found[0]), at[name])
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
    found = []
    for first in range(0, len(points), together):
        xs, ys = zip(*points[first : first + together])
        found.append((sum(xs) / len(xs), sum(ys) / len(ys), min(ys), max(ys)))
    return found


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
    power, letter = next(
        ((p, s) for p, s in ((12, " T"), (9, " G"), (6, " M")) if abs(value) >= 10**p), (0, "")
    )
    return f"{value / 10**power:,.{max(0, power - math.floor(math.log10(unit)))}f}{letter}"
