"""Sentence about a learning rate that jumps because a resumed run has another schedule."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace
from typing import NamedTuple

from megatron_packed.checkpoint.run_metadata import RunProgress
from megatron_packed.config.options import Stored
from megatron_packed.config.resumed_options import stored_schedule
from megatron_packed.config.run import RunConfig, unchecked_stored
from megatron_packed.config.section import unchecked
from megatron_packed.config.sections.packing import PackingConfig
from megatron_packed.config.serialise import (
    as_given,
    differing_options,
    restoring_words,
    section_to_dict,
    to_dict,
)
from megatron_packed.optim.schedules import Schedule

_DECAY_LENGTH = ("optim.lr_decay_iters", "optim.lr_decay_samples")
_OPTIONS = {
    "lr": ("optim.lr",),
    "min_lr": ("optim.min_lr",),
    "decay_style": ("optim.lr_decay_style",),
    "decay_steps": _DECAY_LENGTH,
    "warmup_steps": (
        "optim.lr_warmup_iters",
        "optim.lr_warmup_samples",
        "optim.lr_warmup_fraction",
    ),
    "warmup_init": ("optim.lr_warmup_init",),
    "wsd_decay_steps": ("optim.lr_wsd_decay_iters", "optim.lr_wsd_decay_samples"),
    "wsd_decay_style": ("optim.lr_wsd_decay_style",),
}
"""Options that set each field of a `Schedule`."""
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
    # Batches have today's size. A schedule in samples has the same rates with every size, and one in
    # iterations counts steps.
    earlier = unchecked_stored({**stored, "packing": vars(config.packing)})
    length, step = earlier.training.train_iters or earlier.training.train_samples, done.iteration
    if not (step and length and "packing" in stored) or earlier.optim.lr is None:
        return None
    samples = done.samples(config.packing.micro_batch_size)
    ahead = samples - step * config.packing.global_batch_size
    try:
        old, new = (Schedule.from_config(run, ahead) for run in (earlier, config))
    except ValueError:  # the version that saved the checkpoint had other rules
        return None
    last_batch = _last_batch(unchecked(PackingConfig, stored["packing"]), samples)
    counts_samples = earlier.schedule_units == {"samples"}
    rates = _Rates(
        last=old.at(step - (earlier.full_batches(last_batch) if counts_samples else 1)),
        unchanged=old.at(step),
        next=new.at(step),
    )
    same = math.isclose(rates.next, rates.unchanged, rel_tol=_ROUNDING)
    # Two rates with the same text would make a sentence that contradicts itself.
    if same or _shown(rates.next) == _shown(rates.unchanged):
        return None
    causes = _causes(old, new, step)
    if old.ahead != new.ahead and "decay_steps" not in causes:
        causes.append("decay_steps")  # one counts steps, the other samples
    return _sentence(config, earlier, stored, rates, causes, step)


def _last_batch(packing: PackingConfig, samples: int) -> int:
    """Return the samples of the last step of a run that trained on ``samples`` samples."""
    ramp = packing.batch_ramp
    if ramp is None:
        return packing.global_batch_size
    for batch in range(ramp.start, ramp.full, ramp.increment):
        if ramp.stages(samples=samples - batch)[0].packs * ramp.micro == batch:
            return batch
    return ramp.full


def _causes(old: Schedule, new: Schedule, step: int) -> list[str]:
    """Return the fields of a schedule whose change alters its rate."""

    def alters(name: str) -> bool:
        try:
            return replace(new, **{name: getattr(old, name)}).at(step) != new.at(step)
        except ValueError:  # the old value contradicts another new value
            return True

    differing = [name for name in _OPTIONS if getattr(old, name) != getattr(new, name)]
    return list(filter(alters, differing)) or differing


def _sentence(
    config: RunConfig,
    earlier: RunConfig,
    stored: Stored,
    rates: _Rates,
    causes: Collection[str],
    done: int,
) -> str:
    earlier_optim, options = section_to_dict(earlier.optim), to_dict(config)
    reasons, keys = [], set()
    for name in causes:
        keys |= {*_OPTIONS[name]}
        changed = list(differing_options({"optim": earlier_optim}, options, _OPTIONS[name]))
        reasons += [
            f"{field.flag} is {as_given(field, value)} (was {as_given(field, earlier_value)})"
            for field, earlier_value, value in changed
        ]
        # Without a change of its own options, a length follows the length of the run.
        if not changed:
            reasons.append(f"its decay follows {_length(config, earlier)}")
            keys |= {*_DECAY_LENGTH}
    # The number of steps keeps a decay that followed the length of the run.
    unchanged_optim = {"optim": {**earlier_optim, **stored_schedule(stored)}}
    because = ", and ".join(dict.fromkeys(reasons))
    return (
        f"the schedule has changed since the checkpoint: the learning rate {_move(rates, done)}, because {because}; "
        f"{restoring_words(unchanged_optim, options, keys)} to keep the schedule, with which step {done + 1:,} has "
        f"{_shown(rates.unchanged)}"
    )


def _length(config: RunConfig, earlier: RunConfig) -> str:
    """Return the flag that gives the length of the run, with its value and the earlier one."""
    (flag, value), (earlier_flag, earlier_value) = (
        (training.length_flag, vars(training)[training.length_flag[2:].replace("-", "_")])
        for training in (config.training, earlier.training)
    )
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
