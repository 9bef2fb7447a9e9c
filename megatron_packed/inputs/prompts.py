"""Prompts for generation: texts, lines of files, and their tokens."""

from __future__ import annotations

import json
import os
import stat
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, NamedTuple

from megatron_packed.config.data_fields import LABEL, DataFields
from megatron_packed.config.run import RunConfig
from megatron_packed.config.sections.data_parts.tokenizer import TOKENS
from megatron_packed.data.errors import REASONS, BadLine, DataError
from megatron_packed.data.sources.compression import Blocks
from megatron_packed.data.sources.jsonl_lines import LineReader, RawLine
from megatron_packed.data.sources.line_fields import has_field, renamed
from megatron_packed.data.sources.line_schema import (
    FIELDS,
    Conversation,
    LineSample,
    PromptCompletion,
    Text,
    TokenSequence,
    parse_line,
)
from megatron_packed.data.sources.message_masks import LISTED_MASK
from megatron_packed.data.sources.preference_lines import PREFERENCE_ANSWERS
from megatron_packed.data.sources.strict_json import check_characters, object_of_line
from megatron_packed.data.tokenizers.base import Tokenizer
from megatron_packed.data.tokenizers.chat_format import ChatFormat, TextPiece
from megatron_packed.data.tokenizers.encode import (
    answer_ends,
    encode_pieces,
    prompt_tokens,
    with_special_tokens,
)
from megatron_packed.inputs.open_documents import chat_format_of

STANDARD_INPUT = "-"
"""Name of a file of prompts that stands for standard input."""
MOST_BYTES = 2**28
"""Limit of the bytes of a file of prompts, decompressed. All prompts are held in memory."""
MOST_PROMPTS = 1_000_000
"""Limit of the prompts of a file."""
_SPLIT = "split the prompts into several files"
_BLOCK_BYTES = 2**20
_ASKING = ("system", "user", "human", "tool", "function", "function_response", "observation")
"""Roles of a last message that the model answers."""
_NO_ANSWER = "..."
"""Answer that a line without an answer gets while it is parsed as a line of training data."""


class GivenPrompt(NamedTuple):
    """A prompt as a user gave it."""

    name: str
    """Name for messages, for example ``prompts.jsonl, line 3``."""
    content: str | Text | Conversation
    """Prompt without its answer.

    A string is a user's message with ``--sft``, else the beginning of a text. `Text` is always the
    beginning of a text.
    """
    expected: str | None = None
    """Answer that the file contains; None without one."""

    @property
    def shown(self) -> str:
        """Text of the prompt; of a conversation, the content of its last message."""
        if isinstance(self.content, Conversation):
            return str(self.content.messages[-1]["content"])
        return self.content.text if isinstance(self.content, Text) else self.content


class EncodedPrompts(NamedTuple):
    """Tokens of prompts."""

    tokens: list[list[int]]
    ends: frozenset[int]
    """Tokens that end an answer."""


def read_prompts(path: str | Path, fields: DataFields | None = None) -> list[GivenPrompt]:
    """Read prompts from a file, one for each line; blank lines are skipped.

    If the first line begins with ``{``, all lines are JSON objects: ``{"prompt": TEXT}``,
    ``{"messages": [...]}``, or a line of training data. An answer at the end of a line is not part
    of the prompt. Otherwise each line is a text. A JSON array has objects or strings as elements.

    Args:
        path: a file, plain or compressed, or ``-`` for standard input.
        fields: names of the fields of lines of training data, from ``--data-fields``.
    Raises:
        DataError: the file cannot be read, is no file, has no prompt, has an unusable line, or
            exceeds `MOST_BYTES` or `MOST_PROMPTS`.
    """
    name = "standard input" if str(path) == STANDARD_INPUT else str(path)
    try:
        lines = list(_lines(path, name))
    except OSError as error:
        raise DataError(f"{name} cannot be read: {error.strerror}; check the path.") from None
    if not lines:
        raise DataError(f"{name} has no prompt; write one prompt on each line.")
    as_json = lines[0].data.lstrip().startswith(b"{")
    prompts = []
    for line in lines:
        where = f"{name}, {line.kind} {line.number}"
        try:
            if as_json:
                prompts += _of_object(where, line.data, fields)
            else:
                prompts.append(_of_text(where, line))
        except BadLine as error:
            raise _not_a_prompt(where, error) from None
    return prompts


def encode_prompts(
    config: RunConfig, tokenizer: Tokenizer, prompts: Iterable[GivenPrompt]
) -> EncodedPrompts:
    """Encode prompts as the run's documents were encoded.

    Raises:
        DataError: the chat template cannot be used, a prompt is empty, or the tokenizer or the
            template does not take a prompt.
    """
    data = config.data
    special = data.special_tokens_in_text == TOKENS
    if not data.sft:
        tokens = [_tokens(prompt, tokenizer, None, special) for prompt in prompts]
        return EncodedPrompts(tokens, answer_ends(tokenizer))
    chat = chat_format_of(data, tokenizer)
    try:
        tokens = [_tokens(prompt, tokenizer, chat, special) for prompt in prompts]
        return EncodedPrompts(tokens, answer_ends(tokenizer, chat))
    finally:
        chat.close()


def texts(prompts: Sequence[str], name: str = "the prompt") -> list[GivenPrompt]:
    """Return prompts for texts.

    Args:
        prompts: the texts.
        name: name of a single prompt for messages; several prompts are numbered from 1.
    """
    if len(prompts) == 1:
        return [GivenPrompt(name, prompts[0])]
    return [GivenPrompt(f"prompt {number}", text) for number, text in enumerate(prompts, start=1)]


def _lines(path: str | Path, name: str) -> Iterator[RawLine]:
    with _readable(path, name) as file:
        _check_size(file, name)
        num_prompts = 0
        for line in LineReader(file):
            if line.reason is not None:
                raise _not_a_prompt(f"{name}, {line.kind} {line.number}", BadLine(line.reason))
            if line.is_blank:
                continue
            num_prompts += 1
            if num_prompts > MOST_PROMPTS:
                raise DataError(f"{name} has more than {MOST_PROMPTS:,} prompts; {_SPLIT}.")
            yield line


@contextmanager
def _readable(path: str | Path, name: str) -> Iterator[Path]:
    """Yield a file with the content of ``path``: a copy of standard input or of a pipe.

    A reader opens a file more than once, which a pipe does not permit. The copy has no name in a
    folder, so the kernel removes it even if this process is killed.
    """
    is_input = str(path) == STANDARD_INPUT
    mode = stat.S_IFIFO if is_input else os.stat(path).st_mode
    if stat.S_ISREG(mode):
        yield Path(path)
        return
    if not is_input and not stat.S_ISFIFO(mode):
        raise DataError(
            f"{name} is a directory, device or socket, not a file; give a file of prompts, or - for "
            "standard input."
        )
    # TMPDIR may be small, and a job may be killed at any time, so a name would stay there.
    with TemporaryFile() as copy:
        with sys.stdin.buffer if is_input else open(path, "rb") as source:
            # One byte more than the limit, so that `_check_size` reports it.
            left = MOST_BYTES + 1
            while left and (block := source.read(min(left, _BLOCK_BYTES))):
                copy.write(block)
                left -= len(block)
        copy.flush()
        # Opening this path gives a new descriptor of the unnamed file, at its first byte.
        yield Path(f"/proc/self/fd/{copy.fileno()}")


def _check_size(file: Path, name: str) -> None:
    """Check that a file, decompressed, has at most `MOST_BYTES` bytes.

    The reader of lines does not return before the end of a line, however long it is.
    """
    size = 0
    for block in Blocks(file):
        size += len(block)
        if size > MOST_BYTES:
            raise DataError(f"{name} has more than {MOST_BYTES >> 20} MiB of prompts; {_SPLIT}.")


def _not_a_prompt(where: str, bad_line: BadLine) -> DataError:
    return DataError(f"{where} is not a prompt: {_in_words(bad_line)}.")


def _in_words(bad_line: BadLine) -> str:
    return REASONS[bad_line.reason] + (f" ({bad_line.detail})" if bad_line.detail else "")


def _of_text(name: str, line: RawLine) -> GivenPrompt:
    try:
        text = line.data.decode()
    except UnicodeDecodeError as error:
        raise BadLine("invalid_utf8", f"byte {error.start} of the line") from None
    return GivenPrompt(name, _string(text) if line.kind == "element" else text)


def _string(element: str) -> str:
    """Return the value of an element of a JSON array, which must be a string."""
    try:
        value = json.loads(element)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, str):
        raise BadLine("wrong_type", "an element is not a string")
    return value


def _of_object(name: str, line: bytes, fields: DataFields | None) -> list[GivenPrompt]:
    """Read a JSON object: add an answer if the line has none, then parse it as training data.

    Labels, masks and preferences of answers do not matter, because only the prompt is used.
    """
    value = object_of_line(line)
    if fields is None or not any(has_field(value, path) for _, path in fields.paths):
        about_answers = (*PREFERENCE_ANSWERS, LISTED_MASK)
        value = {name: part for name, part in value.items() if name not in about_answers}
        return [_of_fields(name, value, None)]
    without_label = DataFields.from_pairs(pair for pair in fields.paths if pair[0] != LABEL)
    assert without_label is not None
    return [
        _of_fields(name, targets, DataFields.from_pairs((target, target) for target in targets))
        for targets in renamed(value, without_label)
    ]


def _of_fields(name: str, value: dict[str, Any], fields: DataFields | None) -> GivenPrompt:
    if set(value) & FIELDS == {"prompt"}:
        if not isinstance(value["prompt"], str):
            raise BadLine("wrong_type", "prompt is not a string")
        return GivenPrompt(name, value["prompt"])
    _add_answer(value)
    return _without_answer(name, parse_line(json.dumps(value).encode(), fields)[0])


def _add_answer(value: dict[str, Any]) -> None:
    """Add `_NO_ANSWER` to a line that has a question without an answer."""
    for question, answer in (("prompt", "completion"), ("instruction", "output")):
        if question in value and not value.get(answer) and not value.get("response"):
            value[answer] = _NO_ANSWER
    for turns in (value.get("messages"), value.get("conversations")):
        if not isinstance(turns, list) or not turns:
            continue
        last = turns[-1]
        if isinstance(last, dict) and last.get("role", last.get("from")) in _ASKING:
            role, content = ("role", "content") if "role" in last else ("from", "value")
            turns += [{role: "assistant", content: _NO_ANSWER}]


def _without_answer(name: str, sample: LineSample) -> GivenPrompt:
    if isinstance(sample, Text):
        return GivenPrompt(name, sample)
    if isinstance(sample, PromptCompletion):
        return GivenPrompt(name, Text(sample.prompt), _expected(sample.completion))
    if isinstance(sample, TokenSequence):
        raise BadLine("wrong_type", "a prompt is a text or messages, but the line has tokens")
    *messages, answer = sample.messages
    if not messages:
        raise BadLine("empty_messages", "there is no message before the answer")
    content = Conversation(messages, sample.tools, sample.schema)
    return GivenPrompt(name, content, _expected(answer.get("content")))


def _expected(answer: str | None) -> str | None:
    return None if answer in (None, "", _NO_ANSWER) else answer


def _tokens(
    prompt: GivenPrompt, tokenizer: Tokenizer, chat: ChatFormat | None, special: bool
) -> list[int]:
    """Return the tokens of a prompt.

    Args:
        special: special tokens that a text spells act as such (``--special-tokens-in-text``).
    """
    content = prompt.content
    try:
        if isinstance(content, str):  # other prompts were checked as lines of JSON
            check_characters(content)
        if chat is not None and not isinstance(content, Text):
            messages, tools = [{"role": "user", "content": content}], None
            if isinstance(content, Conversation):
                messages, tools = content.messages, content.tools
            return prompt_tokens(tokenizer, chat, messages, tools)
        if isinstance(content, Conversation):
            raise DataError(
                f"{prompt.name} is a conversation, but the run has no --sft, so the model has no chat "
                "format; give the text to continue."
            )
        text = content.text if isinstance(content, Text) else content
        # As `SampleEncoder` encodes texts of the training data.
        pieces = [TextPiece(text, False, special)]
        if special:
            pieces = with_special_tokens(tokenizer, pieces)
        [document] = encode_pieces(tokenizer, [pieces])
        if isinstance(document, BadLine):
            raise document
    except BadLine as error:
        raise DataError(f"{prompt.name} cannot be encoded: {_in_words(error)}.") from None
    if not len(document.ids):
        raise DataError(f"{prompt.name} is empty; give at least one character.")
    return [int(token) for token in document.ids]
