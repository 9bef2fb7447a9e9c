"""config.json and generation_config.json of a model that this project trained, from its options.

A family can hold a model if config.json can express every option that decides what the weights
compute. Otherwise each option that config.json cannot express is listed with its value.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megatron_packed.checkpoint.errors import CheckpointError
from megatron_packed.checkpoint.original_facts import CONFIG, GENERATION, IDS, MAX_POSITIONS
from megatron_packed.config import flag_names as flags
from megatron_packed.config.kinds.layer_kind import KINDS, LayerKind
from megatron_packed.config.options import Field
from megatron_packed.config.section import section_fields
from megatron_packed.config.sections.model import ModelConfig
from megatron_packed.config.serialise import as_given
from megatron_packed.models.convert.families.decoder import (
    MULTIPLIERS,
    ROPE_SCALING,
    pattern_of,
    plain_window,
)
from megatron_packed.models.convert.families.family import Family
from megatron_packed.models.convert.families.registry import FAMILIES, WRITTEN
from megatron_packed.models.convert.huggingface_config import entries_for

_MOST_FAMILIES = 3
"""Number of families, the nearest first, that the refusal of a model describes."""
_LEFT_OUT = ("rope_type", "time_step_limit", "sliding_window")
"""Keys with one supported value that config.json leaves out, because the value is the default."""
_READ_BY: dict[str, Callable[[LayerKind], bool]] = {
    "ffn_hidden_size": lambda kind: kind.has_mlp,
    "squared_relu": lambda kind: kind.has_activation,
    "swiglu": lambda kind: kind.has_activation,
    "add_bias_linear": lambda kind: kind.may_have_bias,
}
"""Options of the stack that only some kinds of layers read."""
_READ_IF: dict[str, Callable[[ModelConfig], object]] = {
    "qk_layernorm_scope": lambda model: model.qk_layernorm,
    "moe_shared_expert_gate": lambda model: model.moe_shared_expert_intermediate_size,
    "moe_router_pre_softmax": lambda model: model.moe_router_score_function == "softmax",
    "add_qkv_bias": lambda model: not model.add_bias_linear,
    **dict.fromkeys(ROPE_SCALING[1:], lambda model: model.use_rope_scaling),
}
"""Options that a model reads only with the values of other options."""
_ZEROS = {"moe_router_enable_expert_bias": "mixer.router.expert_bias"}
"""Options of a family that a model without the option can still use: the parameter is zero."""
_EXPRESSED = (
    "hybrid_layer_pattern",
    "mtp_num_layers",
    "mtp_use_repeated_layer",
    "make_vocab_size_divisible_by",
    "untie_embeddings_and_output_weights",
    "vocab_size",
)
"""Options that each family expresses in another way than by its tables. The exported
tables have the rows of the vocabulary without padding.
"""


@dataclass(frozen=True, kw_only=True)
class SpecialIds:
    """Token numbers for config.json and generation_config.json."""

    bos: int | None = None
    pad: int | None = None
    ends: tuple[int, ...] = ()
    """Tokens that end an answer; empty if they are unknown."""

    def fields(self) -> dict[str, Any]:
        """Return the keys of config.json; a single end is a number, several ends are a list."""
        ends = list(self.ends) if len(self.ends) > 1 else next(iter(self.ends), None)
        return {"bos_token_id": self.bos, "eos_token_id": ends, "pad_token_id": self.pad}

    def keeping(self, original: Mapping[str, Any]) -> SpecialIds:
        """Return the numbers, with those of the original where the training has none.

        Ends of the original are added to the ends of the training.

        Args:
            original: token numbers by key, as `original_facts` has them.
        """
        ends = original.get("eos_token_id") or []
        ends = ends if isinstance(ends, list) else [ends]
        return SpecialIds(
            bos=original.get("bos_token_id") if self.bos is None else self.bos,
            pad=original.get("pad_token_id") if self.pad is None else self.pad,
            ends=tuple(dict.fromkeys((*self.ends, *ends))),
        )


@dataclass(frozen=True, kw_only=True)
class TrainedOptions:
    """Facts of a training that an export needs."""

    model: ModelConfig
    """Options of the model, with ``vocab_size``."""
    bf16: bool
    """True if the run trained with ``--bf16``."""
    max_positions: int | None
    """Longest document that the model can read, in tokens; None leaves it to transformers."""
    ids: SpecialIds = SpecialIds()
    """Token numbers that the training decided."""
    original: Mapping[str, Any] = field(default_factory=dict)
    """Facts of the Hugging Face model whose weights the training began with; see `original_facts`."""


def json_text(fields: Mapping[str, Any]) -> str:
    """Return the text of a JSON file with one key in each line."""
    return json.dumps(fields, indent=2, ensure_ascii=False) + "\n"


def family_for(model: ModelConfig, wanted: str | None = None) -> tuple[Family, ModelConfig]:
    """Return the family that can hold a model, and the model as the family describes it.

    Args:
        model: options of the trained model.
        wanted: name of the family; None takes the first family that can hold the model.
    Returns:
        The family, and ``model`` with the family's options whose parameters are zeros in ``model``.
    Raises:
        CheckpointError: no family can hold the model; the message lists the options.
    """
    model = plain_model(model)
    reasons = nearest_families(model, [wanted] if wanted else WRITTEN)
    for name, obstacles in reasons.items():
        if not obstacles:
            family = FAMILIES[name]
            same: dict[str, Any] = {
                key: True
                for key in _ZEROS
                if key in entries_for(family.fixed, model.hybrid_layer_pattern)
            }
            return family, replace(model, **same)
    listed = list(reasons.items())[:_MOST_FAMILIES]
    sentences = [f"{name} cannot express {'; '.join(obstacles)}" for name, obstacles in listed]
    raise CheckpointError(
        "the options of this model have no place in a Hugging Face config.json. "
        + ". ".join(sentences),
        cure=f"train a model with the options of a family, which {flags.HF_FAMILY} names",
    )


def nearest_families(model: ModelConfig, names: Sequence[str] = WRITTEN) -> dict[str, list[str]]:
    """Return the obstacles of each family, the nearest family first.

    Families with the layers of the pattern come before others. Families at the same distance have
    the order of the registry.
    """
    reasons = {name: obstacles(FAMILIES[name], model) for name in names}

    def distance(name: str) -> tuple[bool, int]:
        return not _has_pattern(FAMILIES[name], model.main_layers), len(reasons[name])

    return {name: reasons[name] for name in sorted(reasons, key=distance)}


def plain_model(model: ModelConfig) -> ModelConfig:
    """Return the model without options whose value means the same as leaving them out."""
    same: dict[str, Any] = {name: None for name in MULTIPLIERS if getattr(model, name) == 1}
    if model.window_size is not None:
        same |= plain_window(model)
    for kind in KINDS.values():
        same |= kind.left_out(model)
    if model.kv_channels is not None and model.softmax_scale == model.kv_channels**-0.5:
        same["softmax_scale"] = None
    if not model.use_rope_scaling:
        defaults = {option.name: option.default for option in section_fields(ModelConfig)}
        same |= {name: defaults[name] for name in ROPE_SCALING}
    return replace(model, **same)


def obstacles(family: Family, model: ModelConfig) -> list[str]:
    """Return each option of ``model`` that ``family`` cannot express, with its value."""
    model = plain_model(model)
    pattern = model.hybrid_layer_pattern
    if not _has_pattern(family, model.main_layers):
        blocks = " or ".join(family.blocks)
        sentences = [
            f"{model.flag('hybrid_layer_pattern')} {model.main_layers} (the family repeats {blocks} and has no "
            "other layers)"
        ]
    else:
        sentences = [*_derived_values(family, model), *family.unfit(model)]
    if model.mtp_depths:
        sentences += _depth_obstacles(family, model)
    options = set(entries_for(family.options, pattern).values())
    symbols = "".join(family.blocks)
    for option in section_fields(ModelConfig):
        if option.name in family.derived or not _matters(option, model, symbols):
            continue
        value = getattr(model, option.name)
        if option.name in options:
            if _written(option.name, value) is None:
                sentences.append(f"a model without {option.flag}")
            continue
        held = entries_for(family.fixed, pattern).get(option.name, option.default)
        if value != held and not (option.name in _ZEROS and not value):
            sentences.append(_other_value(option, value, held))
    return sentences


def _depth_obstacles(family: Family, model: ModelConfig) -> Iterator[str]:
    if family.depths is None:
        yield f"{model.flag('mtp_num_layers')} {model.mtp_depths} (the family has none)"
    else:
        yield from family.depths.unfit(model)


def _has_pattern(family: Family, pattern: str) -> bool:
    """Return whether the pattern consists of the family's blocks."""
    length = len(family.blocks[0])
    blocks = {pattern[start : start + length] for start in range(0, len(pattern), length)}
    return blocks <= set(family.blocks)


def _derived_values(family: Family, model: ModelConfig) -> Iterator[str]:
    """Yield options that a new config.json would not give back, with both values."""
    fields = family.spelled(_model_fields(family, model))
    pattern = pattern_of(family, fields)
    if pattern != model.main_layers:
        pattern_flag = f"{model.flag('hybrid_layer_pattern')} {model.main_layers}"
        yield f"{pattern_flag} (the family has {pattern})"
        return
    held = plain_model(replace(model, **family.derive(fields, model.hybrid_layer_pattern)))
    for option in section_fields(ModelConfig):
        value = getattr(model, option.name)
        if option.name in family.derived and value != getattr(held, option.name):
            yield _other_value(option, value, getattr(held, option.name))


def config_fields(family: Family, model: ModelConfig, trained: TrainedOptions) -> dict[str, Any]:
    """Return the config.json of a model that ``family`` can hold.

    Args:
        model: options of the model as `family_for` returns them.
        trained: other facts of the training.
    """
    longest = trained.max_positions
    return {
        **_model_fields(family, model),
        "tie_word_embeddings": not model.untie_embeddings_and_output_weights,
        **({} if longest is None else {MAX_POSITIONS: longest}),
        "initializer_range": model.init_method_std,
        "torch_dtype": "bfloat16" if trained.bf16 else "float32",
        **_token_numbers(trained),
    }


def _token_numbers(trained: TrainedOptions) -> dict[str, Any]:
    """Return the token numbers of config.json; null for no token.

    A key that neither the original nor the training has is left out if there is an original:
    transformers then takes the family's default, as for the original.
    """
    facts = trained.original.get(CONFIG)
    if facts is None:
        return trained.ids.fields()
    numbers = trained.ids.keeping(facts).fields()
    return {key: value for key, value in numbers.items() if key in facts or value is not None}


def _model_fields(family: Family, model: ModelConfig) -> dict[str, Any]:
    """Return the keys of config.json that decide what the model computes."""
    pattern = model.hybrid_layer_pattern
    fields: dict[str, object] = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "num_hidden_layers": len(model.main_layers) // family.symbols_per_layer,
    }
    for theirs, ours in entries_for(family.options, pattern).items():
        fields[theirs] = _written(ours, getattr(model, ours))
    for key, value in entries_for(family.must_be, pattern).items():
        if key not in _LEFT_OUT and value is not None:
            fields.setdefault(key, value)
    depths = family.depths.written(model) if family.depths and model.mtp_depths else {}
    return {**fields, **family.written(model), **depths}


def generation_fields(trained: TrainedOptions) -> dict[str, Any]:
    """Return generation_config.json, which stops where answers end.

    Sampling values are those of the original. Without an original, decoding is greedy.
    """
    facts = trained.original.get(GENERATION)
    numbers = trained.original.get(CONFIG, {}) if facts is None else facts
    sampling = {"do_sample": False} if facts is None else facts
    ids = trained.ids.keeping(numbers).fields()
    token_numbers = {key: value for key, value in ids.items() if value is not None}
    return {**{key: value for key, value in sampling.items() if key not in IDS}, **token_numbers}


def zero_parameters(trained: ModelConfig, exported: ModelConfig) -> tuple[str, ...]:
    """Return endings of parameters that only ``exported`` has; their values are zeros."""
    return tuple(
        parameter
        for name, parameter in _ZEROS.items()
        if getattr(exported, name) and not getattr(trained, name)
    )


def _matters(option: Field, model: ModelConfig, symbols: str) -> bool:
    """Return whether an option affects what layers of this model compute.

    Args:
        symbols: kinds of layers to regard.
    """
    if option.option.training_only or option.name in _EXPRESSED:
        return False
    rope = option.name.startswith(("rotary_", *ROPE_SCALING))
    if rope and model.position_embedding_type != "rope":
        return False
    needs = _READ_IF.get(option.name)
    if needs is not None and not needs(model):
        return False
    reads = _READ_BY.get(option.name)
    readers = {
        symbol
        for symbol, kind in KINDS.items()
        if (kind.name == option.option.group if reads is None else reads(kind))
    }
    return not readers or bool(readers & set(model.hybrid_layer_pattern) & set(symbols))


def _written(name: str, value: object) -> object:
    """Return a value as config.json has it; None if the value cannot be written."""
    if name == "moe_router_topk_scaling_factor" and value is None:
        return 1.0
    return value if not isinstance(value, float) or math.isfinite(value) else None


def _other_value(option: Field, *values: Any) -> str:
    """Return a clause about the value of the model and the value of the family."""
    ours, held = (
        f"no {option.flag}" if value is None else f"{option.flag} {as_given(option, value)}"
        for value in values
    )
    return f"{ours} (the family has {held})"
