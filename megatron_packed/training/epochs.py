"""Number of steps that ``--train-epochs`` gives, from the packs of the training data."""

from __future__ import annotations

from dataclasses import replace

from megatron_packed.config.errors import ConfigError, Problem
from megatron_packed.config.run import RunConfig
from megatron_packed.data.packing.pack_plan import PackPlan


def with_epochs(config: RunConfig, plan: PackPlan) -> RunConfig:
    """Return the configuration with the steps and samples of ``--train-epochs``.

    Without ``--train-epochs``, ``config`` is returned. The number of steps is rounded up, so the
    last step may take packs of the next epoch. The length is stored in samples, too: a run that
    resumes with another batch size then ends at the same place of the data.

    Raises:
        ConfigError: the configuration names another number of steps, or an option does not fit the
            number of steps.
    """
    epochs = config.training.train_epochs
    if epochs is None:
        return config
    steps = -(-plan.packs_of(epochs) // plan.packs_per_step)
    if config.training.train_iters not in (None, steps):
        rule = f"gives {steps} steps with this data, but --train-iters is {config.training.train_iters}"
        cure = "leave one of the two flags out"
        raise ConfigError([Problem("--train-epochs", f"{epochs:g}", rule, cure)])
    samples = steps * config.packing.global_batch_size
    training = replace(config.training, train_iters=steps, train_samples=samples)
    return replace(config, training=training)


def epochs_sentences(config: RunConfig, plan: PackPlan) -> list[str]:
    """Return one line with the number of steps of ``--train-epochs``; empty without the flag."""
    epochs = config.training.train_epochs
    if epochs is None:
        return []
    packs, steps = plan.packs_of(epochs), with_epochs(config, plan).last_iteration()
    more = steps * plan.packs_per_step - packs
    ends = f" The last step also takes {more} of the next {_packs(more)}." if more else ""
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
