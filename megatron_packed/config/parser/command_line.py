"""Flags of the command line: their meaning by spelling, and the reader of ``--flag value ...``,
``--flag=value`` and ``@args-file``, which gives values as text.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from megatron_packed.config.errors import Problem
from megatron_packed.config.options import Field
from megatron_packed.config.parser.text_file import MOST_BYTES, read_text_file
from megatron_packed.config.run import every_field

META_FLAGS: dict[str, str] = {
    "--config": "Read options from a YAML file; flags override them.",
    "--print-config": "Print all values and their origins, and exit.",
    "--explain": "Print which features are on, off or partly on with these options on this "
    "machine, with reasons, and exit.",
    "--help": "Print the flags of a first run, and exit (also -h).",
    "--help-all": "Print every flag with its default, unit and choices, and exit.",
    "--version": "Print the version, and exit.",
}


@dataclass(frozen=True)
class Spelling:
    """Meaning of one spelling of a flag.

    Args:
        field: the option.
        sets: for a flag that takes no value, the value it sets.
        deprecated: True if users should write `preferred` instead.
    """

    field: Field
    sets: Any = None
    deprecated: bool = False

    @property
    def preferred(self) -> str:
        """Spelling to use instead of a deprecated spelling."""
        shorthand = self.sets is not None and self.field.kind.base is not bool
        return f"{self.field.flag} {self.sets}" if shorthand else self.field.flag


@cache
def spellings() -> Mapping[str, Spelling]:
    """Return every flag that sets an option, with its meaning."""
    by_spelling: dict[str, Spelling] = {}
    for field in every_field():
        short = {"--" + name: value for name, value in (field.option.shorthands or {}).items()}
        old = {*short, *("--" + name for name in field.option.deprecated)}
        for spelling in field.spellings:
            assert spelling not in by_spelling, f"{spelling} names two options"
            sets = field.switches[spelling] if field.kind.base is bool else short.get(spelling)
            by_spelling[spelling] = Spelling(field, sets, spelling in old)
    return by_spelling


def usable_flags() -> list[str]:
    """Return every flag that is accepted; error messages suggest the nearest."""
    from megatron_packed.config.megatron.flags import TAKEN

    return [*spellings(), *META_FLAGS, *TAKEN]


def known_flags() -> set[str]:
    """Return every flag that is accepted or refused by name."""
    from megatron_packed.config.megatron.flags import REFUSAL_OF

    return {*usable_flags(), *REFUSAL_OF}


COMMAND_LINE = "flag"
_FLAG = re.compile(r"--[A-Za-z][A-Za-z0-9_.-]*(=.*)?", re.DOTALL)
# "--M*" is a layer pattern (two MLPs, a Mamba layer and attention), not a flag.
_PATTERN = re.compile(r"[-MGDE*+|/]+")
_MAX_NESTING = 8
# Each file counts as at least this number of bytes, so the number of files is limited too.
_LEAST_COST = 256


@dataclass(frozen=True)
class Word:
    """Word of the command line and its source: ``flag``, or ``@file``."""

    text: str
    source: str = COMMAND_LINE

    @property
    def is_flag(self) -> bool:
        return self.text == "-h" or bool(
            _FLAG.fullmatch(self.text) and not _PATTERN.fullmatch(self.text)
        )


@dataclass(frozen=True)
class Occurrence:
    """Flag with its values: the text after ``=``, and the words up to the next flag."""

    flag: str
    texts: tuple[str, ...]
    source: str


def read_command_line(argv: Sequence[str], problems: list[Problem]) -> list[Occurrence]:
    """Return the flags of a command line in order, and append problems to ``problems``.

    The flags of a file named by ``@`` replace its name.
    """
    flags: list[tuple[Word, list[str]]] = []
    for word in _expand(argv, COMMAND_LINE, (), problems, _Files()):
        if word.is_flag:
            flags.append((word, []))
        elif not flags:
            problems.append(
                Problem(
                    word.text,
                    "",
                    "is not a flag and follows no flag",
                    "write --flag value; --help-all lists all flags",
                )
            )
        else:
            flags[-1][1].append(word.text)
    return [_occurrence(flag, texts) for flag, texts in flags]


def _occurrence(flag: Word, texts: list[str]) -> Occurrence:
    name, equals, attached = flag.text.partition("=")
    return Occurrence(name, (attached, *texts) if equals else tuple(texts), flag.source)


class _Files:
    """Reader of the @files of one command line, which limits their total size. A file is read again
    each time its name occurs.
    """

    def __init__(self) -> None:
        self._left = MOST_BYTES

    def words(self, path: str) -> list[str]:
        """Return the words of a file.

        Raises:
            ValueError: a clause with the reason why the file cannot be read.
        """
        if self._left <= 0:
            raise ValueError(
                f"follows {MOST_BYTES // 1024} KiB of other files, and no more is read"
            )
        self._left -= _LEAST_COST
        text = read_text_file(path)
        self._left -= len(text)
        # A backslash at the end of a line continues it, so that a shell script's flags can be
        # pasted.
        return shlex.split(text.replace("\\\n", " "), comments=True)


def _expand(
    argv: Sequence[str],
    source: str,
    within: tuple[str, ...],
    problems: list[Problem],
    files: _Files,
) -> Iterator[Word]:
    for text in argv:
        if not text.startswith("@") or len(text) == 1:
            yield Word(text, source)
            continue
        path = text[1:]
        if path in within or len(within) >= _MAX_NESTING:
            problems.append(
                Problem(
                    text,
                    "",
                    f"includes itself ({' -> '.join((*within, path))})",
                    "remove one of these @ names",
                )
            )
            continue
        try:
            inside = files.words(path)
        except ValueError as error:
            problems.append(
                Problem(
                    text,
                    "",
                    f"the @file {error}",
                    "give @FILE, with flags written as on a command line",
                )
            )
            continue
        yield from _expand(inside, text, (*within, path), problems, files)
