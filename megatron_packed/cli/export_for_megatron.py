"""Export of a run's checkpoint for Megatron, with the options of the run's tokenizer.

Megatron takes these options with ``--use-checkpoint-args``, and refuses to start without a tokenizer.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from megatron_packed.checkpoint.load import Step
from megatron_packed.cli.export_trained import checkpoint_to_export, tokenizer_files
from megatron_packed.config import flag_names as flags
from megatron_packed.config.hub_paths import is_hub_path, parse_hub_path
from megatron_packed.config.sections.data import DataConfig
from megatron_packed.config.sections.data_parts.tokenizer import (
    BYTES,
    GPT2,
    HUGGING_FACE,
    NULL,
    SENTENCEPIECE,
    TIKTOKEN,
    TRAINED_BPE,
)
from megatron_packed.data.errors import DataError
from megatron_packed.data.tokenizers.base import vocabulary
from megatron_packed.data.tokenizers.exported_files import Files
from megatron_packed.data.tokenizers.huggingface_settings import TOKENIZER_JSON
from megatron_packed.inputs.open_documents import build_tokenizer
from megatron_packed.models.convert.import_huggingface import OnProgress, silent
from megatron_packed.models.convert.megatron.export_megatron import MegatronTokenizer, to_megatron
from megatron_packed.models.convert.megatron.export_optimizer import ExportedState
from megatron_packed.training.trained_model import stored_run

TOKENIZER_FOLDER = "tokenizer"
"""Folder of the new directory for the files of a tokenizer that Megatron has under no other path."""
_OPTIONS = {
    HUGGING_FACE: ("tokenizer_model",),
    TIKTOKEN: (
        "tokenizer_model",
        "tiktoken_pattern",
        "tiktoken_num_special_tokens",
        "tokenizer_special_tokens",
    ),
    SENTENCEPIECE: ("tokenizer_model", "tokenizer_special_tokens"),
    GPT2: ("vocab_file", "merge_file"),
    NULL: ("null_tokenizer_eod_id",),
}
"""Options of each type of tokenizer that Megatron has, too."""


class MegatronExport(NamedTuple):
    """Checkpoint for Megatron."""

    state: ExportedState | str
    """State of the optimizer, or the reason why only weights were written; may be empty."""
    tokenizer: str
    """Sentence about the tokenizer that Megatron finds in the checkpoint."""


def export_for_megatron(
    checkpoint: Path,
    directory: Path,
    *,
    step: Step = None,
    optimizer: bool = True,
    expert_parallel: int | None = None,
    on_progress: OnProgress = silent,
) -> MegatronExport:
    """Write a checkpoint for Megatron, with its tokenizer; see `to_megatron`.

    Args:
        step: export the checkpoint of this step; None exports the newest.
        optimizer, expert_parallel: see `to_megatron`.
    Raises:
        CheckpointError: as `to_megatron`, or the metadata of the checkpoint is damaged.
    """
    source = checkpoint_to_export(checkpoint, step)
    found, metadata = source.path, source.manifest.metadata
    tokenizer, sentence = _tokenizer(metadata["config"], found, directory)
    written = to_megatron(
        found,
        directory,
        tokenizer=tokenizer,
        optimizer=optimizer,
        expert_parallel=expert_parallel,
        on_progress=on_progress,
    )
    return MegatronExport(written.state, sentence)


def _tokenizer(
    stored: Mapping[str, Any], found: Path, directory: Path
) -> tuple[MegatronTokenizer, str]:
    """Return the tokenizer of a checkpoint in Megatron's terms, and a sentence about it."""
    size = stored["model"].get("vocab_size")
    if "data" not in stored:
        named = f"The checkpoint names no tokenizer; give Megatron {flags.TOKENIZER_TYPE}."
        return MegatronTokenizer({}, size), named
    run = stored_run(stored, found, None, "cpu")
    # A checkpoint with a trained tokenizer is itself the folder of this tokenizer's files.
    kind = stored["data"]["tokenizer_type"]
    files: Files = {}
    try:
        used = build_tokenizer(run.data, size, build_missing=False)
        try:
            size = vocabulary(used, size)
            if kind in (BYTES, TRAINED_BPE):
                files, _ = tokenizer_files(run.data, used)
        finally:
            used.close()
    except DataError:
        pass  # the weights need no tokenizer, whose files may be on another machine
    if files:
        options = {
            "tokenizer_type": HUGGING_FACE,
            "tokenizer_model": str(directory / TOKENIZER_FOLDER),
        }
    else:
        options = _options(kind, run.data)
    files = {f"{TOKENIZER_FOLDER}/{name}": content for name, content in files.items()}
    return MegatronTokenizer(options, size, files), _sentence(options, size)


def _options(kind: str, data: DataConfig) -> dict[str, Any]:
    """Return the options of a tokenizer that Megatron reads itself; none if it cannot."""
    if kind not in _OPTIONS:
        return {}
    options: dict[str, Any] = {"tokenizer_type": kind}
    for name in _OPTIONS[kind]:
        value = getattr(data, name)
        if name in ("tokenizer_model", "vocab_file", "merge_file"):
            value = _path(str(value))
            if value is None:
                return {}
        elif isinstance(value, tuple):
            value = list(value) or None
        options[name] = value
    return options


def _path(path: str) -> str | None:
    """Return a path as Megatron reads it, which knows folders and names of the Hub.

    Returns None for a commit or file of the Hub, because a name alone means another one.
    """
    if is_hub_path(path):
        source = parse_hub_path(path)
        whole = (
            source is not None and source.revision is None and source.inside in ("", TOKENIZER_JSON)
        )
        return source.name if source is not None and whole else None
    absolute = Path(path).absolute()
    return str(absolute.parent if absolute.name == TOKENIZER_JSON else absolute)


def _sentence(options: Mapping[str, Any], size: int | None) -> str:
    if not options:
        return f"Its tokenizer is not one of Megatron's; give Megatron {flags.TOKENIZER_TYPE}."
    paths = [options[name] for name in ("tokenizer_model", "vocab_file") if name in options]
    named = " ".join([options["tokenizer_type"], *paths])
    more = ""
    if options["tokenizer_type"] == NULL and size is not None:
        more = f" Give it {flags.VOCAB_SIZE} {size} too."
    return f"With --use-checkpoint-args, Megatron takes its tokenizer, {named}.{more}"
