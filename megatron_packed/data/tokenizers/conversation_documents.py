"""Documents of a conversation: which answers are trained, and with which text before them.

A model is trained on the text that it is served with. The text before an answer is the prompt that
the template gives for the messages before it (``add_generation_prompt``). The answer is the text
that the template prints when this answer is the last message.

Templates that show thoughts only after the last user message print the earlier turns of a longer
conversation in another way. Then no rendering of the complete conversation holds all answers, and
one conversation becomes several documents, each with its history as it is served.

The module needs only jinja2, like `chat_template`.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from megatron_packed.data.errors import BadLine, Notes, printable
from megatron_packed.data.sources.strict_json import BROKEN, GENERATION_START
from megatron_packed.data.tokenizers.chat_template import (
    GENERATION_MARKS,
    REASONING,
    Rendered,
    TemplateRenderer,
    Tools,
    unmarked,
)
from megatron_packed.data.tokenizers.turn_markers import Messages, common_length

_THOUGHT = re.compile("((?:.*?<think>)?)((?:(?<=<think>).*(?=</think>))?)(.*)", re.DOTALL)
"""Content of an answer: text up to the beginning of a thought, the thought, and the rest."""
_PARTS = (("tool_calls",), REASONING)
"""Fields of each part of an answer beside its content."""


class RenderedDocument(NamedTuple):
    """One document of a conversation: its first messages, as they are served."""

    end: int
    """Number of messages of the conversation that the document holds."""
    learned: list[int]
    """Numbers of the assistant messages that are trained in this document."""
    text: str
    """As `Rendered.text`."""
    spans: list[tuple[int, int]]
    """As `Rendered.spans`."""
    as_served: bool = False
    """True if each range was located by the prompt and the answer as they are served."""


class RenderingRules(NamedTuple):
    """Options that decide what of a conversation is trained, and in which documents."""

    trains_all: bool = False
    """True to train all text of the complete conversation, except assistant messages with ``train:
    false``.
    """
    ends_once: bool = True
    """True if a document ends with its last trained answer. A template without generation blocks
    may then print special tokens after the last message that are missing when more messages follow.
    These tokens are left out of the ranges of earlier answers.
    """
    last_only: bool = False
    """True to train only the document that ends last (``--multi-turn last``)."""
    counts_unprinted: bool = False
    """True to count parts of a conversation that the template does not print, False to refuse the
    conversation (``--unprinted-policy``).
    """


class _Served(NamedTuple):
    """An answer as it is served."""

    start: int
    """Length of the prompt."""
    text: str
    """Text of the conversation up to this answer: the prompt, then the answer."""


class ConversationRenderer(TemplateRenderer):
    """Compiled chat template that renders conversations to the documents that are trained.

    Args:
        source, variables, special_tokens, date: as for `TemplateRenderer`.
        rules: what of a conversation is trained.
    """

    def __init__(
        self,
        source: str,
        variables: Mapping[str, Any],
        special_tokens: Sequence[str],
        date: str | None = None,
        rules: RenderingRules = RenderingRules(),  # noqa: B008 - immutable
    ) -> None:
        super().__init__(source, variables, special_tokens, date)
        self._rules = rules

    def conversation(self, messages: Messages, tools: Tools = None) -> Rendered:
        """Render the document of a conversation that ends last, without notes about its meaning.

        Raises:
            BadLine: as for `documents`.
        """
        try:
            messages = self._with_fitting_arguments(messages, tools)
            messages, tools = self.protected(messages, tools)
            if self._rules.trains_all:
                return self._everything(messages, tools)
            if self.has_generation_blocks:
                return _marked_spans(self.render(messages, tools), _trained(messages))
            served = self._served(messages, tools, Counter())
            document = self._grouped(messages, tools, served, self._rules.ends_once)[-1]
            return Rendered(document.text, document.spans)
        except RecursionError:
            raise BadLine("too_deep", "while rendering") from None

    def documents(
        self, messages: Messages, tools: Tools = None
    ) -> tuple[list[RenderedDocument], Notes]:
        """Render a conversation to documents in which each answer has its history as served.

        With generation blocks there is one document, and the ranges are the output of the blocks.
        Otherwise an answer is trained in the last document whose text begins with the prompt of the
        answer and with the answer as it is served. Assistant messages with ``train: false`` are
        context.

        Returns:
            The documents in the order of their last answers, and notes about what of the
            conversation is not learned.
        Raises:
            BadLine: the template raises an error, no answer is printed as it is served, or a part
                of the conversation is not printed.
        """
        notes: Notes = Counter()
        try:
            if tools and self._rules.counts_unprinted and self._refuses_tools(messages, tools):
                tools = None
                notes["not_printed", "tools"] += 1
            messages = self._with_fitting_arguments(messages, tools)
            shown = self.protected(messages, tools, notes)
            documents = self._documents(*shown, notes)
            if any(kind == "letters" for kind, _ in notes):
                self._check_letters(messages, tools, documents)
        except RecursionError:
            raise BadLine("too_deep", "while rendering") from None
        if self._rules.last_only and len(documents) > 1:
            earlier = sum(len(document.learned) for document in documents[:-1])
            notes["not_served", "answers of earlier turns"] += earlier
            documents = documents[-1:]
        return documents, notes

    def _with_fitting_arguments(self, messages: Messages, tools: Tools) -> Messages:
        """Return messages whose calls have arguments in the form that the template accepts.

        Most templates need an object. Those of DeepSeek V3 and R1 join the arguments with other
        text, so they need the JSON text.
        """
        calls = [call for message in messages for call in message.get("tool_calls") or ()]
        if not any(
            isinstance((call.get("function") or call).get("arguments"), dict) for call in calls
        ):
            return messages
        try:
            self.render(messages, tools)
        except BadLine:
            with suppress(BadLine):
                texts = [_with_text_arguments(message) for message in messages]
                self.render(texts, tools)
                return texts
        return messages

    def _refuses_tools(self, messages: Messages, tools: Tools) -> bool:
        """Return True if the template raises an error for tools, but not without them."""
        try:
            self.render(messages, tools)
        except BadLine:
            with suppress(BadLine):
                self.render(messages, None)
                return True
        return False

    def _documents(self, messages: Messages, tools: Tools, notes: Notes) -> list[RenderedDocument]:
        """Render a protected conversation to documents, and add to the notes."""
        answers = [number for number, trained in _answers(messages) if trained]
        if self._rules.trains_all:
            rendered = self._everything(messages, tools)
            texts = {n: rendered.text for n, _ in list(_answers(messages))[-1:]}
            self._printed(messages, tools, texts, {}, notes)
            return [RenderedDocument(len(messages), answers, *rendered)]
        if self.has_generation_blocks:
            text = self.render(messages, tools)
            messages = self._printed(messages, tools, dict.fromkeys(answers, text), {}, notes)
            answers = [number for number, trained in _answers(messages) if trained]
            rendered = _marked_spans(text, _trained(messages))
            return [RenderedDocument(len(messages), answers, *rendered)]
        served = self._served(messages, tools, notes)
        if served:
            texts = {number: answer.text for number, answer in served.items()}
            messages = self._printed(messages, tools, texts, served, notes)
            lost = [n for n, trained in _answers(messages) if n in served and not trained]
            for number in lost:
                del served[number]
            if not served:
                raise BadLine("empty_assistant", f"messages[{lost[0]}], as it is printed")
        return self._grouped(messages, tools, served, self._rules.ends_once)

    def _check_letters(
        self, messages: Messages, tools: Tools, documents: Sequence[RenderedDocument]
    ) -> None:
        """Check that broken special tokens change no decision of the template.

        A template may search or remove such a text, for example ``</think>`` in a question.

        Raises:
            BadLine: the text is another one with the tokens unbroken.
        """
        for document in documents:
            unbroken = unmarked(self.render(messages[: document.end], tools))
            text = document.text.replace(BROKEN, "")
            if unbroken != text:
                detail = "the chat template decides by a special token that a message spells"
                raise BadLine("special_token_in_content", detail)

    def _everything(self, messages: Messages, tools: Tools) -> Rendered:
        """Render a complete conversation, with the ranges of all text but the answers with
        ``train: false``.

        Raises:
            BadLine: such an answer cannot be located in the text.
        """
        if all(_trained(messages)):
            text = unmarked(self.render(messages, tools))
            return Rendered(text, [(0, len(text))] if text else [])
        left_out = [
            {**message, "train": not message.get("train", True)}
            if message["role"] == "assistant"
            else message
            for message in messages
        ]
        if self.has_generation_blocks:
            text, spans = _marked_spans(self.render(messages, tools), _trained(left_out))
        else:
            notes: Notes = Counter()
            served = self._served(left_out, tools, notes)
            documents = self._grouped(left_out, tools, served, ends_once=False)
            if notes or len(documents) > 1:
                raise BadLine("template_prefix", "the place of an answer with train: false")
            text, spans = documents[0].text, documents[0].spans
        ends = [0, *(end for span in spans for end in span), len(text)]
        return Rendered(
            text, [(start, end) for start, end in zip(ends[::2], ends[1::2]) if end > start]
        )

    def _served(self, messages: Messages, tools: Tools, notes: Notes) -> dict[int, _Served]:
        """Render each answer to train as it is served; answers without a prompt get a note.

        Raises:
            BadLine: the template raises an error, or no answer is printed as it is served.
        """
        served: dict[int, _Served] = {}
        refused: list[BadLine] = []
        for number, trained in _answers(messages):
            if not trained:
                continue
            if not number:  # no server generates an answer to nothing
                refused.append(BadLine("no_question", "messages[0]"))
                notes["not_served", "answers before the first message"] += 1
                continue
            try:
                prompt_text = self.render(messages[:number], tools, prompt=True)
            except BadLine as bad_line:
                refused.append(bad_line)
                notes["not_served", "answers for which the template gives no prompt"] += 1
                continue
            after = self.render(messages[: number + 1], tools)
            if after.startswith(prompt_text):
                served[number] = _Served(len(prompt_text), after)
            else:
                detail = f"messages[{number}]: {_difference(prompt_text, after)}"
                refused.append(BadLine("template_prefix", detail))
                notes["not_served", "answers printed without the generation prompt"] += 1
        if refused and not served:
            raise refused[0]
        return served

    def _grouped(
        self, messages: Messages, tools: Tools, served: dict[int, _Served], ends_once: bool
    ) -> list[RenderedDocument]:
        """Return the documents of a conversation, each with the answers that its text holds.

        The document that ends last is the complete conversation, or without what follows the last
        answer if ``ends_once``. Answers that it does not hold get documents of their
        own, of which later ones hold earlier answers where they can.
        """
        left = sorted(served)
        if not left:
            text = self.render(messages, tools)
            return [RenderedDocument(len(messages), [], text, [])]
        documents: list[RenderedDocument] = []
        if not ends_once and left[-1] + 1 < len(messages):
            text = self.render(messages, tools)
            documents.append(self._document(len(messages), text, served, left, ends_once))
            if not documents[0].learned:
                documents = []
        while left := [n for n in left if not any(n in d.learned for d in documents)]:
            text = served[left[-1]].text
            documents.append(self._document(left[-1] + 1, text, served, left, ends_once))
        return documents[::-1]

    def _document(
        self,
        end: int,
        text: str,
        served: dict[int, _Served],
        answers: Sequence[int],
        ends_once: bool,
    ) -> RenderedDocument:
        """Return the document with ``text``, and the answers of ``answers`` that it holds."""
        learned, spans = [], []
        for number in answers:
            start, after = served[number]
            if ends_once:
                served_text, after = after, self._without_document_end(after, text)
                if after != served_text and not self._ends_specially(after):
                    continue  # the answer would be learned without an end
            if text.startswith(after) and start <= len(after):
                learned.append(number)
                spans.append((start, len(after)))
        nonempty = [span for span in spans if span[1] > span[0]]
        return RenderedDocument(end, learned, text, nonempty, as_served=len(nonempty) == len(spans))

    def _ends_specially(self, text: str) -> bool:
        """Return True if a special token ends a text, or white space after it."""
        return text.rstrip().endswith(self.special_tokens)

    def _without_document_end(self, after: str, text: str) -> str:
        """Remove special tokens and white space at the end of ``after`` until ``text`` begins with
        ``after``.
        """
        while not text.startswith(after):
            fitting = [token for token in self.special_tokens if after.endswith(token)]
            shorter = after[: -len(max(fitting, key=len))] if fitting else after.rstrip()
            if shorter == after:
                break
            after = shorter
        return after

    def _printed(
        self,
        messages: Messages,
        tools: Tools,
        texts: Mapping[int, str],
        served: Mapping[int, _Served],
        notes: Notes,
    ) -> Messages:
        """Check that the template prints all parts of a conversation.

        A part is not printed if the text is the same with other content, or without the part.
        Thoughts and calls are compared where their message is the last one, because templates may
        drop them from earlier turns. With generation blocks, or if all text is trained, they are
        compared in the complete conversation.

        Args:
            texts: text of the conversation up to each answer to compare, or of the complete
                conversation.
            served: the answers as they are served, if they are known.
        Returns:
            The messages. An answer that is empty without the parts that are not printed has
            ``train: false``.
        Raises:
            BadLine: a part is not printed, unless `RenderingRules.counts_unprinted`.
        """
        checked = list(messages)
        lost: list[tuple[str, str]] = []
        complete = self._rules.trains_all or self.has_generation_blocks
        for number, text in texts.items():
            message = messages[number]
            context = messages if complete else messages[: number + 1]
            gone: list[str] = []
            left: list[str] = []
            for fields in _PARTS:
                name = next((name for name in fields if message.get(name)), None)
                if name is not None:
                    stays = self._stays(text, context, tools, number, dict.fromkeys(fields))
                    (gone if stays else left).append(name)
            start = served[number].start if number in served else 0
            thought, said = self._prints_content(text, start, context, tools, number)
            names = [*gone, "content"] if not (thought and said) else gone
            lost += [(f"messages[].{name}", f"messages[{number}].{name}") for name in names]
            if names and not left and not (said and message["content"].strip()):
                checked[number] = {**message, "train": False}
                notes["not_served", "answers that are empty as they are printed"] += 1
        if texts:
            last = max(texts)
            context = messages if complete else messages[: last + 1]
            lost += self._unprinted_context(texts[last], context, tools)
        if lost and not self._rules.counts_unprinted:
            raise BadLine("not_printed", ", ".join(dict.fromkeys(place for _, place in lost)))
        for name, _ in lost:
            notes["not_printed", name] += 1
        return checked

    def _unprinted_context(
        self, text: str, messages: Messages, tools: Tools
    ) -> Iterator[tuple[str, str]]:
        """Yield the name and the place of each part before the answers that is not printed."""
        if tools and self._stays(text, messages, None):
            yield "tools", "tools"
        for role in ("system", "user", "tool"):
            number = next((n for n, m in enumerate(messages) if m["role"] == role), None)
            if number is not None and (content := messages[number]["content"]).strip():
                other = {"content": f"{content} {content}"}
                if self._stays(text, messages, tools, number, other):
                    yield f"messages of the role {role}", f"messages[{number}].content"

    def _prints_content(
        self, text: str, start: int, messages: Messages, tools: Tools, number: int
    ) -> tuple[bool, bool]:
        """Compare the content of an answer with the text after character ``start``.

        Returns:
            True if the text has the thought inside of the content, and True if it has the rest.
        """
        match = _THOUGHT.fullmatch(messages[number]["content"])
        assert match is not None
        prefix, thought, said = match.groups()
        printed = []
        for part, changed in (
            (thought, f"{prefix}{thought} x{said}"),
            (said.removeprefix("</think>"), f"{prefix}{thought}{said} x"),
        ):
            is_present = not part.strip() or part.strip() in text[start:]
            other = {"content": changed}
            printed.append(is_present or not self._stays(text, messages, tools, number, other))
        return printed[0], printed[1]

    def _stays(
        self,
        text: str,
        messages: Messages,
        tools: Tools,
        number: int = 0,
        changes: Mapping[str, Any] | None = None,
    ) -> bool:
        """Return True if ``messages`` with other fields in one message have the same text.

        Args:
            changes: the fields of message ``number`` that change; None removes a field.
        """
        changed = {**messages[number], **(changes or {})}
        other = {name: value for name, value in changed.items() if value is not None}
        with suppress(BadLine):
            return text == self.render([*messages[:number], other, *messages[number + 1 :]], tools)
        return False


def _with_text_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message whose calls have JSON texts as arguments."""

    def as_text(call: dict[str, Any]) -> dict[str, Any]:
        if isinstance(call.get("function"), dict):
            return {**call, "function": as_text(call["function"])}
        arguments = call.get("arguments")
        if not isinstance(arguments, dict):
            return call
        return {**call, "arguments": json.dumps(arguments, ensure_ascii=False)}

    calls = message.get("tool_calls")
    return {**message, "tool_calls": [as_text(call) for call in calls]} if calls else message


def _answers(messages: Messages) -> Iterator[tuple[int, bool]]:
    """Yield the number of each assistant message, and True if the message is to be trained."""
    for number, message in enumerate(messages):
        if message["role"] == "assistant":
            yield number, message.get("train", True)


def _trained(messages: Messages) -> list[bool]:
    return [trained for _, trained in _answers(messages)]


def _difference(prompt: str, text: str) -> str:
    """Return the first parts at which a prompt and the printed text differ."""
    same = common_length(prompt, text)
    shown = [printable(part.replace(BROKEN, "")[same:], 60) for part in (prompt, text)]
    return f"the prompt goes on with {shown[0]!r}, the printed text with {shown[1]!r}"


def _marked_spans(marked: str, train: list[bool]) -> Rendered:
    """Remove the generation marks from ``marked``, and return the ranges that they surrounded."""
    spans: list[tuple[int, int]] = []
    pieces: list[str] = []
    length, start, at = 0, -1, 0
    for match in GENERATION_MARKS.finditer(marked):
        piece = marked[at : match.start()]
        pieces.append(piece)
        length += len(piece)
        at = match.end()
        opens = match.group() == GENERATION_START
        if opens == (start >= 0):
            raise BadLine("template_spans", "generation blocks are nested")
        if opens:
            start = length
        else:
            spans.append((start, length))
            start = -1
    pieces.append(marked[at:])
    if not all(train):
        if len(spans) != len(train):
            raise BadLine(
                "template_spans",
                f"{len(train)} assistant messages, some with train: false, but {len(spans)} generation blocks",
            )
        spans = [span for span, wanted in zip(spans, train) if wanted]
    return Rendered("".join(pieces), [(start, end) for start, end in spans if end > start])
