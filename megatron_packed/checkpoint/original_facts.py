"""Facts of a Hugging Face model that a new config.json repeats and no option of a model holds.

A conversion stores them in the metadata of its checkpoint, and runs copy them to their own
checkpoints. So the export of a fine-tuned model needs no files of the original.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_packed.checkpoint.errors import CheckpointError
from megatron_packed.checkpoint.sealed_json import parse_object, read_small_file
from megatron_packed.config.stored_config import is_number, wrong
from megatron_packed.config.value_checks import INT32_MAX

CONFIG, GENERATION = "config", "generation"
"""Parts of the facts: keys of config.json, and of generation_config.json."""
TOKENIZER_HASH = "tokenizer_hash"
"""Fact beside these parts: `meaning_hash` of the original's tokenizer, to which its numbers belong.
Conversions without a readable tokenizer and older ones lack it.
"""
GENERATION_CONFIG = "generation_config.json"
MAX_POSITIONS = "max_position_embeddings"
IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
"""Keys of token numbers. Both files have them, and their ends of answers may differ."""
_MAX_BYTES = 1 << 20
_MOST_ENDS = 1000
_NUMBERS = """
    diversity_penalty encoder_repetition_penalty epsilon_cutoff eta_cutoff frequency_penalty
    guidance_scale length_penalty max_time min_p presence_penalty repetition_penalty temperature
    top_h top_p typical_p
"""
_COUNTS = """
    max_length max_new_tokens min_length min_new_tokens no_repeat_ngram_size num_beam_groups
    num_beams num_return_sequences top_k
"""
_SWITCHES = """
    do_sample output_attentions output_hidden_states output_logits output_scores
    remove_invalid_values renormalize_logits return_dict_in_generate use_cache
"""
_SAMPLING = {
    **dict.fromkeys(_NUMBERS.split(), "a number"),
    **dict.fromkeys(_COUNTS.split(), "a whole number"),
    **dict.fromkeys(_SWITCHES.split(), "true or false"),
}
"""Keys of generation_config.json that are kept beside token numbers, and the type of each."""
_NOTHING_SAID = {"_from_model_config", "transformers_version"}
"""Keys that decide nothing, so that a conversion does not report that it leaves them out."""


def facts_of(fields: Mapping[str, Any], generation: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the facts of a model.

    A token number of null is kept: without the key, transformers takes the default of the family.

    Args:
        fields: keys of config.json, or of its ``text_config``.
        generation: keys of generation_config.json; None if the model has no such file.
    """
    facts = {CONFIG: {key: fields[key] for key in IDS if key in fields}}
    if fields.get(MAX_POSITIONS) is not None:
        facts[CONFIG][MAX_POSITIONS] = fields[MAX_POSITIONS]
    if generation is not None:
        # The same holds for sampling values.
        kept_keys = {*IDS, *_SAMPLING}
        facts[GENERATION] = {key: value for key, value in generation.items() if key in kept_keys}
    return facts


def read_facts(config: Path, fields: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the facts of the model with this config.json, and keys that are left out.

    Reads the generation_config.json beside it. If config.json nests the text model, its token
    numbers may stand inside or outside; a number of the text model counts first.

    Raises:
        CheckpointError: a fact has a value of the wrong type, or a file is not strict JSON.
    """
    path = config.parent / GENERATION_CONFIG
    generation = None
    if os.path.lexists(path):  # a broken link is refused, because its numbers would be lost
        generation = parse_object(read_small_file(Path(os.path.realpath(path)), _MAX_BYTES), path)
    text = fields.get("text_config") or {}
    text_values = {key: value for key, value in text.items() if value is not None}
    facts = facts_of({**text, **fields, **text_values}, generation)
    for part, where in ((CONFIG, config), (GENERATION, path)):
        problem = next(_problems(facts.get(part, {}), part), None)
        if problem is not None:
            raise CheckpointError(problem, path=where, cure=f"correct {where.name}")
    kept_keys = {*IDS, *_SAMPLING, *_NOTHING_SAID}
    return facts, sorted(
        key for key, value in (generation or {}).items() if key not in kept_keys and value
    )


def facts_problem(value: Any) -> str | None:
    """Return the first problem of stored facts, as a clause; None if there is none."""
    if not isinstance(value, dict) or not value.keys() <= {CONFIG, GENERATION, TOKENIZER_HASH}:
        return wrong(value, "the facts of a model")
    for part, keys in value.items():
        if part == TOKENIZER_HASH:
            if not isinstance(keys, str):
                return f".{part}{wrong(keys, 'a text')}"
            continue
        if not isinstance(keys, dict):
            return f".{part}{wrong(keys, 'an object')}"
        problem = next(_problems(keys, part), None)
        if problem is not None:
            return f".{part}.{problem}"
    return None


def _problems(keys: Mapping[str, Any], part: str) -> Iterator[str]:
    """Yield a clause for each key that is unknown or has a value of the wrong type."""
    for key, value in keys.items():
        if key in IDS and value is None:
            continue
        if key == "eos_token_id":
            several = value if isinstance(value, list) else [value]
            if len(several) > _MOST_ENDS or not all(map(_is_token, several)):
                yield f"{key}{wrong(value, 'a token number or a list of them')}"
        elif key in IDS:
            if not _is_token(value):
                yield f"{key}{wrong(value, 'a token number')}"
        elif key == MAX_POSITIONS and part == CONFIG:
            if type(value) is not int or not 0 < value <= INT32_MAX:
                yield f"{key}{wrong(value, 'a whole number above 0')}"
        elif key not in _SAMPLING or part != GENERATION:
            yield f"{key} is unknown"
        elif not _fits(value, _SAMPLING[key]):
            yield f"{key}{wrong(value, _SAMPLING[key])}"


def _is_token(value: Any) -> bool:
    # Some models have a padding token of -1, which means none.
    return type(value) is int and -1 <= value <= INT32_MAX


def _fits(value: Any, kind: str) -> bool:
    """Return whether a sampling value has a type; null stands for the default of transformers."""
    if value is None:
        return True
    if kind == "true or false":
        return isinstance(value, bool)
    return is_number(value) and (kind == "a number" or type(value) is int)
