"""From a conversation to pieces of text that are trained or not."""

from __future__ import annotations

import hashlib
import threading
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from megatron_packed.data.errors import DataError
from megatron_packed.data.schema import Conversation
from megatron_packed.data.template import DEFAULT_TEMPLATE, Rendered, TemplateError, TemplateRenderer
from megatron_packed.data.template_process import CPU_SECONDS, TemplateProcess
from megatron_packed.data.tokenizer import Tokenizer

PROMPT_FORMATS = ("default", "identity")
"""Values of ``--sft-tokenizer-prompt-format``. Megatron's ``default`` trains on every token; ours on the assistant's.
"""
BUILT_IN_TEMPLATES = {"chatml": DEFAULT_TEMPLATE}
"""Values of ``--chat-template`` that are names and not files."""


class Piece(NamedTuple):
    """Adjacent pieces make up one document."""

    text: str
    train: bool
    """Whether the tokens of this piece are targets."""
    markup: bool
    """A template printed it: special tokens in it count, unless broken (see `template`)."""


class ChatFormat(Protocol):
    """How conversations become text. Safe to use from several threads."""

    fingerprint: str
    """Changes whenever a conversation could become other text."""

    def pieces(self, conversation: Conversation) -> list[Piece]:
        """The conversation as text.

        Raises:
            BadLine: it cannot be rendered, or what the assistant said cannot be told for certain.
        """
        ...

    def prompt(self, messages: list[dict[str, Any]], tools: list[Any] | None = None) -> list[Piece]:
        """The text after which an answer is to be generated."""
        ...

    def close(self) -> None:
        """Release processes; the format stays usable."""
        ...


class IdentityFormat:
    """The contents of the messages one after the other, with nothing between them."""

    fingerprint = "identity-1"

    def pieces(self, conversation: Conversation) -> list[Piece]:
        return [
            Piece(message["content"], message["role"] == "assistant" and message.get("train", True), False)
            for message in conversation.messages
            if message["content"]
        ]

    def prompt(self, messages: list[dict[str, Any]], tools: list[Any] | None = None) -> list[Piece]:
        return [Piece(message["content"], False, False) for message in messages if message["content"]]

    def close(self) -> None:
        pass


class TemplateFormat:
    """A jinja2 chat template. Ours is rendered here; any other in a process of its own (one per thread that asks).

    Args:
        source: the template; None for the built-in one.
        tokenizer: its special tokens and the variables that templates expect.
        cpu_seconds: limit for one conversation.
    Raises:
        DataError: the template does not compile.
    """

    def __init__(self, source: str | None, tokenizer: Tokenizer, cpu_seconds: float = CPU_SECONDS) -> None:
        self._source = DEFAULT_TEMPLATE if source is None else source
        self._arguments = (self._source, tokenizer.template_variables, list(tokenizer.special_tokens))
        self._cpu_seconds = cpu_seconds
        self.fingerprint = "template-1:" + hashlib.sha256(self._source.encode("utf-8", "surrogatepass")).hexdigest()
        self._own = TemplateRenderer(*self._arguments) if self._source == DEFAULT_TEMPLATE else None
        self._idle: list[TemplateProcess] = []
        self._lock = threading.Lock()
        if self._own is None:
            try:
                self._idle.append(TemplateProcess(*self._arguments, cpu_seconds=cpu_seconds))
            except TemplateError as error:
                raise DataError(str(error)) from None

    def pieces(self, conversation: Conversation) -> list[Piece]:
        return _split(self._with_renderer("conversation", conversation.messages, conversation.tools))

    def prompt(self, messages: list[dict[str, Any]], tools: list[Any] | None = None) -> list[Piece]:
        return [Piece(self._with_renderer("prompt", messages, tools), False, True)]

    def close(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for process in idle:
            process.close()

    def _with_renderer(self, method: str, *arguments: Any) -> Any:
        if self._own is not None:
            return getattr(self._own, method)(*arguments)
        with self._lock:
            process = self._idle.pop() if self._idle else None
        if process is None:
            process = TemplateProcess(*self._arguments, cpu_seconds=self._cpu_seconds)
        try:
            return getattr(process, method)(*arguments)
        finally:
            with self._lock:
                self._idle.append(process)


def _split(rendered: Rendered) -> list[Piece]:
    pieces, at = [], 0
    for start, end in rendered.spans:
        pieces.append(Piece(rendered.text[at:start], False, True))
        pieces.append(Piece(rendered.text[start:end], True, True))
        at = end
    pieces.append(Piece(rendered.text[at:], False, True))
    return [piece for piece in pieces if piece.text]


def chat_format(prompt_format: str, tokenizer: Tokenizer, chat_template: str | Path | None = None) -> ChatFormat:
    """The format that the options ask for.

    Args:
        prompt_format: one of `PROMPT_FORMATS`.
        chat_template: a file with a jinja2 template, or one of `BUILT_IN_TEMPLATES`; None for the tokenizer's own, or
            ``chatml`` if it has none.
    Raises:
        DataError: unknown format, unreadable file, or a template that does not compile.
    """
    if prompt_format == "identity":
        if chat_template is not None:
            raise DataError("--sft-tokenizer-prompt-format identity uses no template; leave --chat-template out.")
        return IdentityFormat()
    if prompt_format != "default":
        raise DataError(
            f"--sft-tokenizer-prompt-format {prompt_format} is not built; choose one of {', '.join(PROMPT_FORMATS)} "
            "(default uses the tokenizer's own chat template)."
        )
    if chat_template is None:
        return TemplateFormat(tokenizer.chat_template, tokenizer)
    if chat_template in BUILT_IN_TEMPLATES:
        return TemplateFormat(BUILT_IN_TEMPLATES[str(chat_template)], tokenizer)
    file = Path(chat_template)
    try:
        return TemplateFormat(file.read_text(encoding="utf-8"), tokenizer)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        names = ", ".join(BUILT_IN_TEMPLATES)
        raise DataError(f"--chat-template {file} cannot be read: {reason}; name a jinja2 file or {names}.") from None
