"""Exceptions for unusable data, and notes about lines that are used.

`DataError` stops a run, `BadLine` rejects one line of a file. A line that is used, but of which a
field, an answer or a special token does not reach the targets as it is written, gets a note. The
report of the data counts the notes of each kind by name, so that nothing is lost in silence.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from megatron_packed.config import flag_names as flags
from megatron_packed.config.errors import printable as printable

REASONS: dict[str, str] = {
    # bytes
    "line_too_long": "the line is longer than the limit and was skipped",
    "nul_byte": "the line contains NUL bytes; the file is probably damaged",
    "invalid_utf8": "the line is not UTF-8; `iconv -f UTF-16 -t UTF-8` (or `-f LATIN1`) converts a file",
    "corrupt_stream": "the compressed stream is damaged or cut off; nothing after this point of the file can be read",
    "corrupt_array": "the JSON array is damaged or cut off, or other text comes after its end; nothing after this "
    "point of the file can be read",
    "read_error": "the operating system reported a read error; nothing after this point of the file can be read",
    # JSON
    "malformed_json": "the line is not valid JSON; often the line was cut off, or one object spans several lines",
    "too_deep": "objects or lists are nested more than 128 levels deep",
    "nan_literal": "the line contains NaN or Infinity, which JSON does not allow",
    "huge_number": "a number has more than 4000 characters, or is larger than 1.8e308",
    "duplicate_key": "an object has the same key twice, and JSON readers disagree about which value counts",
    "lone_surrogate": "the text contains half of a surrogate pair, which cannot be encoded as UTF-8",
    "reserved_character": "the text contains U+FDD0, U+FDD1 or U+FDD2, which are reserved to mark text while chat "
    "templates are rendered",
    # schema
    "not_an_object": "a line, or an element of an array, must be one JSON object",
    "no_known_field": "a line needs one of the fields `messages`, `conversations`, `prompt`, `instruction` (with "
    f"`output`), `text` or `input_ids`; {flags.DATA_FIELDS} reads other names",
    "missing_key": f"the line lacks a field that {flags.JSON_KEYS} or {flags.DATA_FIELDS} names",
    "wrong_type": "a field has a different type than the schema requires",
    "not_text": "a part of a message is an image, a sound or another kind that is no text",
    "unknown_role": "the roles are system or developer, user, assistant, and tool or function; `conversations` may "
    f"also use human and gpt, and `messages` with the {flags.DATA_FIELDS} of the place",
    "missing_completion": "the line has a `prompt` but no `completion`",
    "empty_messages": "`messages` is empty",
    "empty_assistant": "an assistant message has no content and calls no tool",
    "empty_completion": "`completion` is empty, so the line has nothing to train on",
    "empty_text": "`text` is empty",
    "no_assistant": "the conversation has no assistant message, so the line has nothing to train on",
    "contradictory_masks": "two fields of a line disagree about what is learned",
    "preference_data": "the line is a preference pair or has a KTO label, and their losses are not built",
    "contradictory_system": "the `system` field and the system message at the start of the messages differ; keep one "
    "of them",
    "rejected_answer": "`label` is false: the answer was rejected, and only accepted answers are learned",
    "no_question": "the only answer to learn begins the conversation, so no prompt can ask for it",
    "bad_train_flag": "a field that says what is learned has another value than true, false, 0 or 1 (`train`: true or "
    "false), or learns a message that is not the assistant's",
    # template and tokens
    "template_error": "the chat template raised an error for this conversation",
    "template_prefix": "the chat template prints other text before an answer than the prompt that it gives for the "
    "same messages, so a served model would get another prompt",
    "not_printed": "the chat template does not print a part of the conversation, so its meaning would be lost",
    "template_spans": "the template's generation blocks cannot be matched with the assistant messages",
    "template_limit": "rendering the chat template exceeded its limit of time, memory or output",
    "special_token_in_content": "the text contains the spelling of a special token, which this tokenizer cannot encode "
    "as plain text, or by which the chat template decides what it prints",
    "token_outside": "a given token is not in the vocabulary of the tokenizer",
    "token_across_boundary": "one token covers both trained and untrained text",
    "tokenizer_limit": "the tokenizer exceeded its limit of time or memory",
    "tokenizer_failed": "the tokenizer's library rejected the text",
    "not_a_token_number": f"a NullTokenizer reads token numbers separated by spaces, each below {flags.VOCAB_SIZE}",
    "killed_worker": "the process that tokenised the line crashed, was killed, or did not finish",
    "all_masked": "a mask excludes every answer of a conversation, so the line has nothing to train on",
    "no_trainable_token": "tokenisation left no token to train on",
    "question_too_long": "the question and the template's text around it leave no room for the answer; a larger "
    f"{flags.MAX_DOCUMENT_LENGTH} does",
}
"""Reasons why a line is put into quarantine, each with the sentence that reports print."""
CURES: dict[str, str] = {
    "no_known_field": f"name the fields with {flags.DATA_FIELDS}, as the place below says",
    "missing_completion": f"name the field of the answers with {flags.DATA_FIELDS}",
    "missing_key": f"name fields that the lines have with {flags.DATA_FIELDS}",
    "preference_data": f"give the {flags.DATA_FIELDS} of the place below",
    "unknown_role": "rename the roles",
    "not_printed": f"give {flags.CHAT_TEMPLATE} a template that prints it, or {flags.UNPRINTED_POLICY} count to train "
    "without it",
    "template_error": f"give another {flags.CHAT_TEMPLATE}, or correct the conversations that it refuses",
    "template_prefix": f"give another {flags.CHAT_TEMPLATE}, or {flags.CHAT_TEMPLATE_KWARGS} "
    """'{"enable_thinking": false}' if its prompt begins a thought that the answers lack""",
    "special_token_in_content": f"remove it from the data, or give another {flags.CHAT_TEMPLATE}",
    "token_outside": f"give the {flags.TOKENIZER_MODEL} that made the tokens",
}
"""Cures of reasons that other data or a flag can mend; for other reasons, the data must be corrected."""
EMPTY = frozenset(
    {
        "empty_assistant",
        "empty_completion",
        "empty_text",
        "rejected_answer",
        "question_too_long",
        "all_masked",
    }
)
"""Reasons of lines that are right but have nothing to learn. They do not count as bad lines."""


class DataError(ValueError):
    """Error for data that the run cannot use.

    The message names the file or option, the cause, and what to do.
    """


class NotTokenizedError(DataError):
    """Error for data or a vocabulary that is not in a cache yet, if it must not be built or
    downloaded now.
    """


class BadLine(Exception):
    """Error for one line that cannot be used; the line goes into quarantine and the run continues.

    Args:
        reason: a key of `REASONS`.
        detail: the exact place of the fault, e.g. ``messages[2].role is 'bot'``.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        assert reason in REASONS, reason
        self.reason = reason
        self.detail = detail
        super().__init__(f"{reason}: {detail}" if detail else reason)

    def __reduce__(self) -> tuple[type[BadLine], tuple[str, str]]:
        return (BadLine, (self.reason, self.detail))


NOTES: dict[str, str] = {
    "unread_field": "fields that are not read",
    "null_argument": "null arguments of tool calls, which are left out as in a table",
    "text_argument": "arguments of tool calls that are no JSON object, passed on as text, by function",
    "letters": "special tokens that the data spells, encoded as letters",
    "turn_markers": "lines of text that spell turn markers of the tokenizer, encoded as letters",
    "not_printed": "parts of conversations that the chat template does not print",
    "not_served": "answers that are context only",
    "left_out": "documents that are left out of lines with other documents",
}
"""Kinds of notes, each with the words of the report before the names and their counts."""

Notes = Counter[tuple[str, str]]
"""Number of notes by kind (a key of `NOTES`) and name, for example ``("letters", "<|im_end|>")``."""


def most_first(counts: Mapping[str, int]) -> list[tuple[str, int]]:
    """Return names and counts in descending order of counts, then by name."""
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))


def note_lines(counts: Mapping[str, Mapping[str, int]], most_names: int = 20) -> list[str]:
    """Return one line of text for each kind of note, with its names in descending order of counts.

    Args:
        counts: counts of the names of each kind.
        most_names: number of names that a line lists.
    Example:
        ``{"unread_field": {"id": 600}}`` gives ``["fields that are not read: id (600)"]``.
    """
    lines = []
    for kind, title in NOTES.items():
        ordered = most_first(counts.get(kind, {}))
        if not ordered:
            continue
        names = ", ".join(f"{name} ({count})" for name, count in ordered[:most_names])
        suffix = f" and {len(ordered) - most_names} more" if len(ordered) > most_names else ""
        lines.append(f"{title}: {names}{suffix}")
    return lines
