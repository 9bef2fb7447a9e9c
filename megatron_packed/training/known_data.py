"""Facts about a run's data that need no tokenising: sizes of files, and what a cache contains."""

from __future__ import annotations

import shutil
import tempfile
from math import ceil
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_packed.checkpoint.errors import CheckpointError
from megatron_packed.config.run import RunConfig
from megatron_packed.config.sections.data import DataConfig
from megatron_packed.config.sections.data_parts.tokenizer import TRAINED_BPE
from megatron_packed.data.errors import DataError, NotTokenizedError
from megatron_packed.data.index.indexed_file import index_path
from megatron_packed.data.sources.jsonl_lines import MAX_LINE_BYTES
from megatron_packed.data.sources.source_files import expand_paths
from megatron_packed.data.sources.tokenize_files import BuildOptions, check_before_building
from megatron_packed.data.tokenizers.base import vocabulary
from megatron_packed.data.tokenizers.bpe_training import MIN_VOCAB_SIZE
from megatron_packed.training.open_documents import build_tokenizer, names_indexed, open_documents
from megatron_packed.training.run_estimate import StepWork
from megatron_packed.training.stored_files import files_of_start, with_stored_template


class KnownData(NamedTuple):
    """Facts about the training data."""

    vocab_size: int | None
    """Entries of the vocabulary; None if the tokenizer cannot be read."""
    lengths: NDArray[np.int64] | None
    """Tokens of each training document; None if the data is not tokenised."""
    reason: str
    """Reason why the lengths are unknown; empty if they are known."""
    refusal: str
    """Error with which a run on this machine would end; empty if there is none."""


def known_data(config: RunConfig, *, given: bool = True) -> KnownData:
    """Return what is known of the training data without tokenising it.

    Args:
        given: False if the options name no data.
    """
    lengths, refusal = None, ""
    vocab_size, reason = config.model.vocab_size, "" if given else "no data is given"
    try:
        files = files_of_start(config)
    except CheckpointError:
        files = None  # the load reports the damage
    options = with_stored_template(config, files).data
    trained = None if files is None else files.trained_tokenizer(options)
    try:
        tokenizer = build_tokenizer(options, vocab_size, build_missing=False, trained=trained)
        vocab_size = vocabulary(tokenizer, vocab_size)
        if options.named.fault:  # the file may exist only on the training machine
            raise DataError(
                f"the file of --data-args-path or --per-split-data-args-path {options.named.fault}"
            )
        try:
            if given:
                documents = open_documents(
                    options,
                    tokenizer,
                    validates=False,
                    shorten_to=config.shorten_to,
                    made_from=config.made_from,
                    show=False,
                    build_missing=False,
                )
                lengths = documents.train.lengths
        finally:
            tokenizer.close()
    except NotTokenizedError as error:
        reason = str(error).rstrip(".")
    except (DataError, OSError) as error:
        reason = refusal = str(error).rstrip(".")
    if vocab_size is None and options.tokenizer_type == TRAINED_BPE:
        vocab_size = max(options.tokenizer_vocab_size, MIN_VOCAB_SIZE)
    return KnownData(vocab_size, lengths, reason, refusal)


def first_lines_refusal(options: DataConfig) -> str:
    """Return why the first lines of the text files cannot be used; empty if they can."""
    texts = [path for path in options.train_paths if not names_indexed(path)]
    folder = Path(tempfile.mkdtemp(prefix="megatron_packed_"))
    try:
        check_before_building(
            expand_paths(texts, download=False) if texts else [],
            BuildOptions(
                sft=options.sft,
                max_bad_fraction=options.max_bad_fraction,
                max_line_bytes=MAX_LINE_BYTES,
                fields=options.fields,
                show_progress=False,
            ),
            folder / "quarantine.jsonl",  # stays, because the error names it
        )
    except NotTokenizedError:  # not downloaded from the Hugging Face Hub yet
        pass
    except (DataError, OSError) as error:
        return str(error).rstrip(".")
    shutil.rmtree(folder, ignore_errors=True)
    return ""


def file_sizes(paths: tuple[str, ...]) -> list[int]:
    """Return the bytes of each file that data paths name.

    Raises:
        DataError, OSError: a path names no file.
    """
    files: list[Path] = []
    for path in paths:
        indexed = names_indexed(path)
        files += (
            [index_path(path), Path(f"{path}.bin")]
            if indexed
            else expand_paths([path], download=False)
        )
    return [file.stat().st_size for file in files]


def documents_in_pack(config: RunConfig, work: StepWork) -> int:
    """Return the number of documents that a pack has capacity for: the largest capacity of the
    graphs, or an estimate for the fullest pack.
    """
    capacities = config.cuda_graph.capacities if config.cuda_graph.enabled else None
    if capacities is not None:
        return capacities[-1]
    cap = config.packing.max_documents_per_pack
    # The balanced packer keeps the number of documents of every pack near the mean. The largest
    # number is about 1.5 times the mean.
    return min(ceil(1.5 * work.documents_per_pack), cap or config.packing.tokens_per_pack)
