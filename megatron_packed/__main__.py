"""``megatron-packed COMMAND`` and ``python -m megatron_packed COMMAND``."""

import sys

from megatron_packed.config.optional_packages import required_packages

EXIT_INTERRUPTED = 130
"""Exit code after Ctrl-C."""


def run_program() -> int:
    """Run one command and return its exit code.

    Ctrl-C or a missing package ends the command with one sentence, also while modules are imported.
    `doctor` reports old packages itself.
    """
    try:
        with required_packages(any_version=sys.argv[1:2] == ["doctor"]):
            from megatron_packed.cli.main import main

            return main()
    except KeyboardInterrupt:
        print("interrupted.", file=sys.stderr)
        return EXIT_INTERRUPTED


if __name__ == "__main__":
    sys.exit(run_program())
