"""Errors of data: a whole run (`DataError`) or one line of a file (`BadLine`)."""

from __future__ import annotations

from megatron_packed.config import flag_names as flags
from megatron_packed.config.errors import printable as printable

REASONS: dict[str, str] = {
    # bytes
    "line_too_long": "the line is longer than the limit; it was skipped without being held in memory",
    "nul_byte": "the line contains NUL bytes, as a damaged file does",
    "invalid_utf8": "the line is not UTF-8; `iconv -f UTF-16 -t UTF-8`, or `-f LATIN1`, converts a file",
    "corrupt_gzip": "the gzip stream is damaged or cut off; nothing after this point of the file can be read",
    "read_error": "the operating system failed to read on; nothing after this point of the file can be read",
    # JSON
    "malformed_json": "the line is not a JSON value (each needs a line of its own; a cut-off line is the usual cause)",
    "json_array": "a line must be one JSON object, and this begins an array; `python3 -c 'import json, sys; "
    "[print(json.dumps(x)) for x in json.load(sys.stdin)]' < data.json > data.jsonl` makes lines of one",
    "too_deep": "objects or lists are nested more than 128 levels deep",
    "nan_literal": "NaN and Infinity are not JSON",
    "huge_number": "a number has more digits than any reader handles",
    "duplicate_key": "an object names the same key twice, so its meaning depends on the reader",
    "lone_surrogate": "half of a surrogate pair is not a character and cannot be encoded",
    "reserved_character": "U+FDD0 to U+FDD2 are no characters; they are used to mark text while templates are rendered",
    # schema
    "not_an_object": "a line must be one JSON object",
    "no_known_field": "a line needs `messages`, `conversations`, `prompt`, `instruction` and `output`, or `text`",
    "missing_key": f"the line lacks a field that {flags.JSON_KEYS} names",
    "wrong_type": "a field has another type than the schema says",
    "unknown_role": "roles are system, user, assistant and tool; in `conversations` human and gpt, too",
    "missing_completion": "`prompt` needs a `completion`",
    "empty_messages": "`messages` is empty",
    "empty_assistant": "an assistant message says nothing and calls no tool",
    "empty_completion": "`completion` is empty, so nothing would be trained",
    "empty_text": "`text` is empty",
    "no_assistant": "a conversation without an assistant message trains nothing",
    "bad_train_flag": "`train` must be true or false, and true only on an assistant message",
    # template and tokens
    "template_error": "the chat template refused the conversation",
    "template_prefix": "the chat template rewrites earlier turns, so the assistant's text cannot be told for certain",
    "template_spans": "the template's generation blocks cannot be matched with the assistant messages",
    "template_limit": "rendering used more time, memory or output than allowed",
    "special_token_in_content": "the text spells a special token, and this tokenizer cannot encode it as plain text",
    "token_across_boundary": "one token covers both trained and untrained text",
    "tokenizer_limit": "the tokenizer needed more time or memory than allowed",
    "tokenizer_failed": "the tokenizer's library does not take the text",
    "not_a_token_number": f"a NullTokenizer reads token numbers separated by spaces, each below {flags.VOCAB_SIZE}",
    "killed_worker": "the process that tokenised the line was killed, crashed, or did not come to an end",
    "no_trainable_token": "after tokenisation no token is left to train",
}
"""Every reason for which a line is put into quarantine."""


class DataError(ValueError):
    """The data cannot be used as asked; the message says which file or option, why, and what to do."""


class BadLine(Exception):
    """One line cannot be used.

    Args:
        reason: a key of `REASONS`.
        detail: where exactly, e.g. ``messages[2].role is 'bot'``.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        assert reason in REASONS, reason
        self.reason = reason
        self.detail = detail
        super().__init__(f"{reason}: {detail}" if detail else reason)

    def __reduce__(self) -> tuple[type[BadLine], tuple[str, str]]:
        return (BadLine, (self.reason, self.detail))
