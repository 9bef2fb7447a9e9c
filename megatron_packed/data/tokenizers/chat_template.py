"""Rendering of chat templates in sandboxed jinja2, with the character ranges to train on.

This module needs only jinja2, because a template that came with a tokenizer is rendered in a small
child process (`template_process`).

The renderer puts private markers into the text. They are Unicode noncharacters, which `line_schema`
does not allow in data:

- `GENERATION_START` and `GENERATION_END` surround the output of a ``{% generation %}`` block.
- `BROKEN` follows the first character of every special token that is spelled inside a message. A
  user who writes ``<|im_end|>`` therefore cannot end a turn. Special tokens without `BROKEN` come
  from the template.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from megatron_packed.data.errors import BadLine, printable

GENERATION_START, GENERATION_END, BROKEN = "\ufdd0", "\ufdd1", "\ufdd2"
_GENERATION_MARKS = re.compile(f"[{GENERATION_START}{GENERATION_END}]")

DEFAULT_TEMPLATE = """\
{%- if tools -%}
  {{- raise_exception('the built-in template prints no tool definitions; give --chat-template one that does') -}}
{%- endif -%}
{%- for message in messages -%}
  {{- '<|im_start|>' + message.role + '\\n' -}}
  {%- if message.role == 'assistant' -%}
    {%- generation -%}
      {{- message.content -}}
      {%- for call in message.tool_calls or [] -%}
        {{- '\\n<tool_call>\\n' + (call.function or call) | tojson + '\\n</tool_call>' -}}
      {%- endfor -%}
      {{- '<|im_end|>' -}}
    {%- endgeneration -%}
  {%- else -%}
    {{- message.content + '<|im_end|>' -}}
  {%- endif -%}
  {{- '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""
"""Template for tokenizers without a template: ChatML, in which the end of an assistant turn is
trained."""


class Rendered(NamedTuple):
    """Text of a rendered conversation, and the ranges to train on."""

    text: str
    """Rendered text, which may contain `BROKEN`; see the docstring of the module."""
    spans: list[tuple[int, int]]
    """Character ranges of ``text`` to train on, in ascending order; no range is empty."""


class TemplateError(ValueError):
    """Error for a template that cannot be used for any conversation."""


class _Generation(Extension):
    """jinja2 extension: ``{% generation %} ... {% endgeneration %}`` marks the text that it prints."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's interface

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Any) -> str:
        return f"{GENERATION_START}{caller()}{GENERATION_END}"


class TemplateRenderer:
    """Compiled chat template.

    Args:
        source: jinja2, in the dialect of Hugging Face tokenizers (``trim_blocks``,
            ``raise_exception``, ``tojson``, ``{% generation %}``). The function ``strftime_now`` is
            undefined, so that the same data gives the same tokens every day. Templates that test
            for this function print a fixed date instead.
        variables: e.g. ``{"bos_token": "<s>", "eos_token": "</s>"}``.
        special_tokens: spellings that must not act as special tokens inside a message.
    Raises:
        TemplateError: the template does not compile.
    """

    def __init__(
        self, source: str, variables: Mapping[str, str], special_tokens: Sequence[str]
    ) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        # Random functions are removed: the same data must give the same tokens.
        del environment.filters["random"]
        del environment.globals["lipsum"]
        environment.globals["raise_exception"] = _raise_exception
        try:
            parsed = environment.parse(source)
            self._template = environment.from_string(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise TemplateError(
                f"the chat template does not compile: {printable(str(error), 400)}"
            ) from None
        self.has_generation_blocks = any(
            call.node.identifier == _Generation.identifier and call.node.name == "_mark"
            for call in parsed.find_all(nodes.Call)
            if isinstance(call.node, nodes.ExtensionAttribute)
        )
        self._variables = dict(variables)
        self._special_tokens = tuple(token for token in special_tokens if token)
        ordered = sorted(special_tokens, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, ordered))) if ordered else None

    def prompt(self, messages: list[dict[str, Any]], tools: list[Any] | None = None) -> str:
        """Render the text after which the model generates an answer.

        Raises:
            BadLine: the template raises an error.
        """
        return _GENERATION_MARKS.sub(
            "", self._render(self._protect(messages), self._protect(tools), prompt=True)
        )

    def conversation(
        self,
        messages: list[dict[str, Any]],
        tools: list[Any] | None = None,
        ends_once: bool = False,
    ) -> Rendered:
        """Render a complete conversation with the ranges of the assistant messages.

        The ranges are the output of the template's generation blocks. If the template has none, the
        range of an assistant message is the text that the message adds to the conversation before
        it. Assistant messages with ``train: false`` have no range.

        Raises:
            BadLine: the template raises an error, or the text of an assistant message cannot be
                located reliably.
        """
        try:
            messages, tools = self._protect(messages), self._protect(tools)
            train = [
                message.get("train", True) for message in messages if message["role"] == "assistant"
            ]
            if self.has_generation_blocks:
                return _marked_spans(self._render(messages, tools), train)
            return self._added_spans(messages, tools, ends_once)
        except RecursionError:
            raise BadLine("too_deep", "while rendering") from None

    def answers(self, messages: list[dict[str, Any]], tools: list[Any] | None = None) -> Rendered:
        """Render a conversation like `conversation`, also if the template ends it specially.

        A template without generation blocks may print special tokens after the last message that
        are missing when more messages follow. They are then left out of the ranges.

        Raises:
            BadLine: as for `conversation`.
        """
        return self.conversation(messages, tools, ends_once=True)

    def everything(
        self, messages: list[dict[str, Any]], tools: list[Any] | None = None
    ) -> Rendered:
        """Render a complete conversation, and return the ranges to train on all of its text.

        Only assistant messages with ``train: false`` are not in the ranges.

        Raises:
            BadLine: as for `conversation`.
        """
        if all(
            message["role"] != "assistant" or message.get("train", True) for message in messages
        ):
            text = _GENERATION_MARKS.sub(
                "", self._render(self._protect(messages), self._protect(tools))
            )
            return Rendered(text, [(0, len(text))] if text else [])
        of_assistant = [
            {**message, "train": not message.get("train", True)} for message in messages
        ]
        text, left_out = self.conversation(of_assistant, tools)
        ends = [0, *(end for span in left_out for end in span), len(text)]
        return Rendered(
            text, [(start, end) for start, end in zip(ends[::2], ends[1::2]) if end > start]
        )

    def _added_spans(
        self, messages: list[dict[str, Any]], tools: list[Any] | None, ends_once: bool
    ) -> Rendered:
        text = self._render(messages, tools)
        spans = []
        for number, message in enumerate(messages):
            if message["role"] != "assistant" or not message.get("train", True):
                continue
            before = self._render(messages[:number], tools, prompt=True)
            after = self._render(messages[: number + 1], tools)
            if ends_once:
                after = self._without_document_end(after, text)
            if not (after.startswith(before) and text.startswith(after)):
                raise BadLine(
                    "template_prefix", f"messages[{number}]; add a generation block to the template"
                )
            if len(after) > len(before):
                spans.append((len(before), len(after)))
        return Rendered(text, spans)

    def _without_document_end(self, after: str, text: str) -> str:
        """Remove special tokens and white space at the end of ``after`` until ``text`` begins with
        ``after``.
        """
        while not text.startswith(after):
            fitting = [token for token in self._special_tokens if after.endswith(token)]
            shorter = after[: -len(max(fitting, key=len))] if fitting else after.rstrip()
            if shorter == after:
                break
            after = shorter
        return after

    def _render(
        self, messages: list[dict[str, Any]], tools: list[Any] | None, prompt: bool = False
    ) -> str:
        try:
            return self._template.render(
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=prompt,
                **self._variables,
            )
        except (BadLine, RecursionError, MemoryError):
            raise
        except Exception as error:  # an expression in a template can raise any exception
            raise BadLine(
                "template_error", f"{type(error).__name__}: {printable(str(error))}"
            ) from None

    def _protect(self, value: Any) -> Any:
        """Return ``value`` with `BROKEN` in every special token that its strings spell."""
        if self._special is None:
            return value
        if isinstance(value, str):
            return self._special.sub(_break, value)
        if isinstance(value, list):
            return [self._protect(item) for item in value]
        if isinstance(value, dict):
            return {self._protect(key): self._protect(item) for key, item in value.items()}
        return value


def _marked_spans(marked: str, train: list[bool]) -> Rendered:
    """Remove the generation marks from ``marked``, and return the ranges that they surrounded."""
    spans: list[tuple[int, int]] = []
    pieces: list[str] = []
    length, start, at = 0, -1, 0
    for match in _GENERATION_MARKS.finditer(marked):
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


def _break(match: re.Match[str]) -> str:
    token = match.group()
    return token[0] + BROKEN + token[1:]


def _raise_exception(message: object = "") -> NoReturn:
    raise BadLine("template_error", printable(str(message)))


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes HTML characters, and models would learn to write the escapes
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
