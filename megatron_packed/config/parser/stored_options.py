"""Options that come from a checkpoint: for ``--use-checkpoint-args``, and for text generation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from megatron_packed.config.errors import ConfigError, Problem
from megatron_packed.config.options import Field, Stored
from megatron_packed.config.parser.precedence import ADAPTERS, STARTS, GivenOptions
from megatron_packed.config.run import STORED, every_field, keys_deciding, stored_values
from megatron_packed.config.section import KERNELS, section_fields
from megatron_packed.config.sections.data import OF_TRAINED_BPE, TRAINING_DATA
from megatron_packed.config.sections.data_parts.tokenizer import TRAINED_BPE
from megatron_packed.config.sections.model import ModelConfig
from megatron_packed.config.sections.model_parts.lora import keys_of_adapters
from megatron_packed.config.sections.training import TrainingConfig
from megatron_packed.config.serialise import as_flag, as_given
from megatron_packed.config.value_checks import MISSING

ReadStored = Callable[[Mapping[str, Any]], Stored | None]
"""Function that takes the given values by key, and returns the configuration in the checkpoint that
the run loads; None if there is no checkpoint. It raises `ConfigError`.
"""
NO_DATA = ("(none)",)
"""Value of ``data.data_path`` when no data is read; the file is never opened."""
PRECISION = ("bf16", "transformer_impl")
TOKENIZER_CHOICE = tuple(
    key for key in keys_deciding("tokenizer", "tokenizer name") if key.startswith("data.")
)
"""Options that together choose the tokenizer."""
_FLAG = "--use-checkpoint-args"
UNKNOWN_LENGTH = 2048
"""Length of documents that text generation assumes for converted weights, which store none."""
_LENGTH = "packing.seq_length"
_PATTERN, _BF16 = "model.hybrid_layer_pattern", "training.bf16"
_TYPE = "data.tokenizer_type"
_TOKENIZER_FILES = ("tokenizer_model", "vocab_file", "merge_file")
_FORMS = ("chat_template", "sft_tokenizer_prompt_format")
"""Options that contradict each other, so the checkpoint's one is not taken beside a given one."""
_OF_PROMPTS = ("sft", "data_fields")
"""Options of the files that also decide how prompts are read."""
_OF_INFERENCE = {
    "training": {
        *PRECISION,
        "seed",
        "deterministic_mode",
        *(field.name for field in section_fields(TrainingConfig) if field.option.group == KERNELS),
    },
    "packing": {"seq_length", "max_document_length"},
    "checkpoint": {
        "load",
        "ckpt_step",
        "use_checkpoint_args",
        "load_adapter",
        "pretrained_checkpoint",
    },
    "data": {
        *(key.removeprefix("data.") for key in (*TOKENIZER_CHOICE, *keys_deciding("chat"))),
        *_OF_PROMPTS,
        *OF_TRAINED_BPE,
        "data_cache_path",
    },
}
"""Options that text generation uses, by section, next to those of the model."""


def take_stored(options: GivenOptions, read: ReadStored | None, *, trains: bool) -> str:
    """Take options of the checkpoint for ``--use-checkpoint-args`` (`GivenOptions.uses_checkpoint`).

    The model's options replace given ones, except those that only affect training, such as dropout.
    ``--seq-length``, the tokenizer and the settings of its chat template are taken only if they are
    not given. The precision is the run's own and must be that of the checkpoint. A program that does
    not train takes it from the checkpoint.

    Args:
        options: those of the command line.
        read: reads the checkpoint; None if this command cannot.
        trains: the program trains.
    Returns:
        A line with the options of the checkpoint; empty if none is taken.
    """
    if read is None:
        cure = (
            "give the model's options; pretrain_hybrid.py and megatron-packed train, generate, "
            "packing, plan and tune take this flag"
        )
        options.refuse(_FLAG, "", "this command reads no checkpoint", cure)
        options.expect(_expected())
        return ""
    stored = _read(options, read)
    if stored is None:
        return ""
    if not stored and _PATTERN not in options.values:
        folders = " or ".join(str(options.values[key]) for key in STARTS if key in options.values)
        cure = "give the flags of the model, or the directory of a run's checkpoints"
        options.refuse(_FLAG, "", f"finds no checkpoint in {folders}", cure)
        options.expect(_expected())
        return ""
    if stored and trains:
        options.problems += _precision_problem(options, stored)
    return _taken(options, _chosen(options, stored, trains=trains), f" ({_FLAG})")


def take_adapters(options: GivenOptions, read: ReadStored) -> str:
    """Take the options of the adapters in ``--load-adapter`` that are not given.

    Args:
        options: those of the command line.
        read: reads a checkpoint.
    Returns:
        A line with the options of the adapters; empty if none is taken.
    """
    others = {key: value for key, value in options.values.items() if key != "checkpoint.ckpt_step"}
    try:
        stored = read({**others, "checkpoint.load": options.values[ADAPTERS]})
    except ConfigError as error:
        options.problems += error.problems
        return ""
    keys = {*keys_of_adapters()} - options.values.keys() - options.unsound
    taken = [(field, value) for field, value in stored_values(stored or {}) if field.key in keys]
    return _taken(options, iter(taken), " (--load-adapter)")


def take_for_inference(options: GivenOptions, read: ReadStored) -> str:
    """Take all options of the checkpoint that text generation uses, except those that are given.

    With ``--use-checkpoint-args`` the model's options replace given ones, as in `take_stored`.
    Other options of a run, for example of its optimizer, are removed, so that they need not agree
    with each other.

    Returns:
        A line with the options of the checkpoint; empty if none is taken.
    """
    for key in [key for key in options.values if not _infers(key)]:
        del options.values[key]
        options.sources.pop(key, None)
    stored = _read(options, read) if options.loads else {}
    line = ""
    if stored:
        line = _taken(options, _chosen(options, stored, infers=True))
    options.values |= {"optim.lr": 0.0, "training.train_iters": 1}
    options.values.setdefault(_LENGTH, UNKNOWN_LENGTH)
    if options.values.get(_TYPE) != TRAINED_BPE:
        for name in OF_TRAINED_BPE:
            options.values.pop(f"data.{name}", None)
    if not any(options.values.get(key) for key in TRAINING_DATA):
        options.values["data.data_path"] = NO_DATA
    return line


def with_stored_cure(options: GivenOptions, problems: Sequence[Problem]) -> list[Problem]:
    """Return problems in which a missing option that a checkpoint may contain has this cure, too."""
    if not options.loads or options.uses_checkpoint:
        return list(problems)
    stored = {field.flag for field in every_field() if field.key in _expected()}
    cured = []
    for problem in problems:
        if problem.option in stored and not problem.value and problem.rule.startswith(MISSING):
            cure = f"{problem.cure}, or take it from the loaded checkpoint with {_FLAG}"
            problem = replace(problem, cure=cure)
        cured.append(problem)
    return cured


def _infers(key: str) -> bool:
    section, _, name = key.partition(".")
    return section == ModelConfig.title or name in _OF_INFERENCE.get(section, ())


def _precision_problem(options: GivenOptions, stored: Stored) -> list[Problem]:
    """Return the problem of a training run in another precision than its checkpoint's.

    The load refuses it too, but only after the data was tokenised.
    """
    stored_bf16, run_bf16 = stored["training"]["bf16"], bool(options.values.get(_BF16))
    if stored_bf16 == run_bf16 or _BF16 in options.unsound:
        return []
    rule = f"is {'not ' * stored_bf16}given, and the checkpoint was made {'with' if stored_bf16 else 'without'} it"
    cure = "give it; a load does not change precisions"
    return [
        Problem(
            "--bf16", "", rule, cure if stored_bf16 else cure.replace("give it", "leave it out")
        )
    ]


def _expected() -> list[str]:
    """Return the keys of options that are not missing if the checkpoint cannot be read."""
    return [*(field.key for field in section_fields(ModelConfig)), _LENGTH]


def _read(options: GivenOptions, read: ReadStored) -> Stored | None:
    """Return the configuration in the checkpoint; None after a problem was added to ``options``."""
    try:
        return read(options.values) or {}  # a new run has no checkpoint yet
    except ConfigError as error:
        options.problems += error.problems
        options.expect(_expected())
        return None


def _taken(options: GivenOptions, changes: Iterator[tuple[Field, Any]], by: str = "") -> str:
    """Set the options, and return the line that names those that change a value."""
    shown_flags = []
    for field, stored_value in changes:
        is_given, previous_value = (
            field.key in options.values,
            options.values.get(field.key, field.default),
        )
        stored_value = tuple(stored_value) if isinstance(stored_value, list) else stored_value
        options.unsound.discard(field.key)
        options.values[field.key], options.sources[field.key] = stored_value, STORED
        if stored_value != previous_value:
            flag = (
                f"{field.flag} {as_given(field, stored_value)}"
                if stored_value is None
                else as_flag(field, stored_value)
            )
            instead = is_given and field.section == ModelConfig.title
            shown_flags.append(
                f"{flag} instead of {as_given(field, previous_value)}" if instead else flag
            )
    return f"options of the checkpoint{by}: {'; '.join(shown_flags)}" if shown_flags else ""


def _chosen(
    options: GivenOptions, stored: Stored, *, trains: bool = False, infers: bool = False
) -> Iterator[tuple[Field, Any]]:
    """Yield the options that come from the checkpoint, with their stored values.

    Args:
        options: those of the command line.
        stored: configuration in the checkpoint.
        trains: the program trains, in a precision of its own (`take_stored`).
        infers: text generation takes all options that it uses (`take_for_inference`).
    """
    values, named = options.values, options.values.keys() | options.unsound
    replaces = not infers or bool(values.get("checkpoint.use_checkpoint_args"))
    of_training = (*PRECISION, "seed") if infers else PRECISION
    takes_tokenizer = _takes_tokenizer(options, stored)
    trained = stored.get("data", {}).get("tokenizer_type") == TRAINED_BPE and takes_tokenizer
    for field, stored_value in stored_values(stored):
        takes, name = field.key not in named, field.name
        if field.section == ModelConfig.title:
            takes |= replaces and not field.option.training_only
        elif field.key in TOKENIZER_CHOICE:
            takes &= takes_tokenizer
        elif field.option.resume == "chat":
            # Without --sft, texts have no chat template.
            applies = infers or values.get("data.sft") or name == "special_tokens_in_text"
            takes &= bool(applies) and not _other_form(field, named)
        elif field.section == "data":
            takes &= infers and _infers(field.key)
            if name in OF_TRAINED_BPE:
                takes &= trained and named.isdisjoint(TRAINING_DATA)
        elif field.key == _LENGTH:
            # A document may be longer than a pack has slots for one sample.
            longest = stored["packing"].get("max_document_length") if infers else None
            stored_value = longest or stored_value
        else:
            takes &= field.section == "training" and name in of_training and not trains
            # TransformerEngine runs on GPUs only, and local layers compute the same.
            if infers and name == "transformer_impl":
                takes &= values.get("training.device") != "cpu"
        if takes:
            yield field, stored_value


def _takes_tokenizer(options: GivenOptions, stored: Stored) -> bool:
    """Return whether options of the tokenizer that are not given come from the checkpoint.

    They do unless a given option belongs to another type of tokenizer. A tokenizer that was moved
    needs only its new path.
    """
    data, named = stored.get("data", {}), options.values.keys() | options.unsound
    if _TYPE in named:
        return bool(options.values.get(_TYPE) == data.get("tokenizer_type"))
    files = [name for name in _TOKENIZER_FILES if f"data.{name}" in named]
    return all(data.get(name) is not None for name in files)


def _other_form(field: Field, named: Mapping[str, Any] | set[str]) -> bool:
    """Return whether the other one of two options that contradict each other is given."""
    return field.name in _FORMS and any(
        f"data.{name}" in named for name in _FORMS if name != field.name
    )
