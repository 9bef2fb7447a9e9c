"""Conversion of a conversation to pieces of text, each marked as trained or not."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from functools import cached_property, partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

from megatron_packed.config import flag_names as flags
from megatron_packed.config.sections.data_parts.tokenizer import (
    AT_TURN,
    COUNTED,
    EACH_ANSWER,
    LAST_ANSWER,
    REFUSED,
)
from megatron_packed.data.errors import BadLine, DataError, Notes
from megatron_packed.data.sources.line_schema import Conversation
from megatron_packed.data.tokenizers.base import TURN_END, TURN_START, Tokenizer
from megatron_packed.data.tokenizers.prompt_formats import DEFAULT_TEMPLATE, FORMATS_BY_NAME
from megatron_packed.files.regular_files import open_regular

if TYPE_CHECKING:
    from megatron_packed.data.tokenizers.chat_template import Tools
    from megatron_packed.data.tokenizers.conversation_documents import ConversationRenderer
    from megatron_packed.data.tokenizers.template_process import TemplateProcess
    from megatron_packed.data.tokenizers.turn_markers import Messages, Spans, TurnCutter, TurnEnd

_MOST_BYTES = 16 << 20
"""Maximum bytes of a file with a chat template; the longest of published models has 20 kB."""
BUILT_IN_TEMPLATES = {"chatml": DEFAULT_TEMPLATE}
"""Values of ``--chat-template`` that name a built-in template instead of a file."""
OWN_TEMPLATES = {
    *BUILT_IN_TEMPLATES.values(),
    *(form.template for form in FORMATS_BY_NAME.values() if form.template),
}
"""Templates of this project, which need no process of their own."""


class TextPiece(NamedTuple):
    """Piece of the text of a document. Consecutive pieces make up the document."""

    text: str
    train: bool
    """True if the tokens of this piece are targets."""
    markup: bool
    """True if a template printed the piece. Special tokens spelled in the piece are then encoded as
    special tokens, unless they are broken (see `chat_template`).
    """


def joined_text(pieces: Iterable[TextPiece]) -> str:
    """Return the text that pieces make up."""
    return "".join(piece.text for piece in pieces)


class ChatDocument(NamedTuple):
    """One document of a conversation."""

    conversation: Conversation
    """First messages of the conversation. Assistant messages that are context have ``train: false``."""
    pieces: list[TextPiece]
    """Text of the document."""
    as_served: bool = False
    """True if each answer to learn is one piece, and all text before it is its prompt as served."""


class ChatFormat(Protocol):
    """Interface of the conversion of conversations to text. Several threads may use it."""

    fingerprint: str
    """Hash of the template and of the ends of its documents. With an equal hash and equal `rules`,
    every conversation is converted to the same documents.
    """
    rules: tuple[object, ...] = ()
    """Options that decide how conversations become documents, in types that JSON has."""
    ends_documents: bool = False
    """True if the text of a conversation already marks its end. Then no end-of-document token is
    appended.
    """
    ends_turns: bool = False
    """True if the text ends with the last trained answer. An end-of-document token is then appended
    only if no special token ends this answer.
    """
    last_only: bool = False
    """True if only the document that ends last is used (``--multi-turn last``)."""
    refusal: str | None = None
    """Reason why the options allow no conversation, with its cure; None if they allow them."""

    @property
    def turn_end(self) -> TurnEnd | None:
        """End of a turn, found by rendering; None if the format prints no special token after an
        answer.
        """
        return None

    @property
    def turn_markers(self) -> frozenset[str]:
        """Special tokens that begin and end turns and documents; no text of a message acts as one."""
        return frozenset()

    def documents(self, conversation: Conversation) -> tuple[list[ChatDocument], Notes]:
        """Return the documents of a conversation, and notes about what is not learned.

        Raises:
            BadLine: the conversation cannot be rendered, its answers are printed in another way
                than they are served, or a part of it is not printed.
        """
        ...

    def pieces(self, conversation: Conversation) -> list[TextPiece]:
        """Return the text of a conversation that is one document.

        Raises:
            BadLine: as for `documents`.
        """
        ...

    def prompt(self, messages: Messages, tools: Tools = None) -> list[TextPiece]:
        """Return the text after which the model generates an answer."""
        ...

    def complete_text(self, messages: Messages, tools: Tools = None) -> str:
        """Return all text of a conversation, also the text after the last answer.

        Raises:
            BadLine: the messages cannot be rendered.
        """
        ...

    def reads_field(self, name: str) -> bool:
        """Return True if the format reads a field of messages that has no fixed meaning."""
        return False

    def sentences(self) -> list[str]:
        """Return sentences about the format for the report of the data."""
        return []

    def close(self) -> None:
        """Release processes; the format stays usable."""
        ...


class IdentityFormat(ChatFormat):
    """Chat format that joins the contents of the messages without a template.

    Use this format for conversations that a template has already rendered: special tokens spelled
    in the contents are encoded as special tokens. All text is trained, except assistant messages
    with
    ``train: false``.
    """

    fingerprint = "identity-2"
    ends_documents = True

    def documents(self, conversation: Conversation) -> tuple[list[ChatDocument], Notes]:
        return [ChatDocument(conversation, self.pieces(conversation))], Counter()

    def pieces(self, conversation: Conversation) -> list[TextPiece]:
        parts = groupby(
            conversation.messages, key=lambda m: m["role"] != "assistant" or m.get("train", True)
        )
        pieces = [
            TextPiece("".join(message["content"] for message in part), train, True)
            for train, part in parts
        ]
        return [piece for piece in pieces if piece.text]

    def prompt(self, messages: Messages, tools: Tools = None) -> list[TextPiece]:
        return [TextPiece(self.complete_text(messages), False, True)]

    def complete_text(self, messages: Messages, tools: Tools = None) -> str:
        return "".join(message["content"] for message in messages)

    def close(self) -> None:
        """Do nothing, because there is no child process to end."""


def only_learned(messages: Sequence[dict[str, Any]], learned: Collection[int]) -> Messages:
    """Return messages in which only the given assistant messages are learned."""
    return [
        {**message, "train": False}
        if message["role"] == "assistant" and number not in learned
        else message
        for number, message in enumerate(messages)
    ]


_Renderer: TypeAlias = "ConversationRenderer | TemplateProcess"


class TemplateFormat:
    """Chat format of a jinja2 template.

    Templates of this project are rendered in this process. Other templates are rendered in child
    processes, one per thread.

    Args:
        source: the template; None for the built-in template, if the tokenizer has its tokens.
        tokenizer: provides the special tokens and the variables that templates expect.
        tool_source: template for conversations with tools; None for ``source``.
        trains_all: True makes every token a target, except assistant messages with ``train:
            false``. False makes only the tokens of the assistant targets.
        ends_documents: see `ChatFormat`.
        answer_end: value of ``--answer-end``; without effect if ``trains_all`` or
            ``ends_documents`` is True.
        multi_turn: value of ``--multi-turn``.
        unprinted_policy: value of ``--unprinted-policy``.
        date: value of ``--chat-template-date``.
        kwargs: value of ``--chat-template-kwargs``.
    Raises:
        DataError: the template does not compile.
    """

    def __init__(
        self,
        source: str | None,
        tokenizer: Tokenizer,
        *,
        tool_source: str | None = None,
        trains_all: bool = False,
        ends_documents: bool = False,
        answer_end: str = AT_TURN,
        multi_turn: str = EACH_ANSWER,
        unprinted_policy: str = REFUSED,
        date: str | None = None,
        kwargs: str | None = None,
    ) -> None:
        self.refusal = _no_chatml(tokenizer) if source is None else None
        self._source = DEFAULT_TEMPLATE if source is None else source
        self._tool_source = tool_source
        self.ends_documents = ends_documents
        self.ends_turns = answer_end == AT_TURN and not (trains_all or ends_documents)
        self.last_only = multi_turn == LAST_ANSWER
        self._trains_all = trains_all
        self._counts_unprinted = unprinted_policy == COUNTED
        self._variables = {**tokenizer.template_variables, **json.loads(kwargs or "{}")}
        self._special_tokens = list(tokenizer.special_tokens)
        self._date = date
        self.fingerprint = ("template-2:" if self.ends_turns else "template-1:") + _hash(
            self._source
        )
        self.fingerprint += ":everything" * trains_all + ":no-end" * ends_documents
        of_tools = None if tool_source is None else _hash(tool_source)
        self.rules: tuple[object, ...] = (multi_turn, unprinted_policy, date, kwargs, of_tools)
        # Faults of a template are found here. An own template has none, and it is compiled for the
        # first conversation, because plain texts need none.
        if self._source not in OWN_TEMPLATES:
            self._renderer = self._build(self._source)
        if tool_source is not None:
            self._with_tools = self._build(tool_source)

    def _build(self, source: str) -> _Renderer:
        """Return the renderer of a template, which several threads may use.

        Own templates are rendered in this process, others in child processes.

        Raises:
            DataError: the template does not compile.
        """
        from megatron_packed.data.tokenizers.chat_template import TemplateError
        from megatron_packed.data.tokenizers.conversation_documents import (
            ConversationRenderer,
            RenderingRules,
        )
        from megatron_packed.data.tokenizers.template_process import TemplateProcess

        rules = RenderingRules(
            trains_all=self._trains_all,
            ends_once=self.ends_turns,
            last_only=self.last_only,
            counts_unprinted=self._counts_unprinted,
        )
        kind = ConversationRenderer if source in OWN_TEMPLATES else TemplateProcess
        try:
            return kind(source, self._variables, self._special_tokens, self._date, rules)
        except TemplateError as error:
            raise DataError(str(error)) from None

    @cached_property
    def _renderer(self) -> _Renderer:
        return self._build(self._source)

    @cached_property
    def _with_tools(self) -> _Renderer:
        return self._renderer

    def documents(self, conversation: Conversation) -> tuple[list[ChatDocument], Notes]:
        if self.refusal is not None:
            raise DataError(self.refusal)
        messages, tools = conversation.messages, conversation.tools
        rendered, notes = self._for(tools).documents(messages, tools)
        if ("not_printed", "tools") in notes:  # later renderings of its parts go without tools
            conversation = conversation._replace(tools=None)
        documents = []
        for end, learned, text, spans, as_served in rendered:
            part = conversation._replace(messages=only_learned(messages[:end], learned))
            pieces = self._divided(text, spans)
            documents.append(ChatDocument(part, pieces, as_served))
        return documents, notes

    def pieces(self, conversation: Conversation) -> list[TextPiece]:
        messages, tools = conversation.messages, conversation.tools
        return self._divided(*self._for(tools).conversation(messages, tools))

    def prompt(self, messages: Messages, tools: Tools = None) -> list[TextPiece]:
        return [TextPiece(self._for(tools).prompt(messages, tools), False, True)]

    def complete_text(self, messages: Messages, tools: Tools = None) -> str:
        return self._for(tools).complete_text(messages, tools)

    def reads_field(self, name: str) -> bool:
        # A template can read a field only by its name, or by a loop over all fields of a message.
        return name in self._source or name in (self._tool_source or "")

    @cached_property
    def turn_end(self) -> TurnEnd | None:
        from megatron_packed.data.tokenizers.turn_markers import find_turn_end

        return find_turn_end(self.complete_text, self._special_tokens)

    @cached_property
    def turn_markers(self) -> frozenset[str]:
        return self._renderer.turn_markers

    def sentences(self) -> list[str]:
        sentences = []
        if self._date is None and "strftime_now" in self._source:
            sentences.append(
                "The chat template asks for today's date, and gets none, so that the same data has the same "
                f"tokens every day; {flags.CHAT_TEMPLATE_DATE} sets a date."
            )
        if self.ends_turns:
            from megatron_packed.data.tokenizers.turn_markers import PROBES

            for messages in PROBES:
                with suppress(BadLine):
                    return [*sentences, *self._sentences_of_blocks(messages)]
        return sentences

    def _sentences_of_blocks(self, messages: Messages) -> list[str]:
        """Return what the generation blocks of the template change about the served answers."""
        [*_, document], _ = self._renderer.documents(messages)
        if document.as_served:
            return []
        sentences = []
        if self.turn_end is not None and self._cutter.extends(document.text, document.spans):
            sentences.append(
                "The {% generation %} blocks of the chat template leave out "
                f"{self.turn_end.token}, which ends an answer; this token is learned too, "
                "because a model that never learns it does not stop."
            )
        if document.spans and not document.text.startswith(self._renderer.prompt(messages[:-1])):
            sentences.append(
                "The text before the last {% generation %} block differs from the prompt that the "
                "chat template gives (add_generation_prompt), which a served model gets."
            )
        return sentences

    @cached_property
    def _cutter(self) -> TurnCutter:
        from megatron_packed.data.tokenizers.turn_markers import TurnCutter

        return TurnCutter(self.turn_end, self._special_tokens)

    def _divided(self, text: str, spans: Spans) -> list[TextPiece]:
        return divided(*self._cutter.cut(text, spans)) if self.ends_turns else divided(text, spans)

    def _for(self, tools: Tools) -> _Renderer:
        return self._with_tools if tools else self._renderer

    def close(self) -> None:
        for name in ("_renderer", "_with_tools"):
            if name in vars(self):
                getattr(self, name).close()


def lacks_chatml(tokenizer: Tokenizer) -> list[str]:
    """Return the tokens of ChatML that a tokenizer does not have."""
    return [token for token in (TURN_START, TURN_END) if token not in tokenizer.special_tokens]


def _no_chatml(tokenizer: Tokenizer) -> str | None:
    """Return the refusal of a tokenizer without template and without ChatML's tokens, else None."""
    missing = lacks_chatml(tokenizer)
    if not missing:
        return None
    return (
        f"the tokenizer has no chat template, and {' and '.join(missing)} of ChatML are no tokens of it. Turns would "
        f"begin and end with letters; give {flags.CHAT_TEMPLATE} the template of the model, or {flags.CHAT_TEMPLATE} "
        "chatml to learn these letters."
    )


def _hash(source: str) -> str:
    return hashlib.sha256(source.encode("utf-8", "surrogatepass")).hexdigest()


def divided(text: str, spans: Spans) -> list[TextPiece]:
    """Return the pieces of a text of markup with the given trained ranges."""
    pieces, at = [], 0
    for start, end in spans:
        pieces += [TextPiece(text[at:start], False, True), TextPiece(text[start:end], True, True)]
        at = end
    return [piece for piece in (*pieces, TextPiece(text[at:], False, True)) if piece.text]


def chat_format(
    tokenizer: Tokenizer,
    chat_template: str | Path | None = None,
    prompt_format: str | None = None,
    answer_end: str = AT_TURN,
    *,
    multi_turn: str = EACH_ANSWER,
    unprinted_policy: str = REFUSED,
    date: str | None = None,
    kwargs: str | None = None,
) -> ChatFormat:
    """Build the chat format that the options select.

    Args:
        chat_template: a file with a jinja2 template, or one of `BUILT_IN_TEMPLATES`; None for the
            tokenizer's own template, or ``chatml`` if the tokenizer has none.
        prompt_format: a key of `prompt_formats.FORMATS_BY_NAME`; ``default`` uses the template.
            None uses the template and trains only on the assistant's text.
        answer_end, multi_turn, unprinted_policy, date, kwargs: see `TemplateFormat`; prompt formats
            ignore ``answer_end`` and ``multi_turn``.
    Raises:
        DataError: the file cannot be read, the template does not compile, or the tokenizer lacks
            special tokens of the format.
    """
    if prompt_format == "identity":
        return IdentityFormat()
    source = template_source(tokenizer, chat_template)
    build = partial(
        TemplateFormat,
        tokenizer=tokenizer,
        unprinted_policy=unprinted_policy,
        date=date,
        kwargs=kwargs,
    )
    of_tools = getattr(tokenizer, "tool_chat_template", None) if chat_template is None else None
    if prompt_format is None:
        return build(source, tool_source=of_tools, answer_end=answer_end, multi_turn=multi_turn)
    form = FORMATS_BY_NAME[prompt_format]
    missing = [token for token in form.special_tokens if token not in tokenizer.special_tokens]
    if missing:
        raise DataError(
            f"{flags.SFT_TOKENIZER_PROMPT_FORMAT} {prompt_format} needs the special tokens {', '.join(missing)}, which "
            "the tokenizer does not have; use the tokenizer of a model with this format, or choose another format."
        )
    if form.template is not None:
        source, of_tools = form.template, None
    return build(source, tool_source=of_tools, trains_all=form.trains_all, ends_documents=True)


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
        with open_regular(file) as stream:
            text = stream.read(_MOST_BYTES + 1).decode()
        if len(text) <= _MOST_BYTES:
            return text
        reason: str | None = f"it has more than {_MOST_BYTES >> 20} MiB"
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
    names = ", ".join(BUILT_IN_TEMPLATES)
    raise DataError(
        f"{flags.CHAT_TEMPLATE} {file} cannot be read: {reason}; give a jinja2 file or {names}."
    )
