"""Options that a resumed run takes from its checkpoint: of its packs and sums, unless the user gives
them, and of its schedule with ``--use-checkpoint-opt_param-scheduler``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from megatron_packed.config.errors import ConfigError
from megatron_packed.config.options import Field, Stored
from megatron_packed.config.run import RunConfig, every_field, stored_values
from megatron_packed.config.section import section_fields
from megatron_packed.config.sections.collectives import overlaps_tensor_parallel
from megatron_packed.config.sections.optim import (
    DECAY,
    ENDS_WITH_RUN,
    RATE,
    SAMPLE_UNITS,
    OptimizerConfig,
)
from megatron_packed.config.serialise import as_flag, as_given


def with_implied(stored: Stored) -> dict[str, dict[str, Any]]:
    """Return the configuration of a checkpoint, with values for the options that did not exist when
    it was saved.
    """
    full = {name: dict(section) for name, section in stored.items()}
    for field in every_field():
        earlier = field.option.earlier
        if earlier is not None and {"packing", "data"} <= stored.keys():
            full.setdefault(field.section, {}).setdefault(field.name, earlier(stored))
    return full


def implied_keys(config: RunConfig) -> set[str]:
    """Return the keys of options that a checkpoint decides because the user did not give them, e.g.
    ``packing.overlong_policy``.
    """
    return {
        field.key
        for field in every_field()
        if field.option.earlier is not None and not config.is_given(field.key)
    }


PACK_SECTIONS = ("packing", "data")
"""Sections of the options that decide packs; those of others decide how numbers are added up."""


def packs_as_stored(config: RunConfig, stored: Stored) -> tuple[RunConfig, list[str]]:
    """Return the configuration that continues the packs of a checkpoint, and the flags that come
    from the checkpoint.

    Options that the user gave keep their values. If the checkpoint's values do not fit the other
    options, no option changes; the run is then refused when its packs are compared.
    """
    changes = [each for each in _other_values(config, stored) if each[0].section in PACK_SECTIONS]
    try:
        return _with_values(config, changes), [as_flag(*change) for change in changes]
    except ConfigError:
        return config, []


def sums_as_stored(
    config: RunConfig, stored: Stored, processes: int
) -> tuple[RunConfig, list[str], list[str]]:
    """Return the configuration that adds numbers up in the order of a checkpoint's run, the flags
    that come from the checkpoint, and those that do not fit this run.

    A newer default would be as good, but the run would not have the bits of a run that never stopped.
    """
    taken, unfit = [], []
    for field, value in _other_values(config, stored):
        conditions = field.option.conditions
        acts = all(condition.holds(config, processes) for condition in conditions)
        if field.section in PACK_SECTIONS or not acts:
            continue
        try:
            config = _with_values(config, [(field, value)])
            taken.append(as_flag(field, value))
        except ConfigError:
            unfit.append(as_flag(field, value))
    config, more = overlap_as_stored(config, stored)
    return config, taken + more, unfit


def _other_values(config: RunConfig, stored: Stored) -> Iterator[tuple[Field, Any]]:
    """Yield the options that a checkpoint decides and that have another value in it, with this value."""
    keys = implied_keys(config)
    for field, value in stored_values(with_implied(stored)):
        if field.key in keys and value not in (None, config.value_of(field)):
            yield field, value


def _with_values(config: RunConfig, changes: Iterable[tuple[Field, Any]]) -> RunConfig:
    sections: dict[str, dict[str, Any]] = {}
    for field, value in changes:
        sections.setdefault(field.section, {})[field.name] = value
    changed = {name: replace(getattr(config, name), **each) for name, each in sections.items()}
    return replace(config, **changed)


def overlap_as_stored(config: RunConfig, stored: Stored) -> tuple[RunConfig, list[str]]:
    """Return the configuration, and the flag ``--no-tp-comm-overlap`` if it comes from a checkpoint.

    Its run had no overlap and this one would have it by default, which rounds sums of more than two
    ranks in another way.
    """
    parallel = config.parallel
    earlier = stored.get("parallel", {}).get("tp_comm_overlap", False)
    exchanges_rows = parallel.tensor_model_parallel_size > 1 and parallel.sequence_parallel
    by_default = parallel.tp_comm_overlap is None and overlaps_tensor_parallel(config)
    if not (exchanges_rows and by_default and earlier is False):
        return config, []
    kept = replace(config, parallel=replace(parallel, tp_comm_overlap=False))
    return kept, ["--no-tp-comm-overlap"]


def partition_as_stored(config: RunConfig, stored: Stored) -> tuple[RunConfig, list[str]]:
    """Return the configuration with the partition of attention that keeps the packs of a checkpoint,
    and its flag, if the run may choose one.

    That of the checkpoint comes first, because it also keeps the order of sums.
    """
    has_flag = config.is_given("parallel.cp_partition_mode")
    if not config.parallel.exchanges_keys or (has_flag and not config.parallel.chooses_partition):
        return config, []
    parallel = stored.get("parallel", {})
    mode = parallel.get("cp_partition_mode", "zigzag")  # before the option there was no other
    ranks = parallel.get("context_parallel_size", 1)
    exchanges_keys = ranks > 1 and parallel.get("cp_comm_type", "a2a") != "a2a"
    chunks = 2 * ranks if exchanges_keys and mode == "zigzag" else 1
    alignment = stored.get("packing", {}).get("pad_packed_seq_alignment") or chunks
    for fits in sorted(("contiguous", "zigzag"), key=lambda one: one != mode):
        try:
            kept = replace(config, parallel=replace(config.parallel, cp_partition_mode=fits))
        except ConfigError:
            continue
        if kept.document_alignment == alignment:
            changed = kept.parallel != config.parallel
            return kept, [f"--cp-partition-mode {fits}"] * changed
    return config, []


_SCHEDULE = tuple(
    field for field in section_fields(OptimizerConfig) if field.option.group in (RATE, DECAY)
)


def takes_schedule(config: RunConfig) -> bool:
    """Return whether the run continues the schedule of the checkpoint that it resumes."""
    options = config.checkpoint
    return (
        options.use_checkpoint_opt_param_scheduler
        and options.load is not None
        and options.load_optim
        and not options.finetune
    )


def stored_schedule(stored: Stored) -> dict[str, Any]:
    """Return the schedule options in the configuration of a checkpoint.

    A change that ended with the checkpoint's run gets that run's length. In a checkpoint from before
    there was a rise of the weight decay, the weight decay is constant.
    """
    optim, training = stored["optim"], stored["training"]
    schedule = {
        field.name: optim.get(field.name, field.default)
        for field in _SCHEDULE
        if field.name in optim or field.option.group == DECAY
    }
    samples = training.get("train_samples")
    for iters in ENDS_WITH_RUN:
        constant = iters == "weight_decay_incr_iters" and (
            schedule["weight_decay_incr_style"] == "constant"
        )
        if not constant and not schedule.get(iters) and not schedule.get(SAMPLE_UNITS[iters]):
            schedule[SAMPLE_UNITS[iters]] = samples
            schedule[iters] = training["train_iters"] if samples is None else None
    return schedule


def schedule_as_stored(config: RunConfig, stored: Stored) -> tuple[RunConfig, list[str]]:
    """Return the configuration with the schedule of a checkpoint, and texts of the overridden
    options such as ``--lr 0.1 instead of 0.2``.

    Raises:
        ConfigError: the schedule does not fit the other options.
    """
    schedule, changed = stored_schedule(stored), []
    for field in _SCHEDULE:
        run_value = getattr(config.optim, field.name)
        stored_value = schedule.get(field.name, run_value)
        if stored_value != run_value:
            replaced = f" instead of {as_given(field, run_value)}" * (run_value is not None)
            changed.append(f"{field.flag} {as_given(field, stored_value)}{replaced}")
    return replace(config, optim=replace(config.optim, **schedule)), changed
