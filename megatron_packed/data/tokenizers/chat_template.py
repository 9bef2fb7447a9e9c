"""Rendering of chat templates in sandboxed jinja2, with the character ranges to train on.

This module needs only jinja2, because a template that came with a tokenizer is rendered in a small
child process (`template_process`).

The renderer puts private markers into the text. They are Unicode noncharacters, which `strict_json`
does not allow in data:

- `GENERATION_START` and `GENERATION_END` surround the output of a ``{% generation %}`` block.
- `BROKEN` follows the first character of every special token that is spelled inside a message and
  must not act as one. A user who writes ``<|im_end|>`` therefore cannot end a turn. In the text of
  the assistant only turn markers are broken (`turn_markers`), so that ``<think>`` is a token.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any, NamedTuple, NoReturn

import jinja2
from jinja2 import nodes, pass_environment
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from megatron_packed.config import flag_names as flags
from megatron_packed.config.optional_packages import old_package
from megatron_packed.data.errors import BadLine, Notes, printable
from megatron_packed.data.sources.strict_json import BROKEN, GENERATION_END, GENERATION_START
from megatron_packed.data.tokenizers.turn_markers import Messages, find_turn_markers

_OLD_JINJA = old_package("jinja2")
"""Clause and command about a jinja2 that is too old; read before the process can no longer open files.

The commands of this package check it at their start, but other programs may render, too.
"""
GENERATION_MARKS = re.compile(f"[{GENERATION_START}{GENERATION_END}]")

REASONING = ("reasoning_content", "reasoning", "thinking")
"""Fields of an assistant message that hold its thoughts."""
Tools = list[Any] | None


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


def template_environment() -> ImmutableSandboxedEnvironment:
    """Return the jinja2 environment of Hugging Face tokenizers, without its functions."""
    return ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )


class TemplateRenderer:
    """Compiled chat template.

    Args:
        source: jinja2, in the dialect of Hugging Face tokenizers (``trim_blocks``,
            ``raise_exception``, ``tojson``, ``{% generation %}``).
        variables: e.g. ``{"bos_token": "<s>", "eos_token": "</s>"}``.
        special_tokens: spellings of special tokens, which a message may not forge.
        date: date that ``strftime_now`` prints, as ``2026-11-28``. None leaves the function
            undefined, so that the same data gives the same tokens every day. Templates that test
            for this function print a fixed date instead.
    Raises:
        TemplateError: the template does not compile, or jinja2 is too old.
    """

    def __init__(
        self,
        source: str,
        variables: Mapping[str, Any],
        special_tokens: Sequence[str],
        date: str | None = None,
    ) -> None:
        if _OLD_JINJA is not None:
            old, command = _OLD_JINJA
            raise TemplateError(f"a chat template can leave the sandbox of {old}; run {command}.")
        environment = template_environment()
        environment.filters["tojson"] = _to_json
        environment.filters["attr"] = _attribute
        # Random functions are removed: the same data must give the same tokens.
        del environment.filters["random"]
        del environment.globals["lipsum"]
        environment.globals["raise_exception"] = _raise_exception
        if date is not None:
            environment.globals["strftime_now"] = datetime.fromisoformat(date).strftime
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
        self.special_tokens = tuple(token for token in special_tokens if token)
        ordered = sorted(self.special_tokens, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, ordered))) if ordered else None

    def close(self) -> None:
        """Do nothing, because there is no child process to end."""

    @cached_property
    def turn_markers(self) -> frozenset[str]:
        """Special tokens that begin and end turns and documents; see `find_turn_markers`."""

        def prompt(messages: Messages, tools: Tools = None) -> str:
            return unmarked(self.render(messages, tools, prompt=True))

        def render(messages: Messages, tools: Tools = None) -> str:
            return unmarked(self.render(messages, tools))

        return find_turn_markers(render, prompt, self.special_tokens, self._variables)

    def prompt(self, messages: Messages, tools: Tools = None) -> str:
        """Render the text after which the model generates an answer.

        Raises:
            BadLine: the template raises an error.
        """
        messages, tools = self.protected(messages, tools)
        return unmarked(self.render(messages, tools, prompt=True))

    def complete_text(self, messages: Messages, tools: Tools = None) -> str:
        """Render a complete conversation.

        Raises:
            BadLine: the template raises an error.
        """
        return unmarked(self.render(*self.protected(messages, tools)))

    def render(self, messages: Messages, tools: Tools, prompt: bool = False) -> str:
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
            needs_date = "strftime_now" in str(error)
            cure = f" ({flags.CHAT_TEMPLATE_DATE} gives the template a date)" * needs_date
            detail = f"{type(error).__name__}: {printable(str(error))}{cure}"
            raise BadLine("template_error", detail) from None

    def protected(
        self, messages: Messages, tools: Tools, notes: Notes | None = None
    ) -> tuple[Messages, Tools]:
        """Return messages and tools with `BROKEN` in special tokens that must not act as such.

        Args:
            notes: gets the number of broken tokens of each spelling.
        """
        if self._special is None:
            return messages, tools
        count: Notes = Counter() if notes is None else notes
        return [self._protected_message(message, count) for message in messages], self._broken(
            tools, count
        )

    def _protected_message(self, message: dict[str, Any], notes: Notes) -> dict[str, Any]:
        if message["role"] != "assistant":
            broken: dict[str, Any] = self._broken(message, notes)
            return broken
        answer_parts = {name: message[name] for name in ("content", *REASONING) if name in message}
        other_fields = {name: value for name, value in message.items() if name not in answer_parts}
        # The order of the fields stays, because a template may print them by a loop.
        protected = {
            **self._broken(answer_parts, notes, in_answer=True),
            **self._broken(other_fields, notes),
        }
        return {name: protected[name] for name in message if name in protected}

    def _broken(self, value: Any, notes: Notes, in_answer: bool = False) -> Any:
        """Return ``value`` with `BROKEN` in the special tokens that its strings spell.

        Args:
            in_answer: break only turn markers.
        """
        assert self._special is not None
        if isinstance(value, str):

            def broken(match: re.Match[str]) -> str:
                token = match.group()
                if in_answer and token not in self.turn_markers:
                    return token
                notes["letters", token] += 1
                return token[0] + BROKEN + token[1:]

            return self._special.sub(broken, value)
        if isinstance(value, list):
            return [self._broken(item, notes, in_answer) for item in value]
        if isinstance(value, dict):
            return {
                self._broken(key, notes, in_answer): self._broken(item, notes, in_answer)
                for key, item in value.items()
            }
        return value


def unmarked(text: str) -> str:
    return GENERATION_MARKS.sub("", text)


@pass_environment
def _attribute(environment: ImmutableSandboxedEnvironment, value: Any, name: Any) -> Any:
    """Return an attribute as a dot does; used as the filter ``attr``.

    The filter of jinja2 was twice a way out of the sandbox, by names such as ``format``. This one
    leaves all decisions to the sandbox and never returns a formatting method.
    """
    text = str(name)
    if text in ("format", "format_map") or text.startswith("_"):
        return environment.unsafe_undefined(value, text)
    try:
        attribute = getattr(value, text)
    except AttributeError:
        return environment.undefined(obj=value, name=text)
    if environment.is_safe_attribute(value, text, attribute):
        return attribute
    return environment.unsafe_undefined(value, text)


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
