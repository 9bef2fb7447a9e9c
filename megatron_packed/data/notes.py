"""Notes about lines that are used: what of their meaning is not learned as it is written.

A line that cannot be used raises `errors.BadLine`. A line that is used, but of which a field, an
answer or a special token does not reach the targets, gets a note. The report of the data counts the
notes of each kind by name, so that nothing is lost in silence.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

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
        ordered = sorted(counts.get(kind, {}).items(), key=lambda item: (-item[1], item[0]))
        if not ordered:
            continue
        names = ", ".join(f"{name} ({count})" for name, count in ordered[:most_names])
        suffix = f" and {len(ordered) - most_names} more" if len(ordered) > most_names else ""
        lines.append(f"{title}: {names}{suffix}")
    return lines
