"""The formats of Megatron's ``--sft-tokenizer-prompt-format``: chat templates, and which of their
text is trained.

With one of them a conversation has the tokens and the targets that it has in Megatron, and no end
of document besides. What Megatron's templates pass over without a word (tools and their calls)
makes a line unusable here.
"""

from __future__ import annotations

from typing import NamedTuple


class PromptFormat(NamedTuple):
    template: str | None
    """jinja2; None for the tokenizer's own or --chat-template."""
    trains_all: bool
    """True if every token is a target, not those of the assistant alone."""
    special_tokens: tuple[str, ...] = ()
    """That the template prints and a tokenizer must have."""
    end: str | None = None
    """Token of them that ends an answer; None where only an end of document can."""


_NO_TOOLS = """\
{%- if tools -%}
  {{- raise_exception('this prompt format prints no tool definitions; give --chat-template one that does') -}}
{%- endif -%}
{%- for message in messages -%}
  {%- if message.role == 'tool' or message.tool_calls -%}
    {{- raise_exception('this prompt format prints no tool calls and results; give --chat-template one that does') -}}
  {%- endif -%}
{%- endfor -%}
"""

_NEMOTRON_H_ALIGNED = (
    _NO_TOOLS
    + """\
{%- for message in messages -%}
  {%- set content = (message.content | trim) + '\\n' -%}
  {%- if message.role == 'system' -%}
    {{- '<SPECIAL_10>System\\n' + content -}}
  {%- elif message.role == 'user' -%}
    {{- '<SPECIAL_11>User\\n' + content + '<SPECIAL_11>Assistant\\n' -}}
  {%- else -%}
    {%- generation -%}{{- content -}}{%- endgeneration -%}
  {%- endif -%}
{%- endfor -%}
"""
)

_NEMOTRON_NANO_V2 = (
    _NO_TOOLS
    + """\
{%- for message in messages -%}
  {%- if message.role == 'assistant' -%}
    {{- '<SPECIAL_11>Assistant\\n' -}}
    {%- generation -%}{{- (message.content | trim) + '\\n<SPECIAL_12>\\n' -}}{%- endgeneration -%}
  {%- else -%}
    {%- set content = message.content | replace('/think', '') | replace('/no_think', '') | trim -%}
    {{- ('<SPECIAL_10>System\\n' if message.role == 'system' else '<SPECIAL_11>User\\n') + content + '\\n' -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<SPECIAL_11>Assistant\\n' -}}
{%- endif -%}
"""
)

PROMPT_FORMATS = {
    "nemotron-h-aligned": PromptFormat(
        _NEMOTRON_H_ALIGNED, False, ("<SPECIAL_10>", "<SPECIAL_11>")
    ),
    "nemotron-nano-v2": PromptFormat(
        _NEMOTRON_NANO_V2, False, ("<SPECIAL_10>", "<SPECIAL_11>", "<SPECIAL_12>"), "<SPECIAL_12>"
    ),
    "identity": PromptFormat(None, True),
    "default": PromptFormat(None, True),
}
"""``identity``: the messages' contents one after the other, as a template printed them before:
special tokens in them count. ``default``: a template's text, all of it trained.
"""
