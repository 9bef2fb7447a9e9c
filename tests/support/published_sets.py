"""Instruction sets in the shapes in which people publish them, with the answers to learn."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from support.json_lines import write_lines

WORDS = ["red", "green", "blue", "amber", "violet", "silver", "cool", "warm", "é", "雪"]


class Published(NamedTuple):
    """One set: a file, the flags that train it, and what a run must learn from it."""

    path: Path
    data_fields: str | None
    answers: list[list[str]]
    """Answers of each document."""
    empty: int = 0
    """Number of lines without an answer."""

    @property
    def num_bytes(self) -> int:
        """Number of bytes of all answers, which is their number of byte tokens."""
        return sum(len(answer.encode()) for answers in self.answers for answer in answers)


def made_up(count: int, seed: int) -> list[tuple[str, str]]:
    """Return questions and answers; every tenth answer is empty."""
    draw = random.Random(seed)
    return [
        (
            " ".join(draw.choices(WORDS, k=draw.randint(1, 5))) + "?",
            " ".join(draw.choices(WORDS, k=draw.randint(1, 4))) if number % 10 else "",
        )
        for number in range(count)
    ]


def alpaca(folder: Path) -> Published:
    """Return a gzip file with one JSON array, as Alpaca is published, and some empty outputs."""
    pairs = made_up(40, seed=1)
    rows = [{"instruction": q, "input": "", "output": a} for q, a in pairs]
    path = folder / "alpaca.json.gz"
    path.write_bytes(gzip.compress(json.dumps(rows, indent=4).encode()))
    return _of(path, None, pairs)


def other_names(folder: Path) -> Published:
    """Return a JSON array with the fields ``query`` and ``response``."""
    pairs = [pair for pair in made_up(40, seed=2) if pair[1]]
    path = folder / "pairs.json"
    path.write_text(json.dumps([{"query": q, "response": a, "type": "x"} for q, a in pairs]))
    return _of(path, "prompt=query,completion=response", pairs)


def nested(folder: Path) -> Published:
    """Return JSON lines like those of SQuAD 2, in which some questions have no answer."""
    pairs = made_up(60, seed=3)
    rows = [
        {
            "id": f"{number}",
            "context": "Of colours.",
            "qa": {"question": q},
            "answers": {"text": [a, a[:2]] if a else [], "answer_start": [0, 0]},
        }
        for number, (q, a) in enumerate(pairs)
    ]
    fields = "instruction=qa.question,input=context,output=answers.text.0"
    return _of(_lines(folder / "squad.jsonl", rows), fields, pairs)


def content_lists(folder: Path) -> Published:
    """Return conversations of two turns whose contents are lists of parts."""
    pairs = [pair for pair in made_up(48, seed=4) if pair[1]]
    rows, answers = [], []
    for (q, a), (other, b) in zip(pairs[::2], pairs[1::2]):
        turns = [("user", q), ("assistant", a), ("user", other), ("assistant", b)]
        messages = [
            {
                "role": role,
                "content": [{"type": "text", "text": part} for part in (text[:2], text[2:])],
            }
            for role, text in turns
        ]
        rows.append({"id": len(rows), "conversation": messages})
        answers.append([a, b])
    path = _lines(folder / "parts.jsonl", rows)
    return Published(path, "messages=conversation", answers)


def sharegpt(folder: Path) -> Published:
    """Return a zstd file of ShareGPT conversations, some of them without an answer."""
    pairs = made_up(30, seed=5)
    rows = [
        {"conversations": [{"from": "human", "value": q}, {"from": "gpt", "value": a}]}
        for q, a in pairs
    ]
    codec = pytest.importorskip("pyarrow").Codec("zstd")
    path = folder / "sharegpt.jsonl.zst"
    text = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(codec.compress(text, asbytes=True))
    return _of(path, None, pairs)


SETS = (alpaca, other_names, nested, content_lists, sharegpt)


def _of(path: Path, fields: str | None, pairs: list[tuple[str, str]]) -> Published:
    answers = [[answer] for _, answer in pairs if answer]
    return Published(path, fields, answers, len(pairs) - len(answers))


def _lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    write_lines(path, rows)
    return path
