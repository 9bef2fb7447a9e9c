"""``megatron-packed COMMAND``: what is useful around a run. Training itself is ``torchrun
pretrain_hybrid.py``.

Exit codes are those of training: 0 done; 2 usage, without a traceback; 3 data; 4 no checkpoint can
be loaded.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout

from megatron_packed import __version__
from megatron_packed.checkpoint.errors import printable
from megatron_packed.cli import convert, generate, packing, plan, plot, preprocess, report, tune
from megatron_packed.cli.doctor import command as doctor
from megatron_packed.cli.errors import UsageError
from megatron_packed.config.standard_streams import SteadyStream, open_closed_descriptors

COMMANDS = (doctor, packing, tune, plan, plot, preprocess, report, generate, convert)
EXIT_BROKEN_PIPE = 141
"""As of a program that the signal of a closed pipe ends."""
EXIT_NOT_WRITTEN = 1
"""As of a program whose output a full disk has lost."""
EXIT_INTERRUPTED = 130
"""As of a program that Ctrl-C ends."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code.

    Args:
        argv: the command line without the program's name; by default this process's.
    Raises:
        SystemExit: code 2, what argparse or the configuration finds wrong; 0, --help and --version.
    """
    open_closed_descriptors()
    if sys.stdout is None:  # closed on purpose: there is no output to lose
        sys.stdout = os.fdopen(1, "w", closefd=False)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a path whose bytes are no text
    parser = argparse.ArgumentParser(
        "megatron-packed", description="Looks at data, runs and checkpoints."
    )
    parser.add_argument("--version", action="version", version=f"megatron_packed {__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        # Words of a command that takes the flags of a run are not completed: --prompt-x is no
        # --prompt.
        subparser = subparsers.add_parser(
            command.NAME,
            help=command.HELP,
            description=command.__doc__,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_arguments(subparser)
        subparser.set_defaults(command=command)
    arguments, run_flags = parser.parse_known_args(argv)
    output = SteadyStream(sys.stdout, "standard output")
    try:
        with redirect_stdout(output):  # type: ignore[type-var]
            code = int(arguments.command.run(arguments, run_flags))
        output.flush()
        return code if output.failed is None else _lost(output.failed)
    except UsageError as error:
        print(printable(str(error)), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted.", file=sys.stderr)
        return EXIT_INTERRUPTED


def _lost(error: Exception) -> int:
    """Return the exit code of a command whose output could not be written, after a sentence if the
    disk is full.
    """
    # Python flushes the stream at the exit, and would fail again.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if isinstance(error, BrokenPipeError):  # `| head` has seen enough
        return EXIT_BROKEN_PIPE
    print(f"standard output cannot be written: {error}.", file=sys.stderr)
    return EXIT_NOT_WRITTEN


if __name__ == "__main__":
    sys.exit(main())
