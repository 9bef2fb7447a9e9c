"""Write ``template_tables``: what the transformers library makes of the random conversations.

``python tools/template_tables.py`` renders and encodes
every history of `support.template_conversations` with ``apply_chat_template``. It needs transformers.
``--show STRUCTURE NUMBER`` prints the texts of one conversation. The table has one row for each
assistant message, in the order of the conversations; `support.template_conversations` makes the
hashes.

- ``kind``: an entry of `KINDS`.
- ``prompt``, ``answer``: hashes of the tokens of the prompt and of the answer. The answer ends with
  the last token that ends a turn, or is whole if the template prints no such token.
- ``prompt_text``, ``answer_text``: hashes of the same texts.
- ``prompt_letters``, ``answer_letters``: the same as the first pair, but special tokens that a
  message quotes are letters: all tokens in the text of others and in calls, and tokens of turns and
  documents in the assistant's text. They are 0 if the template decides by such a token, so that
  their places in the text are unknown.

The library gets the lines without null keys, and no tools in place of an empty list.

``tokenizer.json`` beside the tables is trained once. Delete it to train it again.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import numpy as np
import tokenizers
import transformers
from transformers.utils import chat_template_utils

import common  # noqa: F401  paths of helpers
from support import template_conversations as made

KINDS = ("tokens", "seam", "no_prefix", "raises")
"""Relations between the prompt and the conversation with the answer.

- ``tokens``: the tokens of the conversation begin with the tokens of the prompt.
- ``seam``: the same holds for the texts only, because a token covers the end of the prompt and the
  beginning of the answer. The answer's tokens are those of its text alone, which a model generates.
- ``no_prefix``: the text of the conversation does not begin with the prompt.
- ``raises``: the template or the library refuses one of the two.
"""
COLUMNS = (
    "prompt",
    "answer",
    "prompt_text",
    "answer_text",
    "prompt_letters",
    "answer_letters",
)
PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Pieces of text that the tokenizer encodes separately, as in the tokenizers of Llama 3 and Qwen.
Line ends before a word are then one token, also at the end of a prompt."""
OWN_FIELDS = ("content", "reasoning_content", "reasoning", "thinking")
"""Fields in which the assistant's special tokens act as such; they do not in arguments of calls."""
HIDDEN = "\ue000{}\ue001"
_HIDDEN = re.compile("\ue000(\\d+)\ue001")


class FixedDate(datetime):
    """Clock that stands still at `made.DATE`."""

    @classmethod
    def now(cls, tz: Any = None) -> FixedDate:
        return cls.fromisoformat(made.DATE)


class Oracle:
    """The transformers library with the tokenizer and the template of one structure."""

    def __init__(self, structure: made.Structure, folder: Path) -> None:
        made.write_tokenizer(structure, folder)
        self.structure = structure
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        chat_template_utils._compile_jinja_template(structure.template)  # else each line "raises"
        self.tokens = [*structure.turn_tokens, *structure.special]
        self._special = re.compile("(" + "|".join(map(re.escape, _longest(self.tokens))) + ")")
        self._turns = re.compile("|".join(map(re.escape, _longest(structure.turn_tokens))))
        plain = tokenizers.Tokenizer.from_file(str(made.TABLES / "tokenizer.json"))
        plain.add_tokens(
            [
                tokenizers.AddedToken(token, normalized=False, special=False)
                for token in structure.plain
            ]
        )
        self._plain = plain
        # Added tokens have other numbers in a tokenizer without the special ones.
        self._numbers = {
            plain.token_to_id(token): self.tokenizer.convert_tokens_to_ids(token)
            for token in structure.plain
        }

    def rows(self, line: dict[str, Any]) -> list[tuple[int, ...]]:
        """Return the rows of one conversation: the kind and the columns of each answer."""
        line = made.without_nulls(line)
        hidden = self._hide(line)
        return [
            self._row(line, hidden, number)
            for number, message in enumerate(line["messages"])
            if message["role"] == "assistant"
        ]

    def texts(self, line: dict[str, Any], number: int) -> tuple[str, str]:
        """Return the prompt before message ``number``, and the conversation up to this message."""
        messages, tools = line["messages"], line.get("tools") or None
        return self._text(messages[:number], tools, True), self._text(
            messages[: number + 1], tools, False
        )

    def _row(self, line: dict[str, Any], hidden: dict[str, Any], number: int) -> tuple[int, ...]:
        try:
            prompt, whole = self.texts(line, number)
        except Exception:  # the library, jinja2, or the template
            return (KINDS.index("raises"), *[0] * len(COLUMNS))
        prompt_ids, whole_ids = self._ids(prompt), self._ids(whole)
        assert prompt_ids == self._encoded(line, number, prompt=True)
        assert whole_ids == self._encoded(line, number, prompt=False)
        if not whole.startswith(prompt):
            return (KINDS.index("no_prefix"), *[0] * len(COLUMNS))
        answer = self._cut(whole[len(prompt) :])
        answer_ids = self._ids(answer)
        kind = "seam"
        if whole_ids[: len(prompt_ids)] == prompt_ids:
            kind = "tokens"
            assert whole_ids[len(prompt_ids) :][: len(answer_ids)] == answer_ids
        pairs = [(made.token_hash(prompt_ids), made.token_hash(answer_ids))]
        pairs.append((made.text_hash(prompt), made.text_hash(answer)))
        pairs.append(self._letters(hidden, number, prompt, answer))
        return (KINDS.index(kind), *(value for pair in pairs for value in pair))

    def _letters(
        self, hidden: dict[str, Any], number: int, prompt: str, answer: str
    ) -> tuple[int, int]:
        try:
            texts = self.texts(hidden, number)
        except Exception:
            return 0, 0
        if not texts[1].startswith(texts[0]):
            return 0, 0
        parts = (texts[0], self._cut(texts[1][len(texts[0]) :]))
        if tuple(map(self._shown, parts)) != (prompt, answer):
            return 0, 0
        ids = [self._letter_ids(part) for part in parts]
        return made.token_hash(ids[0]), made.token_hash(ids[1])

    def _text(self, messages: list[dict[str, Any]], tools: Any, prompt: bool) -> str:
        text = self.tokenizer.apply_chat_template(
            messages, tools, add_generation_prompt=prompt, tokenize=False
        )
        assert isinstance(text, str)
        return text

    def _encoded(self, line: dict[str, Any], number: int, prompt: bool) -> list[int]:
        messages = line["messages"][: number + (not prompt)]
        tools = line.get("tools") or None
        ids = self.tokenizer.apply_chat_template(
            messages, tools, add_generation_prompt=prompt, tokenize=True, return_dict=False
        )
        return list(ids)

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _cut(self, answer: str) -> str:
        """Return the text of an answer up to the last end of a turn."""
        end = self.structure.turn_end
        if end is None or end not in answer:
            return answer
        return answer[: answer.rindex(end) + len(end)]

    def _hide(self, line: dict[str, Any]) -> dict[str, Any]:
        """Return the line with private characters in place of the tokens that become letters."""
        messages = [
            {
                name: self._hidden(value, self._turns if name in own else self._special)
                for name, value in message.items()
            }
            for message in line["messages"]
            for own in [OWN_FIELDS if message["role"] == "assistant" else ()]
        ]
        return {"messages": messages, "tools": self._hidden(line.get("tools"), self._special)}

    def _hidden(self, value: Any, pattern: re.Pattern[str]) -> Any:
        if isinstance(value, str):
            return pattern.sub(lambda match: HIDDEN.format(self.tokens.index(match.group())), value)
        if isinstance(value, list):
            return [self._hidden(item, pattern) for item in value]
        if isinstance(value, dict):
            return {key: self._hidden(item, pattern) for key, item in value.items()}
        return value

    def _shown(self, text: str) -> str:
        return _HIDDEN.sub(lambda match: self.tokens[int(match.group(1))], text)

    def _letter_ids(self, hidden: str) -> list[int]:
        ids = []
        for at, part in enumerate(self._special.split(hidden)):
            if at % 2:
                ids.append(self.tokenizer.convert_tokens_to_ids(part))
            else:
                encoded = self._plain.encode(self._shown(part), add_special_tokens=False).ids
                ids += [self._numbers.get(number, number) for number in encoded]
        return ids


def _longest(tokens: Any) -> list[str]:
    return sorted(tokens, key=len, reverse=True)


def train_tokenizer() -> None:
    """Train the byte-level tokenizer on the texts of all conversations."""
    engine = tokenizers.Tokenizer(tokenizers.models.BPE())
    engine.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Split(tokenizers.Regex(PIECES), "isolated"),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    engine.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=700,
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    texts = [
        json.dumps(line, ensure_ascii=False).replace("\\n", "\n")
        for structure in made.STRUCTURES
        for line in made.conversations(structure)
    ]
    engine.train_from_iterator([*texts, *(s.template for s in made.STRUCTURES)], trainer)
    engine.save(str(made.TABLES / "tokenizer.json"), pretty=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--show", nargs=2, metavar=("STRUCTURE", "NUMBER"))
    arguments = parser.parse_args()
    made.TABLES.mkdir(exist_ok=True)
    if not (made.TABLES / "tokenizer.json").exists():
        train_tokenizer()
    with (
        mock.patch.object(chat_template_utils, "datetime", FixedDate),
        TemporaryDirectory() as folder,
    ):
        if arguments.show:
            show(Path(folder), *arguments.show)
            return
        arrays: dict[str, np.ndarray[Any, Any]] = {}
        for structure in made.STRUCTURES:
            lines = made.conversations(structure)
            oracle = Oracle(structure, Path(folder))
            rows = [row for line in lines for row in oracle.rows(line)]
            kinds = Counter(KINDS[row[0]] for row in rows)
            letters = sum(row[1:3] != row[5:7] and bool(row[5]) for row in rows)
            print(structure.name, len(rows), dict(kinds), f"with letters {letters}")
            arrays[f"{structure.name}.kind"] = np.array([row[0] for row in rows], np.uint8)
            table = np.array([row[1:] for row in rows], np.uint64)
            arrays[f"{structure.name}.hashes"] = table
            hashed = made.text_hash(json.dumps(lines))
            arrays[f"{structure.name}.conversations"] = np.array(hashed, np.uint64)
    arrays["transformers"] = np.array(transformers.__version__)
    np.savez_compressed(made.TABLES / "tables.npz", **arrays)


def show(folder: Path, name: str, number: str) -> None:
    """Print one conversation, and its texts as transformers renders them."""
    [structure] = [structure for structure in made.STRUCTURES if structure.name == name]
    line = made.conversations(structure)[int(number)]
    oracle = Oracle(structure, folder)
    print(json.dumps(line, ensure_ascii=False))
    for at, message in enumerate(line["messages"]):
        if message["role"] == "assistant":
            try:
                for text in oracle.texts(line, at):
                    print(at, json.dumps(text, ensure_ascii=False))
            except Exception as error:
                print(at, type(error).__name__, error)


if __name__ == "__main__":
    main()
