"""A whole run from Python."""

from __future__ import annotations

import os

from megatron_packed.config.environment_variables import apply_environment
from megatron_packed.config.run import RunConfig
from megatron_packed.training.exit_codes import ExitCode
from megatron_packed.training.pretrain import run_job
from megatron_packed.training.run_writers import Callback
from megatron_packed.training.signals import SignalFlag


def train(config: RunConfig, callback: Callback | None = None) -> ExitCode:
    """Run the job of this process, and return when the run has ended.

    The job is that of ``pretrain_hybrid.py``: data, model, training, validation, checkpoints and
    logs. Under torchrun every process calls this function. Call it in the main thread, which
    receives the signals of the run.

    Args:
        config: configuration of the run. With ``deterministic_mode`` call
            ``megatron_packed.config.apply_environment(config.training)`` before torch is imported.
            The settings of that mode stay in this process after the run.
        callback: called on rank 0 with the metrics of every iteration: those of a line of
            ``--log-jsonl``, as a dict with ``iteration``, ``lm_loss``, ``learning_rate``,
            ``grad_norm`` and more. Validations call it with ``valid_loss``. The values are on the
            host and arrive while the device works on the next step, so a quick callback costs the
            device no time. An OSError of the callback is a warning; any other error ends the run.
    Returns:
        ``DONE`` after the last iteration, ``PREEMPTED`` after a signal or a time limit,
        ``NONFINITE`` where ``--on-nonfinite stop`` ended the run. With ``--save`` the run has saved
        a checkpoint in each of the three cases.
    Raises:
        TypeError: ``config`` is not a `RunConfig`, or ``callback`` cannot be called.
        ValueError: the environment, the devices, the libraries or the data do not fit.
        Exception: any other error that ended the run. Other processes of the run end at once.
    """
    if not isinstance(config, RunConfig):
        raise TypeError(
            f"config is of type {type(config).__name__}; pass a RunConfig, for example of RunConfig.from_args."
        )
    if callback is not None and not callable(callback):
        raise TypeError(f"callback is {callback!r}; pass a function that takes the metrics.")
    apply_environment(config.training)
    with SignalFlag(speaks=os.environ.get("RANK", "0") == "0") as signal_flag:
        return ExitCode(run_job(config, signal_flag, callback, raises=True))
