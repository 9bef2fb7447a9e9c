"""Two small data sets: service dialogues, and documents of very unequal lengths.

They are generated from a seed, so that the tests need no file and no licence. If the environment
variable ``MEGATRON_PACKED_TEST_DATA`` names a folder, the tests also run on the beginnings of real
data sets in it. These are ``sgd_chat.train.jsonl.gz`` and ``sgd_chat.valid.jsonl.gz`` (dialogues),
and ``docs_longtail.jsonl.gz`` (documents, of which a tenth is used for validation).
"""

from __future__ import annotations

import gzip
import json
import os
import random
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

REAL_DATA = os.environ.get("MEGATRON_PACKED_TEST_DATA")


class Sample(NamedTuple):
    """Files for training and validation."""

    train: Path
    valid: Path


def dialogues(folder: Path) -> Sample:
    """Write 600 dialogues about bookings for training and 60 for validation."""
    draw = random.Random(7)
    return _written(
        folder, [_dialogue(draw) for _ in range(600)], [_dialogue(draw) for _ in range(60)]
    )


def documents(folder: Path) -> Sample:
    """Write 300 documents for training and 40 for validation.

    Most documents have a few sentences, and some have several hundred.
    """
    draw = random.Random(8)
    return _written(
        folder, [_document(draw) for _ in range(300)], [_document(draw) for _ in range(40)]
    )


def real_dialogues(folder: Path) -> Sample:
    train, valid = (
        _lines(f"sgd_chat.{part}.jsonl.gz", count)
        for part, count in (("train", 600), ("valid", 60))
    )
    return _written(folder, train, valid)


def real_documents(folder: Path) -> Sample:
    """Take documents from all parts of the file, because its sources differ."""
    lines = list(_lines("docs_longtail.jsonl.gz", 10_000))[::25]
    return _written(folder, [line for i, line in enumerate(lines) if i % 10], lines[::10])


def _lines(name: str, count: int) -> Iterator[dict[str, object]]:
    assert REAL_DATA is not None
    with gzip.open(Path(REAL_DATA) / name, "rt", encoding="utf-8") as file:
        yield from map(json.loads, islice(file, count))


def _written(folder: Path, train: object, valid: object) -> Sample:
    folder.mkdir(parents=True, exist_ok=True)
    made = Sample(folder / "train.jsonl", folder / "valid.jsonl")
    for path, samples in zip(made, (train, valid)):
        path.write_text("".join(json.dumps(sample) + "\n" for sample in samples), encoding="utf-8")  # type: ignore[attr-defined]
    return made


TOWNS = [
    "Ashford",
    "Brinmore",
    "Calder",
    "Dunwick",
    "Elmstead",
    "Farleigh",
    "Glenrock",
    "Hartwell",
    "Inverloch",
]
NAMES = [
    "Lantern",
    "Olive",
    "Harbour",
    "Copper",
    "Willow",
    "Station",
    "Juniper",
    "Falcon",
    "Meadow",
    "Anchor",
]
KINDS = {
    "restaurant": (
        ["Thai", "Greek", "Mexican", "Indian", "vegan"],
        ["Kitchen", "Table", "Grill"],
        "a table",
    ),
    "hotel": (["cheap", "quiet", "modern", "central", "old"], ["Inn", "House", "Lodge"], "a room"),
    "concert": (
        ["jazz", "folk", "rock", "piano", "choir"],
        ["Hall", "Club", "Theatre"],
        "a ticket",
    ),
}
DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]


def _dialogue(draw: random.Random) -> dict[str, object]:
    """Return a dialogue in which a user books something with the help of an assistant.

    The assistant requests missing details, makes proposals, answers questions and confirms.
    """
    kind = draw.choice(list(KINDS))
    styles, endings, unit = KINDS[kind]
    style, town, day, hour = (
        draw.choice(styles),
        draw.choice(TOWNS),
        draw.choice(DAYS),
        draw.randint(1, 11),
    )
    turns: list[tuple[str, str]] = []

    def exchange(user: str, assistant: str) -> None:
        turns.extend([("user", user), ("assistant", assistant)])

    wish = draw.choice(
        ["I am looking for", "Could you find me", "Please help me to find", "I would like"]
    )
    where = draw.random() < 0.5
    exchange(
        f"{wish} a {style} {kind}" + (f" in {town}." if where else "."),
        "Which day do you have in mind?"
        if where
        else f"Sure. In which town should I look for a {kind}?",
    )
    if not where:
        exchange(f"{town}, please.", f"Which day do you want to go to {town}?")
    place = f"{draw.choice(NAMES)} {draw.choice(endings)}"
    found = draw.randint(2, 9)
    exchange(
        f"On {day}.",
        f"I found {found} of them. {place} in {town} is a {style} {kind} and has places on {day}.",
    )
    for _ in range(draw.choice([0, 0, 1, 1, 2, 4])):
        if draw.random() < 0.5:
            place = f"{draw.choice(NAMES)} {draw.choice(endings)}"
            exchange(
                "Is there another one?",
                f"How about {place}? It is a {style} {kind} in {town} as well.",
            )
        else:
            number = "".join(str(draw.randint(0, 9)) for _ in range(4))
            exchange("What is their phone number?", f"You can reach {place} at 555-{number}.")
    if draw.random() < 0.8:
        exchange(
            f"Good. Book {unit} at {hour} o'clock.",
            f"Please confirm: {unit} at {place} in {town} on {day} at {hour} o'clock.",
        )
        exchange(
            "Yes, that is right.",
            f"Done. {place} expects you on {day} at {hour} o'clock. Anything else?",
        )
    exchange(
        draw.choice(["No, thanks.", "That is all.", "Thank you, bye."]),
        "You are welcome. Have a nice day!",
    )
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


SYLLABLES = [
    "ba",
    "con",
    "der",
    "el",
    "fi",
    "gra",
    "har",
    "in",
    "jo",
    "ka",
    "lu",
    "mor",
    "ne",
    "or",
    "pra",
    "qui",
]


def _vocabulary() -> list[str]:
    draw = random.Random(3)
    return ["".join(draw.choices(SYLLABLES, k=draw.randint(1, 4))) for _ in range(400)]


VOCABULARY = _vocabulary()


def _document(draw: random.Random) -> dict[str, object]:
    """Return a document with headings and sentences of invented words.

    A document keeps its subject, and common words follow common words.
    """
    subject = draw.sample(VOCABULARY, 12)
    sentences = max(1, round(draw.lognormvariate(1.6, 1.2)))
    text = [
        f"Title: {subject[0]} {subject[1]}\nStatus: {draw.choice(['draft', 'final', 'active'])}\n"
    ]
    for number in range(min(sentences, 400)):
        if number % 12 == 11:
            text.append(f"\n\n{number // 12}. {draw.choice(subject)}\n")
        words = [draw.choice(["The", "A", "Every", "No", "This"])]
        for _ in range(draw.randint(2, 5)):
            words.append(draw.choice(subject) if draw.random() < 0.7 else draw.choice(VOCABULARY))
            words.append(
                draw.choice(["of the", "and a", "is", "must have", "with the", "for every", "or"])
            )
        text.append(" ".join([*words, draw.choice(subject)]) + ". ")
    return {"text": "".join(text)}
