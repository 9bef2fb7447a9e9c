"""Tokenise JSONL, Parquet and Hugging Face data sets on disk into Megatron's indexed data sets.

Writes PREFIX_KEY_document.bin and PREFIX_KEY_document.idx for each key, and their checksums to
PREFIX_KEY_document.crc32c. The output does not depend on the number of workers; a failed run leaves
no incomplete output. Unusable lines are counted and listed in PREFIX.quarantine.jsonl. Takes the
tokenizer flags of pretrain_hybrid.py (--tokenizer-type, --tokenizer-model, ...), --data-fields and
--max-bad-fraction.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from megatron_packed.cli.command import UsageError, command, input_failures, show, show_aside
from megatron_packed.cli.packing import with_unused_flags
from megatron_packed.config.data_fields import DataFields, pairs_fault, pairs_of
from megatron_packed.config.parser.parse import parse_or_exit
from megatron_packed.config.parser.precedence import gather
from megatron_packed.config.sections.data_parts.tokenizer import HUGGING_FACE, TRAINED_BPE


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--input",
        nargs="+",
        required=True,
        metavar="PATH",
        help="files of JSON lines or JSON arrays (also compressed), Parquet files, directories of such "
        "files, quoted patterns, or directories written by save_to_disk of Hugging Face's datasets",
    )
    parser.add_argument(
        "--output-prefix", required=True, metavar="PREFIX", help="prefix of the output file names"
    )
    parser.add_argument(
        "--json-keys",
        nargs="+",
        metavar="KEY",
        help="fields to tokenise (default: text)",
    )
    parser.add_argument(
        "--append-eod",
        action="store_true",
        help="append the end-of-document token to every document",
    )
    parser.add_argument(
        "--workers", type=int, metavar="N", help="number of processes (default: one per processor)"
    )


@command(
    "preprocess",
    "tokenise JSONL, Parquet and Hugging Face data sets into .bin and .idx",
    _add_arguments,
)
def preprocess_command(arguments: argparse.Namespace, run_flags: Sequence[str]) -> int:
    workers = len(os.sched_getaffinity(0)) if arguments.workers is None else arguments.workers
    if workers < 1:
        raise UsageError(f"--workers {workers}: must be at least 1.")
    if len(set(arguments.json_keys or ())) < len(arguments.json_keys or ()):
        raise UsageError(f"--json-keys {' '.join(arguments.json_keys)}: a key is given twice.")
    keys = tuple(arguments.json_keys or ["text"])
    prefix = Path(arguments.output_prefix)
    if arguments.output_prefix.endswith("/") or prefix.name in ("", ".."):
        example = os.path.join(arguments.output_prefix, "corpus")
        raise UsageError(
            f"--output-prefix {arguments.output_prefix!r}: give the beginning of file names, for example {example}."
        )
    values = gather(run_flags).values
    if "data.data_path" in values:
        raise UsageError("--data-path: give the files with --input instead.")
    _check_fields(values.get("data.data_fields", ()), arguments.json_keys)
    argv = ["--data-path", *arguments.input, *run_flags]
    if "packing.seq_length" not in values:
        argv += ["--seq-length", "2"]
    if "data.data_cache_path" not in values:  # the directory of a TrainedBPETokenizer
        argv += ["--data-cache-path", str(prefix.parent)]
    typed = {"--data-path": "--input", "--data-cache-path": "--output-prefix"}
    config = parse_or_exit(with_unused_flags(argv), launched=False, typed=typed)
    from megatron_packed.data.index.preprocess import PreprocessOptions, preprocess
    from megatron_packed.data.sources.source_files import expand_paths, quarantine_of
    from megatron_packed.data.tokenizers.huggingface import HuggingFaceTokenizer
    from megatron_packed.inputs.open_documents import build_tokenizer

    with input_failures():
        report, names = preprocess(
            expand_paths(arguments.input, show_aside),
            prefix,
            partial(build_tokenizer, config.data, config.model.vocab_size, check_data=False),
            PreprocessOptions(
                keys=keys,
                fields=config.data.fields,
                append_eod=arguments.append_eod,
                max_bad_fraction=config.data.max_bad_fraction,
                workers=workers,
                special_tokens_in_text=config.data.special_tokens_in_text,
            ),
        )
    text = report.lines_of_text(quarantine_of(prefix))
    show("\n".join([*text, *(f"written: {name}.bin, .idx and .crc32c" for name in names)]))
    if config.data.tokenizer_type == TRAINED_BPE:  # it cannot be trained again on the files written
        trained = build_tokenizer(config.data, config.model.vocab_size, build_missing=False)
        assert isinstance(trained, HuggingFaceTokenizer)
        show(
            f"Train on these files with --tokenizer-type {HUGGING_FACE} --tokenizer-model {trained.path}"
        )
    return 0


def _check_fields(arguments: Sequence[str], keys: Sequence[str] | None) -> None:
    """Check that ``--data-fields`` names only text, before a rule of a run answers with ``--sft``.

    Raises:
        UsageError: the fields are those of prompts and answers, or ``--json-keys`` is given, too.
    """
    pairs = pairs_of(arguments)
    fields = None if pairs_fault(pairs) else DataFields.from_pairs(pairs)
    if fields is not None and (keys or not fields.trains_text):
        raise UsageError(
            f"--data-fields {fields}: preprocess writes text; give --data-fields text=FIELD without --json-keys, or "
            "--json-keys only."
        )
