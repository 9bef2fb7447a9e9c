"""config.json, read by us: no class of the model's is imported, and nothing in the file is
executed.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_packed.checkpoint.errors import CheckpointError
from megatron_packed.checkpoint.sealed_json import parse_object, read_small_file
from megatron_packed.config import flag_names as flags
from megatron_packed.config.errors import ConfigError
from megatron_packed.config.sections.model import ModelConfig
from megatron_packed.models.convert.huggingface_names import FAMILIES, Family, Fields

MAX_CONFIG_BYTES = 16 << 20


def read_config(path: Path) -> dict[str, Any]:
    """The fields of a config.json, with infinities as numbers (transformers 5 writes
    ``{"__float__": "Infinity"}``).

    Raises:
        CheckpointError: missing, not strict JSON, no object.
    """
    if path.is_dir():
        raise CheckpointError("is a directory", path=path, cure="name the config.json in it")
    if not path.exists():
        cure = "it says what the model is made of: name that of a model, or download it with the weights"
        raise CheckpointError("does not exist", path=path, cure=cure)
    fields = parse_object(read_small_file(path.resolve(), MAX_CONFIG_BYTES), path, finite=False)
    return {key: _plain(value) for key, value in fields.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if (
        isinstance(value, dict)
        and set(value) == {"__float__"}
        and isinstance(value["__float__"], str)
    ):
        return {"Infinity": math.inf, "-Infinity": -math.inf}.get(value["__float__"], value)
    return value


def model_of(
    fields: Fields, path: Path, ignored: Collection[str] = ()
) -> tuple[Family, ModelConfig]:
    """The family of a config.json and our configuration of the model.

    Args:
        path: for messages.
        ignored: keys that the caller vouches for: they change nothing that the model computes.
    Raises:
        CheckpointError: another family, or options that are not built, with every problem found.
    """
    family = FAMILIES.get(str(fields.get("model_type")))
    if family is None:
        raise CheckpointError(
            "the model_type is not built",
            path=path,
            expected=" or ".join(FAMILIES),
            found=repr(fields.get("model_type"))[:100],
        )
    fields = family.spelled(fields)
    try:
        pattern = family.pattern(fields)
    except ValueError as error:
        raise CheckpointError(str(error), path=path) from None
    fields = {**{of: fields[key] for key, of in family.repeats.items() if key in fields}, **fields}
    problems = list(_problems(fields, family, pattern, ignored))
    if problems:
        raise CheckpointError("; ".join(problems), path=path, cure="convert a model without these")
    values = {"hybrid_layer_pattern": pattern, **_chosen(family.fixed, pattern)}
    values |= {mine: fields[theirs] for theirs, mine in _chosen(family.options, pattern).items()}
    values["untie_embeddings_and_output_weights"] = not fields.get("tie_word_embeddings", False)
    try:
        return family, ModelConfig(**values)
    except ConfigError as error:
        raise CheckpointError(f"its sizes make no model: {error}", path=path) from None


def _problems(
    fields: Fields, family: Family, pattern: str, ignored: Collection[str]
) -> Iterator[str]:
    options = _chosen(family.options, pattern)
    yield from (
        f"{key} is missing" for key in options if fields.get(key) is None
    )  # our defaults are not theirs
    for key, value in _chosen(family.must_be, pattern).items():
        if key in fields and not _same(fields[key], value):
            yield f"{key} is {fields[key]!r}, and only {value!r} is built"
    for key, of in family.repeats.items():
        if key in fields and not _same(fields[key], fields[of]):
            yield f"{key} is {fields[key]!r} and contradicts {of} {fields[of]!r}"
    if not isinstance(fields.get("tie_word_embeddings", False), bool):
        yield f"tie_word_embeddings is {fields['tie_word_embeddings']!r}, neither true nor false"
    yield from family.rules(fields)
    known = {
        key for table in (family.options, family.must_be) for keys in table.values() for key in keys
    }
    for key in sorted(
        set(fields) - known - set(family.no_effect.split()) - set(family.repeats) - set(ignored)
    ):
        cure = f"{flags.IGNORE_KEY} {key}, if it changes no output"
        yield f"{key} is {fields[key]!r}, and no such option is known ({cure})"


def _same(found: object, value: object) -> bool:
    """Equal, and neither is a truth value where the other is a number."""
    return found == value and isinstance(found, bool) == isinstance(value, bool)


def _chosen(table: Mapping[str, Mapping[str, Any]], pattern: str) -> dict[str, Any]:
    """What a table says about a model of this pattern."""
    return {
        key: value
        for symbol, keys in table.items()
        if symbol in pattern
        for key, value in keys.items()
    }
