"""adapter_config.json of PEFT, written and read as data.

Sources: PEFT 0.21.2, ``tuners.lora.config`` and ``utils.other.get_pattern_key``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from megatron_packed.checkpoint.errors import CheckpointError
from megatron_packed.checkpoint.load import ADAPTER_CONFIG
from megatron_packed.checkpoint.sealed_json import parse_object, read_small_file
from megatron_packed.config.value_checks import INT32_MAX
from megatron_packed.models.convert.families.field_types import shown_value

_MAX_BYTES = 16 << 20
_MOST_PATTERNS = 2000
_PLAIN_PATTERN = re.compile(r"\^?(?:[A-Za-z0-9_-]|\\?\.|\.\*)+\$?")
"""Patterns of paths that are read. They have no groups or alternatives, so matches are quick."""
_REFUSED = {
    "use_dora": "adapters with a magnitude (DoRA) are not supported",
    "lora_bias": "adapters have no bias here",
    "fan_in_fan_out": "weights are stored as (outputs, inputs) here",
    "trainable_token_indices": "rows of a table cannot be trained alone; save the whole table",
    "layer_replication": "layers cannot be repeated",
    "use_qalora": "quantised adapters are not supported",
    "use_bdlora": "block-diagonal adapters are not supported",
    "alora_invocation_tokens": "adapters that begin at a token are not supported",
    "arrow_config": "routed adapters are not supported",
    "kasa_config": "this variant of adapters is not supported",
    "velora_config": "this variant of adapters is not supported",
    "monteclora_config": "this variant of adapters is not supported",
    "megatron_config": "adapters of Megatron's layers are not supported",
}
"""Options that must be off, and the reason."""
_NO_EFFECT = """
    auto_mapping corda_config ensure_weight_tying
    eva_config exclude_modules inference_mode layers_pattern layers_to_transform loftq_config
    lora_ga_config megatron_core peft_version qalora_group_size revision runtime_config
    target_modules task_type
"""
"""Options that do not change what adapters in a file compute: the file names its matrices."""
_KEEPING_THE_BASE = (True, False, "gaussian", "eva", "orthogonal")
"""Values of ``init_lora_weights`` with which PEFT leaves the base's weights as they are."""


@dataclass(frozen=True, kw_only=True)
class PeftConfig:
    """Options of adapters that decide what they compute, in PEFT's names."""

    r: int
    lora_alpha: float
    use_rslora: bool = False
    lora_dropout: float = 0.0
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    """Ranks of the matrices whose paths end with a pattern."""
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    target_parameters: tuple[str, ...] = ()
    """Ends of the paths of parameters with adapters."""
    modules_to_save: tuple[str, ...] = ()
    """Ends of the paths of modules whose weights are in the file as a whole."""
    base_model: str | None = None

    def rank(self, path: str) -> int:
        """Return the rank of the adapter of a matrix."""
        return next((rank for key, rank in self._ranks if key.match(path)), self.r)

    def alpha(self, path: str) -> float:
        """Return the number that takes the place of ``lora_alpha`` for a matrix."""
        return next((alpha for key, alpha in self._alphas if key.match(path)), self.lora_alpha)

    @cached_property
    def _ranks(self) -> list[tuple[re.Pattern[str], int]]:
        return [(_ending(key), rank) for key, rank in self.rank_pattern.items()]

    @cached_property
    def _alphas(self) -> list[tuple[re.Pattern[str], float]]:
        return [(_ending(key), alpha) for key, alpha in self.alpha_pattern.items()]

    def targets(self, parameter: str) -> bool:
        """Return whether a parameter has an adapter, by its path."""
        return any(f".{parameter}".endswith(f".{target}") for target in self.target_parameters)


def _ending(pattern: str) -> re.Pattern[str]:
    return re.compile(rf"(.*\.)?({pattern})$")


def fields_of(config: PeftConfig, target_modules: list[str]) -> dict[str, Any]:
    """Return the fields of adapter_config.json.

    Args:
        target_modules: ends of the paths of the modules with adapters.
    """
    alpha = int(config.lora_alpha) if float(config.lora_alpha).is_integer() else config.lora_alpha
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": config.base_model,
        "inference_mode": True,
        "r": config.r,
        "lora_alpha": alpha,
        "lora_dropout": config.lora_dropout,
        "use_rslora": config.use_rslora,
        "target_modules": target_modules,
        "target_parameters": list(config.target_parameters) or None,
        "modules_to_save": list(config.modules_to_save) or None,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_dora": False,
        "init_lora_weights": True,
        "rank_pattern": dict(config.rank_pattern),
        "alpha_pattern": dict(config.alpha_pattern),
    }


def read_peft_config(directory: Path) -> PeftConfig:
    """Read adapter_config.json.

    Raises:
        CheckpointError: the file is missing or not strict JSON, or an option is not supported; the
            message lists every problem.
    """
    path = directory / ADAPTER_CONFIG
    if not path.exists():
        raise CheckpointError(
            "does not exist", path=path, cure="name the directory of an adapter that PEFT saved"
        )
    fields = parse_object(read_small_file(path.resolve(), _MAX_BYTES), path)
    problems = list(_problems(fields))
    if problems:
        cure = "convert an adapter without these options"
        if lacking := [key for key in _REQUIRED if key not in fields]:
            cure = f"add {' and '.join(lacking)} with the values of the training"
        raise CheckpointError("; ".join(problems), path=path, cure=cure)
    return PeftConfig(
        r=fields["r"],
        lora_alpha=fields["lora_alpha"],
        use_rslora=fields.get("use_rslora", False),
        lora_dropout=fields.get("lora_dropout", 0.0),
        rank_pattern=fields.get("rank_pattern") or {},
        alpha_pattern=fields.get("alpha_pattern") or {},
        target_parameters=tuple(fields.get("target_parameters") or ()),
        modules_to_save=tuple(fields.get("modules_to_save") or ()),
        base_model=fields.get("base_model_name_or_path"),
    )


def _is_rank(value: object) -> bool:
    return type(value) is int and 0 < value <= INT32_MAX


def _is_alpha(value: object) -> bool:
    return type(value) in (int, float) and 0 < float(str(value)) < math.inf


def _is_share(value: object) -> bool:
    return type(value) in (int, float) and 0 <= float(str(value)) < 1


def _is_names(value: object) -> bool:
    return value is None or (
        isinstance(value, list) and all(isinstance(name, str) and name for name in value)
    )


def _is_text(value: object) -> bool:
    return value is None or isinstance(value, str)


_KEYS: dict[str, tuple[Callable[[object], bool], str]] = {
    "r": (_is_rank, "a whole number above 0"),
    "lora_alpha": (_is_alpha, "a number above 0"),
    "lora_dropout": (_is_share, "a number from 0 to below 1"),
    "use_rslora": (lambda value: isinstance(value, bool), "true or false"),
    "target_parameters": (_is_names, "a list of names"),
    "modules_to_save": (_is_names, "a list of names"),
    "base_model_name_or_path": (_is_text, "a text"),
    "peft_type": (lambda value: value == "LORA", "LORA"),
    "task_type": (lambda value: value in (None, "CAUSAL_LM"), "CAUSAL_LM"),
    "bias": (lambda value: value == "none", "none"),
    "init_lora_weights": (
        lambda value: value in _KEEPING_THE_BASE,
        "a start that leaves the base's weights as they are",
    ),
}
"""Keys that are read, the check of their values, and the values in words."""
_REQUIRED = ("peft_type", "r", "lora_alpha")


def _problems(fields: Mapping[str, Any]) -> Iterator[str]:
    """Yield a clause for each option that is missing, unknown or not supported."""
    no_effect = _NO_EFFECT.split()
    yield from (f"{key} is missing" for key in _REQUIRED if key not in fields)
    for key, value in fields.items():
        if key in _KEYS:
            fits, words = _KEYS[key]
            if not fits(value):
                yield f"{key} is {shown_value(value)}, but it must be {words}"
        elif key in ("rank_pattern", "alpha_pattern"):
            yield from _pattern_problems(key, value)
        elif key in _REFUSED:
            if value not in (None, False, [], {}):
                yield f"{key} is {shown_value(value)}, but {_REFUSED[key]}"
        elif key not in no_effect and value not in (None, False, [], {}):
            yield f"{key} is {shown_value(value)}, but this option is unknown"


def _pattern_problems(key: str, value: object) -> Iterator[str]:
    fits = _is_rank if key == "rank_pattern" else _is_alpha
    if value is None:
        return
    if not isinstance(value, dict) or len(value) > _MOST_PATTERNS:
        yield f"{key} is {shown_value(value)}, but it must have a number for each pattern"
        return
    for pattern, number in value.items():
        if len(pattern) > 300 or pattern.count("*") > 1 or not _PLAIN_PATTERN.fullmatch(pattern):
            yield f"{key} has {shown_value(pattern)}, but only names, dots and one .* are supported"
        elif not fits(number):
            yield f"{key} of {pattern} is {shown_value(number)}, but it must be above 0"
