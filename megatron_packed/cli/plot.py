"""Plot one or more runs from their --log-jsonl files: loss, throughput, memory, expert load and more.

The page needs no network connection. The log of a run that is still going can be used.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from megatron_packed.cli.command import check_ending, command, file_failures, show


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs",
        type=Path,
        nargs="+",
        metavar="RUN",
        help="--log-jsonl file of a run, or the directory that contains it",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="PAGE.html",
        help="HTML page to write; by default plot.html next to the log",
    )
    parser.add_argument(
        "--png", type=Path, metavar="IMAGE.png", help="also write the plots as an image"
    )
    parser.add_argument("--title", help="title of the page; by default the names of the runs")


@command(
    "plot",
    "plot the curves of one or more runs from their logs",
    _add_arguments,
    takes_run_flags=False,
)
def plot_command(arguments: argparse.Namespace, run_flags: Sequence[str]) -> int:
    check_ending("--out", arguments.out, ".html")
    check_ending("--png", arguments.png, ".png")
    from megatron_packed.reporting.curves import read_run
    from megatron_packed.reporting.run_charts import write_runs_png
    from megatron_packed.reporting.run_report import write_runs_page

    first = arguments.runs[0]
    page = arguments.out or (first if first.is_dir() else first.parent) / "plot.html"
    with file_failures(first):
        runs = [read_run(path) for path in arguments.runs]
        title = arguments.title or ", ".join(run.name for run in runs)
        show(str(write_runs_page(runs, page, title=title)))
        if arguments.png is not None:
            show(str(write_runs_png(runs, arguments.png)))
    return 0
