"""The tokenised cache: built once from source files, memory-mapped by every process, checked as it
is read.

A cache directory holds raw little-endian arrays (``tokens`` int32, ``targets`` uint8, ``offsets``
and ``target_counts`` int64; with `shorten_conversations` also ``source_lengths`` and
``source_targets``), CRC32C checksums of their 64 KiB blocks, and ``manifest.json``, which carries a
checksum of itself. Its name is a hash of everything that decides the content: the sources, the
tokenizer, the chat format, the limits.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_packed.data.errors import DataError, printable
from megatron_packed.data.sources.cache_directory import get_or_build
from megatron_packed.data.sources.checked_arrays import CheckedArray, checksum
from megatron_packed.data.sources.data_report import DataReport
from megatron_packed.data.sources.jsonl_lines import (
    MAX_LINE_BYTES,
    QUARANTINE_SUFFIX,
    expand_paths,
    file_identity,
)
from megatron_packed.data.sources.tokenize_files import BuildOptions, build_arrays, check_kind
from megatron_packed.data.tokenizers.base import Tokenizer
from megatron_packed.data.tokenizers.chat_format import ChatFormat
from megatron_packed.data.tokenizers.encode import SampleEncoder
from megatron_packed.data.tokenizers.shorten_conversations import ShorteningEncoder

FORMAT = 2
"""Version of the cache: goes up whenever the same sources would be stored differently."""
_SHORTENING = 1
"""Version of shortened documents: goes up whenever the same documents would be shortened
differently.
"""
DEFAULT_CACHE_NAME = ".megatron_packed_cache"
_MANIFEST = "manifest.json"
_CONTENT = ("tokens", "targets", "offsets", "target_counts")
"""The arrays that decide what is trained on."""


class TokenizedDataset:
    """Documents as tokens and target marks. Usable from several threads.

    Args:
        directory: a cache directory made by `open_dataset`.
    Raises:
        DataError: a file is missing, has another size than written, or the manifest or an index
            array is damaged.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        self.manifest = read_manifest(self.directory)
        entries = self.manifest["arrays"]
        self._tokens = CheckedArray(self.directory, "tokens", "<i4", entries["tokens"])
        self._targets = CheckedArray(self.directory, "targets", "u1", entries["targets"])
        self._offsets = CheckedArray(
            self.directory, "offsets", "<i8", entries["offsets"]
        ).read_all()
        self.target_counts: NDArray[np.int64] = CheckedArray(
            self.directory, "target_counts", "<i8", entries["target_counts"]
        ).read_all()
        """``(D,)`` targets of each document."""
        self.lengths: NDArray[np.int64] = np.diff(self._offsets)
        """``(D,)`` tokens of each document, the end of document included; at least 2."""
        sources = {"source_lengths": self.lengths, "source_targets": self.target_counts}
        for name in sources.keys() & entries.keys():
            sources[name] = CheckedArray(self.directory, name, "<i8", entries[name]).read_all()
        self.source_lengths: NDArray[np.int64] = sources["source_lengths"]
        """``(D,)`` tokens of each document before it was shortened."""
        self.source_targets: NDArray[np.int64] = sources["source_targets"]
        """``(D,)`` targets of each document before it was shortened."""
        self.report = DataReport(**self.manifest["report"])
        self.vocab_size: int = self.manifest["vocab_size"]
        """Of the tokenizer; every token is below it."""
        self._check_index()

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def key(self) -> str:
        """Hash of everything that decides the content."""
        return str(self.manifest["key"])

    @property
    def content_hash(self) -> str:
        """Hash of the tokens and target marks themselves, wherever the files lie and whenever they
        were written.
        """
        arrays = self.manifest["arrays"]
        return hashlib.sha256(_canonical({name: arrays[name] for name in _CONTENT})).hexdigest()

    def document(
        self, index: int, start: int = 0, length: int | None = None
    ) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
        """Tokens and target marks of a document or of ``length`` of its tokens from ``start``, as
        read-only views.

        ``targets[t]`` is 1 where token t is to be predicted from those before it. A piece that
        starts inside a document may have a 1 at 0; nothing in the piece predicts it, so it does not
        count.

        Raises:
            IndexError: there is no such document or piece.
            DataError: the data on disk is not what was written.
        """
        first, stop = self._place(index, start, length)
        return self._tokens.read(first, stop), self._targets.read(first, stop)

    def target_mask(self, index: int) -> NDArray[np.uint8]:
        """Target marks of a whole document."""
        return self._targets.read(*self._place(index, 0, None))

    def count_targets(
        self,
        documents: NDArray[np.integer],
        starts: NDArray[np.integer],
        lengths: NDArray[np.integer],
    ) -> NDArray[np.int64]:
        """Targets of pieces of documents, all arrays ``(S,)``: marked tokens, but for the first of
        the piece.
        """
        counts: NDArray[np.int64] = self.target_counts[documents]
        for piece in np.flatnonzero(np.asarray(lengths) != self.lengths[documents]):
            first, stop = self._place(
                int(documents[piece]), int(starts[piece]), int(lengths[piece])
            )
            counts[piece] = np.count_nonzero(self._targets.read(first, stop)[1:])
        return counts

    def target_entropy(self) -> float:
        """Entropy of the distribution of target tokens, in nats: the loss of the best model that
        knows no context.
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
        """Return a report of the data that was read, for people."""
        return self.report.lines_of_text(quarantine_of(self.directory))

    def verify(self) -> None:
        """Check every byte now; without it each block is checked when it is first read.

        Raises:
            DataError: names the file and the bytes.
        """
        self._tokens.read_all()
        self._targets.read_all()

    def _place(self, index: int, start: int, length: int | None) -> tuple[int, int]:
        if not 0 <= index < len(self):
            raise IndexError(
                f"document {index} does not exist; the data set has {len(self)}, from 0."
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
                f"{self.directory}: its index does not fit its manifest; remove it to build it again."
            )
        if self._offsets[-1] != self._tokens.count or self._tokens.count != self._targets.count:
            raise DataError(
                f"{self.directory}: its arrays do not fit its index; remove it to build it again."
            )
        if count and self.lengths.min() < 2:
            raise DataError(
                f"{self.directory}: its index is not in order; remove it to build it again."
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
    num_threads: int | None = None,
    show: bool = True,
    build_missing: bool = True,
) -> TokenizedDataset:
    """Open the tokenised form of ``paths``, making it first if no process has made it yet.

    Any number of processes may call this at once. A damaged cache is built again.

    Args:
        paths: see `jsonl_lines.expand_paths`.
        chat: how conversations become text; see `chat_format.chat_format`.
        sft: whether conversations and prompts are expected, or plain text.
        shorten_to: tokens to which conversations and prompts are shortened so that they keep their
            last answer; see `shorten_conversations`. None keeps them whole.
        cache_root: directory for caches; None for `DEFAULT_CACHE_NAME` beside the first file.
        max_bad_fraction: more bad lines than this share are an error. Bad lines are listed in
            ``<cache_root>/<key>.quarantine.jsonl``.
        num_threads: threads that tokenise; None for one per processor.
        show: print progress and warnings.
        build_missing: False raises an error for data that is not tokenised yet.
    Raises:
        DataError: no usable data; see also `tokenize_files.build_arrays`.
    """
    files = expand_paths(paths)
    contents = _Contents(
        files=files,
        identities=[file_identity(file) for file in files],
        tokenizer=tokenizer,
        chat=chat,
        shorten_to=shorten_to,
        options=BuildOptions(
            sft=sft,
            max_bad_fraction=max_bad_fraction,
            max_line_bytes=max_line_bytes,
            num_threads=num_threads,
            show_progress=show,
        ),
    )
    return contents.open(cache_directory(files, cache_root), build_missing)


@dataclass(frozen=True, kw_only=True)
class _Contents:
    """Everything that decides the content of a cache directory."""

    files: Sequence[Path]
    identities: Sequence[object]
    """Hash of each file when it was first looked at."""
    tokenizer: Tokenizer
    chat: ChatFormat
    shorten_to: int | None
    options: BuildOptions

    def key(self) -> str:
        """Return the name of the cache directory; equal contents have equal names."""
        identity: list[object] = [
            FORMAT,
            self.identities,
            self.tokenizer.fingerprint,
            self.chat.fingerprint,
            self.options.sft,
            self.options.max_line_bytes,
        ]
        if self.shorten_to is not None:
            identity += [_SHORTENING, self.shorten_to]
        return hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:32]

    def encoder(self) -> SampleEncoder:
        if self.shorten_to is None:
            return SampleEncoder(tokenizer=self.tokenizer, chat=self.chat)
        return ShorteningEncoder(
            tokenizer=self.tokenizer, chat=self.chat, max_tokens=self.shorten_to
        )

    def open(self, root: Path, build_missing: bool) -> TokenizedDataset:
        """Open the cache directory under ``root``, building it if need be."""
        directory = root / self.key()
        options = self.options
        try:
            if not build_missing and not _is_valid(directory):
                names = ", ".join(map(str, self.files))
                raise DataError(f"{names}: not tokenised yet, in {root}.")
            get_or_build(
                directory,
                is_valid=_is_valid,
                build=partial(self._build, final=directory),
                log=_say if options.show_progress else _be_quiet,
            )
        finally:
            self.chat.close()
        dataset = TokenizedDataset(directory)
        dataset.report.check(options.max_bad_fraction, quarantine_of(directory))
        for schema in dataset.report.schemas:
            check_kind(schema, options.sft)
        return dataset

    def _build(self, directory: Path, *, final: Path) -> None:
        """Fill ``directory``, which becomes ``final``."""
        report, entries = build_arrays(
            self.files, self.encoder(), directory, quarantine_of(final), self.options
        )
        sources = [
            {"file": str(file), "identity": identity}
            for file, identity in zip(self.files, self.identities)
        ]
        _write_manifest(
            directory,
            {
                "format": FORMAT,
                "key": final.name,
                "vocab_size": self.tokenizer.vocab_size,
                "tokenizer": self.tokenizer.fingerprint,
                "chat": self.chat.fingerprint,
                "sources": sources,
                "arrays": entries,
                "report": report.as_dict(),
            },
        )


def cache_directory(files: Sequence[Path], cache_root: str | Path | None) -> Path:
    """Return the directory for caches of ``files``: ``cache_root``, or `DEFAULT_CACHE_NAME` beside
    the first file.
    """
    return Path(cache_root) if cache_root is not None else files[0].parent / DEFAULT_CACHE_NAME


def quarantine_of(directory: Path) -> Path:
    """Return the file that lists the lines that a cache directory leaves out."""
    return directory.with_name(f"{directory.name}{QUARANTINE_SUFFIX}")


def read_manifest(directory: Path) -> dict[str, Any]:
    """The manifest of a cache directory.

    Raises:
        DataError: missing, damaged, or of another format.
    """
    path = directory / _MANIFEST
    try:
        value = json.loads(path.read_bytes())
        stored = value.pop("crc32c")
    except FileNotFoundError:
        raise DataError(
            f"{path} is missing; {directory} is not a cache of tokenised data."
        ) from None
    except (OSError, ValueError, AttributeError, KeyError, RecursionError) as error:
        raise DataError(
            f"{path} is damaged ({printable(str(error), 80)}); remove {directory}."
        ) from None
    if checksum(_canonical(value)) != stored:
        raise DataError(
            f"{path} is damaged (CRC32C differs); remove {directory} and it will be built again."
        )
    if value["format"] != FORMAT:
        raise DataError(f"{directory} has format {value['format']}, expected {FORMAT}; remove it.")
    return dict(value)


def _write_manifest(directory: Path, manifest: dict[str, Any]) -> None:
    manifest = {**manifest, "crc32c": checksum(_canonical(manifest))}
    (directory / _MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _is_valid(directory: Path) -> bool:
    if not directory.exists():
        return False
    try:
        TokenizedDataset(directory)
    except DataError:
        return False
    return True


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _be_quiet(line: str) -> None:
    pass
