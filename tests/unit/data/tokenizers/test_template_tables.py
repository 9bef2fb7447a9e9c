"""Trained answers of eight template structures against tables that the transformers library made.

``tools/template_tables.py`` describes the tables. The tokens before each answer of 300 conversations
must be those that a server gives the model for this history. The trained tokens must be those of
the template. Any other answer must be refused or counted, with a reason.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any, NamedTuple

import numpy as np
import pytest

from megatron_packed.data.errors import BadLine, Notes
from megatron_packed.data.tokenizers.chat_format import chat_format
from megatron_packed.data.tokenizers.encode import EncodedDocument, SampleEncoder
from megatron_packed.data.tokenizers.huggingface import HuggingFaceTokenizer
from support import template_conversations as made
from support.data_helpers import samples_of

with np.load(made.TABLES / "tables.npz") as _arrays:
    TABLE = dict(_arrays)
TOKENS, SEAM, NO_PREFIX, RAISES = range(4)
"""Values of the column ``kind``; see ``tools/template_tables.py``."""

LEARNED = {
    # exact, letters
    "qwen3": (610, 315),
    "qwen3_5": (543, 306),
    "nemotron": (314, 111),
    "glm": (597, 326),
    "llama": (382, 170),
    "mistral": (315, 161),
    "gemma": (369, 131),
    "granite": (571, 278),
}
"""Least numbers of answers that are learned with exactly the tokens of the library, and with letters
in place of quoted special tokens. Quotes are far more frequent here than in data."""
LEFT_OUT = {
    "qwen3": {"not_served": 22, "empty_assistant": 8, "not_printed": 7},
    "qwen3_5": {"not_served": 14, "empty_assistant": 24},
    # calls of the last message and reasoning_content are never printed
    "nemotron": {
        "not_served": 56,
        "not_printed": 304,
        "empty_assistant": 12,
        "special_token_in_content": 35,  # the template looks for /think, which </think> spells
    },
    "glm": {"not_served": 10, "empty_assistant": 26, "not_printed": 4},
    # template_error: two calls in one message; a call where a question must stand
    "llama": {"not_served": 13, "not_printed": 188, "empty_assistant": 8, "template_error": 146},
    # template_error: turns that do not alternate; calls without an id
    "mistral": {
        "not_served": 17,
        "not_printed": 105,  # text beside calls
        "empty_assistant": 14,
        "template_error": 314,
        "no_question": 30,
    },
    "gemma": {
        "not_served": 19,
        "not_printed": 96,
        "empty_assistant": 5,
        "template_error": 82,
        "no_question": 31,
    },
    "granite": {"not_served": 5, "not_printed": 125, "empty_assistant": 9},
}
"""Greatest numbers of answers that are not learned, by reason: a note, or the refusal of the line."""


class Answer(NamedTuple):
    """Row of the table: one assistant message."""

    kind: int
    exact: tuple[int, int]
    texts: tuple[int, int]
    letters: tuple[int, int]
    trained: bool


class Run(NamedTuple):
    """Consecutive targets of a document, and the tokens before them."""

    exact: tuple[int, int]
    texts: tuple[int, int]


def read_table(structure: made.Structure, lines: list[dict[str, Any]]) -> list[list[Answer]]:
    """Return the rows of each line."""
    rows = zip(TABLE[f"{structure.name}.kind"].tolist(), TABLE[f"{structure.name}.hashes"].tolist())
    answers = [
        [
            Answer(
                kind, (h[0], h[1]), (h[2], h[3]), (h[4], h[5]), message.get("train") is not False
            )
            for message in line["messages"]
            if message["role"] == "assistant"
            for kind, h in [next(rows)]
        ]
        for line in lines
    ]
    assert next(rows, None) is None
    return answers


def runs_of(encoder: SampleEncoder, document: EncodedDocument, end: int | None) -> list[Run]:
    """Return the runs of targets of a document.

    Args:
        end: end of a turn; None if the template prints none. The document then ends with the
            end-of-document token, which is no part of the answer.
    """
    ids, targets = document.ids.tolist(), document.targets.tolist()
    decode = encoder.tokenizer.decode
    if end is None:
        assert ids[-1] == encoder.tokenizer.eod_id and targets[-1]
        ids, targets = ids[:-1], targets[:-1]
    runs = []
    borders = np.flatnonzero(np.diff([0, *targets, 0])).tolist()
    for first, last in zip(borders[::2], borders[1::2]):
        before, answer = ids[:first], ids[first:last]
        assert end is None or answer[-1] == end
        runs.append(
            Run(
                (made.token_hash(before), made.token_hash(answer)),
                (made.text_hash(decode(before)), made.text_hash(decode(answer))),
            )
        )
    return runs


def outcomes(answers: list[Answer], runs: list[Run], notes: Notes) -> list[str]:
    """Return the outcome of each answer of a line, then faults: runs without an answer, and counts
    without an answer.
    """
    left = list(runs)
    names = []
    letters = any(kind == "letters" for kind, _ in notes)
    not_served = sum(count for (kind, _), count in notes.items() if kind == "not_served")
    for answer in answers:
        if answer.kind in (TOKENS, SEAM):
            run = next((run for run in left if run.exact == answer.exact), None)
            name = "exact"
            if run is None and letters:
                # Letters in the right places, or, where the template decides by the quoted token,
                # at least the right text.
                run = next(
                    (
                        run
                        for run in left
                        if run.texts == answer.texts and answer.letters in (run.exact, (0, 0))
                    ),
                    None,
                )
                name = "letters"
            if run is not None:
                left.remove(run)
                names.append(name if answer.trained else "learned with train: false")
                continue
        if not answer.trained:
            names.append("train: false")
        elif not_served:
            not_served -= 1
            names.append("not_served")
        else:
            names.append("lost in silence")
    return names + ["differs"] * len(left) + ["not_served is too large"] * not_served


@pytest.mark.parametrize("structure", made.STRUCTURES, ids=lambda structure: structure.name)
def test_answers_are_trained_as_transformers_serves_them(structure, tmp_path) -> None:
    lines = made.conversations(structure)
    hashed = made.text_hash(json.dumps(lines))
    assert hashed == TABLE[f"{structure.name}.conversations"], "make the tables again"
    made.write_tokenizer(structure, tmp_path)
    tokenizer = HuggingFaceTokenizer(tmp_path)
    chat = chat_format(tokenizer, date=made.DATE)
    encoder = SampleEncoder(tokenizer=tokenizer, chat=chat)
    end = None if structure.turn_end is None else tokenizer.special_tokens[structure.turn_end]
    counts: Counter[str] = Counter()
    silent = []
    for number, (line, answers) in enumerate(zip(lines, read_table(structure, lines))):
        trained = sum(answer.trained for answer in answers)
        try:
            [encoded] = encoder.encode([samples_of(line)])
            if isinstance(encoded, BadLine):
                raise encoded
        except BadLine as bad:
            counts[bad.reason] += trained
            continue
        runs = [run for document in encoded.documents for run in runs_of(encoder, document, end)]
        names = outcomes(answers, runs, encoded.notes)
        counts.update(names)
        if not {"exact", "letters", "not_served", "train: false"}.issuperset(names):
            silent.append((number, names))
    chat.close()
    assert not silent, f"tools/template_tables.py --show {structure.name} NUMBER: {silent}"
    counts.pop("train: false")
    learned = (counts.pop("exact"), counts.pop("letters"))
    assert all(np.greater_equal(learned, LEARNED[structure.name])), learned
    assert counts <= Counter(LEFT_OUT[structure.name]), counts


def test_table_has_the_version_of_transformers() -> None:
    assert str(TABLE["transformers"]) == "5.24.0"
    assert all(TABLE[f"{s.name}.hashes"].shape[1] == 6 for s in made.STRUCTURES)
