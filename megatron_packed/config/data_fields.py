"""Fields of a line that give the parts of a schema, as ``--data-fields`` names them.

A path with ``[*]`` makes one document for each element of a list. All paths with ``[*]`` must enter
the same list at each level, because there is no rule which elements of two lists belong together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from megatron_packed.config.errors import Fault
from megatron_packed.config.parser.did_you_mean import did_you_mean, nearest

ANSWERS = frozenset({"completion", "output", "response"})
"""Fields that hold an answer. An answer may be empty; the line is then left out and counted."""
LABEL = "label"
"""Target that is true for an accepted answer and false for a rejected one, as in KTO data."""
EACH = "[*]"
"""End of a name of a list in a path that takes each element of the list in turn."""
_GOES_WITH: dict[tuple[str, ...], tuple[str, ...]] = {
    ("messages",): ("system", "tools", LABEL),
    ("conversations",): ("system", "tools", LABEL),
    ("prompt", "completion"): (LABEL,),
    ("instruction", "output"): ("input", "system", "history", "tools", LABEL),
    ("text",): (),
}
"""Required targets of each schema, and its optional targets."""
TARGETS = tuple(
    dict.fromkeys(name for pair in _GOES_WITH.items() for part in pair for name in part)
)
"""Names that can be on the left of ``=``."""
_EXAMPLE = "give, for example, prompt=question,completion=answer"
_EXAMPLE_EACH = (
    "it after the name of a list, as in prompt=rows[*].question,completion=rows[*].answer"
)


@dataclass(frozen=True)
class DataFields:
    """Path of the field of a line that gives each target.

    Example:
        ``question`` is a field of the line, ``qa.question`` a field of the object ``qa``, and
        ``answers.0`` the first element of the list ``answers``. ``rows[*].text`` is the field
        ``text`` of each element of the list ``rows``, and each element makes a document.
    """

    paths: tuple[tuple[str, str], ...]
    """``(target, path)`` of each target, in the order of `TARGETS`."""

    @classmethod
    def from_pairs(cls, pairs: Iterable[tuple[str, str]]) -> DataFields | None:
        """Return the fields of pairs without a `pairs_fault`; None for no pair."""
        paths = dict(pairs)
        ordered = tuple((target, paths[target]) for target in TARGETS if target in paths)
        return cls(ordered) if ordered else None

    @property
    def required(self) -> tuple[str, ...]:
        """Targets without which a line has no schema."""
        targets = {target for target, _ in self.paths}
        return next(required for required in _GOES_WITH if targets >= set(required))

    @property
    def lists(self) -> tuple[str, ...]:
        """Paths of the lists whose elements make documents, from the outer list to the inner one.

        Example:
            ``questions[*].answers[*].text`` enters ``("questions", "questions[*].answers")``.
        """
        return max((lists_of(path) for _, path in self.paths), key=len)

    @property
    def trains_text(self) -> bool:
        """True if the lines are plain text, not prompts or conversations with answers."""
        return self.required == ("text",)

    def __str__(self) -> str:
        return ",".join(f"{target}={path}" for target, path in self.paths)


def lists_of(path: str) -> tuple[str, ...]:
    """Return the paths of the lists of which a path takes each element; see `DataFields.lists`."""
    parts = path.split(EACH)[:-1]
    return tuple(EACH.join(parts[: count + 1]) for count in range(len(parts)))


def without_each(path: str) -> str:
    """Return a path without ``[*]``, which gives the values of all elements together."""
    return path.replace(EACH, "")


def pairs_of(arguments: Iterable[str]) -> list[tuple[str, str]]:
    """Return the ``(target, path)`` pairs of words like ``prompt=question,completion=answer``."""
    parts = [part for word in arguments for part in word.split(",")]
    return [(target.strip(), path.strip()) for target, _, path in (p.partition("=") for p in parts)]


def fields_from(mapping: Mapping[str, str] | None) -> DataFields | None:
    """Return the fields of a mapping from target to path.

    Raises:
        ValueError: the mapping is wrong, with its value and the cure.
    """
    if mapping is None:
        return None
    if not isinstance(mapping, Mapping) or not all(
        isinstance(word, str) for pair in mapping.items() for word in pair
    ):
        raise ValueError(
            f"data_fields is {mapping!r}; give a dict of names of fields, for example "
            "{'prompt': 'question', 'completion': 'answer'}."
        )
    if fault := pairs_fault(list(mapping.items())):
        raise ValueError(f"data_fields {dict(mapping)}: {fault[0]}; {fault[1]}.")
    return DataFields.from_pairs(mapping.items())


def pairs_fault(pairs: list[tuple[str, str]]) -> Fault | None:
    """Return the first problem of pairs of targets and paths; None if they are right."""
    targets = [target for target, _ in pairs]
    for target, path in pairs:
        if not target or not path:
            return ("every part must be TARGET=FIELD", _EXAMPLE)
        if target not in TARGETS:
            suggestions = nearest(target, TARGETS)
            cure = f"use one of {', '.join(TARGETS)}"
            return (f"{target} is no target", did_you_mean(suggestions, cure))
        if targets.count(target) > 1:
            return (f"{target} is given twice", "give every target once")
        if "" in path.split("."):
            return (f"{path} has an empty name beside a dot", _EXAMPLE)
    return _schema_fault(targets) or _elements_fault(pairs)


def _elements_fault(pairs: list[tuple[str, str]]) -> Fault | None:
    """Return the first problem of paths with ``[*]``; None if they are right."""
    deepest, most = "", lists_of("")
    for target, path in pairs:
        for name in path.split("."):
            if EACH in name and (name == EACH or EACH in name.removesuffix(EACH)):
                return (f"{path} has {EACH} in a wrong place", f"write {_EXAMPLE_EACH}")
        if target == LABEL and EACH in path:
            return (
                f"{target} chooses lines, but {path} is of elements",
                f"leave {EACH} out of {path}",
            )
        lists = lists_of(path)
        if lists != most[: len(lists)] and most != lists[: len(most)]:
            return (
                f"{deepest} and {path} take the elements of different lists",
                f"use {EACH} after the same list in both, or a number in place of {EACH}",
            )
        if len(lists) > len(most):
            deepest, most = path, lists
    return None


def _schema_fault(targets: list[str]) -> Fault | None:
    """Return the problem of targets that belong to no schema or to several schemas."""
    begun = [required for required in _GOES_WITH if set(required) & set(targets)]
    if len(begun) > 1:
        names = " and ".join(next(name for name in targets if name in part) for part in begun[:2])
        return (f"{names} belong to different schemas", "name the fields of one schema")
    if not begun:
        allowed = [
            " and ".join(required)
            for required, others in _GOES_WITH.items()
            if set(targets) <= set(others)
        ]
        return (f"{', '.join(targets)} needs a schema", f"add {' or '.join(allowed) or 'messages'}")
    [required] = begun
    if missing := [name for name in required if name not in targets]:
        return (
            f"{required[0] if missing[0] != required[0] else required[1]} needs {missing[0]}",
            f"add {missing[0]}=FIELD",
        )
    for name in targets:
        if name not in required and name not in _GOES_WITH[required]:
            optional_targets = ", ".join(_GOES_WITH[required]) or "no other target"
            return (
                f"{name} does not go with {' and '.join(required)}",
                f"leave it out ({' and '.join(required)} can have {optional_targets})",
            )
    return None
