"""Conversion of a conversation to pieces of text, each marked as trained or not."""

from __future__ import annotations

import hashlib
import threading
from contextlib import suppress
from functools import cached_property, partial
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from megatron_packed.config import flag_names as flags
from megatron_packed.config.sections.data_parts.tokenizer import AT_TURN
from megatron_packed.data.errors import BadLine, DataError
from megatron_packed.data.sources.line_schema import Conversation
from megatron_packed.data.tokenizers.base import Tokenizer
from megatron_packed.data.tokenizers.chat_template import (
    DEFAULT_TEMPLATE,
    Rendered,
    TemplateError,
    TemplateRenderer,
)
from megatron_packed.data.tokenizers.limited_process import CPU_SECONDS
from megatron_packed.data.tokenizers.prompt_formats import PROMPT_FORMATS
from megatron_packed.data.tokenizers.template_process import TemplateProcess, template_budget
from megatron_packed.data.tokenizers.turn_ends import PROBES, TurnCutter, TurnEnd, find_turn_end

BUILT_IN_TEMPLATES = {"chatml": DEFAULT_TEMPLATE}
"""Values of ``--chat-template`` that name a built-in template instead of a file."""
_OWN_TEMPLATES = {
    *BUILT_IN_TEMPLATES.values(),
    *(form.template for form in PROMPT_FORMATS.values() if form.template),
}


class TextPiece(NamedTuple):
    """Piece of the text of a document. Consecutive pieces make up the document."""

    text: str
    train: bool
    """True if the tokens of this piece are targets."""
    markup: bool
    """True if a template printed the piece. Special tokens spelled in the piece are then encoded as
    special tokens, unless they are broken (see `chat_template`).
    """


class ChatFormat(Protocol):
    """Interface of the conversion of conversations to text. Several threads may use it."""

    fingerprint: str
    """Hash of everything that determines the text of a conversation: with an equal hash, every
    conversation is converted to the same text.
    """
    ends_documents: bool
    """True if the text of a conversation already marks its end. Then no end-of-document token is
    appended.
    """
    ends_turns: bool
    """True if the text ends with the last trained answer. An end-of-document token is then appended
    only if no special token ends this answer.
    """
    turn_end: TurnEnd | None
    """End of a turn, found by rendering; None if the format prints no special token after an
    answer.
    """

    def pieces(self, conversation: Conversation) -> list[TextPiece]:
        """Return the text of a conversation.

        Raises:
            BadLine: the conversation cannot be rendered, or the assistant's text cannot be located
                reliably.
        """
        ...

    def prompt(
        self, messages: list[dict[str, Any]], tools: list[Any] | None = None
    ) -> list[TextPiece]:
        """Return the text after which the model generates an answer."""
        ...

    def complete_text(self, messages: list[dict[str, Any]], tools: list[Any] | None = None) -> str:
        """Return all text of a conversation, also the text after the last answer.

        Raises:
            BadLine: the messages cannot be rendered.
        """
        ...

    def sentences(self) -> list[str]:
        """Return sentences about the format for the report of the data."""
        ...

    def close(self) -> None:
        """Release processes; the format stays usable."""
        ...


class IdentityFormat:
    """Chat format that joins the contents of the messages without a template.

    Use this format for conversations that a template has already rendered: special tokens spelled
    in the contents are encoded as special tokens. All text is trained, except assistant messages
    with
    ``train: false``.
    """

    fingerprint = "identity-2"
    ends_documents = True
    ends_turns = False
    turn_end: TurnEnd | None = None

    def pieces(self, conversation: Conversation) -> list[TextPiece]:
        parts = groupby(
            conversation.messages, key=lambda m: m["role"] != "assistant" or m.get("train", True)
        )
        pieces = [
            TextPiece("".join(message["content"] for message in part), train, True)
            for train, part in parts
        ]
        return [piece for piece in pieces if piece.text]

    def prompt(
        self, messages: list[dict[str, Any]], tools: list[Any] | None = None
    ) -> list[TextPiece]:
        return [TextPiece(self.complete_text(messages), False, True)]

    def complete_text(self, messages: list[dict[str, Any]], tools: list[Any] | None = None) -> str:
        return "".join(message["content"] for message in messages)

    def sentences(self) -> list[str]:
        return []

    def close(self) -> None:
        pass


class TemplateFormat:
    """Chat format of a jinja2 template.

    Templates of this project are rendered in this process. Other templates are rendered in child
    processes, one per thread.

    Args:
        source: the template; None for the built-in template.
        tokenizer: provides the special tokens and the variables that templates expect.
        cpu_seconds: limit of the CPU time for one conversation.
        trains_all: True makes every token a target, except assistant messages with ``train:
            false``. False makes only the tokens of the assistant targets.
        ends_documents: see `ChatFormat`.
        answer_end: value of ``--answer-end``; without effect if ``trains_all`` or
            ``ends_documents`` is True.
    Raises:
        DataError: the template does not compile.
    """

    def __init__(
        self,
        source: str | None,
        tokenizer: Tokenizer,
        cpu_seconds: float = CPU_SECONDS,
        *,
        trains_all: bool = False,
        ends_documents: bool = False,
        answer_end: str = AT_TURN,
    ) -> None:
        self._source = DEFAULT_TEMPLATE if source is None else source
        self.ends_documents = ends_documents
        self.ends_turns = answer_end == AT_TURN and not (trains_all or ends_documents)
        self._method = "everything" if trains_all else "conversation"
        if self.ends_turns:
            self._method = "answers"
        self._special_tokens = list(tokenizer.special_tokens)
        arguments = (self._source, tokenizer.template_variables, self._special_tokens)
        self._start = partial(
            TemplateProcess, *arguments, cpu_seconds=cpu_seconds, budget=template_budget()
        )
        self.fingerprint = ("template-2:" if self.ends_turns else "template-1:") + hashlib.sha256(
            self._source.encode("utf-8", "surrogatepass")
        ).hexdigest()
        self.fingerprint += ":everything" * trains_all + ":no-end" * ends_documents
        self._own = TemplateRenderer(*arguments) if self._source in _OWN_TEMPLATES else None
        self._idle: list[TemplateProcess] = []
        self._lock = threading.Lock()
        if self._own is None:
            try:
                self._idle.append(self._start())
            except TemplateError as error:
                raise DataError(str(error)) from None

    def pieces(self, conversation: Conversation) -> list[TextPiece]:
        rendered = self._with_renderer(self._method, conversation.messages, conversation.tools)
        return _split(self._cutter.cut(rendered) if self.ends_turns else rendered)

    def prompt(
        self, messages: list[dict[str, Any]], tools: list[Any] | None = None
    ) -> list[TextPiece]:
        return [TextPiece(self._with_renderer("prompt", messages, tools), False, True)]

    def complete_text(self, messages: list[dict[str, Any]], tools: list[Any] | None = None) -> str:
        everyone = [
            {name: value for name, value in message.items() if name != "train"}
            for message in messages
        ]
        return str(self._with_renderer("everything", everyone, tools).text)

    @cached_property
    def turn_end(self) -> TurnEnd | None:
        return find_turn_end(self.complete_text, self._special_tokens)

    def sentences(self) -> list[str]:
        if not self.ends_turns or self.turn_end is None:
            return []
        for messages in PROBES:
            with suppress(BadLine):
                if self._cutter.extends(self._with_renderer(self._method, messages, None)):
                    return [
                        "The {% generation %} blocks of the chat template leave out "
                        f"{self.turn_end.token}, which ends an answer; this token is learned too, "
                        "because a model that never learns it does not stop."
                    ]
                return []
        return []

    @cached_property
    def _cutter(self) -> TurnCutter:
        return TurnCutter(self.turn_end, self._special_tokens)

    def close(self) -> None:
        with self._lock:
            idle = self._idle
            self._idle = []
        for process in idle:
            process.close()

    def _with_renderer(self, method: str, *arguments: Any) -> Any:
        if self._own is not None:
            return getattr(self._own, method)(*arguments)
        with self._lock:
            process = self._idle.pop() if self._idle else None
        if process is None:
            process = self._start()
        try:
            return getattr(process, method)(*arguments)
        finally:
            with self._lock:
                self._idle.append(process)


def _split(rendered: Rendered) -> list[TextPiece]:
    pieces, at = [], 0
    for start, end in rendered.spans:
        pieces.append(TextPiece(rendered.text[at:start], False, True))
        pieces.append(TextPiece(rendered.text[start:end], True, True))
        at = end
    pieces.append(TextPiece(rendered.text[at:], False, True))
    return [piece for piece in pieces if piece.text]


def chat_format(
    tokenizer: Tokenizer,
    chat_template: str | Path | None = None,
    prompt_format: str | None = None,
    answer_end: str = AT_TURN,
) -> ChatFormat:
    """Build the chat format that the options select.

    Args:
        chat_template: a file with a jinja2 template, or one of `BUILT_IN_TEMPLATES`; None for the
            tokenizer's own template, or ``chatml`` if the tokenizer has none.
        prompt_format: a key of `prompt_formats.PROMPT_FORMATS`; ``default`` uses the template.
            None uses the template and trains only on the assistant's text.
        answer_end: see `TemplateFormat`; prompt formats ignore it.
    Raises:
        DataError: the file cannot be read, the template does not compile, or the tokenizer lacks
            special tokens of the format.
    """
    if prompt_format is None:
        source = template_source(tokenizer, chat_template)
        return TemplateFormat(source, tokenizer, answer_end=answer_end)
    if prompt_format == "identity":
        return IdentityFormat()
    form = PROMPT_FORMATS[prompt_format]
    missing = [token for token in form.special_tokens if token not in tokenizer.special_tokens]
    if missing:
        raise DataError(
            f"{flags.SFT_TOKENIZER_PROMPT_FORMAT} {prompt_format} needs the special tokens {', '.join(missing)}, which "
            "the tokenizer does not have; use the tokenizer of a model with this format, or choose another format."
        )
    template = form.template or template_source(tokenizer, chat_template)
    return TemplateFormat(template, tokenizer, trains_all=form.trains_all, ends_documents=True)


def template_source(tokenizer: Tokenizer, chat_template: str | Path | None) -> str | None:
    """Return the jinja2 source of a chat template; None for the built-in template.

    Args:
        chat_template: see `chat_format`.
    Raises:
        DataError: the file cannot be read.
    """
    if chat_template is None:
        return tokenizer.chat_template
    if chat_template in BUILT_IN_TEMPLATES:
        return BUILT_IN_TEMPLATES[str(chat_template)]
    file = Path(chat_template)
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        names = ", ".join(BUILT_IN_TEMPLATES)
        raise DataError(
            f"{flags.CHAT_TEMPLATE} {file} cannot be read: {reason}; give a jinja2 file or {names}."
        ) from None
