"""Random conversations for eight structures of chat templates, and a tokenizer for each structure.

The templates are in ``tests/unit/data/tokenizers/templates``. They were written for the tests, after
descriptions of what the templates of known models print. ``tools/template_tables.py`` stores
what the transformers library makes of the conversations. ``test_template_tables.py`` makes the same
conversations again and compares.

All draws use ``random.Random.random`` alone, which gives the same numbers in every Python version.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers

from support.messages import assistant, tool, user

TOKENIZERS = Path(__file__).parents[1] / "unit" / "data" / "tokenizers"
TEMPLATES = TOKENIZERS / "templates"
TABLES = TOKENIZERS / "template_tables"
CONVERSATIONS = 300
"""Number of conversations of each structure."""
DATE = "2025-03-09"
"""Date that templates get from ``strftime_now``."""

THOUGHTS = ("<think>", "</think>")
CALLS = ("<tool_call>", "</tool_call>")
RESULTS = ("<tool_response>", "</tool_response>")


class Structure(NamedTuple):
    """One structure of templates: the tokens of its model, and how often its data has something."""

    name: str
    turn_tokens: tuple[str, ...]
    """Special tokens with which the template begins and ends turns and documents."""
    special: tuple[str, ...]
    """Other special tokens."""
    plain: tuple[str, ...]
    """Added tokens that are not special."""
    bos: str | None
    eos: str
    turn_end: str | None
    """Last token of an answer; None if the template prints no end of a turn."""
    tools: float = 0.4
    """Fraction of the conversations with tools."""
    thoughts: float = 0.3
    """Fraction of the answers with thoughts."""
    system: float = 0.35
    """Fraction of the conversations with a system message."""

    @property
    def template(self) -> str:
        return (TEMPLATES / f"{self.name}.jinja").read_text(encoding="utf-8")


STRUCTURES = (
    Structure(
        "qwen3",
        turn_tokens=("<|im_start|>", "<|im_end|>", "<|endoftext|>"),
        special=("<|quad_start|>",),
        plain=(*THOUGHTS, *CALLS, *RESULTS),
        bos=None,
        eos="<|im_end|>",
        turn_end="<|im_end|>",
    ),
    Structure(
        "qwen3_5",
        turn_tokens=("<|im_start|>", "<|im_end|>", "<|endoftext|>"),
        special=(*THOUGHTS, *CALLS),
        plain=RESULTS,
        bos=None,
        eos="<|im_end|>",
        turn_end="<|im_end|>",
    ),
    Structure(
        "nemotron",
        turn_tokens=("<s>", "</s>", "<SPECIAL_10>", "<SPECIAL_11>", "<SPECIAL_12>"),
        special=(*THOUGHTS, "<TOOLCALL>", "</TOOLCALL>"),
        plain=("<AVAILABLE_TOOLS>", "</AVAILABLE_TOOLS>"),
        bos="<s>",
        eos="<SPECIAL_12>",
        turn_end="<SPECIAL_12>",
        tools=0.15,
        thoughts=0.15,
    ),
    Structure(
        "glm",
        turn_tokens=(
            "<|endoftext|>",
            "[gMASK]",
            "<sop>",
            "<|system|>",
            "<|user|>",
            "<|assistant|>",
            "<|observation|>",
        ),
        special=(*THOUGHTS, *CALLS),
        plain=("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        bos=None,
        eos="<|endoftext|>",
        turn_end=None,
    ),
    Structure(
        "llama",
        turn_tokens=(
            "<|begin_of_text|>",
            "<|end_of_text|>",
            "<|start_header_id|>",
            "<|end_header_id|>",
            "<|eot_id|>",
        ),
        special=("<|python_tag|>", "<|eom_id|>"),
        plain=(),
        bos="<|begin_of_text|>",
        eos="<|eot_id|>",
        turn_end="<|eot_id|>",
        thoughts=0.02,
    ),
    Structure(
        "mistral",
        turn_tokens=(
            "<s>",
            "</s>",
            "[INST]",
            "[/INST]",
            "[AVAILABLE_TOOLS]",
            "[/AVAILABLE_TOOLS]",
            "[TOOL_RESULTS]",
            "[/TOOL_RESULTS]",
        ),
        special=("[TOOL_CALLS]",),
        plain=(),
        bos="<s>",
        eos="</s>",
        turn_end="</s>",
        thoughts=0.02,
    ),
    Structure(
        "gemma",
        turn_tokens=("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
        special=("<start_of_image>",),
        plain=("<unused0>",),
        bos="<bos>",
        eos="<eos>",
        turn_end="<end_of_turn>",
        tools=0.08,
        thoughts=0.02,
    ),
    Structure(
        "granite",
        turn_tokens=("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>"),
        special=(),
        plain=(*CALLS, *RESULTS, *THOUGHTS),
        bos=None,
        eos="<|end_of_text|>",
        turn_end="<|end_of_text|>",
        thoughts=0.02,
    ),
)


def write_tokenizer(structure: Structure, folder: Path) -> None:
    """Write the base tokenizer with the tokens and the template of a structure."""
    engine = tokenizers.Tokenizer.from_file(str(TABLES / "tokenizer.json"))
    engine.add_special_tokens([*structure.turn_tokens, *structure.special])
    engine.add_tokens(
        [tokenizers.AddedToken(token, normalized=False, special=False) for token in structure.plain]
    )
    engine.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": structure.eos}
    config |= {} if structure.bos is None else {"bos_token": structure.bos}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(structure.template, encoding="utf-8")


def token_hash(ids: Sequence[int]) -> int:
    """Return 64 bits that stand for a sequence of token numbers."""
    text = " ".join(map(str, ids)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def text_hash(text: str) -> int:
    """Return 64 bits that stand for a text."""
    data = text.encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def conversations(structure: Structure) -> list[dict[str, Any]]:
    """Return the conversations of a structure as lines with ``messages`` and perhaps ``tools``."""
    return [
        _Draw(structure, f"{structure.name} {number}").line() for number in range(CONVERSATIONS)
    ]


def without_nulls(value: Any) -> Any:
    """Return a line without keys whose value is null: a table has every key in every row."""
    if isinstance(value, dict):
        return {name: without_nulls(part) for name, part in value.items() if part is not None}
    return [without_nulls(part) for part in value] if isinstance(value, list) else value


# ------------------------------------------------------------------------------------------------------
# drawing of one conversation

_COMMON = (
    "the a weather in of and is not snow rain coal white black why how many trains leave from to"
)
_RARE = (
    "Lima Oslo Zürich 東京 naïve café ☂️ Ελλάδα 3 17 0.5 x == y {} [] </b> \\n \"quoted\" 'so' a\tb"
)
_WORDS = (*_COMMON.split(" "), *_RARE.split(" "))
_ENDS = (".", "?", "!", "\n", "\n\n", ":", "\n\n\n", " ...")
_SPACES = (" ", "\n", "\n\n", "  ", "\t", " \n ")
_SWITCHES = ("/no_think", "/think", " /no_think", "/think\n", " or </think>")
_FUNCTIONS: tuple[dict[str, Any], ...] = (
    {
        "name": "get_weather",
        "description": "Return the weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "Name of the city, like Zürich"},
                "days": {"type": "integer"},
            },
            "required": ["city"],
        },
    },
    {
        "name": "search",
        "description": "Search <b>documents</b>.",
        "parameters": {
            "type": "object",
            "properties": {
                "query": {"type": "string"},
                "limit": {"type": "integer", "default": None},
                "tags": {"type": "array", "items": {"type": "string"}},
            },
        },
    },
    {
        "name": "clock",
        "description": "Return the time.",
        "parameters": {"type": "object", "properties": {}},
    },
)


class _Draw:
    """Random draws for one conversation."""

    def __init__(self, structure: Structure, seed: str) -> None:
        self._structure = structure
        # A string as seed is hashed with SHA-512, in the same way in every version.
        self._random = random.Random(seed)
        self._calls = 0

    def line(self) -> dict[str, Any]:
        structure = self._structure
        line: dict[str, Any] = {"messages": []}
        messages = line["messages"]
        has_tools = self._happens(structure.tools)
        if has_tools:
            line["tools"] = self._tools()
        elif self._happens(0.03):
            line["tools"] = []
        if self._happens(structure.system):
            messages.append({"role": "system", "content": self._text() + self._switch()})
        if self._happens(0.04):
            messages.append(self._answer())
        for _ in range(1 + self._below(4)):
            messages += self._turn(has_tools)
        if self._happens(0.05):
            messages.append(user(self._text()))
        if not any(message["role"] == "assistant" for message in messages):
            messages.append(self._answer())
        return line

    def _turn(self, has_tools: bool) -> list[dict[str, Any]]:
        messages = [user(self._text() + self._switch())]
        if self._happens(0.02):
            messages.append(user(self._text()))
        while has_tools and self._happens(0.45):
            call = self._call_message()
            messages.append(call)
            messages += [self._result(one) for one in call["tool_calls"]]
        messages.append(self._answer())
        if self._happens(0.03):
            messages.append(self._answer())
        return messages

    def _answer(self) -> dict[str, Any]:
        message: dict[str, Any] = assistant(self._text(answer=True))
        if self._happens(0.005):
            message["content"] = self._choice(("", "\n"))
        self._add_thoughts(message)
        self._add_train(message)
        return message

    def _call_message(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant"}
        if self._happens(0.8):
            message["content"] = self._choice(("", None, self._text(answer=True)))
        message["tool_calls"] = [self._call() for _ in range(2 if self._happens(0.1) else 1)]
        self._add_thoughts(message)
        self._add_train(message)
        return message

    def _call(self) -> dict[str, Any]:
        self._calls += 1
        arguments: dict[str, Any] = {}
        for name in ("city", "days", "nested"):
            if self._happens(0.6):
                arguments[name] = self._value()
        function = {"name": self._choice(_FUNCTIONS)["name"], "arguments": arguments}
        if self._happens(0.15):
            return function
        return {"type": "function", "id": f"call{self._calls:05}", "function": function}

    def _value(self) -> Any:
        values = (self._text(answer=True), 3, -0.5, True, None, [1, "zwei"], {"a": {"b": "Ü"}}, "")
        return self._choice(values)

    def _result(self, call: dict[str, Any]) -> dict[str, Any]:
        content = self._text()
        if self._happens(0.4):
            content = json.dumps({"result": content}, ensure_ascii=False)
        message = tool(content)
        if "id" in call:
            message["tool_call_id"] = call["id"]
        if self._happens(0.3):
            message["name"] = call.get("function", call)["name"]
        return message

    def _tools(self) -> list[dict[str, Any]]:
        tools: list[dict[str, Any]] = []
        for function in _FUNCTIONS:
            if self._happens(0.6) or not tools:
                if self._happens(0.03):
                    function = {**function, "description": self._quoted(answer=False)}
                tools.append({"type": "function", "function": function})
        return tools

    def _add_thoughts(self, message: dict[str, Any]) -> None:
        if not self._happens(self._structure.thoughts):
            return
        thoughts, kind = self._text(answer=True), self._random.random()
        if kind < 0.3 and message.get("content"):
            gap = self._choice(("\n\n", "\n", ""))
            message["content"] = f"<think>\n{thoughts}\n</think>{gap}{message['content']}"
        elif kind < 0.92:
            message["reasoning_content"] = thoughts
        else:
            message[self._choice(("reasoning", "thinking"))] = thoughts

    def _add_train(self, message: dict[str, Any]) -> None:
        if self._happens(0.17):
            message["train"] = self._choice((False, False, False, True, None))

    def _switch(self) -> str:
        if self._structure.name == "nemotron" and self._happens(0.1):
            return str(self._choice(_SWITCHES))
        return ""

    def _text(self, answer: bool = False) -> str:
        text = ""
        for _ in range(1 + self._below(3)):
            words = [self._choice(_WORDS) for _ in range(1 + self._below(7))]
            text += ("" if text.endswith("\n") or not text else " ") + " ".join(words)
            text += self._choice(_ENDS)
        text = text.strip()
        if self._happens(0.09):
            text = self._with_quote(text, self._quoted(answer))
        if self._happens(0.12):
            text = self._choice(_SPACES) + text
        if self._happens(0.12):
            text += self._choice(_SPACES)
        return text

    def _quoted(self, answer: bool) -> str:
        """Return one or two tokens of the tokenizer, as a message spells them."""
        structure = self._structure
        tokens = (*structure.turn_tokens, *structure.special, *structure.plain)
        if self._happens(0.4):
            tokens = structure.turn_tokens
        token = self._choice(tokens)
        return f"{token} {self._choice(tokens)}" if self._happens(0.2) else token

    def _with_quote(self, text: str, quoted: str) -> str:
        at = self._below(len(text) + 1)
        return text[:at] + quoted + text[at:]

    def _happens(self, probability: float) -> bool:
        return self._random.random() < probability

    def _below(self, count: int) -> int:
        return int(self._random.random() * count)

    def _choice(self, options: Sequence[Any]) -> Any:
        return options[self._below(len(options))]
