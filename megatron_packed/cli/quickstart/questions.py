"""Questions and answers from the documentation that ships with this Python interpreter.

The answer to a question about a module, class, function or method is the first sentence of its
docstring. The source files are read with ``ast``; nothing is imported or downloaded. The same
interpreter gives the same questions.

Every object has questions in several wordings. Two wordings of each object are kept for validation, so
validation has questions about known objects in a known wording, but no question of training.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from megatron_packed.files.written_files import write_file

MODULES = (
    "argparse",
    "ast",
    "base64",
    "bisect",
    "calendar",
    "collections",
    "configparser",
    "contextlib",
    "copy",
    "csv",
    "dataclasses",
    "difflib",
    "enum",
    "fnmatch",
    "fractions",
    "functools",
    "getpass",
    "glob",
    "gzip",
    "heapq",
    "html",
    "inspect",
    "ipaddress",
    "json",
    "linecache",
    "locale",
    "logging",
    "mimetypes",
    "os",
    "pathlib",
    "pickle",
    "platform",
    "posixpath",
    "pprint",
    "queue",
    "random",
    "re",
    "sched",
    "secrets",
    "shelve",
    "shlex",
    "shutil",
    "socket",
    "statistics",
    "string",
    "subprocess",
    "tarfile",
    "tempfile",
    "textwrap",
    "threading",
    "timeit",
    "traceback",
    "uuid",
    "warnings",
    "wave",
    "weakref",
    "webbrowser",
    "zipfile",
)
"""Modules whose objects have questions. Modules without Python source are skipped."""
KNOWN_AS = {"posixpath": "os.path"}
"""Names under which users know a module, where the name of the file differs."""
MOST_OBJECTS = 96
"""Number of objects, chosen so that two minutes on two CPU cores teach all answers."""
ANSWER_CHARACTERS = range(16, 65)
"""Accepted lengths of an answer. Longer answers would take longer to learn."""
MOST_TURNS = 6
"""Largest number of questions in one conversation of the training data."""
_SENTENCE = re.compile(r"[A-Z][a-z]*( [A-Za-z0-9,'/()-]+){2,}")
"""Matches a description in words; others show calls or code."""
WORDINGS = (
    "What is `{name}`?",
    "When would I use `{name}`?",
    "Explain `{name}`.",
    "Explain `{name}` to me.",
    "Describe `{name}` in one sentence.",
    "Tell me about `{name}`.",
    "What does the documentation of `{name}` say?",
    "I found `{name}` in a program. What is it?",
    "Which description does `{name}` have?",
    "Quote the documentation of `{name}`.",
    "`{name}`?",
    "My question is about `{name}`.",
)
"""Wordings of the questions about one object."""
VALID_WORDINGS = 2
"""Number of wordings of each object that are kept for validation."""


class Documented(NamedTuple):
    """One object of the standard library with a short description."""

    name: str
    summary: str
    """First sentence of the docstring."""


class Question(NamedTuple):
    question: str
    answer: str


def write_questions(library: Path, folder: Path) -> tuple[int, int]:
    """Write ``train.jsonl`` and ``valid.jsonl`` in the ``messages`` schema.

    Args:
        library: folder with the source files of the standard library.
        folder: receives the two files.
    Returns:
        The number of objects, and the number of training questions.
    Raises:
        ValueError: the library has no docstrings.
    """
    objects = chosen_objects(documented(library))
    if not objects:
        raise ValueError(
            f"{library} has no docstrings; install the sources of Python's standard library."
        )
    train: list[Question] = []
    valid: list[Question] = []
    for thing in objects:
        wordings = sorted(WORDINGS, key=lambda wording: number_of(thing.name, wording))
        seen_questions = [
            Question(wording.format(name=thing.name), thing.summary) for wording in wordings
        ]
        valid += seen_questions[:VALID_WORDINGS]
        train += seen_questions[VALID_WORDINGS:]
    train.sort(key=lambda question: number_of(question.question, "order"))
    valid.sort(key=lambda question: number_of(question.question, "order"))
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / "train.jsonl", conversations(train))
    _write(folder / "valid.jsonl", [[question] for question in valid])
    return len(objects), len(train)


def read_questions(file: Path) -> list[Question]:
    """Return the first question of every conversation of a file."""
    lines = file.read_text(encoding="utf-8").splitlines()
    contents = [[m["content"] for m in json.loads(line)["messages"]] for line in lines]
    return [Question(question, answer) for question, answer, *_ in contents]


def documented(library: Path) -> Iterator[Documented]:
    """Yield the public objects of `MODULES` that have a short description."""
    for module in MODULES:
        files = (library / f"{module}.py", library / module / "__init__.py")
        tree = _parse(next((file for file in files if file.is_file()), None))
        if tree is not None:
            name = KNOWN_AS.get(module, module)
            yield from _described(name, tree)
            yield from _members(name, tree)


def chosen_objects(objects: Iterator[Documented]) -> list[Documented]:
    """Return at most `MOST_OBJECTS` objects with different descriptions, in a hashed order."""
    first = {thing.summary: thing for thing in reversed(list(objects))}
    return sorted(first.values(), key=lambda thing: number_of(thing.name))[:MOST_OBJECTS]


def conversations(questions: Sequence[Question]) -> list[list[Question]]:
    """Split questions into conversations of 1 to `MOST_TURNS` turns."""
    parts: list[list[Question]] = []
    at = 0
    while at < len(questions):
        turns = 1 + number_of(questions[at].question, "turns") % MOST_TURNS
        parts.append(list(questions[at : at + turns]))
        at += turns
    return parts


def number_of(*parts: str) -> int:
    """Return a number that depends only on ``parts``: the same in every process and machine."""
    return int.from_bytes(hashlib.blake2b("\n".join(parts).encode(), digest_size=8).digest(), "big")


def _members(parent: str, node: ast.Module | ast.ClassDef) -> Iterator[Documented]:
    for child in node.body:
        if not isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if child.name.startswith("_"):
            continue
        name = f"{parent}.{child.name}"
        yield from _described(name, child)
        if isinstance(child, ast.ClassDef):
            yield from _members(name, child)


def _described(
    name: str, node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
) -> Iterator[Documented]:
    paragraph = " ".join((ast.get_docstring(node) or "").split("\n\n", 1)[0].split())
    summary = paragraph.split(". ", 1)[0].rstrip(".")
    if len(summary) in ANSWER_CHARACTERS and _SENTENCE.fullmatch(summary):
        yield Documented(name, f"{summary}.")


def _parse(file: Path | None) -> ast.Module | None:
    if file is None:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(file.read_bytes())
    except (SyntaxError, ValueError, OSError):
        return None


def _write(file: Path, parts: Sequence[Sequence[Question]]) -> None:
    lines = []
    for part in parts:
        messages = []
        for question, answer in part:
            messages.append({"role": "user", "content": question})
            messages.append({"role": "assistant", "content": answer})
        lines.append(json.dumps({"messages": messages}, ensure_ascii=False) + "\n")
    # Renamed when complete, so that an interrupted command leaves no half of a file.
    write_file(file, "".join(lines).encode())
