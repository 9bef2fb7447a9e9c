"""Write an HTML page with the curves and numbers of a run, from its --log-jsonl file.

The log of a run that is still going, or that was killed, can be used.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from megatron_packed.cli.errors import UsageError, check_ending
from megatron_packed.cli.output import show

NAME = "report"
HELP = "write an HTML page about a run from its log"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("log", type=Path, metavar="LOG.jsonl", help="--log-jsonl file of the run")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="PAGE.html",
        help="HTML page to write; by default next to the log",
    )
    parser.add_argument("--title", help="title of the page; by default the log's path")


def run(arguments: argparse.Namespace, rest: Sequence[str]) -> int:
    if rest:
        raise UsageError(
            f"report does not take {rest[0]}; megatron-packed report --help lists its options."
        )
    check_ending("--out", arguments.out, ".html")
    from megatron_packed.reporting.run_report import write_report

    log, page = arguments.log, arguments.out or arguments.log.with_suffix(".html")
    try:
        show(str(write_report(log, page, title=arguments.title or str(log))))
    except OSError as error:
        raise UsageError(f"{error.filename or log}: {error.strerror}; correct the path.") from None
    except ValueError as error:
        raise UsageError(str(error)) from None
    return 0
