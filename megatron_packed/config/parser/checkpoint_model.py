"""Options of the model that come from a checkpoint, for ``--use-checkpoint-args``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from megatron_packed.config.errors import ConfigError, Problem
from megatron_packed.config.parser.precedence import Given
from megatron_packed.config.section import section_fields
from megatron_packed.config.sections.model import ModelConfig
from megatron_packed.config.serialise import as_flag, as_given

ReadModel = Callable[[Mapping[str, Any]], Mapping[str, Any] | None]
"""Function that takes the given values by key, and returns the options of the model in the
checkpoint that the run loads; None if there is no checkpoint. It raises `ConfigError`.
"""
_FLAG = "--use-checkpoint-args"


def take_model(given: Given, read: ReadModel | None) -> str:
    """Replace given options of the model by those of the checkpoint, if ``--use-checkpoint-args``
    is given.

    Options that only affect training, such as dropout, keep a given value.

    Returns:
        A line with the replaced options; empty if none is replaced.
    """
    loads = {"checkpoint.load", "checkpoint.pretrained_checkpoint"} & given.values.keys()
    if not loads or not given.values.get("checkpoint.use_checkpoint_args"):
        return ""
    fields = section_fields(ModelConfig)
    if read is None:
        cure = (
            "give the model's options, or use it with pretrain_hybrid.py or megatron-packed train"
        )
        given.problems.append(Problem(_FLAG, "", "only runs read a checkpoint", cure))
        given.expect(about.key for about in fields)
        return ""
    try:
        stored = read(given.values)
    except ConfigError as error:
        given.problems += error.problems
        given.expect(about.key for about in fields)
        return ""
    taken = []
    stored = stored or {}  # a new run has no checkpoint yet
    for about in fields:
        if about.name not in stored or (about.option.training_only and about.key in given.values):
            continue
        then, now = stored[about.name], given.values.get(about.key, about.default)
        then = tuple(then) if isinstance(then, list) else then
        given.unsound.discard(about.key)
        given.values[about.key], given.sources[about.key] = then, "checkpoint"
        if then != now:
            flag = f"{about.flag} {as_given(about, then)}" if then is None else as_flag(about, then)
            taken.append(f"{flag} instead of {as_given(about, now)}" if now is not None else flag)
    return f"model of the checkpoint ({_FLAG}): {'; '.join(taken)}" if taken else ""
