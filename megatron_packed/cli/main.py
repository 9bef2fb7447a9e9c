"""``megatron-packed COMMAND``: training, and tools for preparing, planning and inspecting runs.

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
from megatron_packed.checkpoint.errors import printable_message
from megatron_packed.cli.command import EXIT_USAGE, UsageError
from megatron_packed.cli.convert import convert_command
from megatron_packed.cli.doctor.command import doctor_command
from megatron_packed.cli.from_megatron import from_megatron_command
from megatron_packed.cli.generate import generate_command
from megatron_packed.cli.packing import packing_command
from megatron_packed.cli.plan import plan_command
from megatron_packed.cli.plot import plot_command
from megatron_packed.cli.preprocess import preprocess_command
from megatron_packed.cli.quickstart.command import quickstart_command
from megatron_packed.cli.report import report_command
from megatron_packed.cli.train import train_command
from megatron_packed.cli.tune import tune_command
from megatron_packed.config.parser.did_you_mean import did_you_mean, nearest
from megatron_packed.files.standard_streams import SteadyStream, open_closed_descriptors

COMMANDS = (
    train_command,
    quickstart_command,
    doctor_command,
    packing_command,
    tune_command,
    plan_command,
    plot_command,
    preprocess_command,
    report_command,
    generate_command,
    convert_command,
    from_megatron_command,
)
SYNONYMS = {
    "train": ("pretrain", "finetune", "fine-tune", "sft", "run", "launch"),
    "generate": ("chat", "infer", "inference", "sample"),
    "convert": ("export", "import"),
    "preprocess": ("tokenize", "tokenise"),
    "plan": ("estimate", "memory"),
    "from-megatron": ("megatron", "translate"),
}
"""Names of other programs' commands that do the same as a command."""
EXIT_BROKEN_PIPE = 141
"""Exit code when the reader of standard output closed the pipe, as for a program that SIGPIPE ends.
"""
_EXIT_NOT_WRITTEN = 1
"""Exit code when output was lost, for example because the disk is full."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    Args:
        argv: the command line without the program's name; by default this process's.
    Raises:
        KeyboardInterrupt: the user pressed Ctrl-C; `megatron_packed.__main__` ends with one sentence.
        SystemExit: code 2 if argparse or the configuration finds a problem; code 0 for --help and
            --version.
    """
    open_closed_descriptors()
    if sys.stdout is None:  # the user closed standard output: write to the null device
        sys.stdout = os.fdopen(1, "w", closefd=False)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(
            errors="backslashreplace"
        )  # escape file names that are not valid text
    parser = argparse.ArgumentParser(
        "megatron-packed", description="Train models, prepare data, plan and inspect runs."
    )
    parser.add_argument("--version", action="version", version=f"megatron_packed {__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        # Abbreviations are off, because some commands also take the flags of a run: --prompt-x
        # must not be read as --prompt.
        subparser = subparsers.add_parser(
            command.name,
            help=command.help,
            description=command.description,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_arguments(subparser)
        subparser.set_defaults(command=command)
    unknown = _unknown_command(sys.argv[1:] if argv is None else argv)
    if unknown:
        print(printable_message(unknown), file=sys.stderr)
        return EXIT_USAGE
    arguments, run_flags = parser.parse_known_args(argv)
    output = SteadyStream(sys.stdout, "standard output")
    try:
        if run_flags and not arguments.command.takes_run_flags:
            name = arguments.command.name
            raise UsageError(
                f"{name} does not take {run_flags[0]}; megatron-packed {name} --help lists its options."
            )
        with redirect_stdout(output):
            code = arguments.command.run(arguments, run_flags)
        output.flush()
        return code if output.failed is None else _lost(output.failed)
    except UsageError as error:
        print(printable_message(str(error)), file=sys.stderr)
        return error.exit_code


def _unknown_command(argv: Sequence[str]) -> str:
    """Return a sentence if the first word is not a command, with the nearest command; else ""."""
    names = [command.name for command in COMMANDS]
    word = argv[0] if argv else names[0]
    if word.startswith("-") or word in names:
        return ""
    suggestions = [name for name in names if word in SYNONYMS.get(name, ())] or nearest(word, names)
    cure = did_you_mean(suggestions, f"choose from {', '.join(names)}.")
    return f"megatron-packed {word}: is not a command; {cure}"


def _lost(error: Exception) -> int:
    """Return the exit code of a command whose output could not be written. If the disk is full,
    print a sentence first.
    """
    # Python flushes the stream at exit, which would fail again; the null device prevents this.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if isinstance(error, BrokenPipeError):  # for example `| head` has exited
        return EXIT_BROKEN_PIPE
    print(f"standard output cannot be written: {error}.", file=sys.stderr)
    return _EXIT_NOT_WRITTEN


if __name__ == "__main__":
    sys.exit(main())
