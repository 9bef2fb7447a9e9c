"""Write an HTML page with the curves and numbers of a run, from its --log-jsonl file.

The log of a run that is still going, or that was killed, can be used.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from megatron_packed.cli.command import check_ending, command, file_failures, show


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("log", type=Path, metavar="LOG.jsonl", help="--log-jsonl file of the run")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="PAGE.html",
        help="HTML page to write; by default next to the log",
    )
    parser.add_argument("--title", help="title of the page; by default the log's path")


@command(
    "report", "write an HTML page about a run from its log", _add_arguments, takes_run_flags=False
)
def report_command(arguments: argparse.Namespace, run_flags: Sequence[str]) -> int:
    check_ending("--out", arguments.out, ".html")
    from megatron_packed.reporting.run_report import write_report

    log, page = arguments.log, arguments.out or arguments.log.with_suffix(".html")
    with file_failures(log):
        show(str(write_report(log, page, title=arguments.title or str(log))))
    return 0
