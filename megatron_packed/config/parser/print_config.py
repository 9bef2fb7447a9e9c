"""Output of ``--print-config``: the resolved configuration as YAML for ``--config``, with the
origin of each value.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from megatron_packed.config.errors import printable
from megatron_packed.config.options import Field
from megatron_packed.config.run import SECTIONS, RunConfig
from megatron_packed.config.section import section_fields

if TYPE_CHECKING:
    from megatron_packed.config.parser.parse import Parsed

_COLUMN = 56


def config_yaml(parsed: Parsed) -> str:
    """Return one line per option, ``field: value # origin``, and lists of the given flags whose
    effect is always on, and of those that change nothing.
    """
    lines = [
        *_lines(parsed.config, parsed.sources, parsed.idle),
        *_flag_lines("whose effect is always on", parsed.always),
        *_flag_lines("without effect", parsed.accepted),
    ]
    return "\n".join(lines) + "\n"


def _lines(config: RunConfig, sources: Mapping[str, str], idle: Mapping[str, str]) -> Iterator[str]:
    for name, section in SECTIONS.items():
        yield f"{name}:"
        for field in section_fields(section):
            value = config.value_of(field)
            origin = _origin(field, sources)
            if value == () and field.option.empty_word:
                origin += f" ({field.option.empty_word})"
            if field.key in idle:
                origin += f", no effect: {idle[field.key]}"
            yield f"  {field.name}: {_scalar(value)}".ljust(_COLUMN) + f"  # {origin}"


def _origin(field: Field, sources: Mapping[str, str]) -> str:
    source = sources.get(field.key, "default")
    return f"flag {field.flag}" if source == "flag" else source


def _flag_lines(which: str, flags: Mapping[str, str]) -> Iterator[str]:
    if flags:
        yield f"# Given flags {which}:"
    for flag, reason in flags.items():
        yield f"#   {printable(flag)}: {reason}"


def _scalar(value: Any) -> str:
    import yaml  # imported here because only --print-config needs it

    plain = list(value) if isinstance(value, tuple) else value
    text: str = yaml.safe_dump(
        plain, default_flow_style=True, width=float("inf"), allow_unicode=True
    )
    return text.removesuffix("\n").removesuffix("\n...")
