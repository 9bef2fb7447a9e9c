"""Sentence about a learning rate that jumps because a resumed run has another schedule."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace
from typing import NamedTuple

from megatron_packed.checkpoint.run_metadata import RunProgress
from megatron_packed.config.options import Stored
from megatron_packed.config.resumed_options import stored_schedule
from megatron_packed.config.run import SECTIONS, RunConfig, unchecked_run
from megatron_packed.config.section import unchecked
from megatron_packed.config.sections.optim import OptimizerConfig
from megatron_packed.config.sections.packing import PackingConfig
from megatron_packed.config.sections.training import TrainingConfig
from megatron_packed.config.serialise import (
    as_given,
    differing_options,
    restoring_words,
    section_to_dict,
    to_dict,
)
from megatron_packed.optim.schedules import Schedule

_OPTIONS = {
    "lr": ("lr",),
    "min_lr": ("min_lr",),
    "decay_style": ("lr_decay_style",),
    "decay_steps": ("lr_decay_iters", "lr_decay_samples"),
    "warmup_steps": ("lr_warmup_iters", "lr_warmup_samples", "lr_warmup_fraction"),
    "warmup_init": ("lr_warmup_init",),
    "wsd_decay_steps": ("lr_wsd_decay_iters", "lr_wsd_decay_samples"),
    "wsd_decay_style": ("lr_wsd_decay_style",),
}
"""Options of `OptimizerConfig` that set each field of a `Schedule`."""
_LENGTHS = {
    "--train-iters": "train_iters",
    "--train-samples": "train_samples",
    "--train-epochs": "train_epochs",
}
"""Field of `TrainingConfig` for each flag that gives the length of a run."""
_ROUNDING = 1e-6
"""Relative difference up to which two rates are equal."""


class _Rates(NamedTuple):
    """Learning rates around the step at which a run resumes."""

    last: float
    """Rate of the last step before the checkpoint."""
    unchanged: float
    """Rate that the next step would have with the schedule of the checkpoint."""
    next: float
    """Rate of the next step."""


def schedule_change(config: RunConfig, stored: Stored, done: RunProgress) -> str | None:
    """Return a sentence with the learning rates before and after the change, its cause and its
    cure; None if the first step has the rate that the checkpoint's schedule gives.

    Args:
        config: configuration of the resumed run, with the steps of ``--train-epochs``.
        stored: configuration of the checkpoint, in the form of `serialise.to_dict`.
        done: progress with which the run continues.
    Example:
        ``the schedule has changed since the checkpoint: the learning rate rises from 1.25e-03 (step
        10) to 5.56e-03 (step 11) at once, because its decay follows --train-iters (20, was 10);
        give --lr-decay-iters 10 to keep the schedule, with which step 11 has 0.00e+00``
    """
    earlier = _earlier_run(config, stored)
    if earlier is None or not done.iteration:
        return None
    try:
        old, new = Schedule.from_config(earlier), Schedule.from_config(config)
    except ValueError:  # the version that saved the checkpoint had other rules
        return None
    samples = done.samples(config.packing.micro_batch_size)
    previous_samples = samples - _last_batch(unchecked(PackingConfig, stored["packing"]), samples)
    place, kept_place = (_place(run, done.iteration, samples) for run in (config, earlier))
    rates = _Rates(
        last=old.at(_place(earlier, done.iteration - 1, previous_samples)),
        unchanged=old.at(kept_place),
        next=new.at(place),
    )
    same = math.isclose(rates.next, rates.unchanged, rel_tol=_ROUNDING)
    # Two rates with the same text would make a sentence that contradicts itself.
    if same or _shown(rates.next) == _shown(rates.unchanged):
        return None
    causes = _causes(old, new, place)
    if place != kept_place and "decay_steps" not in causes:
        causes.append("decay_steps")  # one counts steps, the other samples
    return _sentence(config, earlier, stored, rates, causes, done.iteration)


def _earlier_run(config: RunConfig, stored: Stored) -> RunConfig | None:
    """Return the run with the schedule and the length of a checkpoint; None if it has no schedule.

    Batches have today's size. A schedule in samples has the same rates with every size, and one
    in iterations counts steps.
    """
    optim, training = (stored.get(name, {}) for name in ("optim", "training"))
    lengths = [training.get(name) for name in ("train_iters", "train_samples")]
    if "lr" not in optim or "packing" not in stored or lengths == [None, None]:
        return None
    sections = {name: getattr(config, name) for name in SECTIONS}
    # Unchecked: rules between its options and those of this run do not matter.
    sections["optim"] = unchecked(OptimizerConfig, optim)
    sections["training"] = unchecked(TrainingConfig, training)
    return unchecked_run(sections)


def _last_batch(packing: PackingConfig, samples: int) -> int:
    """Return the samples of the last step of a run that trained on ``samples`` samples."""
    ramp = packing.batch_ramp
    if ramp is None:
        return packing.global_batch_size
    for batch in range(ramp.start, ramp.full, ramp.increment):
        if ramp.stages(samples=samples - batch)[0].packs * ramp.micro == batch:
            return batch
    return ramp.full


def _place(run: RunConfig, iteration: int, samples: int) -> float:
    """Return the number of finished steps that the schedule of a run counts, after ``iteration``
    steps with ``samples`` samples.
    """
    if run.schedule_units == {"samples"}:
        return samples / run.packing.global_batch_size
    return iteration


def _causes(old: Schedule, new: Schedule, place: float) -> list[str]:
    """Return the fields of a schedule whose change alters its rate."""
    differing = [name for name in _OPTIONS if getattr(old, name) != getattr(new, name)]
    causes = []
    for name in differing:
        try:
            without = replace(new, **{name: getattr(old, name)})
        except ValueError:  # the old value contradicts another new value
            causes.append(name)
            continue
        if without.at(place) != new.at(place):
            causes.append(name)
    return causes or differing


def _sentence(
    config: RunConfig,
    earlier: RunConfig,
    stored: Stored,
    rates: _Rates,
    causes: Collection[str],
    done: int,
) -> str:
    earlier_optim, config_dict = section_to_dict(earlier.optim), to_dict(config)
    reasons, keys = [], set()
    for name in causes:
        options = {f"optim.{option}" for option in _OPTIONS[name]}
        keys |= options
        changed = list(differing_options({"optim": earlier_optim}, config_dict, options))
        reasons += [
            f"{field.flag} is {as_given(field, value)} (was {as_given(field, earlier_value)})"
            for field, earlier_value, value in changed
        ]
        # Without a change of its own options, a length follows the length of the run.
        if not changed:
            reasons.append(f"its decay follows {_length(config, earlier)}")
            keys |= {f"optim.{option}" for option in _OPTIONS["decay_steps"]}
    # The number of steps keeps a decay that followed the length of the run.
    unchanged_optim = {"optim": {**earlier_optim, **stored_schedule(stored)}}
    because = ", and ".join(dict.fromkeys(reasons))
    return (
        f"the schedule has changed since the checkpoint: the learning rate {_move(rates, done)}, because {because}; "
        f"{restoring_words(unchanged_optim, config_dict, keys)} to keep the schedule, with which step {done + 1:,} has "
        f"{_shown(rates.unchanged)}"
    )


def _length(config: RunConfig, earlier: RunConfig) -> str:
    """Return the flag that gives the length of the run, with its value and the earlier one."""
    flag, earlier_flag = config.training.length_flag, earlier.training.length_flag
    value = getattr(config.training, _LENGTHS[flag])
    earlier_value = getattr(earlier.training, _LENGTHS[earlier_flag])
    if flag != earlier_flag:
        return f"{flag} ({value:.12g}), not {earlier_flag} ({earlier_value:.12g})"
    if value != earlier_value:
        return f"{flag} ({value:.12g}, was {earlier_value:.12g})"
    # Epochs of other data have another number of steps.
    return f"{flag} ({config.decay_iters:.12g} steps, was {earlier.decay_iters:.12g})"


def _move(rates: _Rates, done: int) -> str:
    """Return the verb of a sentence about the rates, with the rates of the last and next step."""
    last, following = _shown(rates.last), _shown(rates.next)
    if last == following:
        return f"stays at {last} (steps {done:,} and {done + 1:,})"
    verb = "rises" if rates.next > rates.last else "falls"
    # A smaller move in the direction of the kept schedule is no jump.
    move, kept_move = rates.next - rates.last, rates.unchanged - rates.last
    jumps = move * kept_move <= 0 or abs(move) > abs(kept_move)
    return (
        f"{verb} from {last} (step {done:,}) to {following} (step {done + 1:,}){' at once' * jumps}"
    )


def _shown(rate: float) -> str:
    """Return a rate as the line of a step has it."""
    return f"{rate:.2e}"
