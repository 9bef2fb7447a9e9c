"""A whole run from Python."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from megatron_packed.config.environment_variables import apply_environment
from megatron_packed.config.exit_codes import ExitCode
from megatron_packed.config.run import RunConfig
from megatron_packed.reporting.run_writers import RecordFunction
from megatron_packed.training.callback import Callback, check_callbacks
from megatron_packed.training.pretrain import run_job
from megatron_packed.training.signals import SignalFlag


def train(
    config: RunConfig | Sequence[str] = (),
    callback: RecordFunction | None = None,
    *,
    callbacks: Sequence[Callback] = (),
    quiet: bool = False,
    **options: Any,
) -> ExitCode:
    """Run the job of this process, and return when the run has ended.

    The job is that of ``pretrain_hybrid.py``: data, model, training, validation, checkpoints and
    logs. Under torchrun every process calls this function. Call it in the main thread, which
    receives the signals of the run.

    Args:
        config: configuration of the run, or words of a command line for `RunConfig.from_args`. With
            ``deterministic_mode`` call ``megatron_packed.config.apply_environment(config.training)``
            before torch is imported. The settings of that mode stay in this process after the run.
        callback: called on rank 0 with the metrics of every iteration: those of a line of
            ``--log-jsonl``, as a dict with ``iteration``, ``lm_loss``, ``learning_rate``,
            ``grad_norm`` and more. Validations call it with ``valid_loss``. The values are on the
            host and arrive while the device works on the next step, so a quick callback costs the
            device no time. An OSError of the callback is a warning; any other error ends the run.
        callbacks: objects whose hooks the training loop calls on every rank; pass the same on all
            ranks. See `Callback`. An error of a hook ends the run with a `CallbackError`, whose
            cause is the error.
        quiet: print neither lines nor progress nor warnings of the run. Logs, TensorBoard,
            checkpoints and the callback are unchanged, and errors are raised. With several
            processes, a failed one still prints its error, because the others end without it.
        options: values of options, as in `RunConfig.from_args`: ``train_iters=20, sft=True``. They
            override words.
    Returns:
        ``DONE`` after the last iteration, ``PREEMPTED`` after a signal, a time limit or the request
        of a callback, ``NONFINITE`` where ``--on-nonfinite stop`` ended the run. With ``--save`` the
        run has saved a checkpoint in each of the three cases.
    Raises:
        TypeError: an argument has a wrong type, or there are options beside a `RunConfig`.
        CallbackError: a callback has failed.
        ConfigError: the words and options are wrong; it lists every problem.
        ValueError: the environment, the devices, the libraries or the data do not fit.
        Exception: any other error that ended the run. Other processes of the run end at once.
    """
    config = _configuration(config, options)
    if callback is not None and not callable(callback):
        raise TypeError(f"callback is {callback!r}; pass a function that takes the metrics.")
    check_callbacks(callbacks)
    apply_environment(config.training)
    speaks = not quiet and os.environ.get("RANK", "0") == "0"
    with SignalFlag(speaks=speaks) as signal_flag:
        return ExitCode(run_job(config, signal_flag, callback, callbacks, raises=True, quiet=quiet))


def _configuration(config: RunConfig | Sequence[str], options: dict[str, Any]) -> RunConfig:
    """Return the configuration that `train` was given, complete or as words and options."""
    if not isinstance(config, RunConfig):
        if isinstance(config, str) or not isinstance(config, Sequence):
            raise TypeError(
                f"config is of type {type(config).__name__}; pass a RunConfig, or a list of words such as "
                '["@run.args", "--lr", "1e-3"].'
            )
        return RunConfig.from_args(config, **options)
    if options:
        raise TypeError(
            f"{next(iter(options))}= cannot change a RunConfig; pass the words of the command line in its place, or "
            "give all options to RunConfig.from_args."
        )
    return config
