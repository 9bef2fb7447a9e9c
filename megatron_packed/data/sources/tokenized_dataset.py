"""Cache of tokenised data: built once from source files, then memory-mapped by every process.

A cache directory holds:

- raw little-endian arrays: ``tokens`` int32, ``targets`` uint8, ``offsets`` and ``target_counts``
  int64, and with `shorten_conversations` also ``source_lengths`` and ``source_targets``;
- CRC32C checksums of 64 KiB blocks of each array, which are checked when a block is first read;
- ``manifest.json``, which contains a checksum of itself.

The name of the directory is a hash of everything that decides the content: the sources, the
tokenizer, the chat format, the names of the fields, the limits. The allowed share of bad lines is no
part of it: the counts of the manifest are compared with that share each time the cache is opened.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from megatron_packed.config import flag_names as flags
from megatron_packed.config.data_fields import DataFields
from megatron_packed.config.hub_paths import is_hub_path
from megatron_packed.config.sections.data_parts.tokenizer import DATA_RULES, EARLIER_RULES, TOKENS
from megatron_packed.data.documents import TokensAndTargets
from megatron_packed.data.errors import DataError, NotTokenizedError, printable
from megatron_packed.data.progress_bar import say, warn
from megatron_packed.data.sources.cache_directory import open_or_build, opened
from megatron_packed.data.sources.checked_arrays import CheckedArray
from megatron_packed.data.sources.data_report import DataReport
from megatron_packed.data.sources.jsonl_lines import MAX_LINE_BYTES
from megatron_packed.data.sources.line_schema import NO_CHAT
from megatron_packed.data.sources.source_files import (
    expand_paths,
    file_identity,
    quarantine_of,
)
from megatron_packed.data.sources.tokenize_files import (
    ARRAY_TYPES,
    BuildOptions,
    build_arrays,
    check_kind,
)
from megatron_packed.data.tokenizers.base import Tokenizer
from megatron_packed.data.tokenizers.chat_format import ChatFormat
from megatron_packed.data.tokenizers.encode import SampleEncoder
from megatron_packed.files.checksums import crc32c
from megatron_packed.packed.array_types import Int64Array, IntegerArray

CACHE_FORMAT = 4
"""Version of the cache. Increase this number when a change of the code stores the same sources
differently."""
_MANIFEST = "manifest.json"
_SHORTENING = 2
"""Version of the shortening. Increase this number when a change of the code shortens the same
documents differently."""
_SHORTENING_BEFORE = 1
"""Version of the shortening in caches of `EARLIER_RULES`."""
DEFAULT_CACHE_NAME = ".megatron_packed_cache"
_CONTENT = ("tokens", "targets", "offsets", "target_counts")
"""Arrays that are part of `TokenizedDataset.content_hash`."""


class TokenizedDataset:
    """Documents of a cache directory, as tokens and target marks. Several threads may use it.

    Args:
        directory: a cache directory made by `open_dataset`.
    Raises:
        DataError: a file is missing or has the wrong size, or the manifest or an index array is
            damaged.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        self.manifest = read_cache_manifest(self.directory)
        entries = self.manifest["arrays"]
        arrays = {
            name: CheckedArray(self.directory, name, dtype, entries[name])
            for name, dtype in ARRAY_TYPES.items()
            if name in entries
        }
        self._tokens = arrays["tokens"]
        self._targets = arrays["targets"]
        self._offsets = arrays["offsets"].read_all()
        self.target_counts: Int64Array = arrays["target_counts"].read_all()
        """``(D,)`` number of targets of each document."""
        self.lengths: Int64Array = np.diff(self._offsets)
        """``(D,)`` number of tokens of each document, end of document included; at least 2."""
        sources = {"source_lengths": self.lengths, "source_targets": self.target_counts}
        for name in sources.keys() & arrays.keys():
            sources[name] = arrays[name].read_all()
        self.source_lengths: Int64Array = sources["source_lengths"]
        """``(D,)`` number of tokens of each document before it was shortened."""
        self.source_targets: Int64Array = sources["source_targets"]
        """``(D,)`` number of targets of each document before it was shortened."""
        self.report = DataReport(**self.manifest["report"])
        self.vocab_size: int = self.manifest["vocab_size"]
        """Vocabulary size of the tokenizer; every token is smaller."""
        self._check_index()

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def key(self) -> str:
        """Name of the cache directory: a hash of all inputs that decide its content."""
        return str(self.manifest["key"])

    @property
    def content_hash(self) -> str:
        """Hash of the tokens and target marks; path and time of the files do not count."""
        arrays = self.manifest["arrays"]
        return hashlib.sha256(canonical_json({name: arrays[name] for name in _CONTENT})).hexdigest()

    def document(self, index: int, start: int = 0, length: int | None = None) -> TokensAndTargets:
        """Return read-only views of the tokens and target marks of a document or of a piece of it.

        ``targets[t]`` is 1 if the model is trained to predict token t from the tokens before it. In
        a piece that starts inside a document, ``targets[0]`` may be 1. That mark does not count,
        because the piece has no token before it.

        Args:
            start: first token of the piece within the document.
            length: tokens of the piece; None for all tokens from the start of the document to its
                end.
        Raises:
            IndexError: there is no such document or piece.
            DataError: the data on disk changed since it was written.
        """
        first, stop = self._place(index, start, length)
        return self._tokens.read(first, stop), self._targets.read(first, stop)

    def count_targets(
        self,
        documents: IntegerArray,
        starts: IntegerArray,
        lengths: IntegerArray,
    ) -> Int64Array:
        """Return the number of targets of pieces of documents; all arrays are ``(S,)``.

        The first token of a piece does not count, because no token of the piece predicts it.
        """
        counts: Int64Array = self.target_counts[documents]
        for piece in np.flatnonzero(np.asarray(lengths) != self.lengths[documents]):
            first, stop = self._place(
                int(documents[piece]), int(starts[piece]), int(lengths[piece])
            )
            counts[piece] = np.count_nonzero(self._targets.read(first, stop)[1:])
        return counts

    def target_entropy(self) -> float:
        """Return the entropy of the distribution of target tokens, in nats.

        The entropy is the lowest loss that a model can reach without reading the context.
        """
        counts = np.zeros(self.vocab_size, np.int64)
        step = 2**22
        for start in range(0, self._tokens.count, step):
            stop = min(start + step, self._tokens.count)
            wanted = self._targets.read(start, stop).astype(np.bool_)
            counts += np.bincount(self._tokens.read(start, stop)[wanted], minlength=self.vocab_size)
        shares = counts[counts > 0] / counts.sum()
        return float(-(shares * np.log(shares)).sum())

    def sentences(self) -> list[str]:
        """Return a report of the data as lines of text."""
        return self.report.lines_of_text(quarantine_of(self.directory))

    def verify(self) -> None:
        """Check the checksums of all tokens and target marks now, not when a block is first read.

        Raises:
            DataError: a block is damaged; the message names the file and the bytes.
        """
        self._tokens.read_all()
        self._targets.read_all()

    def _place(self, index: int, start: int, length: int | None) -> tuple[int, int]:
        if not 0 <= index < len(self):
            raise IndexError(
                f"document {index} does not exist; the data set has {len(self)} documents, numbered from 0."
            )
        begin, end = int(self._offsets[index]), int(self._offsets[index + 1])
        stop = end if length is None else begin + start + length
        if start < 0 or not begin + start < stop <= end:
            raise IndexError(
                f"document {index} has {end - begin} tokens; there is no piece of {length} tokens from {start}."
            )
        return begin + start, stop

    def _check_index(self) -> None:
        count = self.report.documents
        of_documents = (self.target_counts, self.source_lengths, self.source_targets)
        if (
            len(self._offsets) != count + 1
            or {*map(len, of_documents)} != {count}
            or self._offsets[0] != 0
        ):
            raise DataError(
                f"{self.directory} is damaged: its index does not match its manifest; remove the directory to build it "
                "again."
            )
        if self._offsets[-1] != self._tokens.count or self._tokens.count != self._targets.count:
            raise DataError(
                f"{self.directory} is damaged: its arrays do not match its index; remove the directory to build it "
                "again."
            )
        if count and self.lengths.min() < 2:
            raise DataError(
                f"{self.directory} is damaged: its index has a document of fewer than 2 tokens; remove the directory "
                "to build it again."
            )


def open_dataset(
    paths: Sequence[str | Path],
    tokenizer: Tokenizer,
    chat: ChatFormat,
    *,
    sft: bool,
    shorten_to: int | None = None,
    cache_root: str | Path | None = None,
    max_bad_fraction: float = 0.01,
    max_line_bytes: int = MAX_LINE_BYTES,
    fields: DataFields | None = None,
    num_threads: int | None = None,
    show: bool = True,
    build_missing: bool = True,
    special_tokens_in_text: str | None = None,
    rules: int = DATA_RULES,
) -> TokenizedDataset:
    """Open the tokenised cache of ``paths``; the first process that needs the cache builds it.

    Any number of processes may call this function at once. A damaged cache is built again.

    Args:
        paths: see `source_files.expand_paths`.
        chat: conversion of conversations to text; see `chat_format.chat_format`.
        sft: True for conversations and prompts, False for plain text.
        shorten_to: most tokens of a conversation or prompt. Longer conversations and prompts are
            shortened and keep their last answer; see `shorten_conversations`. None shortens
            nothing.
        cache_root: directory for caches; None for the directory of `cache_directory`.
        max_bad_fraction: largest allowed share of bad lines. Bad lines are listed in
            ``<cache_root>/<key>.quarantine.jsonl``. The tokenised data of a refused share stays in
            the cache, and a later call with a larger share opens it.
        fields: names of the fields of the lines; None for the names of `line_schema`.
        num_threads: threads that tokenise; None for one per processor.
        show: print progress and warnings.
        build_missing: False raises an error if the cache does not exist yet.
        special_tokens_in_text: value of ``--special-tokens-in-text``.
        rules: value of ``--data-rules``. With earlier rules, tokens of an earlier version in the
            cache are used; if there are none, the lines are tokenised by today's rules.
    Raises:
        DataError: no usable data; see also `tokenize_files.build_arrays`.
    """
    files = expand_paths(paths, say if show else _be_quiet, download=build_missing)
    contents = _Contents(
        files=files,
        identities=[file_identity(file) for file in files],
        tokenizer=tokenizer,
        chat=chat,
        shorten_to=shorten_to,
        special_tokens_in_text=special_tokens_in_text,
        options=BuildOptions(
            sft=sft,
            max_bad_fraction=max_bad_fraction,
            max_line_bytes=max_line_bytes,
            fields=fields,
            num_threads=num_threads,
            show_progress=show,
        ),
    )
    return contents.open(cache_directory(paths[0], files, cache_root), build_missing, rules)


@dataclass(frozen=True, kw_only=True)
class _Contents:
    """All inputs that decide the content of a cache directory."""

    files: Sequence[Path]
    identities: Sequence[object]
    """Hash of each file, taken when the paths were expanded."""
    tokenizer: Tokenizer
    chat: ChatFormat
    shorten_to: int | None
    special_tokens_in_text: str | None
    options: BuildOptions

    def key(self) -> str:
        """Return the name of the cache directory; the same content has the same name.

        Lines of plain text have the same tokens as in earlier versions, and so the same name.
        """
        identity = self._identity(_SHORTENING)
        if self.options.sft:
            identity += ["rules", DATA_RULES, *self.chat.rules, self.special_tokens_in_text]
        elif self.special_tokens_in_text == TOKENS:
            identity += ["special tokens", TOKENS]
        return _key_of(identity)

    def _identity(self, shortening: int) -> list[object]:
        identity: list[object] = [
            CACHE_FORMAT,
            self.identities,
            self.tokenizer.fingerprint,
            self.chat.fingerprint,
            self.options.sft,
            self.options.max_line_bytes,
        ]
        if self.options.fields is not None:
            identity.append(["fields", *self.options.fields.paths])
        if self.shorten_to is not None:
            identity += [shortening, self.shorten_to]
        return identity

    def encoder(self) -> SampleEncoder:
        if self.shorten_to is None:
            return SampleEncoder(
                tokenizer=self.tokenizer,
                chat=self.chat,
                special_tokens_in_text=self.special_tokens_in_text,
            )
        from megatron_packed.data.tokenizers.shorten_conversations import ShorteningEncoder

        return ShorteningEncoder(
            tokenizer=self.tokenizer,
            chat=self.chat,
            special_tokens_in_text=self.special_tokens_in_text,
            max_tokens=self.shorten_to,
        )

    def _open_earlier(self, root: Path) -> TokenizedDataset | None:
        """Open the tokens that an earlier version left under ``root``; None if there are none."""
        # The name of the cache directory in versions before `DATA_RULES`.
        key = _key_of(self._identity(_SHORTENING_BEFORE))
        dataset = opened(root / key, TokenizedDataset)
        if dataset is not None:
            return self.checked(dataset)
        if self.options.show_progress:
            say(
                f"{root} has no tokens that an earlier version made of these files "
                f"({flags.DATA_RULES} {EARLIER_RULES}), so they are tokenised by today's rules"
            )
        return None

    def open(self, root: Path, build_missing: bool, rules: int) -> TokenizedDataset:
        """Open the cache directory under ``root``, and build it first if it is missing."""
        options = self.options
        if options.sft and rules < DATA_RULES:
            earlier = self._open_earlier(root)
            if earlier is not None:
                return earlier
        directory = root / self.key()
        try:
            if not build_missing and opened(directory, TokenizedDataset) is None:
                names = ", ".join(map(str, self.files))
                raise NotTokenizedError(
                    f"{names}: not tokenised yet; {root} contains no cache of these files."
                )
            dataset = open_or_build(
                directory,
                TokenizedDataset,
                build=partial(self._build, final=directory),
                log=say if options.show_progress else _be_quiet,
            )
        finally:
            self.chat.close()
        return self.checked(dataset)

    def checked(self, dataset: TokenizedDataset) -> TokenizedDataset:
        """Return a data set whose lines are usable.

        Raises:
            DataError: too many of its lines are not, they are of the wrong kind, or the options
                allow no conversation.
        """
        options, schemas = self.options, dataset.report.schemas
        # A run with other options may have made the same tokens.
        if self.chat.refusal is not None and not schemas.keys() <= {*NO_CHAT}:
            raise DataError(self.chat.refusal)
        letters_wanted = self.special_tokens_in_text is not None
        quarantine = quarantine_of(dataset.directory)
        dataset.report.check(options.max_bad_fraction, quarantine, letters_wanted)
        for warning in dataset.report.warnings() if options.show_progress else ():
            warn(warning)
        for schema in schemas:
            check_kind(schema, options.sft)
        return dataset

    def _build(self, directory: Path, *, final: Path) -> None:
        """Fill ``directory``, which is then renamed to ``final``."""
        report, entries = build_arrays(
            self.files, self.encoder(), directory, quarantine_of(final), self.options
        )
        sources = [
            {"file": str(file), "identity": identity}
            for file, identity in zip(self.files, self.identities)
        ]
        write_manifest(
            directory,
            {
                "format": CACHE_FORMAT,
                "key": final.name,
                "vocab_size": self.tokenizer.vocab_size,
                "tokenizer": self.tokenizer.fingerprint,
                "chat": self.chat.fingerprint,
                "sources": sources,
                "arrays": entries,
                "report": asdict(report),
            },
        )


def _key_of(identity: list[object]) -> str:
    return hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:32]


def cache_directory(path: str | Path, files: Sequence[Path], cache_root: str | Path | None) -> Path:
    """Return the directory for caches of ``files``, to which the data path ``path`` expands.

    The directory is ``cache_root``, or `DEFAULT_CACHE_NAME` next to the first file. For data of the
    Hugging Face Hub it is `DEFAULT_CACHE_NAME` in the current directory.
    """
    if cache_root is not None:
        return Path(cache_root)
    return (Path() if is_hub_path(str(path)) else files[0].parent) / DEFAULT_CACHE_NAME


def _be_quiet(line: str) -> None:
    pass


# ----------------------------------------------------------------------------------------------
# the manifest of a cache directory


def read_cache_manifest(directory: Path) -> dict[str, Any]:
    """Read and check the manifest of a cache directory.

    Raises:
        DataError: the manifest is missing, damaged, or of another format.
    """
    path = directory / _MANIFEST
    try:
        value = json.loads(path.read_bytes())
        stored = value.pop("crc32c")
    except FileNotFoundError:
        raise DataError(
            f"{path} is missing, so {directory} is not a cache of tokenised data; check the path."
        ) from None
    except (OSError, ValueError, AttributeError, KeyError, RecursionError) as error:
        raise DataError(
            f"{path} is damaged ({printable(str(error), 80)}); remove {directory} to build it again."
        ) from None
    if crc32c(canonical_json(value)) != stored:
        raise DataError(
            f"{path} is damaged (CRC32C differs); remove {directory} to build it again."
        )
    if value["format"] != CACHE_FORMAT:
        raise DataError(
            f"{directory} has format {value['format']}, expected {CACHE_FORMAT}; remove it to build it again."
        )
    return dict(value)


def write_manifest(directory: Path, manifest: dict[str, Any]) -> None:
    """Write ``manifest`` and its checksum to ``manifest.json`` of a cache directory."""
    manifest = {**manifest, "crc32c": crc32c(canonical_json(manifest))}
    (directory / _MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")


def canonical_json(value: Any) -> bytes:
    """Return JSON with sorted keys and no spaces, so that equal values give equal bytes."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
