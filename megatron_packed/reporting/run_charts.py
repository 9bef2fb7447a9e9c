"""Curves of runs, as HTML for a page and as one PNG image."""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from megatron_packed.reporting import charts
from megatron_packed.reporting.charts import COLOURS, DASHES, ChartOfPage, Frame, Line
from megatron_packed.reporting.curves import (
    LOGARITHMIC_FROM,
    Panel,
    Run,
    limit_of,
    numbers_in,
    panels_of,
    points,
    smoothed,
    steady,
)
from megatron_packed.reporting.html_page import counted

_CURE = "pip install matplotlib, then write the page again with megatron-packed report or plot"


def curves(runs: Sequence[Run], levels: Mapping[str, float]) -> dict[str, object]:
    """Return the variables of a page for all charts of the runs: ``figures``.

    With one run, each curve of a chart has a colour. With several runs, each run has a colour.
    Without matplotlib, ``no_curves`` is a sentence with the remedy, and the page is still written.

    Args:
        runs: the runs.
        levels: horizontal lines in the chart of the loss, name -> nats.
    """
    try:
        return {"figures": _figures(runs, levels)}
    except ImportError as error:
        reason = f"matplotlib cannot be imported ({error}): {_CURE}."
        return {"no_curves": f"This page has no curves, because {reason}"}


def write_runs_png(runs: Sequence[Run], image: str | os.PathLike[str]) -> Path:
    """Draw the curves of runs as one PNG image and return its path.

    The image has the same curves as the page about these runs, but no chart of single experts.

    Raises:
        OSError: the image cannot be written.
        ValueError: matplotlib cannot be imported.
    """
    panels = panels_of(runs)
    several = len(runs) > 1
    try:
        # Above the charts, each run's name takes a line of 0.25 inches.
        figure, every = charts.grid(len(panels), 11, 3.2, 0.25 * len(runs) if several else 0.0)
    except ImportError as error:
        raise ValueError(f"a PNG needs matplotlib: pip install matplotlib ({error}).") from error
    for axes, panel in zip(every, panels):
        lines, frame = _lines_and_frame(panel, runs, {})
        charts.draw_lines(axes, _drawable(lines, frame), frame)
        unit = ", ".join(filter(None, (panel.unit, "logarithmic" * frame.logarithmic)))
        title = ", ".join((panel.title, *_single_legend(lines)))
        axes.set_title(title)
        axes.set_ylabel(unit, labelpad=4)
    if several:
        charts.name_runs(figure, [run.name for run in runs])
    return charts.write_png(figure, image)


def lines_of(panel: Panel, runs: Sequence[Run]) -> list[Line]:
    """Return the lines of a panel, without lines that have no points or repeat the line before.

    With one run, each curve has a colour. With several runs, each run has a colour, and curves
    differ by their dashes. The first curve of some panels is smoothed and drawn over a pale
    line of its values.
    """
    alone = len(runs) == 1
    lines: list[Line] = []
    for number, run in enumerate(runs):
        of_run: list[Line] = []
        for place, curve in enumerate(panel.curves):
            line = Line(
                points(run.records, curve),
                COLOURS[(place if alone else number) % len(COLOURS)],
                curve.legend,
                DASHES[(place // len(COLOURS) if alone else place) % len(DASHES)],
                curve.dots,
            )
            # On a CPU, the memory in use is that of the host.
            if line.points and all(line.points != other.points for other in of_run):
                of_run += _smoothed(line, alone) if panel.smooth and place == 0 else [line]
        lines += of_run
    return lines


def _smoothed(line: Line, alone: bool) -> list[Line]:
    """Return a pale line of the values and a line of their means; a short line stays as it is.

    Args:
        line: the values.
        alone: the chart has one run; windows of several runs differ and are not in the legend.
    """
    window, means = smoothed(line.points)
    if window == 1:
        return [line]
    kind = f"mean of {window} steps" if alone else "smoothed"
    legend = ", ".join(filter(None, (line.legend, kind)))
    means_line = replace(line, points=means, smoothed=True, legend=legend)
    return [replace(line, pale=True, legend=""), means_line]


def _lines_and_frame(
    panel: Panel, runs: Sequence[Run], levels: Mapping[str, float]
) -> tuple[list[Line], Frame]:
    """Return the lines of a panel with limits and marks: restarts, and steps without an update."""
    lines = lines_of(panel, runs)
    of_loss = panel.title == "Loss"
    limit = panel.high
    if panel.cut:
        limit = limit_of(
            [line.points for line in lines if not line.smoothed], keeps_first=panel.smooth
        )
    highest = math.inf if limit is None else limit
    values = [y for line in lines for _, y in line.points if 0 < y <= highest]
    spans = max(values, default=0) > LOGARITHMIC_FROM * min(values, default=0)
    logarithmic = panel.logarithmic and spans
    steps = [step for run in runs for step in run.steps]
    numbers = numbers_in(steps, "iteration")
    without_update = numbers_in([step for step in steps if step.get("skipped")], "iteration")
    frame = Frame(
        steps=(min(numbers), max(numbers)),
        low=panel.low,
        high=limit,
        levels=[
            (name, level)
            for name, level in levels.items()
            if of_loss and (level > 0 or not logarithmic)
        ],
        marks=without_update if of_loss else [],
        restarts=runs[0].restarts if len(runs) == 1 else [],
        names_restarts=of_loss,
        logarithmic=logarithmic,
    )
    return lines, frame


def _drawable(lines: Sequence[Line], frame: Frame) -> list[Line]:
    """Return the lines with the points that the axes can show: above 0 if they are logarithmic."""
    if not frame.logarithmic:
        return list(lines)
    above_0 = (replace(line, points=[p for p in line.points if p[1] > 0]) for line in lines)
    return [line for line in above_0 if line.points]


def _single_legend(lines: Sequence[Line]) -> list[str]:
    """Return the legend of lines that share one, which the chart does not show; else nothing."""
    legends = {line.legend for line in lines if line.legend}
    return list(legends) if len(legends) == 1 else []


def _figures(runs: Sequence[Run], levels: Mapping[str, float]) -> list[ChartOfPage]:
    figures = []
    for panel in panels_of(runs):
        lines, frame = _lines_and_frame(panel, runs, levels)
        chart = charts.line_chart(_drawable(lines, frame), frame)
        names = _run_names(panel, runs) if len(runs) > 1 else []
        remarks = (panel.unit, *_single_legend(lines), *_remarks(panel, runs, lines, frame))
        caption = " · ".join(filter(None, remarks))
        figures.append(charts.for_page(chart, panel.title, caption, names))
    for run in runs:
        with_loads = [step for step in run.steps if step.get("expert_load")]
        if with_loads:
            title = f"Load of each expert of {run.name}" if len(runs) > 1 else "Load of each expert"
            last = f"step {with_loads[-1]['iteration']}, relative to the mean of its layer"
            unit = f"{last} (rows: E layers; blue: less than the mean, red: more)"
            loads: Sequence[Sequence[float]] = with_loads[-1]["expert_load"]  # type: ignore[assignment]
            chart = charts.heat_map(loads, row="E layer", column="expert")
            figures.append(charts.for_page(chart, title, unit))
    return figures


def _remarks(panel: Panel, runs: Sequence[Run], lines: Sequence[Line], frame: Frame) -> list[str]:
    """Return the median of a panel with one run and one curve, and the number of values outside."""
    remarks = ["logarithmic axis"] if frame.logarithmic else []
    if (
        len(runs) == 1
        and len(panel.curves) == 1
        and not panel.smooth
        and panel.title != "Learning rate"
    ):
        values = [y for _, y in points(steady(runs[0].steps), panel.curves[0])]
        if values:
            remarks.append(f"median {_short(statistics.median(values))}")
    values_of_lines = {point for line in lines if not line.smoothed for point in line.points}
    zeros = [point for point in values_of_lines if point[1] <= 0]
    if frame.logarithmic and zeros:
        remarks.append(f"{counted(len(zeros), 'value')} of 0 not shown")
    if panel.cut and frame.high is not None:
        outside = [point for point in values_of_lines if point[1] > frame.high]
        remarks.append(f"{counted(len(outside), 'value')} above {_short(frame.high)} not shown")
    return remarks


def _short(value: float) -> str:
    """Return a number with about three digits.

    Example:
        ``12,345`` for 12345.4, and ``0.0123`` for 0.01234.
    """
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _run_names(panel: Panel, runs: Sequence[Run]) -> list[tuple[str, str]]:
    """Return the colours and names of the runs that have numbers for a panel."""
    return [
        (f"var(--c{number % len(COLOURS)})", run.name)
        for number, run in enumerate(runs)
        if any(points(run.records, curve) for curve in panel.curves)
    ]
