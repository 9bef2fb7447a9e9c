"""Reading of config.json as data: no class of the model is imported, no code is executed."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_packed.checkpoint.errors import CheckpointError
from megatron_packed.checkpoint.sealed_json import parse_object, read_small_file
from megatron_packed.config import flag_names as flags
from megatron_packed.config.errors import ConfigError
from megatron_packed.config.layer_pattern import DEPTH
from megatron_packed.config.section import section_fields
from megatron_packed.config.sections.model import ModelConfig
from megatron_packed.models.convert.families.decoder import KEYS_OF_DERIVED, pattern_of
from megatron_packed.models.convert.families.family import Family, Fields
from megatron_packed.models.convert.families.field_types import (
    FIELD_TYPES,
    shown_value,
    wrong_types,
)
from megatron_packed.models.convert.families.qwen_hybrid import OUTSIDE_TEXT
from megatron_packed.models.convert.families.registry import FAMILIES
from megatron_packed.models.convert.tensor_mismatch import QUANTISED_CURE

MAX_CONFIG_BYTES = 16 << 20
CHUNK_SIZES = {"chunk_size", "mamba_chunk_size"}
"""Keys of the chunk size of Mamba layers."""
QUANTISED_KEYS = {"quantization_config", "compression_config"}
"""Keys of models whose weights are not floating-point numbers of 16 or 32 bits."""
_NAMES_OF_FUNCTIONS = {"swish": "silu"}
"""Other names of activation functions, as transformers reads them."""
_KNOWN_ELSEWHERE = """
    attn_logit_softcapping clip_qkv embedding_scale final_logit_softcapping layer_scale
    logit_scale mamba_dt_limit mamba_dt_max mamba_dt_min no_rope_layers per_layer_config qk_norm
    query_pre_attn_scalar scale_depth scale_emb use_qk_norm
"""
"""Keys that decide what models of other families of transformers compute."""
_DECIDING = frozenset(FIELD_TYPES).union(
    *(family.deciding_keys for family in FAMILIES.values()),
    _KNOWN_ELSEWHERE.split(),
)
"""Keys that decide what models of some family compute."""
_DECIDING_PREFIXES = ("rope_", "rope.", "rotary_", "text_config.")


def read_config(path: Path) -> dict[str, Any]:
    """Return the fields of a config.json.

    Infinities become numbers; transformers 5 writes ``{"__float__": "Infinity"}`` for them.

    Raises:
        CheckpointError: the file is missing, is not strict JSON, or does not contain an object.
    """
    if path.is_dir():
        raise CheckpointError("is a directory", path=path, cure="name the config.json file in it")
    if not path.exists():
        cure = "name the config.json of a model, or download config.json together with the weights"
        raise CheckpointError("does not exist", path=path, cure=cure)
    fields = parse_object(read_small_file(path.resolve(), MAX_CONFIG_BYTES), path, finite=False)
    return {key: _plain(value) for key, value in fields.items()}


def _plain(value: object) -> object:
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
    fields: Fields, path: Path, ignored: Collection[str] = (), *, depths: int = 0
) -> tuple[Family, ModelConfig]:
    """Return the family of a config.json and the project's configuration of the model.

    Args:
        path: path of config.json, for messages.
        ignored: keys that the caller declares to have no effect on the model's output.
        depths: depths of multi-token prediction; 0 leaves out those of the files.
    Raises:
        CheckpointError: the family or an option is not supported; the message lists every problem.
    """
    family = FAMILIES.get(str(fields.get("model_type")))
    if family is None:
        raise CheckpointError(
            "this model_type is not supported",
            path=path,
            expected=" or ".join(FAMILIES),
            found=repr(fields.get("model_type"))[:100],
        )
    if type_problems := list(wrong_types(fields, family.read_keys)):
        raise CheckpointError("; ".join(type_problems), path=path, cure="correct config.json")
    inside = fields.get("text_config") or fields
    rotary = "rope_scaling" if inside.get("rope_scaling") else "rope_parameters"
    try:
        fields = family.spelled(fields)
        main = pattern_of(family, fields)
        parts = _depths(fields, family, depths) if depths else {}
    except ValueError as error:
        raise CheckpointError(str(error), path=path) from None
    pattern = main + parts.get("hybrid_layer_pattern", "")
    fields = {**{of: fields[key] for key, of in family.repeats.items() if key in fields}, **fields}
    # Messages have the key of the file, and the tables that of transformers 5.
    problems = [
        problem.replace("rope_parameters.", f"{rotary}.")
        for problem in _problems(fields, family, pattern, ignored)
    ]
    if problems:
        quantised = QUANTISED_KEYS & fields.keys() - set(ignored)
        cure = QUANTISED_CURE if quantised else "convert a model without these options"
        raise CheckpointError("; ".join(problems), path=path, cure=cure)
    values = {**parts, "hybrid_layer_pattern": pattern, **entries_for(family.fixed, pattern)}
    values |= {
        mine: fields[theirs] for theirs, mine in entries_for(family.options, pattern).items()
    }
    values |= family.derive(fields, pattern)
    if "mamba_chunk_size" in values:
        values["mamba_chunk_size"] = _power_of_two(values["mamba_chunk_size"])
    values["untie_embeddings_and_output_weights"] = not fields.get("tie_word_embeddings", False)
    try:
        return family, ModelConfig(**values)
    except ConfigError as error:
        raise CheckpointError(_invalid(error, family, pattern), path=path) from None


def _invalid(error: ConfigError, family: Family, pattern: str) -> str:
    """Return a sentence about invalid sizes, with the key of config.json of each."""
    options = {mine: key for key, mine in entries_for(family.options, pattern).items()}
    their = {**KEYS_OF_DERIVED, **options}
    keys = {
        option.flag: their[option.name]
        for option in section_fields(ModelConfig)
        if option.name in their
    }
    sentences = "; ".join(str(problem).removesuffix(".") for problem in error.problems)
    invalid_keys = [keys[flag] for flag in re.findall(r"--[a-z-]+", sentences) if flag in keys]
    named = f" ({', '.join(dict.fromkeys(invalid_keys))})" if invalid_keys else ""
    return f"invalid sizes{named}: {sentences}"


def _depths(fields: Fields, family: Family, depths: int) -> dict[str, Any]:
    """Return the parts of the pattern for multi-token prediction, and its options."""
    if family.depths is None:
        raise ValueError(f"{family.model_type} has no multi-token prediction")
    layers, stored = family.depths.stored(fields)
    if not layers or depths != stored != 1:
        stored_depths = f"{stored} depths of multi-token prediction" if layers else "no such depth"
        raise ValueError(f"{depths} depths are requested, but config.json has {stored_depths}")
    return {
        **family.depths.derive(fields),
        "hybrid_layer_pattern": (DEPTH + layers) * depths,
        "mtp_use_repeated_layer": depths != stored,
    }


def _power_of_two(chunk_size: object) -> object:
    """Return a chunk size that the project supports; it changes only the rounding of the scan.

    Example:
        100 becomes 128, 1000 becomes 256, and 512 stays as it is.
    """
    if isinstance(chunk_size, bool) or not isinstance(chunk_size, int):
        return chunk_size
    if chunk_size < 1 or not chunk_size & (chunk_size - 1):
        return chunk_size
    return min((16, 32, 64, 128, 256), key=lambda size: abs(size - chunk_size))


def _problems(
    fields: Fields, family: Family, pattern: str, ignored: Collection[str]
) -> Iterator[str]:
    options = entries_for(family.options, pattern)
    # Every option must be present: the project's defaults differ from those of transformers.
    for key in options:
        if fields.get(key) is None:
            names = [*(repeated for repeated, of in family.repeats.items() if of == key), key]
            nulls = [name for name in names if name in fields]
            if nulls:
                yield f"{nulls[0]} is null, but it must have a value"
            else:
                yield f"{' or '.join(reversed(names))} is missing"
    for key, value in entries_for(family.must_be, pattern).items():
        if key in fields and not _same(
            _NAMES_OF_FUNCTIONS.get(str(fields[key]), fields[key]), value
        ):
            yield f"{key} is {shown_value(fields[key])}, but only {value!r} is supported"
    for key, of in family.repeats.items():
        if key in fields and not _same(fields[key], fields[of]):
            yield f"{key} is {shown_value(fields[key])}, which contradicts {of} {shown_value(fields[of])}"
    yield from family.rules(fields)
    read_keys = family.deciding_keys | set(family.no_effect.split())
    for key in sorted(set(fields) - read_keys - set(ignored)):
        yield _unknown(key, fields[key], family)


def _unknown(key: str, value: Any, family: Family) -> str:
    """Return a clause about a key that the family does not read.

    Keys that decide what some model computes are not offered to be ignored.
    """
    if key in QUANTISED_KEYS:
        method = value.get("quant_method", "") if isinstance(value, dict) else ""
        return f"{key} says that the weights are quantised ({shown_value(method or value)})"
    if key in _DECIDING or key.startswith(_DECIDING_PREFIXES) or key.endswith(OUTSIDE_TEXT):
        model = f"{family.model_type} models with this option"
        return f"{key} is {shown_value(value)}, but {model} are not supported"
    cure = f"if it changes no output, give {flags.IGNORE_KEY} {key}"
    return f"{key} is {shown_value(value)}, but this option is unknown ({cure})"


def _same(actual: object, value: object) -> bool:
    """Return whether two values are equal; a boolean never equals a number."""
    return actual == value and isinstance(actual, bool) == isinstance(value, bool)


def entries_for(table: Mapping[str, Mapping[str, Any]], pattern: str) -> dict[str, Any]:
    """Return the entries of a table for the layer kinds in ``pattern``."""
    return {
        key: value
        for symbol, keys in table.items()
        if symbol in pattern
        for key, value in keys.items()
    }
