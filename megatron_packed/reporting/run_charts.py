"""Curves of runs, as HTML for a page and as one PNG image."""

from __future__ import annotations

import html
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_packed.reporting import charts
from megatron_packed.reporting.charts import COLOURS, DASHES, Line
from megatron_packed.reporting.curves import Panel, Run, panels_of, points

STYLE = """
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(420px, 100%), 1fr)); gap: 1em 1.5em }
figure { margin: 0 } figcaption span { display: inline-block; margin-left: 1em; font-size: .85em }
figure > svg { width: 100%; height: auto; fill: #444 }
"""
_CURE = "pip install matplotlib, then write the page again with megatron-packed report or plot"


def curves_html(runs: Sequence[Run], levels: Mapping[str, float] | None = None) -> str:
    """Return HTML with all charts of the runs.

    With one run, each curve of a chart has a colour. With several runs, each run has a colour.
    Without matplotlib, a sentence with the remedy is returned, so that the page is still written.

    Args:
        runs: the runs.
        levels: horizontal lines in the chart of the loss, name -> nats.
    """
    try:
        figures = _figures(runs, levels or {})
    except ImportError as error:
        problem = html.escape(str(error))
        return f"<p>This page has no curves, because matplotlib cannot be imported ({problem}): {_CURE}.</p>"
    return f'<div class="charts">{"".join(figures)}</div>'


def write_png(runs: Sequence[Run], image: str | os.PathLike[str]) -> Path:
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
        charts.draw_lines(axes, lines_of(panel, runs), marks=_skipped(panel, runs))
        axes.set(title=panel.title, ylabel=panel.unit)
    if several:
        charts.name_runs(figure, [run.name for run in runs])
    return charts.write_png(figure, image)


def lines_of(panel: Panel, runs: Sequence[Run]) -> list[Line]:
    """Return the lines of a panel, without lines that have no points.

    With one run, each curve has a colour. With several runs, each run has a colour, and curves
    differ by their dashes.
    """
    alone = len(runs) == 1
    lines = [
        Line(
            points(run.records, curve),
            COLOURS[(place if alone else number) % len(COLOURS)],
            curve.legend,
            "" if alone else DASHES[place % len(DASHES)],
            curve.dots,
        )
        for number, run in enumerate(runs)
        for place, curve in enumerate(panel.curves)
    ]
    return [line for line in lines if line.points]


def _figures(runs: Sequence[Run], levels: Mapping[str, float]) -> list[str]:
    found = []
    for panel in panels_of(runs):
        lines = lines_of(panel, runs)
        shown = list(levels.items()) if panel.title == "Loss" else []
        chart = charts.line_chart(lines, levels=shown, marks=_skipped(panel, runs))
        names = _run_names(panel, runs) if len(runs) > 1 else ""
        found.append(_figure(panel.title, panel.unit, charts.as_svg(chart, panel.title), names))
    for run in runs:
        with_loads = [step for step in run.steps if step.get("expert_load")]
        if with_loads:
            title = f"Load of each expert of {run.name}" if len(runs) > 1 else "Load of each expert"
            last = f"step {with_loads[-1]['iteration']}, relative to the mean of its layer"
            unit = f"{last} (rows: E layers; white: the mean, blue: less, red: more)"
            loads: Sequence[Sequence[float]] = with_loads[-1]["expert_load"]  # type: ignore[assignment]
            chart = charts.heat_map(loads, row="E layer", column="expert")
            found.append(_figure(title, unit, charts.as_svg(chart, title)))
    return found


def _skipped(panel: Panel, runs: Sequence[Run]) -> list[float]:
    """Return the steps to mark in a panel: in the loss panel, steps without an update."""
    if panel.title != "Loss":
        return []
    return [
        float(str(step["iteration"])) for run in runs for step in run.steps if step.get("skipped")
    ]


def _run_names(panel: Panel, runs: Sequence[Run]) -> str:
    """Return the names of the runs that have numbers for a panel, in the colours of their lines."""
    return "".join(
        f'<span><b style="color:{COLOURS[number % len(COLOURS)]}">&#9679;</b> {html.escape(run.name)}</span>'
        for number, run in enumerate(runs)
        if any(points(run.records, curve) for curve in panel.curves)
    )


def _figure(title: str, unit: str, svg: str, names: str = "") -> str:
    heading = f"<b>{html.escape(title)}</b> <small>{html.escape(unit)}</small>"
    return f"<figure><figcaption>{heading} {names}</figcaption>{svg}</figure>"
