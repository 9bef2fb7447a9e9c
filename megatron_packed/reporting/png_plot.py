"""The curves of runs as one PNG image, through matplotlib (extra ``plot``)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_packed.reporting.curves import Run, panels_of
from megatron_packed.reporting.run_report import lines_of
from megatron_packed.reporting.svg_chart import COLOURS, DASHES, MOST_POINTS, Line, thinned

_COLUMNS = 2


def write_png(runs: Sequence[Run], image: str | os.PathLike[str]) -> Path:
    """Draws what the page about the same runs shows over the steps, and returns the image's path.

    Raises:
        OSError: the image cannot be written.
        ValueError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError(
            f"a PNG needs matplotlib: pip install 'megatron-packed[plot]' ({error})."
        ) from error
    panels = panels_of(runs)
    rows = -(-len(panels) // _COLUMNS)
    head = 0.25 * len(runs) if len(runs) > 1 else 0.0  # a line for each of them
    figure = Figure(figsize=(11, 3.2 * rows + head), layout="constrained")
    axes = figure.subplots(rows, _COLUMNS, squeeze=False).ravel()
    for axis, panel in zip(axes, panels):
        for line in lines_of(panel, runs):
            _draw(axis, line)
        axis.set(title=panel.title, ylabel=panel.unit, xlabel="step")
        axis.grid(alpha=0.3)
        named = [curve for curve in panel.curves if curve.legend]
        if named:
            alone = len(runs) == 1
            keys = [
                _key(COLOURS[at] if alone else "black", "" if alone else DASHES[at], curve.dots)
                for at, curve in enumerate(named)
            ]
            axis.legend(keys, [curve.legend for curve in named], fontsize=8, framealpha=0.6)
    for axis in axes[len(panels) :]:
        axis.remove()
    if len(runs) > 1:
        keys = [_key(COLOURS[number % len(COLOURS)], "", False) for number in range(len(runs))]
        figure.legend(keys, [run.name for run in runs], loc="outside upper left", frameon=False)
    image = Path(image)
    image.parent.mkdir(parents=True, exist_ok=True)
    FigureCanvasAgg(figure).print_png(image)
    return image


def _draw(axis: Any, line: Line) -> None:
    """As the page does: means of a long line, in a band from the smallest to the largest."""
    xs, means, low, high = zip(*thinned(line.points, MOST_POINTS))
    if len(xs) < len(line.points):
        axis.fill_between(xs, low, high, color=line.colour, alpha=0.18, linewidth=0)
    marker = "o" if line.dots or len(xs) == 1 else ""
    axis.plot(
        xs,
        means,
        color=line.colour,
        linestyle=_style(line.dash),
        marker=marker,
        markersize=4,
        linewidth=1.4,
    )


def _key(colour: str, dash: str, dots: bool) -> Any:
    from matplotlib.lines import Line2D

    return Line2D(
        [], [], color=colour, linestyle=_style(dash), marker="o" if dots else "", markersize=4
    )


def _style(dash: str) -> Any:
    return (0, tuple(map(float, dash.split()))) if dash else "-"
