"""Reader of a shell script that starts Megatron-LM. The script is read as text and never executed.

Assignments, arrays, quotes and variables are understood. Conditions, loops and other files are not:
such a script is refused with the line.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from megatron_packed.config.errors import printable
from megatron_packed.config.megatron.model_config_file import VARIABLE, MegatronLine
from megatron_packed.config.parser.text_file import read_text_file

CONTROL = frozenset(
    {
        *(
            "if",
            "then",
            "else",
            "elif",
            "fi",
            "case",
            "esac",
            "for",
            "while",
            "until",
            "do",
            "done",
        ),
        *("select", "function", "{", "}", "[[", "source", ".", "eval", "read", "unset", "shift"),
        *("getopts", "trap"),
    }
)
"""Words that begin a command which decides what another command does."""
DECLARATIONS = frozenset({"export", "declare", "local", "readonly", "typeset"})
MOST_WORDS = 10_000
"""Maximum number of words of a script."""
MOST_CHARACTERS = 8 * 1024 * 1024
"""Maximum length of all texts whose variables are replaced. Each assignment can double a value."""
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_PARAMETER = re.compile(r"([A-Za-z_]\w*)(\[[@*]\])?(?::?-(.*))?", re.DOTALL)
_ITEMS = re.compile(r"\$\{(\w+)\[@\]\}")
_PROGRAM = re.compile(r"[^\s=]*\.py")
_PROCESSES = re.compile(r"--(nproc[-_]per[-_]node|nnodes)")
_PLAIN = r"""(?:\$\{[^}]*\}?|(?!\$\(|`)[^\s'"\\;|&<>()])+"""
_CURE = "put echo before the command that starts the training, run the script, and give its output"


@dataclass
class _Word:
    """Word before its variables are replaced.

    Args:
        parts: texts with two marks: variables are replaced, and the value is split at spaces.
    """

    parts: list[tuple[str, bool, bool]] = field(default_factory=list)
    array: list[_Word] | None = None

    @property
    def head(self) -> str:
        """Unquoted text at the beginning."""
        return self.parts[0][0] if self.parts and self.parts[0][2] else ""


class _Unknown(Exception):
    """The value of a word is known only when the script runs."""


def read_script(path: str, environ: Mapping[str, str]) -> MegatronLine:
    """Return the command line of a script that starts one Python program.

    Args:
        environ: values for variables that the script uses and does not set.
    Raises:
        ValueError: a clause with the reason why the file cannot be used.
    """
    reader = _Script(environ)
    for line, command in _Commands(read_text_file(path)).commands():
        reader.read(line, command)
    if len(reader.lines) != 1:
        count = len(reader.lines) or "no"
        raise ValueError(
            f"has {count} commands with a .py file and flags, and must have one; {_CURE}"
        )
    return reader.lines[0]


class _Commands:
    """Splitter of a script into commands, and of commands into words."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._count = 0

    def commands(self) -> Iterator[tuple[int, list[_Word]]]:
        """Yield each command with the number of its first line."""
        while self._at < len(self._text):
            line = self._line()
            command = self._words("\n;|&<>")
            if self._text[self._at : self._at + 1] in ("<", ">"):
                self._skip_redirection(command)
            if command:
                yield line, command
            self._at += 1

    def _skip_redirection(self, command: list[_Word]) -> None:
        """Move to the end of the line, and drop the number of a stream before ``>``."""
        line = self._line()
        end = self._text.find("\n", self._at)
        line_end = self._text[self._at : end if end >= 0 else len(self._text)]
        if line_end.startswith("<<"):
            raise ValueError(f"has a text block (<<) in line {line}; {_CURE}")
        if "--" in line_end or line_end.endswith("\\"):
            raise ValueError(f"has flags after {line_end[0]} in line {line}; {_CURE}")
        if command and self._text[self._at - 1].isdigit() and command[-1].head.isdigit():
            command.pop()
        self._at += len(line_end)

    def _line(self) -> int:
        return self._text.count("\n", 0, self._at) + 1

    def _take(self, pattern: str) -> str:
        """Return the text here that a pattern matches, and move after it; empty without a match."""
        match = re.compile(pattern, re.DOTALL).match(self._text, self._at)
        if match is None:
            return ""
        self._at = match.end()
        return match[0]

    def _words(self, ends: str) -> list[_Word]:
        """Return words up to one of the characters ``ends``."""
        word_list: list[_Word] = []
        word: _Word | None = None
        while self._at < len(self._text) and self._text[self._at] not in ends:
            if self._take(r"\\\n") or (word is None and self._take(r"#[^\n]*")):
                continue
            if self._take(r"\s+?"):
                word = None
                continue
            if word is None:
                word = _Word()
                word_list.append(word)
                self._count += 1
                if self._count > MOST_WORDS:
                    raise ValueError(f"has more than {MOST_WORDS:,} words")
            self._part(word)
        return word_list

    def _part(self, word: _Word) -> None:
        """Read the next quoted or unquoted part of a word."""
        character = self._text[self._at]
        if text := self._take(r"'[^']*'"):
            word.parts.append((text[1:-1], False, False))
        elif text := self._take(r'"(?:[^"\\]|\\.)*"'):
            # Backslashes stay before $ and `.
            text = re.sub(r'\\(["\\\n])', lambda escape: escape[1].strip("\n"), text[1:-1])
            word.parts.append((text, True, False))
        elif character in "'\"":
            raise ValueError(f"has an open quotation mark in line {self._line()}")
        elif text := self._take(r"\\.?"):
            word.parts.append((text[1:], False, False))
        elif character in ";|&<>":
            raise ValueError(f"has {character} in a list in line {self._line()}; {_CURE}")
        elif character in "()":
            is_list = character == "(" and word.array is None and _ASSIGNMENT.fullmatch(word.head)
            if not is_list:
                raise ValueError(f"has a bracket in line {self._line()} that is no list; {_CURE}")
            line = self._line()
            self._at += 1
            word.array = self._words(")")
            if not self._take(r"\)"):
                raise ValueError(f"has a list without an end in line {line}")
        else:
            word.parts.append((self._unquoted(), True, True))

    def _unquoted(self) -> str:
        """Return an unquoted part; a substitution belongs to it as a whole."""
        begin = self._at
        while self._take(_PLAIN) or self._text.startswith(("$(", "`"), self._at):
            if self._text.startswith(("$(", "`"), self._at):
                end = _end_of_substitution(self._text, self._at)
                if end < 0:
                    raise ValueError(f"has a substitution without an end in line {self._line()}")
                self._at = end
        return self._text[begin : self._at]


def _end_of_substitution(text: str, at: int) -> int:
    """Return the position after ``$(...)`` or a pair of backquotes; -1 without an end."""
    if text[at] == "`":
        return text.find("`", at + 1) + 1 or -1
    depth = 0
    for position in range(at + 1, len(text)):
        depth += (text[position] == "(") - (text[position] == ")")
        if depth == 0:
            return position + 1
    return -1


class _Script:
    """Variables of a script, and the command lines that it starts."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._values: dict[str, list[str]] = {name: [value] for name, value in environ.items()}
        self._exported: dict[str, str] = {}
        self._characters = 0
        self.lines: list[MegatronLine] = []

    def read(self, line: int, command: list[_Word]) -> None:
        declares = command[0].head in DECLARATIONS
        if command[0].head in CONTROL:
            shown = printable(command[0].head, 40)
            raise ValueError(f"has {shown} in line {line}, which needs a shell; {_CURE}")
        assignments = command[declares:]
        while assignments and _ASSIGNMENT.match(assignments[0].head):
            self._assign(assignments.pop(0), exported=declares)
        if declares or not assignments:
            return
        try:
            expanded = [text for word in assignments for text in self._expand(word)]
        except _Unknown as error:
            if any(_PROGRAM.search(word.head) for word in assignments):
                raise ValueError(f"uses {error} in line {line}; {_CURE}") from None
            return
        at = next((i for i, text in enumerate(expanded) if _PROGRAM.fullmatch(text)), None)
        if at is None or not any(text.startswith("--") for text in expanded[at + 1 :]):
            return
        files = [text for text in expanded[at + 1 :] if text.startswith("@")]
        if files:
            raise ValueError(f"has the value {printable(files[0], 40)}; write a path as ./@NAME")
        launcher = tuple(_processes(expanded[:at]))
        megatron_line = MegatronLine(tuple(expanded[at + 1 :]), dict(self._exported), (), launcher)
        self.lines.append(megatron_line)

    def _assign(self, word: _Word, exported: bool) -> None:
        match = _ASSIGNMENT.match(word.head)
        assert match is not None
        name, adds = match[1], bool(match[2])
        first = (word.head[match.end() :], True, False)
        try:
            if word.array is not None:
                values = [text for item in word.array for text in self._expand(item)]
            else:
                others = ((text, replaces, False) for text, replaces, _ in word.parts[1:])
                values = ["".join(self._expand(_Word([first, *others])))]
        except _Unknown:
            self._values.pop(name, None)
            return
        old = self._values.get(name, []) if adds else []
        joins = adds and word.array is None and old
        self._values[name] = [old[0] + values[0], *old[1:]] if joins else [*old, *values]
        if exported and values:
            self._exported[name] = self._values[name][0]

    def _expand(self, word: _Word) -> list[str]:
        """Return the words that a word becomes.

        Raises:
            _Unknown: a part is known only when the script runs.
        """
        done: list[str] = []
        current: str | None = None
        if [part[0] for part in word.parts] in (["$@"], ["$*"]):
            return done  # the script's arguments, of which there are none
        for text, replaces, splits in word.parts:
            items = _ITEMS.fullmatch(text) if replaces and not splits else None
            if items and len(word.parts) == 1 and items[1] in self._values:
                return [
                    self._count(item) for item in self._values[items[1]]
                ]  # "${NAME[@]}" has one word for each item
            if not replaces and (VARIABLE.search(text) or text.endswith("$")):
                raise _Unknown("a $ that is no variable")
            pieces = self._replaced(text) if replaces else [(text, False)]
            for value, from_variable in pieces:
                self._count(value)
                if not value:
                    continue
                if not (splits and from_variable):
                    current = (current or "") + value
                    continue
                parts = value.split()
                if parts and current is not None and not value[0].isspace():
                    parts[0] = current + parts[0]
                elif current is not None:
                    parts.insert(0, current)
                done += parts[:-1]
                current = parts[-1] if parts else None
                if parts and value[-1:].isspace():
                    done.append(parts[-1])
                    current = None
            if not splits:
                current = current or ""
        return done if current is None else [*done, current]

    def _count(self, text: str) -> str:
        """Return a text, and refuse a script whose values grow without limit."""
        self._characters += len(text)
        if self._characters > MOST_CHARACTERS:
            raise ValueError(f"has values of more than {MOST_CHARACTERS:,} characters")
        return text

    def _replaced(self, text: str) -> Iterator[tuple[str, bool]]:
        """Yield pieces of a text and whether a piece is the value of a variable."""
        at = 0
        for match in re.finditer(r"\\([$`])|\$\{([^}]{0,1000})\}|\$(\w+|[@*#?!$-])|\$\(|`", text):
            if match.start() < at:
                continue
            yield text[at : match.start()], False
            at = match.end()
            if match[1] == "$":
                raise _Unknown("a $ that is no variable")
            if match[1]:
                yield match[1], False
            elif match[0] in ("$(", "`"):
                raise _Unknown("a substitution")
            else:
                yield self._value(match[2] or match[3] or "", match[0]), True
        yield text[at:], False

    def _value(self, parameter: str, shown: str) -> str:
        match = _PARAMETER.fullmatch(parameter)
        if match is None:
            raise _Unknown(printable(shown, 40))
        name, all_items, default = match.groups()
        values = self._values.get(name)
        if values is None or (default is not None and not "".join(values)):
            if default is None:
                return f"${{{name}}}"
            return default.strip("\"'")
        return " ".join(values if all_items else values[:1])


def _processes(arguments: list[str]) -> Iterator[str]:
    """Yield torchrun's numbers of processes and machines."""
    for word, following in zip(arguments, [*arguments[1:], ""], strict=True):
        name, equals, value = word.partition("=")
        value = value if equals else following
        if _PROCESSES.fullmatch(name) and re.fullmatch("[1-9][0-9]{0,5}", value):
            yield from (name.replace("_", "-"), value)
