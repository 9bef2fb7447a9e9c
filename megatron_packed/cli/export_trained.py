"""Export of a run's checkpoint as a Hugging Face model, with the run's tokenizer.

The options of the model and of the tokenizer come from the checkpoint, so no config.json of another
model is needed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from megatron_packed.checkpoint.errors import CheckpointError
from megatron_packed.checkpoint.load import Step
from megatron_packed.checkpoint.original_facts import (
    CONFIG,
    IDS,
    MAX_POSITIONS,
    TOKENIZER_HASH,
)
from megatron_packed.checkpoint.run_metadata import (
    ORIGINAL,
    metadata_problem,
    tokenizer_warning,
)
from megatron_packed.config import flag_names as flags
from megatron_packed.config.hub_paths import MODEL
from megatron_packed.config.run import RunConfig
from megatron_packed.config.sections.data import DataConfig
from megatron_packed.config.sections.data_parts.tokenizer import (
    BYTES,
    GPT2,
    HUGGING_FACE,
    MODEL_FILES,
    SENTENCEPIECE,
    TRAINED_BPE,
)
from megatron_packed.data.sources.hub import local_path
from megatron_packed.data.tokenizers.base import ByteTokenizer, Tokenizer, meaning_hash, vocabulary
from megatron_packed.data.tokenizers.chat_format import (
    OWN_TEMPLATES,
    lacks_chatml,
    template_source,
)
from megatron_packed.data.tokenizers.exported_files import (
    Files,
    files_of_bytes,
    files_of_gpt2,
    files_of_huggingface,
)
from megatron_packed.data.tokenizers.huggingface import HuggingFaceTokenizer
from megatron_packed.data.tokenizers.prompt_formats import DEFAULT_TEMPLATE, FORMATS_BY_NAME
from megatron_packed.data.tokenizers.served_template import served_template
from megatron_packed.inputs.open_documents import build_tokenizer
from megatron_packed.inputs.prompts import encode_prompts, texts
from megatron_packed.models.convert.export_huggingface import (
    trained_to_huggingface,
)
from megatron_packed.models.convert.families.family import Family
from megatron_packed.models.convert.import_huggingface import OnProgress, silent
from megatron_packed.models.convert.stored_weights import StoredWeights, WeightSource
from megatron_packed.models.convert.trained_config import SpecialIds, TrainedOptions, family_for
from megatron_packed.resume.adapters import refusal_as_whole
from megatron_packed.training.trained_model import stored_run


class Exported(NamedTuple):
    """Exported model."""

    family: Family
    ends: tuple[str, ...]
    """Spellings of the tokens that end an answer; empty if the checkpoint names no tokenizer."""
    missing: str
    """Sentence about tokenizer files that the model lacks; empty if none is missing."""
    warning: str | None
    """Sentence about a tokenizer that is not that of the training; None if it is."""
    positions: str
    """Sentence about documents of the training that are longer than ``max_position_embeddings``;
    empty if there is none.
    """


def export_trained(
    checkpoint: str | os.PathLike[str] | WeightSource,
    directory: str | os.PathLike[str],
    *,
    step: Step = None,
    family: str | None = None,
    tokenizer: str | None = None,
    on_progress: OnProgress = silent,
) -> Exported:
    """Write a checkpoint as a Hugging Face model, with config.json and the tokenizer's files.

    Args:
        checkpoint: see `checkpoint_to_export`.
        directory: new directory of the model.
        step: export the checkpoint of this step, or with ``"best"`` that of the lowest validation
            loss; None exports the newest.
        family: a ``model_type``, for example ``llama``; None takes the first that fits.
        tokenizer: present path of the tokenizer, if it was moved after the training.
    Raises:
        CheckpointError: no family can hold the model, or the checkpoint cannot be read.
        DataError: the tokenizer cannot be read.
    """
    source = checkpoint_to_export(checkpoint, step)
    found, metadata = source.path, source.manifest.metadata
    stored = metadata["config"]
    config = stored_run(stored, found, None, "cpu")
    family_for(config.model, family)  # refuse the model before any file is read
    files: Files = {}
    used, missing, ids, warning = None, _NO_TOKENIZER, SpecialIds(), None
    if tokenizer is not None or "data" in stored:
        data = config.data if tokenizer is None else moved_tokenizer(config.data, tokenizer)
        used = build_tokenizer(data, config.model.vocab_size, build_missing=False)
        files, missing = tokenizer_files(data, used)
        ids = special_ids(config, used)
        warning = tokenizer_warning(found, metadata, meaning_hash(used))
    elif config.model.vocab_size is None:
        raise CheckpointError("names no vocabulary", path=found)
    model = config.model
    if used is not None:
        model = replace(model, vocab_size=vocabulary(used, model.vocab_size))
    options = TrainedOptions(
        model=model,
        bf16=config.training.bf16,
        max_positions=_max_positions(config, metadata),
        ids=ids,
        original=kept_facts(config, metadata, used),
    )
    made = trained_to_huggingface(
        source,
        Path(directory),
        options,
        family=family,
        tokenizer_files=files,
        on_progress=on_progress,
    )
    ends = () if used is None else tuple(used.decode([end]) for end in ids.ends)
    if used is not None:
        used.close()
    return Exported(made, ends, missing, warning, _longer(config, options, stored))


def checkpoint_to_export(
    checkpoint: str | os.PathLike[str] | WeightSource, step: Step = None
) -> WeightSource:
    """Return the weights that an export of ``checkpoint`` takes.

    Args:
        checkpoint: one checkpoint, or a directory of checkpoints, of which the newest is exported;
            or weights that are merged with adapters.
    Raises:
        CheckpointError: there is none, its metadata is damaged, or it holds adapters alone.
    """
    if isinstance(checkpoint, (str, os.PathLike)):
        checkpoint = StoredWeights.newest(Path(checkpoint), step)
    metadata = checkpoint.manifest.metadata
    problem = metadata_problem(metadata) or refusal_as_whole(metadata)
    if problem is not None:
        raise CheckpointError(problem, path=checkpoint.path)
    return checkpoint


_NO_TOKENIZER = (
    "The checkpoint names no tokenizer, so the model has no tokenizer files and no token that ends "
    f"an answer. To add them, give {flags.TOKENIZER_MODEL}."
)


def _max_positions(config: RunConfig, metadata: Mapping[str, Any]) -> int | None:
    """Return ``max_position_embeddings``: the option of the run, else that of the original.

    A model that was trained from scratch has that of its longest document. None if the config.json
    of the original has no value.
    """
    if config.model.max_position_embeddings is None and ORIGINAL in metadata:
        positions: int | None = metadata[ORIGINAL].get(CONFIG, {}).get(MAX_POSITIONS)
        return positions
    return config.max_positions


def _longer(config: RunConfig, options: TrainedOptions, stored: Mapping[str, Any]) -> str:
    trained, positions = config.packing.max_document_length, options.max_positions
    if "packing" not in stored or positions is None or trained <= positions:
        return ""
    return (
        f"{MAX_POSITIONS} is {positions:,}, as in the original, but documents of the training may have "
        f"{trained:,} tokens ({flags.MAX_DOCUMENT_LENGTH}). To raise the value, edit config.json, or "
        f"train with {flags.MAX_POSITION_EMBEDDINGS}."
    )


def kept_facts(
    config: RunConfig, metadata: Mapping[str, Any], used: Tokenizer | None
) -> dict[str, Any]:
    """Return the facts of the original, without token numbers that no longer hold.

    The ends of the training's answers replace those of the original. With another tokenizer, for
    example one learned from the training data, token numbers mean other text.

    Args:
        used: tokenizer of the export; None if there is none.
    """
    facts = metadata.get(ORIGINAL, {})
    then = facts.get(TOKENIZER_HASH, "")
    now = metadata.get("tokenizer_hash", "") if used is None else meaning_hash(used)
    # The original's tokenizer is not at hand, so its other ends might be tokens of other text.
    gone: tuple[str, ...] = ("eos_token_id",) if config.data.sft else ()
    # Not `config`, which names the copy of this tokenizer in the checkpoint as a file.
    is_learned = metadata["config"].get("data", {}).get("tokenizer_type") == TRAINED_BPE
    if is_learned or (then and now and then != now):
        gone = IDS
    return {
        part: {key: value for key, value in keys.items() if key not in gone}
        for part, keys in facts.items()
        if part != TOKENIZER_HASH
    }


def moved_tokenizer(data: DataConfig, path: str) -> DataConfig:
    """Return the options of the data with a tokenizer that is read from ``path``."""
    if data.tokenizer_type in MODEL_FILES:
        return replace(data, tokenizer_model=path)
    return replace(
        data,
        tokenizer_type=HUGGING_FACE,
        tokenizer_model=path,
        vocab_file=None,
        merge_file=None,
        null_tokenizer_eod_id=None,
    )


def special_ids(config: RunConfig, tokenizer: Tokenizer) -> SpecialIds:
    """Return the tokens with a meaning; the end of a turn comes before the end of a document."""
    # A NullTokenizer encodes numbers only.
    ends = encode_prompts(config, tokenizer, texts(["0"])).ends
    ordered = sorted(ends, key=lambda end: (end == tokenizer.eod_id, end))
    pad = None if tokenizer.pad_id == tokenizer.eod_id else tokenizer.pad_id
    bos = tokenizer.prefix_ids[0] if len(tokenizer.prefix_ids) == 1 else None
    return SpecialIds(bos=bos, pad=pad, ends=tuple(ordered))


def tokenizer_files(data: DataConfig, tokenizer: Tokenizer) -> tuple[Files, str]:
    """Return the tokenizer's files, and a sentence about files that cannot be written."""
    templates = trained_templates(data, tokenizer)
    template = None if templates is None else templates.default
    kind = data.tokenizer_type
    if kind == BYTES:
        return files_of_bytes(ByteTokenizer(), template), ""
    if kind == TRAINED_BPE:
        assert isinstance(tokenizer, HuggingFaceTokenizer)
        return files_of_huggingface(tokenizer.path, template), ""
    if kind == HUGGING_FACE:
        return files_of_huggingface(_tokenizer_path(data), template), ""
    if kind == GPT2:
        return files_of_gpt2(Path(str(data.vocab_file)), Path(str(data.merge_file)), template), ""
    if kind == SENTENCEPIECE:
        said = (
            "Only tokenizer.model was copied. transformers may need more files of this tokenizer."
        )
        return {"tokenizer.model": _tokenizer_path(data)}, said
    return {}, f"A {kind} has no files for transformers, so the model has no tokenizer."


def _tokenizer_path(data: DataConfig) -> Path:
    return Path(local_path(str(data.tokenizer_model), MODEL))


_CURE_OF_TRAINING = re.compile(f"; give {flags.CHAT_TEMPLATE}[^']*")
"""Cure in the errors of this project's templates. The template of a model has no such option."""


class ServedTemplates(NamedTuple):
    """Chat templates that print on a server what the training printed."""

    default: str
    for_tools: str | None
    """Template for conversations with tools; None if ``default`` prints them."""


def trained_templates(data: DataConfig, tokenizer: Tokenizer) -> ServedTemplates | None:
    """Return the chat templates of a training; None if no template rendered its conversations."""
    if not data.sft or data.sft_tokenizer_prompt_format == "identity":
        return None
    form = FORMATS_BY_NAME.get(data.sft_tokenizer_prompt_format or "")
    source, for_tools = template_source(tokenizer, data.chat_template), None
    if form is not None and form.template is not None:
        source = form.template
    elif data.chat_template is None:
        for_tools = tokenizer.tool_chat_template
    if source is None:
        if lacks_chatml(tokenizer):
            return None
        source = DEFAULT_TEMPLATE

    def served(template: str) -> str:
        if template in OWN_TEMPLATES:
            template = _CURE_OF_TRAINING.sub("", template)
        return served_template(template, data.chat_template_kwargs, tokenizer.template_variables)

    return ServedTemplates(served(source), None if for_tools is None else served(for_tools))
