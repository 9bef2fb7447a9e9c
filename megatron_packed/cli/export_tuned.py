"""Export of a fine-tuned model in the form of its original, with the chat format of the training.

The export gets the chat template of the training, and the tokens at which its answers end. A model
that is prompted in another way, or does not stop, gives other answers.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

from megatron_packed.checkpoint.load import Step
from megatron_packed.checkpoint.original_facts import GENERATION_CONFIG
from megatron_packed.checkpoint.run_metadata import tokenizer_warning
from megatron_packed.checkpoint.sealed_json import parse_object, read_small_file
from megatron_packed.cli.export_trained import (
    ServedTemplates,
    checkpoint_to_export,
    moved_tokenizer,
    special_ids,
    tokenizer_files,
    trained_templates,
)
from megatron_packed.config import flag_names as flags
from megatron_packed.config.run import RunConfig
from megatron_packed.config.sections.data_parts.tokenizer import (
    BYTES,
    GPT2,
    HUGGING_FACE,
    TRAINED_BPE,
)
from megatron_packed.data.errors import DataError
from megatron_packed.data.tokenizers.base import Tokenizer, meaning_hash
from megatron_packed.data.tokenizers.chat_format import TemplateFormat
from megatron_packed.data.tokenizers.exported_files import Files, files_of_template
from megatron_packed.data.tokenizers.huggingface_settings import CONFIG as SETTINGS
from megatron_packed.data.tokenizers.huggingface_settings import (
    TEMPLATE,
    default_template,
    read_templates,
    tool_template,
)
from megatron_packed.data.tokenizers.served_template import served_template
from megatron_packed.data.tokenizers.untrusted_tokenizer import open_tokenizer
from megatron_packed.inputs.open_documents import build_tokenizer
from megatron_packed.models.convert.answer_ends import ends_of, with_ids
from megatron_packed.models.convert.export_huggingface import (
    TOKENIZER_FILES,
    Converted,
    check_new,
    to_huggingface,
)
from megatron_packed.models.convert.huggingface_config import MAX_CONFIG_BYTES, read_config
from megatron_packed.models.convert.import_huggingface import CONFIG, TOKENIZER, OnProgress, silent
from megatron_packed.models.convert.stored_weights import WeightSource
from megatron_packed.models.convert.trained_config import json_text
from megatron_packed.training.trained_model import stored_run

_WRITTEN = (HUGGING_FACE, TRAINED_BPE, BYTES, GPT2)
"""Types of tokenizers whose files can take the place of the original's. The others write no files for
transformers, or not all of them."""


class Tuned(NamedTuple):
    """Exported model."""

    converted: Converted
    sentences: tuple[str, ...]
    """Differences from the original's files beside the weights, and other facts about serving."""
    warning: str | None
    """Sentence about a tokenizer that is not that of the training; None if it is."""


def export_tuned(
    checkpoint: Path | WeightSource,
    directory: Path,
    config: Path,
    *,
    base: Path | None = None,
    step: Step = None,
    ignored: Collection[str] = (),
    tokenizer: str | None = None,
    keep_base_template: bool = False,
    on_progress: OnProgress = silent,
) -> Tuned:
    """Write a checkpoint as a model in the form of its original; see `to_huggingface`.

    If the checkpoint is of a run with ``--sft``, then the model gets the chat template of the run,
    and ``eos_token_id`` begins with the tokens that end its answers.

    Args:
        checkpoint: see `checkpoint_to_export`.
        config: the config.json of the original. The original's other files are next to it.
        base: directory of the original's tensors; see `to_huggingface`.
        step: export the checkpoint of this step, or with ``"best"`` that of the lowest validation
            loss; None exports the newest.
        tokenizer: present path of the tokenizer, if it was moved after the training.
        keep_base_template: keep the chat template of the original.
    Raises:
        CheckpointError: as `to_huggingface`.
        DataError: the tokenizer or the chat template of the training cannot be read.
    """
    # Wrong paths are refused before a tokenizer is read.
    check_new(directory)
    read_config(config)
    source = checkpoint_to_export(checkpoint, step)
    chat = chat_files(source.manifest.metadata, source.path, config, tokenizer, keep_base_template)
    converted = to_huggingface(
        source,
        directory,
        config,
        base=base,
        ignored=ignored,
        replaced=chat.replaced,
        on_progress=on_progress,
    )
    return Tuned(converted, chat.sentences, chat.warning)


class ChatFiles(NamedTuple):
    """Files of a base that the chat format of a training changes."""

    replaced: Mapping[str, str | Path | None] = {}
    """Text of each file, or the file to copy; None for a file to leave out."""
    sentences: tuple[str, ...] = ()
    """Differences from the files of the base."""
    warning: str | None = None
    """See `Tuned`."""


def chat_files(
    metadata: Mapping[str, Any],
    checkpoint: Path,
    config: Path,
    tokenizer: str | None,
    keep_base_template: bool,
) -> ChatFiles:
    """Return the files that a run with ``--sft`` changes; none for another run.

    Args:
        metadata: metadata of the checkpoint of the run.
        config, tokenizer, keep_base_template: see `export_tuned`.
    Raises:
        DataError: the tokenizer or the chat template of the training cannot be read.
    """
    if not metadata["config"].get("data", {}).get("sft"):
        return ChatFiles()
    run = stored_run(metadata["config"], checkpoint, None, "cpu")
    chat = _TrainedChat(run, metadata, config.parent, tokenizer)
    try:
        replaced, left_out, sentences = chat.files(config, keep_base_template)
        warning = tokenizer_warning(checkpoint, metadata, meaning_hash(chat.tokenizer))
        return ChatFiles({**left_out, **replaced}, sentences, warning or chat.warning)
    finally:
        chat.tokenizer.close()


class _TrainedChat:
    """Chat format of a run, and the files of the original that it changes.

    Args:
        run: options of the run.
        metadata: metadata of its checkpoint.
        original: directory of the original's files.
        path: present path of the tokenizer; None for the path of the training.
    """

    def __init__(
        self, run: RunConfig, metadata: Mapping[str, Any], original: Path, path: str | None
    ) -> None:
        self._run = run
        self._original = original
        self._data = run.data if path is None else moved_tokenizer(run.data, path)
        base = open_tokenizer(original) if os.path.lexists(original / TOKENIZER) else None
        try:
            self.tokenizer = build_tokenizer(self._data, run.model.vocab_size, build_missing=False)
        except DataError:
            # The files of the training may be gone. Its template must not have been among them.
            same = base is not None and meaning_hash(base) == metadata.get("tokenizer_hash")
            if not same or run.data.chat_template is None:
                raise
            self.tokenizer = cast("Tokenizer", base)
        self._replaces_tokenizer = self._data.tokenizer_type in _WRITTEN and not _are_equal(
            self.tokenizer, base
        )
        self._keeps_ids = base is None or _has_tokens_of(self.tokenizer, base)
        if base is not None and base is not self.tokenizer:
            base.close()

    @property
    def warning(self) -> str | None:
        """Sentence about a tokenizer of the training that differs and cannot be written."""
        if self._keeps_ids or self._replaces_tokenizer:
            return None
        return (
            f"the original's tokenizer has other tokens than the {self._data.tokenizer_type} of the training, "
            "which has no files for transformers, so token numbers mean other text there."
        )

    def files(
        self, config: Path, keeps_template: bool
    ) -> tuple[Files, dict[str, None], tuple[str, ...]]:
        """Return the changed files, the files to leave out, and sentences about both."""
        files: Files = {}
        left_out: dict[str, None] = {}
        parts, sentences = [], []
        if self._replaces_tokenizer:
            left_out = dict.fromkeys(TOKENIZER_FILES)
            files, _ = tokenizer_files(self._data, self.tokenizer)
            parts.append("the tokenizer is that of the training")
        templates = trained_templates(self._data, self.tokenizer)
        if templates is not None and templates != self._original_templates():
            if keeps_template:
                sentences.append(
                    f"The chat template is the original's ({flags.KEEP_BASE_TEMPLATE}); the training had another one."
                )
                if SETTINGS in files:
                    files |= self._original_template_files(files[SETTINGS])
            else:
                # A tokenizer of the training has its own settings: they name its special tokens.
                settings = files.get(SETTINGS)
                files |= files_of_template(self._original, *templates, settings=settings)
                parts.append("the chat template is that of the training")
        if self._data.sft_tokenizer_prompt_format == "identity":
            sentences.append(
                "The conversations of the training came rendered (--sft-tokenizer-prompt-format identity), so the "
                "chat template is the original's."
            )
        # If the original has these ends, its files keep every byte.
        ids = special_ids(self._run, self.tokenizer)
        fields, generation = _read(config), self._generation()
        known = set(ids.ends) <= set(ends_of(fields, generation))
        if not (known and self._keeps_ids):
            changed = with_ids(fields, generation, ids, keeping=self._keeps_ids)
            files[CONFIG], files[GENERATION_CONFIG] = map(json_text, changed)
            spelled = " or ".join(self.tokenizer.decode([end]) for end in ids.ends)
            parts.append(f"answers end at {spelled} (eos_token_id)")
        if parts:
            cure = f" {flags.KEEP_BASE_TEMPLATE} keeps the original's template." * (
                TEMPLATE in files
            )
            sentences.insert(0, f"Unlike the original: {'; '.join(parts)}.{cure}")
        sentences += self._sentences_of_date(templates)
        return files, left_out, tuple(sentences)

    def _original_template_files(self, settings: str | Path) -> Files:
        """Return the original's chat template with the settings of another tokenizer."""
        found = read_templates(self._original / TOKENIZER)
        default = default_template(found)
        if default is not None:
            return files_of_template(
                self._original, default, tool_template(found), settings=settings
            )
        assert isinstance(settings, str)
        fields = json.loads(settings)
        return {SETTINGS: json_text({k: v for k, v in fields.items() if k != "chat_template"})}

    def _original_templates(self) -> ServedTemplates | None:
        found = read_templates(self._original / TOKENIZER)
        default, for_tools = default_template(found), tool_template(found)
        if default is None:
            return None
        return ServedTemplates(
            served_template(default), None if for_tools is None else served_template(for_tools)
        )

    def _generation(self) -> dict[str, Any] | None:
        file = self._original / GENERATION_CONFIG
        return _read(file) if os.path.lexists(file) else None

    def _sentences_of_date(self, templates: ServedTemplates | None) -> list[str]:
        if templates is None or not self._prints_date(templates.default):
            return []
        date = self._data.chat_template_date
        given = "got none" if date is None else f"got {date}"
        return [
            f"The chat template prints the date: the training {given} ({flags.CHAT_TEMPLATE_DATE}), and a server "
            "gives today's."
        ]

    def _prints_date(self, template: str) -> bool:
        """Return whether prompts of two days differ."""
        prompts = set()
        # A template may ask for the date and then print another date, for example a variable.
        for date in ("2001-01-01", "2002-02-02") if "strftime_now" in template else ():
            form = TemplateFormat(template, self.tokenizer, date=date)
            try:
                prompts.add(form.complete_text([{"role": "user", "content": "0"}]))
            finally:
                form.close()
        return len(prompts) > 1


def _are_equal(tokenizer: Tokenizer, other: Tokenizer | None) -> bool:
    """Return whether two tokenizers have the same tokens, as far as their spellings show it."""
    if other is None:
        return False
    same = tokenizer.vocab_size == other.vocab_size
    same = same and tokenizer.special_tokens == other.special_tokens
    return same and meaning_hash(tokenizer) == meaning_hash(other)


def _has_tokens_of(tokenizer: Tokenizer, other: Tokenizer) -> bool:
    """Return whether the tokens of ``other`` have the same numbers in ``tokenizer``."""
    same = meaning_hash(tokenizer) == meaning_hash(other)
    return same and other.special_tokens.items() <= tokenizer.special_tokens.items()


def _read(file: Path) -> dict[str, Any]:
    plain = Path(os.path.realpath(file))
    return parse_object(read_small_file(plain, MAX_CONFIG_BYTES), file, finite=False)
