"""Files that a run attaches to its checkpoints, and their use by later runs and for inference.

A ``TrainedBPETokenizer`` is made from the training data, and a chat template is read from a file.
Data, cache and files may be gone or changed when the checkpoint is used, so the checkpoint has a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron_packed.checkpoint.rank_agreement import Ranks
from megatron_packed.checkpoint.run_metadata import FOLDER, found_paths, metadata_problem
from megatron_packed.config.run import STORED, RunConfig
from megatron_packed.config.sections.data import DataConfig
from megatron_packed.config.sections.data_parts.tokenizer import (
    CHAT_TEMPLATES,
    HUGGING_FACE,
    TRAINED_BPE,
)
from megatron_packed.data.tokenizers.base import Tokenizer
from megatron_packed.data.tokenizers.chat_format import template_source
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.inputs.open_documents import build_tokenizer

if TYPE_CHECKING:
    from megatron_packed.checkpoint.load import Step

# transformers' name of the file would make it the template of the tokenizer.json next to it.
TEMPLATE = "template.jinja"
"""Name of the attached chat template."""


def files_to_attach(options: DataConfig, tokenizer: Tokenizer) -> dict[str, str]:
    """Return the texts that the checkpoints of a run contain, by file name.

    Args:
        options: options of the data.
        tokenizer: the tokenizer that `build_tokenizer` returns for them.
    Raises:
        DataError: the chat template cannot be read.
    """
    texts: dict[str, str] = {}
    # Other tokenizers are files of the user: they may be large, and other runs share them. Only the
    # paths of such files are stored.
    if options.tokenizer_type == TRAINED_BPE:
        from megatron_packed.data.tokenizers.bpe_training import files_of_trained
        from megatron_packed.data.tokenizers.huggingface import HuggingFaceTokenizer

        assert isinstance(tokenizer, HuggingFaceTokenizer)
        texts |= files_of_trained(tokenizer)
    if _is_file(options.chat_template) or _uses_own_template(options, tokenizer):
        source = template_source(tokenizer, options.chat_template)
        assert source is not None
        texts[TEMPLATE] = source
    return texts


def _uses_own_template(options: DataConfig, tokenizer: Tokenizer) -> bool:
    """Return whether the one template of the tokenizer's files renders the conversations."""
    renders = options.sft and options.sft_tokenizer_prompt_format in (None, "default")
    # Only the tokenizer itself can offer a second template for tools.
    has_one_template = tokenizer.chat_template is not None and tokenizer.tool_chat_template is None
    return renders and options.chat_template is None and has_one_template


class StoredFiles(NamedTuple):
    """Attached files of a checkpoint, with the options of its data."""

    checkpoint: Path
    data: Mapping[str, Any]
    """Section of the data in the checkpoint's configuration."""
    texts: Mapping[str, str]
    folder: str | None = None
    """Working directory of the run; None for a checkpoint of an earlier version."""

    def trained_tokenizer(self, options: DataConfig) -> str | None:
        """Return the tokenizer.json of the checkpoint's ``TrainedBPETokenizer``.

        Returns None if the options name another tokenizer, or the checkpoint has no such file.
        """
        # Another size requests another tokenizer, which the load then refuses or reports.
        same = options.tokenizer_vocab_size == self.data.get("tokenizer_vocab_size")
        if options.tokenizer_type != TRAINED_BPE or not same:
            return None
        from megatron_packed.data.tokenizers.huggingface_settings import TOKENIZER_JSON

        return self.texts.get(TOKENIZER_JSON)

    def with_template(self, options: DataConfig, *, prefers_stored: bool) -> DataConfig:
        """Return the options with the path of the checkpoint's chat template.

        Args:
            options: options of the data.
            prefers_stored: take the checkpoint's template although the file that the options name
                exists, or the tokenizer has a template. The options must be those of the training.
        """
        path = options.chat_template
        if TEMPLATE not in self.texts or path != self.data.get("chat_template"):
            return options
        if path is None and not prefers_stored:  # the tokenizer's own template, as it is now
            return options
        # A given flag names the file itself. If its text has changed, the data differs, and the
        # load says so: see `changed_files`.
        if path is not None and Path(path).is_file() and not prefers_stored:
            return options
        return replace(options, chat_template=str(self.checkpoint / TEMPLATE))

    def changed_files(self, options: DataConfig, attached: Mapping[str, str]) -> str:
        """Return a clause about a chat template that has another text than the checkpoint's.

        Args:
            options: options of the data of a run that starts from the checkpoint.
            attached: the files that its own checkpoints will contain.
        """
        stored_text, text = self.texts.get(TEMPLATE), attached.get(TEMPLATE)
        if stored_text is None or text is None or stored_text == text:
            return ""
        if options.chat_template is None:
            return (
                "the chat template of the tokenizer has changed "
                f"(--chat-template {self.checkpoint / TEMPLATE} is the text of the checkpoint)"
            )
        return (
            f"the text of --chat-template {options.chat_template} has changed "
            "(--use-checkpoint-args without this flag takes the text of the checkpoint)"
        )

    def for_inference(self, options: DataConfig, *, prefers_stored: bool) -> DataConfig:
        """Return the options with the paths of the checkpoint's tokenizer and chat template.

        The tokenizer is then read as any ``tokenizer.json``, in a process of its own. Relative
        paths of other tokenizers are found from another working directory, too.
        """
        # First, because the paths of attached files replace those of the options.
        moved: dict[str, Any] = dict(found_paths(vars(options), self.folder))
        if moved:
            options = replace(options, **moved)
        if self.trained_tokenizer(options) is not None:
            path = str(self.checkpoint)
            options = replace(options, tokenizer_type=HUGGING_FACE, tokenizer_model=path)
        return self.with_template(options, prefers_stored=prefers_stored)


def stored_files(
    folder: str,
    step: Step = None,
    groups: ParallelGroups | None = None,
    *,
    warn: Callable[[str], None] | None = None,
) -> StoredFiles | None:
    """Read the attached files of the newest checkpoint in which they are intact.

    A collective if ``groups`` is given. Rank 0 reads.

    Args:
        folder: directory of a run's checkpoints, or one checkpoint.
        step: take only this step.
        groups: process groups; None for one process.
        warn: receives a line for each checkpoint with damaged files; None prints to standard error.
    Returns:
        The files; None if there is no checkpoint, or its metadata is invalid, which the load reports.
    Raises:
        CheckpointError: the attached files of no checkpoint are intact.
    """
    from megatron_packed.checkpoint.load import read_attachments

    ranks = Ranks.from_groups(groups)
    attachments = read_attachments(folder, ranks=ranks, step=step, warn=warn)
    # The load reads the same metadata later, and refuses it with its problem.
    if attachments is None or metadata_problem(attachments.metadata) is not None:
        return None
    data = attachments.metadata["config"].get("data", {})
    return StoredFiles(attachments.path, data, attachments.texts, attachments.metadata.get(FOLDER))


def files_of_start(config: RunConfig, groups: ParallelGroups | None = None) -> StoredFiles | None:
    """Return the attached files of the checkpoint with which a run starts; None without one.

    A collective if ``groups`` is given.

    Raises:
        CheckpointError: see `stored_files`.
    """
    options = config.checkpoint
    # The order of `restore`: a run that has saved a checkpoint continues with its own files.
    files = None
    if options.load is not None:
        files = stored_files(options.load, options.ckpt_step, groups)
    if files is None and options.pretrained_checkpoint is not None:
        files = stored_files(options.pretrained_checkpoint, None, groups)
    return files


def with_stored_template(config: RunConfig, files: StoredFiles | None) -> RunConfig:
    """Return the configuration of a run, with the path of a readable chat template.

    The template of the checkpoint is used if ``--use-checkpoint-args`` took the option from it, or
    if the file does not exist any more.
    """
    if files is None:
        return config
    from_checkpoint = (config.origins or {}).get("data.chat_template") == STORED
    return replace(config, data=files.with_template(config.data, prefers_stored=from_checkpoint))


def with_tokenizer(config: RunConfig) -> tuple[RunConfig, Tokenizer]:
    """Return the tokenizer of a run in one process, and the configuration for its documents.

    Both are those of the checkpoint with which the run starts, as in `build_data`.

    Raises:
        CheckpointError: see `stored_files`.
        DataError: see `build_tokenizer`.
    """
    files = files_of_start(config)
    config = with_stored_template(config, files)
    trained = None if files is None else files.trained_tokenizer(config.data)
    return config, build_tokenizer(config.data, config.model.vocab_size, trained=trained)


def _is_file(chat_template: str | None) -> bool:
    return chat_template is not None and chat_template not in CHAT_TEMPLATES
