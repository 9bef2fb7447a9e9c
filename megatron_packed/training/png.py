"""The curves of runs as one PNG image, through matplotlib (extra ``plot``)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from megatron_packed.training.curves import Run, panels_of, points

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
        raise ValueError(f"a PNG needs matplotlib: pip install 'megatron-packed[plot]' ({error}).") from error
    panels = panels_of(runs)
    rows = -(-len(panels) // _COLUMNS)
    figure = Figure(figsize=(11, 3.2 * rows), layout="constrained")
    axes = figure.subplots(rows, _COLUMNS, squeeze=False).ravel()
    for axis, panel in zip(axes, panels):
        for run in runs:
            for curve in panel.curves:
                found = points(run.records, curve)
                if found:
                    words = " ".join(filter(None, [run.name if len(runs) > 1 else "", curve.legend]))
                    marker = "o" if curve.dots or len(found) == 1 else ""
                    # What begins with an underscore would be left out of the legend.
                    axis.plot(*zip(*found), marker=marker, markersize=4, label=words.lstrip("_"))
        axis.set(title=panel.title, ylabel=panel.unit, xlabel="step")
        axis.grid(alpha=0.3)
        if any(text for text in axis.get_legend_handles_labels()[1]):
            axis.legend()
    for axis in axes[len(panels) :]:
        axis.remove()
    image = Path(image)
    image.parent.mkdir(parents=True, exist_ok=True)
    FigureCanvasAgg(figure).print_png(image)
    return image
