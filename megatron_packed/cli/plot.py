"""Plot one or more runs from their --log-jsonl files: loss, throughput, memory, expert load and more.

The page needs no network connection. The log of a run that is still going can be used.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from megatron_packed.cli.errors import UsageError, check_ending
from megatron_packed.cli.output import show

NAME = "plot"
HELP = "plot the curves of one or more runs from their logs"


def add_arguments(parser: argparse.ArgumentParser) -> None:
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


def run(arguments: argparse.Namespace, rest: Sequence[str]) -> int:
    if rest:
        raise UsageError(
            f"plot does not take {rest[0]}; megatron-packed plot --help lists its options."
        )
    check_ending("--out", arguments.out, ".html")
    check_ending("--png", arguments.png, ".png")
    from megatron_packed.reporting.curves import read_run
    from megatron_packed.reporting.run_charts import write_curves_png
    from megatron_packed.reporting.run_report import write_runs_page

    first = arguments.runs[0]
    page = arguments.out or (first if first.is_dir() else first.parent) / "plot.html"
    try:
        runs = [read_run(path) for path in arguments.runs]
        title = arguments.title or ", ".join(one.name for one in runs)
        show(str(write_runs_page(runs, page, title=title)))
        if arguments.png is not None:
            show(str(write_curves_png(runs, arguments.png)))
    except OSError as error:
        raise UsageError(
            f"{error.filename or first}: {error.strerror}; correct the path."
        ) from None
    except ValueError as error:
        raise UsageError(str(error)) from None
    return 0
