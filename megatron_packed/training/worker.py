"""Process of a run: reads the command line before torch is imported, trains, and ends with its
exit code.

``pretrain_hybrid.py`` calls `run_worker`, alone or under torchrun. The processes of ``megatron-packed
train`` call `launched`.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from typing import NoReturn

from megatron_packed.config.environment_variables import apply_environment
from megatron_packed.config.errors import ConfigError, printable
from megatron_packed.config.exit_codes import ExitCode
from megatron_packed.config.idle_options import sentence as idle_sentence
from megatron_packed.config.idle_options import without_effect
from megatron_packed.config.launch_checks import environment_number
from megatron_packed.config.optional_packages import required_packages
from megatron_packed.config.parser.parse import parse_or_exit
from megatron_packed.config.run import RunConfig
from megatron_packed.files.standard_streams import guard_standard_streams
from megatron_packed.resume.stored_options import stored_options
from megatron_packed.training.signals import SignalFlag
from megatron_packed.training.under_launcher import end_with_launcher


def run_worker() -> NoReturn:
    """Run the job that the command line of this process describes."""
    guard_standard_streams()
    with required_packages():
        # Parsed before torch is imported, so that a wrong command line fails within a second.
        config = parse_or_exit(sys.argv[1:], explain_report, read_stored=stored_options)
        # Install the handler before slow work: a signal during start-up takes effect at the first
        # step.
        with SignalFlag(speaks=os.environ.get("RANK", "0") == "0") as signal_flag:
            _run(config, signal_flag)


def launched() -> NoReturn:
    """Run the job like `run_worker`, in a process that a launcher started with blocked signals.

    The launcher has already answered the first signal, and its end ends this process.
    """
    end_with_launcher()
    guard_standard_streams()
    with required_packages(), SignalFlag() as signal_flag:
        # A signal that arrived while this process started is delivered now, to the handler.
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        _run(parse_or_exit(sys.argv[1:], explain_report, read_stored=stored_options), signal_flag)


def explain_report(config: RunConfig) -> str:
    """Return the report of ``--explain``; of a resumed run, with the options of its checkpoint."""
    apply_environment(config.training)
    from megatron_packed.checkpoint.errors import CheckpointError
    from megatron_packed.explain.report import explanation
    from megatron_packed.inputs.known_data import known_data
    from megatron_packed.resume.allowed_changes import refusal_of_stored_model
    from megatron_packed.resume.compared_runs import checkpoint_to_resume, continued_options

    lines: list[str] = []
    processes = environment_number(os.environ, "WORLD_SIZE", 1, [])
    resumed = None
    # The report has its own line about a checkpoint that cannot be read.
    with suppress(CheckpointError):
        resumed = checkpoint_to_resume(config)
    if resumed is not None:
        try:
            config, lines = continued_options(config, resumed, processes)
        except (ConfigError, CheckpointError) as error:
            reason = printable(str(error), 4000)
            print(f"This run would be refused: {reason}", file=sys.stderr)
            wrong_options = isinstance(error, ConfigError)
            raise SystemExit(ExitCode.USAGE if wrong_options else ExitCode.CHECKPOINT) from None
    if config.checkpoint.resumes:
        lines += filter(None, [idle_sentence(without_effect(config, processes), config)])
    report = explanation(config, known_data(config), refusal_of_stored_model(config))
    return "".join(f"{printable(line, 4000)}\n" for line in lines) + report


def _run(config: RunConfig, signal_flag: SignalFlag) -> NoReturn:
    apply_environment(config.training)
    from megatron_packed.training.pretrain import run_job

    exit_code = run_job(config, signal_flag, names_idle_options=True)
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: threads of libraries and broken process groups could change the exit code or
    # keep the process alive.
    os._exit(exit_code)
