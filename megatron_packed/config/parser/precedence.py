"""Choice of the value and the source of every option: default < configuration file < @args-file <
command line < keyword of a call from Python.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_packed.config.errors import MOST_SHOWN, Problem
from megatron_packed.config.megatron.flags import REFUSAL_OF, TAKEN
from megatron_packed.config.options import Field
from megatron_packed.config.parser.command_line import COMMAND_LINE, Occurrence, read_command_line
from megatron_packed.config.parser.config_file import ConfigFileEntry, read_config_file
from megatron_packed.config.parser.did_you_mean import did_you_mean, nearest
from megatron_packed.config.parser.flag_registry import (
    META_FLAGS,
    Spelling,
    spellings,
    usable_flags,
)
from megatron_packed.config.parser.value_text import WrongValueError, from_text, from_yaml
from megatron_packed.config.run import SECTIONS, every_field
from megatron_packed.config.trainer_flags import answer, flags_in
from megatron_packed.config.value_checks import placeholder

# A higher level overrides a lower one. Within a level the last occurrence counts.
FILE, ARGS_FILE, FLAG, KEYWORD = (1, 2, 3, 4)
_SHOWN_CHARACTERS = 80


@dataclass
class Given:
    """Given options, before they are checked together.

    Args:
        values: by key, e.g. ``model.hidden_size``.
        sources: by key, e.g. ``run.yaml:3``, ``@run.args`` or ``flag``.
        unsound: keys of options whose value could not be read.
        taken: given flags of Megatron that are no options, with their texts and source.
    """

    values: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    unsound: set[str] = field(default_factory=set)
    taken: dict[str, tuple[tuple[str, ...], str]] = field(default_factory=dict)
    actions: set[str] = field(default_factory=set)
    problems: list[Problem] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    _levels: dict[str, tuple[int, str]] = field(default_factory=dict)

    def claim(self, key: str, level: int, shown: str) -> bool:
        """Return whether this occurrence sets ``key``. A second occurrence in a configuration file
        is a problem.
        """
        earlier = self._levels.get(key, (0, ""))
        if earlier[0] == level:
            cure = (
                "keep one of them"
                if shown == earlier[1]
                else f"keep one of {earlier[1]} and {shown}"
            )
            self.problems.append(Problem(shown, "", "was given twice", cure))
            return False
        if earlier[0] > level:
            return False
        self._levels[key] = (level, shown)
        return True

    def suggest(self, name: str, known: Iterable[str]) -> list[str]:
        """Return the names that a wrong name may mean, or none if its problem would not be shown."""
        return nearest(name, known) if len(self.problems) < MOST_SHOWN else []

    def expect(self, keys: Iterable[str]) -> None:
        """Mark options that a misspelt name may have meant, so that they are not reported as
        missing too.
        """
        self.unsound.update(key for key in keys if key not in self.values)


def gather(argv: Sequence[str], keywords: Mapping[str, Any] | None = None) -> Given:
    """Read the command line, the files that it names, and keywords of a call from Python. Problems
    are collected; no exception is raised.

    Args:
        argv: words of the command line.
        keywords: options by the names that a configuration file has at its top level.
    """
    given = Given()
    words = read_command_line(argv, given.problems)
    levels = {word: FLAG if word.source == COMMAND_LINE else ARGS_FILE for word in words}
    configs = sorted((word for word in words if word.flag == "--config"), key=levels.__getitem__)
    for occurrence in _last_of_each(configs, given.warnings):
        _read_config(occurrence, given)
    for level in (ARGS_FILE, FLAG):
        of_level = (word for word in words if levels[word] == level and word.flag != "--config")
        for occurrence in _last_of_each(of_level, given.warnings):
            _apply_flag(occurrence, level, given)
    for name, value in (keywords or {}).items():
        _apply_keyword(name, value, given)
    if any(problem.option.startswith(("@", "--config")) for problem in given.problems):
        # The unreadable file may set any option, so no option is reported as missing.
        given.expect(described.key for described in every_field())
    return given


def _last_of_each(occurrences: Iterable[Occurrence], warnings: list[str]) -> list[Occurrence]:
    """Return the last occurrence of each option or flag, which decides its value, as in argparse.

    A warning lists the other occurrences. Scripts of Megatron often repeat a flag of the model
    among the flags of a run.
    """
    found: dict[str, list[Occurrence]] = {}
    for occurrence in occurrences:
        spelling = spellings().get(occurrence.flag)
        found.setdefault(occurrence.flag if spelling is None else spelling.field.key, []).append(
            occurrence
        )
    for several in found.values():
        if len(several) > 1:
            shown = [
                _cut(" ".join((one.flag, *_texts(one))))
                for one in (*several[:2], *several[2:][-2:])
            ]
            shown[2:2] = ["..."] if len(several) > len(shown) else []
            times = f"{several[-1].flag} was given {len(several)} times"
            warnings.append(f"{times}: {', '.join(shown)}. The last one counts.")
    return [several[-1] for several in found.values()]


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."


def _read_config(occurrence: Occurrence, given: Given) -> None:
    paths = _texts(occurrence)
    if len(paths) != 1:
        given.problems.append(
            Problem("--config", " ".join(paths), "takes one file", "give --config run.yaml")
        )
    else:
        for entry in read_config_file(paths[0], given.problems):
            _apply_entry(entry, paths[0], given)


def _apply_flag(occurrence: Occurrence, level: int, given: Given) -> None:
    flag = "--help" if occurrence.flag == "-h" else occurrence.flag
    spelling = spellings().get(flag)
    if flag in META_FLAGS:
        given.actions.add(flag)
        if _texts(occurrence):
            given.problems.append(
                Problem(flag, " ".join(_texts(occurrence)), "takes no value", f"write {flag} alone")
            )
    elif spelling is not None:
        _apply_option(spelling, occurrence, level, given)
    elif flag in TAKEN or flag in REFUSAL_OF:
        _apply_megatron(flag, _texts(occurrence), occurrence.source, level, given)
    elif not _answer_trainer_flag(flag, _texts(occurrence), given):
        meant = given.suggest(flag, usable_flags())
        given.expect(spellings()[name].field.key for name in meant if name in spellings())
        cure = did_you_mean(meant, "correct it; --help-all lists all flags")
        given.problems.append(Problem(flag, " ".join(_texts(occurrence)), "is not a flag", cure))


def _answer_trainer_flag(name: str, texts: Sequence[str], given: Given, shown: str = "") -> bool:
    """Refuse a flag or a key of another trainer with its cure; return False for other names."""
    problem = answer(name, texts, shown or name)
    if problem is None:
        return False
    given.problems.append(problem)
    given.expect(spellings()[flag].field.key for flag in flags_in(problem) if flag in spellings())
    return True


def _apply_option(spelling: Spelling, occurrence: Occurrence, level: int, given: Given) -> None:
    described, flag = spelling.field, occurrence.flag
    if spelling.deprecated:
        given.warnings.append(f"{flag} is deprecated; write {spelling.preferred}.")
    if not given.claim(described.key, level, flag):
        return
    given.sources[described.key] = occurrence.source
    given.unsound.discard(described.key)
    try:
        given.values[described.key] = _option_value(spelling, occurrence)
    except WrongValueError as error:
        given.problems.append(error.problem)
        given.unsound.add(described.key)


def _option_value(spelling: Spelling, occurrence: Occurrence) -> Any:
    described, flag, texts = spelling.field, occurrence.flag, _texts(occurrence)
    shown = " ".join(texts)
    if spelling.sets is not None:
        if texts:
            cure = f"write {flag} alone"
            if described.kind.base is bool:
                opposite = next(
                    name for name, sets in described.switches.items() if sets is not spelling.sets
                )
                cure += f"; {opposite} is its opposite"
            raise WrongValueError(Problem(flag, shown, "takes no value", cure))
        return spelling.sets
    example = f"{flag} {placeholder(described)}"
    if not texts and described.option.bare is not None:
        return described.option.bare
    if not texts:
        raise WrongValueError(Problem(flag, "", "needs a value", f"write {example}"))
    if described.kind.many:
        if shown == described.option.empty_word:
            return ()
        word = described.option.empty_word
        if word and word in texts:
            cure = f"give {word} alone, or leave {word} out"
            raise WrongValueError(Problem(flag, shown, f"combines {word} with other values", cure))
        return tuple(from_text(described, text) for text in texts)
    if len(texts) > 1:
        raise WrongValueError(
            Problem(
                flag,
                shown,
                "takes one value",
                f"write {example}, with quotes around a value that contains spaces",
            )
        )
    return from_text(described, texts[0])


def _apply_megatron(
    flag: str, texts: tuple[str, ...], source: str, level: int, given: Given
) -> None:
    taken, refusal = TAKEN.get(flag), REFUSAL_OF.get(flag)
    shown = " ".join(texts)
    if taken is not None and taken.values is None and texts:
        given.problems.append(Problem(flag, shown, "takes no value", f"write {flag} alone"))
    elif taken is not None and taken.values == () and not texts:
        given.problems.append(Problem(flag, "", "needs a value", f"write {flag} VALUE"))
    elif taken is not None and (
        not taken.values or any(_same_text(texts, value) for value in taken.values)
    ):
        if given.claim(flag, level, flag):
            given.taken[flag] = (texts, source)
    elif refusal is not None:
        fitting = (
            f" (accepted: {', '.join(taken.values)})" if taken is not None and taken.values else ""
        )
        given.problems.append(Problem(flag, shown, refusal.reason + fitting, refusal.nearest))
    elif taken is not None and taken.values:
        words = " or ".join(taken.values)
        cure = f"give {words}, or leave it out"
        given.problems.append(Problem(flag, shown, f"must be {words}: {taken.reason}", cure))


def _same_text(texts: tuple[str, ...], value: str) -> bool:
    if texts == (value,):
        return True
    try:
        return len(texts) == 1 and float(texts[0]) == float(value)
    except ValueError:
        return False


def _apply_entry(entry: ConfigFileEntry, path: str, given: Given) -> None:
    where = f"{path}:{entry.line}"
    name = f"{entry.section}.{entry.name}" if entry.section else entry.name
    _apply_named(entry.section, entry.name, entry.value, f"{where} {name}", where, FILE, given)


def _apply_named(
    section: str, name: str, value: Any, shown: str, source: str, level: int, given: Given
) -> None:
    """Set the option with a name, of a configuration file or a keyword, to a value.

    Args:
        section: section that contains the name; empty without one.
        shown: name in messages.
        source: origin of the value (`Given.sources`).
    """
    spelling = _named_spelling(section, name)
    if spelling is None:
        flag = None if section else _megatron_flag(name)
        if flag is not None:
            if value not in (False, None):
                _apply_megatron(flag, _entry_texts(value), source, level, given)
            return
        if _answer_trainer_flag(name, _entry_texts(value), given, shown):
            return
        known = [f.name for f in every_field() if f.section == section] if section else _names()
        otherwise = "remove it; --print-config shows all keys"
        if level == KEYWORD:
            known = _keywords()
            otherwise = "remove it; each flag of --help-all is a keyword, with underscores"
        meant = given.suggest(name, known)
        given.expect(f.key for f in every_field() if f.name in meant)
        cure = did_you_mean(meant, otherwise)
        place = f"is not an option of {section}" if section else "is not an option"
        given.problems.append(Problem(shown, "", place, cure))
        return
    described = spelling.field
    if spelling.deprecated:
        where = shown if level == KEYWORD else f"{source}: {name}"
        given.warnings.append(f"{where} is deprecated; write {described.name}.")
    if not given.claim(described.key, level, shown):
        return
    given.sources[described.key] = source
    given.unsound.discard(described.key)
    try:
        given.values[described.key] = _entry_value(spelling, value)
    except WrongValueError as error:
        wrong = error.problem
        given.problems.append(Problem(shown, wrong.value, wrong.rule, wrong.cure))
        given.unsound.add(described.key)


def _apply_keyword(name: str, value: Any, given: Given) -> None:
    """Set an option to the value of a keyword; None leaves an option as it is."""
    spelling = _named_spelling("", name)
    if spelling is not None and value is None:
        return
    if spelling is not None and isinstance(value, Mapping):
        value = _text_of_mapping(spelling.field, value)
    _apply_named("", name, _plain_value(value), f"{name}=", "keyword", KEYWORD, given)


def _text_of_mapping(described: Field, value: Mapping[Any, Any]) -> Any:
    """Return a mapping as the texts of its option: pairs such as ``prompt=question``, or JSON."""
    if described.kind.many:
        return [f"{key}={item}" for key, item in value.items()]
    try:
        return json.dumps(dict(value))
    except (TypeError, ValueError):  # the value is refused as no text
        return value


def _plain_value(value: Any) -> Any:
    """Return a value of Python in the form that a configuration file gives: plain data.

    Paths become texts, numbers of NumPy and torch become Python's, and several values a list.
    """
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, (list, tuple, range)):
        return [_plain_value(item) for item in value]
    # Arrays of NumPy and tensors, without an import of these packages.
    convert = getattr(value, "tolist", None)
    return convert() if callable(convert) else value


def _entry_value(spelling: Spelling, value: Any) -> Any:
    described, sets = spelling.field, spelling.sets
    if sets is None:
        return from_yaml(described, value)
    if not isinstance(value, bool):
        raise WrongValueError(
            Problem(described.flag, repr(value), "must be true or false", "write true or false")
        )
    if described.kind.base is bool:
        return value is sets
    return sets if value else described.default


def _named_spelling(section: str, name: str) -> Spelling | None:
    """Return the option that a key of the configuration file or a keyword names.

    A key is a field's name or, outside of a section, any spelling of its flag without the dashes.
    """
    fields: list[Field] = [
        f for f in every_field() if f.name == name and section in ("", f.section)
    ]
    if fields:
        return Spelling(fields[0])
    return None if section else spellings().get("--" + name.replace("_", "-"))


def _megatron_flag(name: str) -> str | None:
    """Return the flag of Megatron that a key or a keyword names; None if it names none."""
    plain = name.replace("_", "-")
    known = (flag for flag in (*TAKEN, *REFUSAL_OF) if flag[2:].replace("_", "-") == plain)
    return next(known, None)


def _entry_texts(value: Any) -> tuple[str, ...]:
    """Return the value of a key as it would follow a flag; ``true`` is a flag without a value."""
    if value is True or value is None:
        return ()
    return tuple(map(str, value)) if isinstance(value, list) else (str(value),)


def _names() -> list[str]:
    return [
        *SECTIONS,
        *(described.name for described in every_field()),
        *(flag[2:] for flag in usable_flags()),
    ]


def _keywords() -> list[str]:
    """Return the names of all options as keywords: fields, and flags with underscores."""
    flags = (flag[2:].replace("-", "_") for flag in (*spellings(), *TAKEN))
    return list(dict.fromkeys([*(described.name for described in every_field()), *flags]))


def _texts(occurrence: Occurrence) -> tuple[str, ...]:
    return (
        occurrence.texts
        if occurrence.attached is None
        else (occurrence.attached, *occurrence.texts)
    )
