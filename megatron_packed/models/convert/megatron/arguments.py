"""The model's options from the options (``args``) that a Megatron checkpoint stores."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_packed.checkpoint.errors import CheckpointError, printable_message
from megatron_packed.config.errors import ConfigError
from megatron_packed.config.kinds.layer_kind import KINDS
from megatron_packed.config.layer_pattern import DEPTH
from megatron_packed.config.megatron.gpt_layers import MOST_GPT_LAYERS
from megatron_packed.config.section import section_fields
from megatron_packed.config.sections.model import ModelConfig
from megatron_packed.models.convert.families.symbols import ATTENTION, MLP, MOE

_CURE = "give the flags of its model after the options of convert"
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        (
            "multi_latent_attention",
            "mtp_hsm",
            "moe_apply_probs_on_input",
            "openai_gelu",
            "quick_geglu",
            "apply_residual_connection_post_layernorm",
            "fp32_residual_connection",
            "rotary_interleaved",
            "use_mup",
            "qk_clip",
            "qk_l2_norm",
            "export_qk_l2_norm",
        ),
        (False,),
    ),
    **dict.fromkeys(
        (
            "experimental_attention_variant",
            "mtp_hybrid_override_pattern",
            "activation_func_clamp_value",
            "moe_mlp_glu_interleave_size",
            "moe_shared_expert_glu_interleave_size",
            "no_rope_freq",
            "mrope_section",
            "heterogeneous_layers_config_path",
            "heterogeneous_layers_config_encoded_json",
            "moe_router_force_biased",
        ),
        (None,),
    ),
    "moe_input_jitter_eps": (None, 0.0),
    "glu_linear_offset": (None, 0.0),
    "onnx_safe": (None, False),
    **dict.fromkeys(
        (
            "use_fused_weighted_squared_relu",
            "apply_query_key_layer_scaling",
            "is_hybrid_model",
        ),
        (False, True),
    ),
    "rotary_seq_len_interpolation_factor": (None, 1),
    "softmax_type": ("vanilla", None),
    "add_position_embedding": (True, False),
}
"""Values of Megatron's options with which its model is one of ours. Other values are refused."""

_OF_THE_RUN = (
    "attention_dropout",
    "make_vocab_size_divisible_by",
    "moe_token_dispatcher_type",
    "moe_expert_rank_capacity_factor",
)
"""Options that the weights do not depend on, or that this project does not have."""
UNPADDED = "unpadded_vocab_size"
"""Option of checkpoints that `export_megatron` writes: the vocabulary without the rows of padding."""
_MOST_LETTERS = 2 * MOST_GPT_LAYERS
"""Limit of the letters and marks of a layer pattern, as long as the pattern of a GPT model."""
_MOST_SHOWN = 400
"""Limit of the characters of a value in a message."""
Refusal = tuple[str, str]
"""Sentence about options that cannot be used, without its full stop, and the cure."""


def model_problem(args: Mapping[str, Any], rows: int) -> Refusal | None:
    """Return the problem of Megatron's options; None if they describe a model of ours.

    Args:
        args, rows: as for `model_of_arguments`.
    """
    refused = [
        f"--{name.replace('_', '-')} {printable_message(str(args[name]), _MOST_SHOWN)}"
        for name, neutral in _NEUTRAL.items()
        if name in args and args[name] not in neutral
    ]
    if refused:
        sentence = f"its model has {', '.join(refused)}, which is not supported"
        return sentence, "bring the weights of a model without it"
    try:
        ModelConfig(**dict(_values(args, rows)))
    except ConfigError as error:
        first = printable_message(str(error.problems[0]).rstrip("."), _MOST_SHOWN)
        return f"its model is not supported: {first}", f"or {_CURE}"
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        # The values may have any type and size, so conversions fail in many ways.
        return f"its options are damaged ({printable_message(str(error), _MOST_SHOWN)})", _CURE
    return None


def model_of_arguments(
    args: Any,
    rows: int,
    path: Path,
    examine: Callable[[Mapping[str, Any], int], Refusal | None] = model_problem,
) -> ModelConfig:
    """Return the model that Megatron's options describe.

    Args:
        args: the options by name, or None if the checkpoint has none.
        rows: rows of the table of words. In Megatron the rows of padding take part in the softmax,
            so all of them are the vocabulary, except in a checkpoint that `export_megatron` wrote.
        path: the checkpoint, for messages.
        examine: `model_problem`, or a function that calls it in a process with limits.
    Raises:
        CheckpointError: there are no options, or the model is not supported.
    """
    if not isinstance(args, Mapping):
        raise CheckpointError("has no options of Megatron (args)", path=path, cure=_cure(path))
    problem = examine(args, rows)
    if problem is not None:
        raise CheckpointError(problem[0], path=path, cure=problem[1])
    return ModelConfig(**dict(_values(args, rows)))


def _cure(path: Path) -> str:
    """Return the cure for missing options, with the file in which NeMo and Bridge have them."""
    files = (path / "run_config.yaml", path.parent / "context" / "model.yaml")
    config = next((file for file in files if file.is_file()), None)
    return _CURE if config is None else f"{_CURE} ({config} has their values)"


def _values(args: Mapping[str, Any], rows: int) -> Iterator[tuple[str, Any]]:
    """Yield the model's options that the checkpoint has."""
    pattern = _pattern(args)
    derived: dict[str, object] = {
        "hybrid_layer_pattern": pattern,
        "vocab_size": _vocabulary(args, rows),
        "num_query_groups": args.get("num_query_groups") if _grouped(args) else None,
        "moe_router_load_balancing_type": _single(args.get("moe_router_load_balancing_type")),
        "moe_aux_loss_coeff": _single(args.get("moe_aux_loss_coeff")),
        "window_size": _text(args.get("window_size")),
        "window_attn_skip_freq": _text(args.get("window_attn_skip_freq")),
        "position_embedding_type": _positions(args),
    }
    # Megatron stores the options of absent layers too.
    symbols = {kind.name: symbol for symbol, kind in KINDS.items()}
    for option in section_fields(ModelConfig):
        if option.name in _OF_THE_RUN or symbols.get(option.option.group, pattern) not in pattern:
            continue
        value = derived.get(option.name, args.get(option.name))
        if value is None:
            continue
        if isinstance(value, int) and option.name in ("rotary_base", "rotary_percent"):
            value = float(value)
        yield option.name, value


def _vocabulary(args: Mapping[str, Any], rows: int) -> int:
    unpadded = args.get(UNPADDED)
    return unpadded if isinstance(unpadded, int) and 0 < unpadded <= rows else rows


def _pattern(args: Mapping[str, Any]) -> str:
    """Return the pattern of a hybrid model, or the two symbols of each layer of a GPT model."""
    pattern = args.get("hybrid_layer_pattern") or args.get("hybrid_override_pattern")
    if pattern:
        if not isinstance(pattern, str) or len(pattern) > _MOST_LETTERS:
            raise ValueError(
                f"the layer pattern has {len(str(pattern)):,} characters, but at most "
                f"{_MOST_LETTERS:,} are read"
            )
        return pattern.replace("|", "")
    blocks = _gpt_blocks(args)
    depths = _count(args, "mtp_num_layers", least=0) if args.get("mtp_num_layers") else 0
    # As in Megatron, the layer of a depth is of the kind of the last layer.
    return "".join(blocks + [DEPTH + blocks[-1]] * depths)


def _gpt_blocks(args: Mapping[str, Any]) -> list[str]:
    """Return the two symbols of each layer of a GPT model."""
    count, frequency = _count(args, "num_layers", least=1), args.get("moe_layer_freq", 1)
    if not args.get("num_experts"):
        return [ATTENTION + MLP] * count
    if isinstance(frequency, list):
        kinds = frequency
    else:
        interval = _count({"moe_layer_freq": frequency}, "moe_layer_freq", least=1)
        kinds = [layer % interval == 0 for layer in range(count)]
    if len(kinds) != count:
        raise ValueError(f"moe_layer_freq has {len(kinds)} layers, but num_layers is {count}")
    return [ATTENTION + (MOE if kind else MLP) for kind in kinds]


def _count(args: Mapping[str, Any], name: str, *, least: int) -> int:
    """Return a number of layers.

    Raises:
        ValueError: the value is missing, no whole number, or out of range.
    """
    value = args.get(name)
    if type(value) is not int or not least <= value <= MOST_GPT_LAYERS:
        shown = "missing" if value is None else printable_message(repr(value))[:80]
        raise ValueError(
            f"{name} is {shown}, not a whole number from {least} to {MOST_GPT_LAYERS:,}"
        )
    return value


def _grouped(args: Mapping[str, Any]) -> bool:
    return bool(args.get("group_query_attention", args.get("num_query_groups")))


def _positions(args: Mapping[str, Any]) -> object:
    if args.get("use_rotary_position_embeddings"):
        return "rope"
    return args.get("position_embedding_type")


def _single(value: object) -> object:
    """Return the only entry of a list; Megatron accepts several losses."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def _text(value: Any) -> str | None:
    if isinstance(value, list):
        return ",".join(str(entry) for entry in value)
    return None if value is None else str(value)
