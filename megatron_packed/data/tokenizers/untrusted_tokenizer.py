"""Tokenizers with files from a download, run in child processes (`limited_process`).

A ``tokenizer.json``, a ``.model`` or a pattern can make its library panic, abort, or run forever on
some text. In a child process such text only becomes a bad line, and such a file only an error
message. The run itself does not crash.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from megatron_packed.config import flag_names as flags
from megatron_packed.config.hub_paths import MODEL, is_hub_name
from megatron_packed.data.errors import DataError, printable
from megatron_packed.data.sources.hub import local_path
from megatron_packed.data.tokenizers.base import Ids, Offsets, TokenIds, Tokenizer
from megatron_packed.data.tokenizers.huggingface import HuggingFaceTokenizer
from megatron_packed.data.tokenizers.limited_process import (
    Budget,
    Call,
    GuardedObject,
    LimitReached,
    Limits,
    SetupRefused,
    library_message,
    serve_calls,
)
from megatron_packed.data.tokenizers.sentencepiece_model import SentencePieceTokenizer
from megatron_packed.data.tokenizers.tiktoken_bpe import TikTokenizer
from megatron_packed.packed.array_types import AnyArray

LIMITS = Limits(cpu_seconds=30.0, cpu_seconds_per_mib=30.0)
"""Limits of a tokenizer process. Large vocabularies load in seconds, and slow tokenizers take about
a second per MiB of text, so the limits are far above usual times.
"""
_MAX_IN_A_ROW = 16
_KINDS: dict[str, Callable[..., Tokenizer]] = {
    "tokenizer.json": HuggingFaceTokenizer,
    "vocab.json": HuggingFaceTokenizer.gpt2,
    "sentencepiece": SentencePieceTokenizer,
    "tiktoken": TikTokenizer,
}
_ATTRIBUTES = tuple(Tokenizer.__annotations__)


class UntrustedTokenizer:
    """Tokenizer in child processes with limits; each thread that encodes uses its own process.

    See `base.Tokenizer` for the attributes and errors.

    Args:
        kind: a key of `_KINDS`, which selects the class of the tokenizer.
        arguments: arguments of the class, in types that JSON has.
        limits: limits of each process.
    Raises:
        DataError: the class raises it, or its library cannot load the files within the limits.
    """

    vocab_size: int
    eod_id: int
    pad_id: int
    prefix_ids: tuple[int, ...]
    special_tokens: Mapping[str, int]
    splits_cleanly: bool
    chat_template: str | None
    tool_chat_template: str | None
    template_variables: Mapping[str, str]
    fingerprint: str

    def __init__(self, kind: str, *arguments: Any, limits: Limits = LIMITS) -> None:
        name = printable(str(arguments[0]))
        cure = f"give another {flags.TOKENIZER_MODEL}"
        budget = Budget(f"the tokenizer {name}", "texts", cure, _MAX_IN_A_ROW)
        try:
            self._guarded = GuardedObject(
                __name__, [kind, *arguments], limits, budget, "tokenizer_limit", quiet=True
            )
        except SetupRefused as error:
            raise DataError(str(error)) from None
        except LimitReached as limit:
            raise DataError(f"{name} could not be loaded: {limit}; {cure}.") from None
        for attribute, value in self._guarded.call("attributes")[0].items():
            setattr(self, attribute, tuple(value) if attribute == "prefix_ids" else value)

    def encode(self, text: str, *, special: bool = False) -> TokenIds:
        return self.encode_batch([text], special=special)[0]

    def encode_batch(self, texts: Sequence[str], *, special: bool = False) -> list[TokenIds]:
        lengths, data = self._guarded.call("encode_batch", list(texts), special)
        return np.split(np.frombuffer(data, np.int32), np.cumsum(lengths)[:-1])

    def encode_with_offsets(self, text: str, *, special: bool = False) -> tuple[TokenIds, Offsets]:
        (count, _), data = self._guarded.call("encode_with_offsets", text, special)
        offsets = np.frombuffer(data[4 * count :], np.int64)
        return np.frombuffer(data, np.int32, count), offsets.reshape(-1, 2)

    def decode(self, ids: Ids, *, skip_special: bool = False) -> str:
        return str(self._guarded.call("decode", list(map(int, ids)), skip_special)[0])

    def close(self) -> None:
        """End the processes; the tokenizer stays usable."""
        self._guarded.close()


# -------------------------------------------------------------------------------------------------------
# functions of the child process


def serve() -> None:
    """Load the tokenizer, then answer calls. This function is the main function of the child."""
    serve_calls(_load, "tokenizer_failed", opens_files=True)


def _load(kind: str, *arguments: Any) -> Call:
    try:
        return partial(_call, _KINDS[kind](*arguments))
    except DataError:
        raise
    except BaseException as error:  # libraries raise Exception itself, or a Rust panic
        raise DataError(
            f"{printable(str(arguments[0]))} cannot be loaded by its library: {library_message(error)}; correct the "
            f"file, or give another {flags.TOKENIZER_MODEL}."
        ) from None


def _call(
    tokenizer: Tokenizer, num_bytes: int, method: str, text: Any = None, special: bool = False
) -> tuple[Any, bytes]:
    if method == "attributes":
        return {name: getattr(tokenizer, name) for name in _ATTRIBUTES}, b""
    if method == "decode":
        return tokenizer.decode(text, skip_special=special), b""
    arrays: Sequence[AnyArray] = getattr(tokenizer, method)(text, special=special)
    return list(map(len, arrays)), b"".join(array.tobytes() for array in arrays)


def open_tokenizer(tokenizer: Tokenizer | str | os.PathLike[str]) -> Tokenizer:
    """Return a given tokenizer unchanged, or load the tokenizer of a ``tokenizer.json``.

    Args:
        tokenizer: a `Tokenizer`, or the path of a ``tokenizer.json`` or of its directory, or
            ``hf://ORGANISATION/NAME``.
    Raises:
        DataError: the files cannot be used, or the value is neither a path nor a tokenizer.
    """
    if isinstance(tokenizer, (str, os.PathLike)):
        path = os.fspath(tokenizer)
        if is_hub_name(path):
            raise DataError(
                f"{path} does not exist; give a tokenizer.json or its directory, or hf://{path} for a model of the "
                "Hugging Face Hub."
            )
        path = local_path(path, MODEL)
        return UntrustedTokenizer("tokenizer.json", path)
    # Tokenizers of users may lack the template for tools, which is newer than the interface.
    needed = {*_ATTRIBUTES, "encode_batch", "decode", "close"} - {"tool_chat_template"}
    if isinstance(tokenizer, type) or not all(hasattr(tokenizer, name) for name in needed):
        raise DataError(
            f"a tokenizer of type {type(tokenizer).__name__} cannot be used; pass a Tokenizer of this package, for "
            "example ByteTokenizer(), or the path of a tokenizer.json. For a tokenizer of Hugging Face, pass the "
            "directory that its save_pretrained wrote."
        )
    return tokenizer
