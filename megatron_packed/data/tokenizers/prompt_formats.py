"""Chat templates of this project, and the formats of ``--sft-tokenizer-prompt-format``.

With these formats of Megatron a conversation has the same tokens and targets as in Megatron, without an added
end-of-document token. Megatron's templates ignore tools and tool calls silently. In this project
they make a line unusable.
"""

from __future__ import annotations

from typing import NamedTuple

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


class PromptFormat(NamedTuple):
    """Chat template of a format, and the rule which of its tokens are targets."""

    template: str | None
    """jinja2 template; None for the template that ``--chat-template`` or the tokenizer gives."""
    trains_all: bool
    """True if every token is a target, False if only the assistant's tokens are."""
    special_tokens: tuple[str, ...] = ()
    """Special tokens that the template prints. The tokenizer must have them."""


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

FORMATS_BY_NAME = {
    "nemotron-h-aligned": PromptFormat(
        _NEMOTRON_H_ALIGNED, False, ("<SPECIAL_10>", "<SPECIAL_11>")
    ),
    "nemotron-nano-v2": PromptFormat(
        _NEMOTRON_NANO_V2, False, ("<SPECIAL_10>", "<SPECIAL_11>", "<SPECIAL_12>")
    ),
    "identity": PromptFormat(None, True),
    "default": PromptFormat(None, True),
}
"""Formats by name. ``identity`` joins the contents of the messages, which a template rendered
before; special tokens spelled in them are encoded as special tokens. ``default`` trains on the
complete text of the chat template.
"""
