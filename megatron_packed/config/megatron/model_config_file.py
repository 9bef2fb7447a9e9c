"""Reader of ``model_config.yaml``, the command line of a functional test of Megatron-LM."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_packed.config.errors import printable
from megatron_packed.config.parser.config_file import plain_loader, yaml_fault
from megatron_packed.config.parser.text_file import read_text_file

VARIABLE = re.compile(r"\$(?:\{([A-Za-z_]\w*)\}|([A-Za-z_]\w*))")
"""Variable in a value, ``${NAME}`` or ``$NAME``."""
_FLAG = re.compile(r"--[A-Za-z][\w.-]*")
_NAME = re.compile(r"[A-Za-z_]\w*")
_ARGUMENTS, _ENVIRONMENT = "MODEL_ARGS", "ENV_VARS"
_OF_THE_TEST = {"TEST_TYPE", "LAUNCHER", "METRICS", "MODE", "TEST_EVALUATION"}
_OTHER_PROGRAMS = {"inference": "generates text", "rl": "is reinforcement learning"}


@dataclass(frozen=True)
class MegatronLine:
    """Command line of Megatron-LM.

    Args:
        arguments: flags and values as separate words. A variable without a value stays as ``${NAME}``.
        environment: environment variables that the file sets.
        left_out: keys of the file that are not part of the command line.
        launcher: numbers of processes and machines, as flags of the launcher.
    """

    arguments: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    launcher: tuple[str, ...] = ()

    @property
    def unset(self) -> tuple[str, ...]:
        """Variables without a value, in order."""
        names = [
            match[1] or match[2] for word in self.arguments for match in VARIABLE.finditer(word)
        ]
        return tuple(dict.fromkeys(names))


def read_model_config(path: str, environ: Mapping[str, str]) -> MegatronLine:
    """Return the command line of a ``model_config.yaml``.

    Args:
        environ: values for variables that the file uses and does not set.
    Raises:
        ValueError: a clause with the reason why the file cannot be used.
    """
    import yaml

    text = read_text_file(path)
    try:
        root = plain_loader()(text).get_single_node()
    except (RecursionError, yaml.YAMLError) as error:
        raise ValueError(yaml_fault(error)[0]) from None
    sections = dict(_pairs(root, "the file"))
    if _ARGUMENTS not in sections:
        raise ValueError(f"has no key {_ARGUMENTS}")
    other = _OTHER_PROGRAMS.get(_scalar(sections["MODE"], "MODE") if "MODE" in sections else "")
    if other:
        raise ValueError(f"{other}, and only training is supported")
    variables = _pairs(sections.get(_ENVIRONMENT), _ENVIRONMENT)
    environment = {name: _scalar(node, name) for name, node in variables}
    strange = [name for name in environment if not _NAME.fullmatch(name)]
    if strange:
        raise ValueError(f"sets {_shown(strange[0])}, which is not a name of a variable")
    arguments = []
    for flag, node in _pairs(sections[_ARGUMENTS], _ARGUMENTS):
        if not _FLAG.fullmatch(flag):
            raise ValueError(f"has the key {_shown(flag)} in {_ARGUMENTS}, which is not a flag")
        arguments += _flag_words(flag, node, {**environ, **environment})
    left_out = [key for key in sections if key not in {_ARGUMENTS, _ENVIRONMENT, *_OF_THE_TEST}]
    return MegatronLine(tuple(arguments), environment, tuple(left_out))


def _pairs(node: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield keys with values; of a repeated key the last value counts, as on a command line."""
    import yaml

    if node is None or (isinstance(node, yaml.ScalarNode) and node.value in ("", "null", "~")):
        return
    if not isinstance(node, yaml.MappingNode):
        raise ValueError(f"must contain keys with values in {name}")
    for key, value in node.value:
        yield _scalar(key, name), value


def _scalar(node: Any, name: str) -> str:
    """Return a value as it is written, because ``.01`` and ``1e-2`` are passed on as text."""
    import yaml

    if not isinstance(node, yaml.ScalarNode):
        raise ValueError(f"must contain plain values in {_shown(name)}")
    if "\0" in node.value:
        raise ValueError(f"contains a zero character in {_shown(name)}")
    return str(node.value).strip()


def _flag_words(flag: str, node: Any, variables: Mapping[str, str]) -> list[str]:
    """Return a flag and its values as the script of the tests passes them to Megatron-LM.

    ``true`` is a flag without a value, an empty value leaves the flag out, brackets contain several
    values, and a value with a space is one word.
    """
    import yaml

    parts = node.value if isinstance(node, yaml.SequenceNode) else [node]
    texts = [_with_values(_scalar(part, flag), variables) for part in parts]
    text = texts[0] if len(texts) == 1 else ""
    if texts == [""]:
        return []
    if text.lower() == "true":
        return [flag]
    if text.startswith("[") and text.endswith("]"):
        values = text[1:-1].split()
    elif len(texts) > 1 or isinstance(node, yaml.SequenceNode):
        values = [word for each in texts for word in each.split()]
    elif re.search(r"[\s|()]", text):
        values = [text]
    else:
        try:
            values = shlex.split(text)
        except ValueError:
            raise ValueError(f"has an open quotation mark in {_shown(flag)}") from None
    files = [word for word in values if word.startswith("@")]
    if files:
        raise ValueError(f"gives {flag} the value {_shown(files[0])}; write a path as ./@NAME")
    return [flag, *values]


def _with_values(text: str, variables: Mapping[str, str]) -> str:
    """Return a text with the values of its variables; a variable without one becomes ``${NAME}``."""

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        return variables.get(name) or f"${{{name}}}"

    return VARIABLE.sub(value, text)


def _shown(text: str) -> str:
    return printable(text, 60)
