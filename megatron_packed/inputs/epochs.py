"""Number of steps that ``--train-epochs`` gives, from the packs of the training data."""

from __future__ import annotations

from dataclasses import replace

from megatron_packed.checkpoint.run_metadata import RunProgress
from megatron_packed.config.errors import ConfigError, Problem
from megatron_packed.config.run import RunConfig
from megatron_packed.data.packing.pack_plan import PackPlan


def with_epochs(
    config: RunConfig, plan: PackPlan, progress: RunProgress | None = None
) -> RunConfig:
    """Return the configuration with the steps and samples of ``--train-epochs``.

    Without ``--train-epochs``, ``config`` is returned. The number of steps is rounded up, so the
    last step may take packs of the next epoch. The length is stored in samples, too: a run that
    resumes with another batch size then ends at the same place of the data.

    Args:
        config: configuration of the run.
        plan: plan of the training data.
        progress: progress with which the run continues; None at step 0. Epochs are those of the
            plan, so steps and samples of earlier phases are added.
    Raises:
        ConfigError: the configuration names another number of steps, or an option does not fit the
            number of steps.
    """
    epochs = config.training.train_epochs
    if epochs is None:
        return config
    steps = -(-plan.packs_of(epochs) // plan.packs_per_step)
    batch = config.packing.global_batch_size
    earlier_samples = 0 if progress is None else progress.plan_samples
    samples = earlier_samples + steps * batch
    if progress is not None and earlier_samples:
        steps += (earlier_samples - progress.samples_ahead(config.packing)) // batch
    # The rules between options expect the steps of a run in which all batches had this size.
    nominal = samples // batch
    if config.training.train_iters not in (None, steps, nominal):
        rule = f"gives {steps} steps with this data, but --train-iters is {config.training.train_iters}"
        cure = "leave one of the two flags out"
        raise ConfigError([Problem("--train-epochs", f"{epochs:g}", rule, cure)])
    training = replace(config.training, train_iters=nominal, train_samples=samples)
    return replace(config, training=training)


def epochs_sentences(config: RunConfig, plan: PackPlan) -> list[str]:
    """Return one line with the number of steps of ``--train-epochs``; empty without the flag."""
    epochs = config.training.train_epochs
    if epochs is None:
        return []
    packs = plan.packs_of(epochs)
    steps = -(-packs // plan.packs_per_step)
    further_packs = steps * plan.packs_per_step - packs
    ends = (
        f" The last step also takes {further_packs} of the next {_packs(further_packs)}."
        if further_packs
        else ""
    )
    blend = (
        " An epoch of the blend has as many tokens as its data sets together."
        if plan.blend is not None
        else ""
    )
    return [
        f"--train-epochs {epochs:g} is {steps:,} steps: {packs:,} {_packs(packs)}.{ends}{blend}"
    ]


def _packs(number: int) -> str:
    return "pack" if number == 1 else "packs"
