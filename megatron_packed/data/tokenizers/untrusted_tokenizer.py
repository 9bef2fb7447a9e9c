"""Tokenizers with files from a download, run in child processes (`limited_process`).

A ``tokenizer.json``, a ``.model`` or a pattern can make its library panic, abort, or run forever on
some text. In a child process such text only becomes a bad line, and such a file only an error
message. The run itself does not crash.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import numpy as np

from megatron_packed.config import flag_names as flags
from megatron_packed.config.hub_paths import MODEL, is_hub_name
from megatron_packed.data.errors import BadLine, DataError, printable
from megatron_packed.data.sources.hub import local_path
from megatron_packed.data.tokenizers.base import Offsets, OffsetTokenizer, TokenIds, Tokenizer
from megatron_packed.data.tokenizers.huggingface import HuggingFaceTokenizer
from megatron_packed.data.tokenizers.limited_process import (
    Answer,
    Budget,
    LimitedProcess,
    LimitReached,
    Limits,
    SetupRefused,
    serve_requests,
)
from megatron_packed.data.tokenizers.sentencepiece_model import SentencePieceTokenizer
from megatron_packed.data.tokenizers.tiktoken_bpe import TikTokenizer
from megatron_packed.packed.array_types import AnyArray, IntegerArray

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
_ATTRIBUTES = (
    "vocab_size",
    "eod_id",
    "pad_id",
    "prefix_ids",
    "special_tokens",
    "splits_cleanly",
    "chat_template",
    "tool_chat_template",
    "template_variables",
    "fingerprint",
)


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
        budget = Budget(
            f"the tokenizer {name}",
            "texts",
            f"give another {flags.TOKENIZER_MODEL}",
            max_in_a_row=_MAX_IN_A_ROW,
        )
        setup = {"kind": kind, "arguments": arguments}
        self._start = partial(LimitedProcess, __name__, setup, limits, budget, quiet=True)
        self._idle: list[LimitedProcess] = []
        self._lock = threading.Lock()
        try:
            process = self._start()
        except SetupRefused as error:
            raise DataError(str(error)) from None
        except LimitReached as limit:
            raise DataError(
                f"{name} could not be loaded: {limit}; give another {flags.TOKENIZER_MODEL}."
            ) from None
        self._idle.append(process)
        for attribute, value in zip(_ATTRIBUTES, json.loads(process.greeting)):
            setattr(self, attribute, tuple(value) if attribute == "prefix_ids" else value)

    def encode(self, text: str, *, special: bool = False) -> TokenIds:
        return self.encode_batch([text], special=special)[0]

    def encode_batch(self, texts: Sequence[str], *, special: bool = False) -> list[TokenIds]:
        head, data = self._ask("encode_batch", texts=list(texts), special=special)
        return np.split(np.frombuffer(data, np.int32), np.cumsum(head["lengths"])[:-1])

    def encode_with_offsets(self, text: str, *, special: bool = False) -> tuple[TokenIds, Offsets]:
        head, data = self._ask("encode_with_offsets", texts=[text], special=special)
        (count,) = head["lengths"]
        return np.frombuffer(data, np.int32, count), np.frombuffer(
            data[4 * count :], np.int64
        ).reshape(-1, 2)

    def decode(self, ids: Sequence[int] | IntegerArray, *, skip_special: bool = False) -> str:
        head, _ = self._ask("decode", ids=[int(token) for token in ids], special=skip_special)
        return str(head["text"])

    def close(self) -> None:
        """End the processes; the tokenizer stays usable."""
        with self._lock:
            idle = self._idle
            self._idle = []
        for process in idle:
            process.close()

    def _ask(self, method: str, **arguments: Any) -> tuple[dict[str, Any], bytes]:
        """Send a request and return the JSON part of the answer, and its arrays as bytes."""
        with self._lock:
            process = self._idle.pop() if self._idle else None
        try:
            process = process or self._start()
            answer = process.ask(json.dumps({"method": method, **arguments}).encode())
        except LimitReached as limit:
            raise BadLine("tokenizer_limit", str(limit)) from None
        finally:
            if process is not None:
                with self._lock:
                    self._idle.append(process)
        head, _, data = answer.partition(b"\n")
        fields = json.loads(head)
        if "failed" in fields:
            raise BadLine("tokenizer_failed", fields["failed"])
        if "wrong" in fields:
            raise DataError(fields["wrong"])
        return fields, data


# -------------------------------------------------------------------------------------------------------
# functions of the child process


def serve() -> None:
    """Load the tokenizer, then answer requests. This function is the main function of the child."""
    serve_requests(_prepare, opens_files=True)


def _prepare(setup: dict[str, Any]) -> tuple[bytes, Answer]:
    arguments = setup["arguments"]
    try:
        tokenizer = _KINDS[setup["kind"]](*arguments)
        greeting = json.dumps([getattr(tokenizer, attribute) for attribute in _ATTRIBUTES])
    except DataError:
        raise
    except BaseException as error:  # libraries raise Exception itself, or a Rust panic
        raise DataError(
            f"{printable(str(arguments[0]))} cannot be loaded by its library: {_words(error)}; correct the file, or "
            f"give another {flags.TOKENIZER_MODEL}."
        ) from None
    return greeting.encode(), partial(_answer, tokenizer)


def _answer(tokenizer: Tokenizer, request: bytes) -> bytes:
    message = json.loads(request)
    head: dict[str, Any]
    arrays: list[AnyArray] = []
    try:
        if message["method"] == "decode":
            head = {"text": tokenizer.decode(message["ids"], skip_special=message["special"])}
        elif message["method"] == "encode_batch":
            arrays = list(tokenizer.encode_batch(message["texts"], special=message["special"]))
            head = {"lengths": [len(ids) for ids in arrays]}
        else:
            offset_tokenizer = cast(OffsetTokenizer, tokenizer)
            (text,) = message["texts"]
            arrays = list(offset_tokenizer.encode_with_offsets(text, special=message["special"]))
            head = {"lengths": [len(arrays[0])]}
    except MemoryError:
        raise LimitReached("out of memory") from None
    except DataError as error:
        head, arrays = {"wrong": str(error)}, []
    except BadLine as bad_line:
        head, arrays = {"failed": bad_line.detail}, []
    except BaseException as error:  # libraries raise Exception itself, or a Rust panic
        head, arrays = {"failed": _words(error)}, []
    return b"\n".join([json.dumps(head).encode(), b"".join(array.tobytes() for array in arrays)])


def _words(error: BaseException) -> str:
    return printable(str(error) or type(error).__name__)


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
        return cast("Tokenizer", UntrustedTokenizer("tokenizer.json", path))
    # Tokenizers of users may lack the template for tools, which is newer than the interface.
    needed = {*_ATTRIBUTES, "encode_batch", "decode", "close"} - {"tool_chat_template"}
    if isinstance(tokenizer, type) or not all(hasattr(tokenizer, name) for name in needed):
        raise DataError(
            f"a tokenizer of type {type(tokenizer).__name__} cannot be used; pass a Tokenizer of this package, for "
            "example ByteTokenizer(), or the path of a tokenizer.json. For a tokenizer of Hugging Face, pass the "
            "directory that its save_pretrained wrote."
        )
    return tokenizer
