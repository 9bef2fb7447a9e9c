"""The command line as a list of flags with their texts: ``--flag value ...``, ``--flag=value``,
``@args-file``.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_packed.config.errors import Problem
from megatron_packed.config.parser.text_file import MOST_BYTES, read_text_file

COMMAND_LINE = "flag"
_FLAG = re.compile(r"--[A-Za-z][A-Za-z0-9_.-]*(=.*)?", re.DOTALL)
_PATTERN = re.compile(
    r"[-MGDE*+|/]+"
)  # "--M*" is two MLPs, a Mamba layer and attention, not a flag
_MAX_NESTING = 8
_LEAST_COST = 256  # of reading a file, so that the number of files is limited, too


@dataclass(frozen=True)
class Word:
    """One word of the command line and where it stands: ``flag``, or ``@file``."""

    text: str
    source: str = COMMAND_LINE

    @property
    def is_flag(self) -> bool:
        return self.text == "-h" or bool(
            _FLAG.fullmatch(self.text) and not _PATTERN.fullmatch(self.text)
        )


@dataclass(frozen=True)
class Occurrence:
    """One flag with the texts that follow it, up to the next flag.

    Args:
        attached: the text behind ``=``; None when there was none.
    """

    flag: str
    texts: tuple[str, ...]
    attached: str | None
    source: str


def read_command_line(argv: Sequence[str], problems: list[Problem]) -> list[Occurrence]:
    """Flags in order; files named by ``@`` are read in their place. Problems are appended."""
    found: list[tuple[Word, list[str]]] = []
    for word in _expand(argv, COMMAND_LINE, (), problems, _Files()):
        if word.is_flag:
            found.append((word, []))
        elif not found:
            problems.append(
                Problem(
                    word.text, "", "is no flag", "write --flag value; --help-all lists the flags"
                )
            )
        else:
            found[-1][1].append(word.text)
    return [_occurrence(flag, texts) for flag, texts in found]


def _occurrence(flag: Word, texts: list[str]) -> Occurrence:
    name, equals, attached = flag.text.partition("=")
    return Occurrence(name, tuple(texts), attached if equals else None, flag.source)


class _Files:
    """The files of arguments of one command line, which may be read once more wherever one is
    named.
    """

    def __init__(self) -> None:
        self._left = MOST_BYTES

    def words(self, path: str) -> list[str]:
        """Return the words of a file.

        Raises:
            ValueError: a clause that says why it cannot be read.
        """
        if self._left <= 0:
            raise ValueError(
                f"comes after {MOST_BYTES // 1024} KiB of others, which is all that is read"
            )
        self._left -= _LEAST_COST
        text = read_text_file(path)
        self._left -= len(text)
        # A backslash at the end of a line continues it, so that a shell script's flags can be
        # pasted.
        return shlex.split(text.replace("\\\n", " "), comments=True)


def _expand(
    words: Sequence[str],
    source: str,
    within: tuple[str, ...],
    problems: list[Problem],
    files: _Files,
) -> Iterator[Word]:
    for text in words:
        if not text.startswith("@") or len(text) == 1:
            yield Word(text, source)
            continue
        path = text[1:]
        if path in within or len(within) >= _MAX_NESTING:
            problems.append(
                Problem(
                    text,
                    "",
                    f"is read while it is being read ({' -> '.join((*within, path))})",
                    "remove the circle",
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
                    f"the file of arguments {error}",
                    "give @FILE with flags as on a command line",
                )
            )
            continue
        yield from _expand(inside, text, (*within, path), problems, files)
