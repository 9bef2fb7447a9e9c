"""The command line as a list of flags with their texts: ``--flag value ...``, ``--flag=value``, ``@args-file``."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_packed.config.errors import Problem

COMMAND_LINE = "flag"
_FLAG = re.compile(r"--[A-Za-z][A-Za-z0-9_.-]*(=.*)?", re.DOTALL)
_PATTERN = re.compile(r"[-MGDE*+|/]+")  # "--M*" is two MLPs, a Mamba layer and attention, not a flag
_MAX_NESTING = 8


@dataclass(frozen=True)
class Word:
    """One word of the command line and where it stands: ``flag``, or ``@file``."""

    text: str
    source: str = COMMAND_LINE

    @property
    def is_flag(self) -> bool:
        return self.text == "-h" or bool(_FLAG.fullmatch(self.text) and not _PATTERN.fullmatch(self.text))


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
    found: list[Occurrence] = []
    for word in _expand(argv, COMMAND_LINE, (), problems):
        if word.is_flag:
            name, equals, attached = word.text.partition("=")
            found.append(Occurrence(name, (), attached if equals else None, word.source))
        elif not found:
            problems.append(Problem(word.text, "", "is no flag", "write --flag value; --help-all lists the flags"))
        else:
            last = found[-1]
            found[-1] = Occurrence(last.flag, (*last.texts, word.text), last.attached, last.source)
    return found


def _expand(words: Sequence[str], source: str, files: tuple[str, ...], problems: list[Problem]) -> Iterator[Word]:
    for text in words:
        if not text.startswith("@") or len(text) == 1:
            yield Word(text, source)
            continue
        path = text[1:]
        if path in files or len(files) >= _MAX_NESTING:
            problems.append(Problem(text, "", f"is read while it is being read ({' -> '.join((*files, path))})",
                                    "remove the circle"))
            continue
        try:
            with open(path, encoding="utf-8-sig") as file:
                # A backslash at the end of a line continues it, so that a shell script's flags can be pasted.
                inside = shlex.split(file.read().replace("\\\n", " "), comments=True)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            problems.append(Problem(text, "", f"the file of arguments cannot be read: {reason}",
                                    "give @FILE with flags as on a command line"))
            continue
        yield from _expand(inside, text, (*files, path), problems)
