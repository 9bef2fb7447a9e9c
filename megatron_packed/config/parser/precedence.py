"""Choice of the value and the source of every option: default < configuration file < @args-file <
command line < keyword of a call from Python.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from megatron_packed.config.errors import MOST_SHOWN, Problem
from megatron_packed.config.options import Field
from megatron_packed.config.parser.command_line import (
    COMMAND_LINE,
    META_FLAGS,
    Occurrence,
    Spelling,
    read_command_line,
    spellings,
    usable_flags,
)
from megatron_packed.config.parser.did_you_mean import did_you_mean, nearest
from megatron_packed.config.run import SECTIONS, every_field
from megatron_packed.config.value_checks import WrongValueError, from_text, from_yaml, placeholder

if TYPE_CHECKING:
    from megatron_packed.config.megatron.flags import AcceptedFlag

# A higher level overrides a lower one. Within a level the last occurrence counts.
FILE, ARGS_FILE, FLAG, KEYWORD = (1, 2, 3, 4)
_SHOWN_CHARACTERS = 80
ADAPTERS = "checkpoint.load_adapter"
STARTS = ("checkpoint.load", "checkpoint.pretrained_checkpoint", ADAPTERS)
"""Options that name the directory of a checkpoint."""


@dataclass
class GivenOptions:
    """Given options, before they are checked together.

    Args:
        values: by key, e.g. ``model.hidden_size``.
        sources: by key, e.g. ``run.yaml:3``, ``@run.args`` or ``flag``.
        unsound: keys of options whose value could not be read.
        megatron_flags: given flags of Megatron that are no options, with their texts and meaning.
    """

    values: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    unsound: set[str] = field(default_factory=set)
    megatron_flags: dict[str, tuple[tuple[str, ...], AcceptedFlag]] = field(default_factory=dict)
    actions: set[str] = field(default_factory=set)
    problems: list[Problem] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    _levels: dict[str, tuple[int, str]] = field(default_factory=dict)

    @property
    def loads(self) -> bool:
        """Return whether the directory of a checkpoint is given."""
        return not self.values.keys().isdisjoint(STARTS)

    @property
    def uses_checkpoint(self) -> bool:
        """Return whether ``--use-checkpoint-args`` is given with the directory of a checkpoint."""
        return self.loads and bool(self.values.get("checkpoint.use_checkpoint_args"))

    def refuse(self, option: str, value: str, rule: str, cure: str) -> None:
        """Add a problem; see `Problem`."""
        self.problems.append(Problem(option, value, rule, cure))

    def expect(self, keys: Iterable[str]) -> None:
        """Mark options that a misspelt name may have meant, so that they are not reported as
        missing too.
        """
        self.unsound.update(key for key in keys if key not in self.values)

    def read_config(self, occurrence: Occurrence) -> None:
        """Set the options of the file that ``--config`` names."""
        if len(occurrence.texts) != 1:
            shown = " ".join(occurrence.texts)
            self.refuse("--config", shown, "takes one file", "give --config run.yaml")
            return
        (path,) = occurrence.texts
        from megatron_packed.config.parser.config_file import read_config_file

        for entry in read_config_file(path, self.problems):
            where = f"{path}:{entry.line}"
            name = f"{entry.section}.{entry.name}" if entry.section else entry.name
            self._set_named(entry.section, entry.name, entry.value, f"{where} {name}", where, FILE)

    def set_flag(self, occurrence: Occurrence, level: int) -> None:
        """Set the option of a flag, or answer another flag."""
        flag = "--help" if occurrence.flag == "-h" else occurrence.flag
        texts, shown = occurrence.texts, " ".join(occurrence.texts)
        spelling = spellings().get(flag)
        if flag in META_FLAGS:
            self.actions.add(flag)
            if texts:
                self.refuse(flag, shown, "takes no value", f"write {flag} alone")
        elif spelling is not None:
            if spelling.deprecated:
                self.warnings.append(f"{flag} is deprecated; write {spelling.preferred}.")
            read = partial(_value_of_texts, spelling, flag, texts)
            self._set(spelling, level, flag, occurrence.source, read)
        elif not (self._set_megatron(flag, texts, level) or self._answer_trainer_flag(flag, texts)):
            names = self._suggest(flag, usable_flags())
            self.expect(spellings()[name].field.key for name in names if name in spellings())
            cure = did_you_mean(names, "correct it; --help-all lists all flags")
            self.refuse(flag, shown, "is not a flag", cure)

    def set_keyword(self, name: str, value: Any) -> None:
        """Set an option to the value of a keyword; None leaves an option as it is."""
        spelling = _named_spelling("", name)
        if spelling is not None and value is None:
            return
        if spelling is not None and isinstance(value, Mapping):
            value = _text_of_mapping(spelling.field, value)
        self._set_named("", name, _plain_value(value), f"{name}=", "keyword", KEYWORD)

    def _claim(self, key: str, level: int, shown: str) -> bool:
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
            self.refuse(shown, "", "was given twice", cure)
            return False
        if earlier[0] > level:
            return False
        self._levels[key] = (level, shown)
        return True

    def _suggest(self, name: str, names: Iterable[str]) -> list[str]:
        """Return the names that a wrong name may mean, or none if its problem would not be shown."""
        return nearest(name, names) if len(self.problems) < MOST_SHOWN else []

    def _answer_trainer_flag(self, name: str, texts: Sequence[str], shown: str = "") -> bool:
        """Refuse a flag or a key of another trainer with its cure; return False for other names."""
        from megatron_packed.config.trainer_flags import FLAG, answer

        problem = answer(name, texts, shown or name)
        if problem is None:
            return False
        self.problems.append(problem)
        flags = (flag for flag in FLAG.findall(problem.cure) if flag in spellings())
        self.expect(spellings()[flag].field.key for flag in flags)
        return True

    def _set(
        self, spelling: Spelling, level: int, shown: str, source: str, read: Callable[[], Any]
    ) -> None:
        """Set the option of a spelling to the value that ``read`` returns."""
        key = spelling.field.key
        if not self._claim(key, level, shown):
            return
        self.sources[key] = source
        self.unsound.discard(key)
        try:
            self.values[key] = read()
        except WrongValueError as error:
            option = error.problem.option if level in (ARGS_FILE, FLAG) else shown
            self.problems.append(replace(error.problem, option=option))
            self.unsound.add(key)

    def _set_named(
        self, section: str, name: str, value: Any, shown: str, source: str, level: int
    ) -> None:
        """Set the option with a name, of a configuration file or a keyword, to a value.

        Args:
            section: section that contains the name; empty without one.
            shown: name in messages.
            source: origin of the value, in `sources`.
        """
        spelling = _named_spelling(section, name)
        if spelling is not None:
            if spelling.deprecated:
                where = shown if level == KEYWORD else f"{source}: {name}"
                self.warnings.append(f"{where} is deprecated; write {spelling.field.name}.")
            read = partial(_value_of_entry, spelling, value)
            self._set(spelling, level, shown, source, read)
            return
        flag = None if section else _megatron_flag(name)
        if flag is not None:
            if value not in (False, None):
                self._set_megatron(flag, _entry_texts(value), level)
        elif not self._answer_trainer_flag(name, _entry_texts(value), shown):
            self._refuse_name(section, name, shown, level)

    def _refuse_name(self, section: str, name: str, shown: str, level: int) -> None:
        """Refuse a name that no option has."""
        cure = "remove it; --print-config shows all keys"
        if level == KEYWORD:
            names = _keywords()
            cure = "remove it; each flag of --help-all is a keyword, with underscores"
        elif section:
            names = [each.name for each in every_field() if each.section == section]
        else:
            names = _names()
        suggestions = self._suggest(name, names)
        self.expect(each.key for each in every_field() if each.name in suggestions)
        place = f"is not an option of {section}" if section else "is not an option"
        self.refuse(shown, "", place, did_you_mean(suggestions, cure))

    def _set_megatron(self, flag: str, texts: tuple[str, ...], level: int) -> bool:
        """Accept or refuse a flag of Megatron that is no option; return False for other flags."""
        from megatron_packed.config.megatron.flags import REFUSAL_OF, TAKEN

        accepted, refusal = TAKEN.get(flag), REFUSAL_OF.get(flag)
        values = None if accepted is None else accepted.values
        shown = " ".join(texts)
        if accepted is not None and values is None and texts:
            self.refuse(flag, shown, "takes no value", f"write {flag} alone")
        elif values == () and not texts:
            self.refuse(flag, "", "needs a value", f"write {flag} VALUE")
        elif accepted is not None and (
            not values or any(_same_text(texts, value) for value in values)
        ):
            if self._claim(flag, level, flag):
                self.megatron_flags[flag] = (texts, accepted)
        elif refusal is not None:
            fitting = f" (accepted: {', '.join(values)})" if values else ""
            self.refuse(flag, shown, refusal.reason + fitting, refusal.nearest)
        elif accepted is not None and values:
            choices = " or ".join(values)
            cure = f"give {choices}, or leave it out"
            self.refuse(flag, shown, f"must be {choices}: {accepted.reason}", cure)
        return accepted is not None or refusal is not None


def gather(argv: Sequence[str], keywords: Mapping[str, Any] | None = None) -> GivenOptions:
    """Read the command line, the files that it names, and keywords of a call from Python. Problems
    are collected; no exception is raised.

    Args:
        argv: words of the command line.
        keywords: options by the names that a configuration file has at its top level.
    """
    options = GivenOptions()
    occurrences = read_command_line(argv, options.problems)
    levels = {each: FLAG if each.source == COMMAND_LINE else ARGS_FILE for each in occurrences}
    configs = [each for each in occurrences if each.flag == "--config"]
    configs.sort(key=levels.__getitem__)
    for occurrence in _last_of_each(configs, options.warnings):
        options.read_config(occurrence)
    flags = [each for each in occurrences if each.flag != "--config"]
    for level in (ARGS_FILE, FLAG):
        of_level = (each for each in flags if levels[each] == level)
        for occurrence in _last_of_each(of_level, options.warnings):
            options.set_flag(occurrence, level)
    for name, value in (keywords or {}).items():
        options.set_keyword(name, value)
    if any(problem.option.startswith(("@", "--config")) for problem in options.problems):
        # The unreadable file may set any option, so no option is reported as missing.
        options.expect(each.key for each in every_field())
    return options


def _last_of_each(occurrences: Iterable[Occurrence], warnings: list[str]) -> list[Occurrence]:
    """Return the last occurrence of each option or flag, which decides its value, as in argparse.

    A warning lists the other occurrences. Scripts of Megatron often repeat a flag of the model
    among the flags of a run.
    """
    groups: dict[str, list[Occurrence]] = {}
    for occurrence in occurrences:
        spelling = spellings().get(occurrence.flag)
        key = occurrence.flag if spelling is None else spelling.field.key
        groups.setdefault(key, []).append(occurrence)
    for several in groups.values():
        if len(several) > 1:
            shown = [
                _cut(" ".join((each.flag, *each.texts)))
                for each in (*several[:2], *several[2:][-2:])
            ]
            shown[2:2] = ["..."] if len(several) > len(shown) else []
            times = f"{several[-1].flag} was given {len(several)} times"
            warnings.append(f"{times}: {', '.join(shown)}. The last one counts.")
    return [several[-1] for several in groups.values()]


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."


def _value_of_texts(spelling: Spelling, flag: str, texts: tuple[str, ...]) -> Any:
    """Return the value that the texts after a flag give."""
    option, shown = spelling.field.option, " ".join(texts)
    if spelling.sets is not None:
        if texts:
            cure = f"write {flag} alone"
            if spelling.field.kind.base is bool:
                cure += f"; {spelling.field.flag_for(not spelling.sets)} is its opposite"
            raise WrongValueError(flag, shown, "takes no value", cure)
        return spelling.sets
    example = f"{flag} {placeholder(spelling.field)}"
    if not texts and option.bare is not None:
        return option.bare
    if not texts:
        raise WrongValueError(flag, "", "needs a value", f"write {example}")
    if spelling.field.kind.many:
        word = option.empty_word
        if shown == word:
            return ()
        if word and word in texts:
            cure = f"give {word} alone, or leave {word} out"
            raise WrongValueError(flag, shown, f"combines {word} with other values", cure)
        return tuple(from_text(spelling.field, text) for text in texts)
    if len(texts) > 1:
        cure = f"write {example}, with quotes around a value that contains spaces"
        raise WrongValueError(flag, shown, "takes one value", cure)
    return from_text(spelling.field, texts[0])


def _same_text(texts: tuple[str, ...], value: str) -> bool:
    if texts == (value,):
        return True
    try:
        return len(texts) == 1 and float(texts[0]) == float(value)
    except ValueError:
        return False


def _text_of_mapping(field: Field, value: Mapping[Any, Any]) -> Any:
    """Return a mapping as the texts of its option: pairs such as ``prompt=question``, or JSON."""
    if field.kind.many:
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


def _value_of_entry(spelling: Spelling, value: Any) -> Any:
    """Return the value that a key of the configuration file or a keyword gives."""
    field, sets = spelling.field, spelling.sets
    if sets is None:
        return from_yaml(field, value)
    if not isinstance(value, bool):
        raise WrongValueError(
            field.flag, repr(value), "must be true or false", "write true or false"
        )
    if field.kind.base is bool:
        return value is sets
    return sets if value else field.default


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
    from megatron_packed.config.megatron.flags import REFUSAL_OF, TAKEN

    plain = name.replace("_", "-")
    flags = (flag for flag in (*TAKEN, *REFUSAL_OF) if flag[2:].replace("_", "-") == plain)
    return next(flags, None)


def _entry_texts(value: Any) -> tuple[str, ...]:
    """Return the value of a key as it would follow a flag; ``true`` is a flag without a value."""
    if value is True or value is None:
        return ()
    return tuple(map(str, value)) if isinstance(value, list) else (str(value),)


def _names() -> list[str]:
    return [
        *SECTIONS,
        *(each.name for each in every_field()),
        *(flag[2:] for flag in usable_flags()),
    ]


def _keywords() -> list[str]:
    """Return the names of all options as keywords: fields, and flags with underscores."""
    from megatron_packed.config.megatron.flags import TAKEN

    flags = (flag[2:].replace("-", "_") for flag in (*spellings(), *TAKEN))
    return list(dict.fromkeys([*(each.name for each in every_field()), *flags]))
