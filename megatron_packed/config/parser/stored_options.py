"""Options that come from a checkpoint, for ``--use-checkpoint-args``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from megatron_packed.config.errors import ConfigError, Problem
from megatron_packed.config.options import Field
from megatron_packed.config.parser.flag_registry import every_field
from megatron_packed.config.parser.precedence import Given
from megatron_packed.config.section import section_fields
from megatron_packed.config.sections.data_parts.tokenizer import TOKENIZER_CHOICE
from megatron_packed.config.sections.model import ModelConfig
from megatron_packed.config.serialise import as_flag, as_given

ReadStored = Callable[[Mapping[str, Any]], Mapping[str, Mapping[str, Any]] | None]
"""Function that takes the given values by key, and returns the configuration in the checkpoint that
the run loads; None if there is no checkpoint. It raises `ConfigError`.
"""
_FLAG = "--use-checkpoint-args"
_LENGTH = "packing.seq_length"


def take_stored(given: Given, read: ReadStored | None) -> str:
    """Take options of the checkpoint, if ``--use-checkpoint-args`` is given.

    The model's options replace given ones, except those that only affect training, such as dropout.
    ``--seq-length`` and the tokenizer are taken only if they are not given.

    Returns:
        A line with the options of the checkpoint; empty if none is taken.
    """
    loads = {"checkpoint.load", "checkpoint.pretrained_checkpoint"} & given.values.keys()
    if not loads or not given.values.get("checkpoint.use_checkpoint_args"):
        return ""
    expected = [*(about.key for about in section_fields(ModelConfig)), _LENGTH]
    if read is None:
        cure = (
            "give the model's options; pretrain_hybrid.py, megatron-packed train and generate take "
            "this flag"
        )
        given.problems.append(Problem(_FLAG, "", "this command reads no checkpoint", cure))
        given.expect(expected)
        return ""
    try:
        stored = read(given.values)
    except ConfigError as error:
        given.problems += error.problems
        given.expect(expected)
        return ""
    taken = []
    for about, then in _replaced(given, stored or {}):  # a new run has no checkpoint yet
        now = given.values.get(about.key, about.default)
        then = tuple(then) if isinstance(then, list) else then
        given.unsound.discard(about.key)
        given.values[about.key], given.sources[about.key] = then, "checkpoint"
        if then != now:
            flag = f"{about.flag} {as_given(about, then)}" if then is None else as_flag(about, then)
            instead = now not in (None, ()) and about.section == ModelConfig.title
            taken.append(f"{flag} instead of {as_given(about, now)}" if instead else flag)
    return f"options of the checkpoint ({_FLAG}): {'; '.join(taken)}" if taken else ""


def _replaced(given: Given, stored: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[Field, Any]]:
    """Yield the options that come from the checkpoint, with their stored values."""
    named = given.values.keys() | given.unsound
    keeps_tokenizer = any(f"data.{name}" in named for name in TOKENIZER_CHOICE)
    for about in every_field():
        if about.name not in stored.get(about.section, {}):
            continue
        if about.section == ModelConfig.title:
            takes = not about.option.training_only or about.key not in given.values
        elif about.key == _LENGTH:
            takes = about.key not in named
        else:
            # The parts of a tokenizer belong together.
            takes = (
                about.section == "data" and about.name in TOKENIZER_CHOICE and not keeps_tokenizer
            )
        if takes:
            yield about, stored[about.section][about.name]
