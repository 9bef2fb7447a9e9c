"""Reader of ``--config run.yaml``: options by section and field, or by flag."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from megatron_packed.config.errors import Fault, Problem
from megatron_packed.config.parser.text_file import read_text_file
from megatron_packed.config.run import SECTIONS
from megatron_packed.config.trainer_flags import answer

MOST_YAML_VALUES = 10_000
"""Maximum number of keys and values of a configuration file, some 50 times the number of options.
"""
MOST_DIGITS = 300
"""Maximum number of digits of a whole number. YAML forms such as 0xfff... and 1:1:1... can give
numbers that fit no float and cannot be printed.
"""


@dataclass(frozen=True)
class ConfigFileEntry:
    """Key of a configuration file with its value.

    Args:
        section: the section that contains the key; empty at the top level.
        name: the key as written.
        line: counted from 1.
    """

    section: str
    name: str
    value: Any
    line: int


def read_config_file(path: str, problems: list[Problem]) -> list[ConfigFileEntry]:
    """Return the keys of a YAML file in order, and append problems to ``problems``.

    Only plain data is read; tags are not. A key that occurs twice is a problem.
    """
    import yaml  # imported here because only runs with --config need it

    try:
        text = read_text_file(path)
    except ValueError as error:
        problems.append(Problem("--config", path, str(error), "give the path of a YAML file"))
        return []
    try:
        loader = plain_loader()(text)
        root = loader.get_single_node()
        return list(_entries(loader, root, path, problems)) if root is not None else []
    # ValueError: an impossible date, or a number with too many digits
    except (RecursionError, yaml.YAMLError, ValueError) as error:
        problems.append(Problem("--config", path, *yaml_fault(error)))
    return []


def yaml_fault(error: Exception) -> Fault:
    """Return what is wrong with the text that the loader refused, and the cure."""
    import yaml

    if isinstance(error, RecursionError):
        return "is nested too deeply", "write sections with plain values"
    if not isinstance(error, yaml.MarkedYAMLError):
        return f"is not valid YAML: {error}", "correct it"
    where = f" at line {error.problem_mark.line + 1}" if error.problem_mark is not None else ""
    return (
        f"is not valid YAML{where}: {error.problem}",
        "correct it; text with *, :, # or a leading - needs quotes",
    )


@cache
def plain_loader() -> Any:
    """Return a variant of PyYAML's safe loader that limits the number of values.

    The loader refuses aliases, with which a few lines can expand to gigabytes.
    """
    import yaml

    class PlainLoader(yaml.SafeLoader):
        nodes = 0

        def compose_node(self, parent: Any, index: Any) -> Any:
            self.nodes += 1
            event = self.peek_event()  # type: ignore[no-untyped-call]
            if isinstance(event, yaml.AliasEvent):
                text = (
                    f"found *{event.anchor}, but aliases are not supported; write the value itself"
                )
            elif self.nodes > MOST_YAML_VALUES:
                text = f"found more than {MOST_YAML_VALUES:,} keys and values"
            else:
                return super().compose_node(parent, index)
            raise yaml.composer.ComposerError(None, None, text, event.start_mark)

        def construct_yaml_int(self, node: Any) -> int:
            value: int = super().construct_yaml_int(node)
            if abs(value) < 10**MOST_DIGITS:
                return value
            text = f"found a whole number of more than {MOST_DIGITS} digits"
            raise yaml.constructor.ConstructorError(None, None, text, node.start_mark)

    PlainLoader.add_constructor("tag:yaml.org,2002:int", PlainLoader.construct_yaml_int)
    return PlainLoader


def _entries(
    loader: Any, root: Any, path: str, problems: list[Problem]
) -> Iterator[ConfigFileEntry]:
    import yaml

    if not isinstance(root, yaml.MappingNode):
        problems.append(
            Problem(
                "--config",
                path,
                "must contain keys with values",
                "write sections such as 'model:' with options below them",
            )
        )
        return
    for key, node in _pairs(root, "", path, problems):
        if key.value in SECTIONS:
            if isinstance(node, yaml.MappingNode):
                for inner, leaf in _pairs(node, key.value, path, problems):
                    value = loader.construct_object(leaf, deep=True)
                    yield ConfigFileEntry(key.value, inner.value, value, inner.start_mark.line + 1)
            elif node.tag != "tag:yaml.org,2002:null":
                name = f"{path}:{key.start_mark.line + 1} {key.value}"
                cure = f"write the options of {key.value} below it, indented"
                section = Problem(name, "", "must contain keys with values", cure)
                # `packing: true` and `model: NAME` are lines of other trainers; a number is not.
                of_trainer = None if node.tag.endswith(":int") else answer(key.value, [], name)
                problems.append(of_trainer or section)
            continue
        yield ConfigFileEntry(
            "", key.value, loader.construct_object(node, deep=True), key.start_mark.line + 1
        )


def _pairs(
    mapping: Any, section: str, path: str, problems: list[Problem]
) -> Iterator[tuple[Any, Any]]:
    import yaml

    seen: dict[str, int] = {}
    for key, node in mapping.value:
        line = key.start_mark.line + 1
        if not isinstance(key, yaml.ScalarNode):
            problems.append(
                Problem(
                    f"{path}:{line}", "", "a key must be plain text", "write the name of an option"
                )
            )
        elif key.value in seen:
            name = f"{section}.{key.value}" if section else key.value
            problems.append(
                Problem(
                    f"{path}:{line} {name}",
                    "",
                    f"was already given in line {seen[key.value]}",
                    "remove one of the two lines",
                )
            )
        else:
            seen[key.value] = line
            yield key, node
