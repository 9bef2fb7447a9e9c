"""Output of ``--print-config``: the resolved configuration as YAML for ``--config``, with the
origin of each value.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megatron_packed.config.options import Field
from megatron_packed.config.run import SECTIONS, RunConfig
from megatron_packed.config.section import section_fields

_COLUMN = 56


def config_yaml(
    config: RunConfig,
    sources: Mapping[str, str],
    always: Mapping[str, str],
    idle: Mapping[str, str],
) -> str:
    """Return one line per option, ``field: value # origin``, and a list of the given flags whose
    effect is always on.

    Args:
        sources, always, idle: as in `parse.Parsed`.
    """
    return "\n".join([*_lines(config, sources, idle), *_always_lines(always)]) + "\n"


def _lines(config: RunConfig, sources: Mapping[str, str], idle: Mapping[str, str]) -> Iterator[str]:
    for name, section in SECTIONS.items():
        yield f"{name}:"
        for described in section_fields(section):
            value = getattr(getattr(config, name), described.name)
            origin = _origin(described, sources)
            if value == () and described.option.empty_word:
                origin += f" ({described.option.empty_word})"
            if described.key in idle:
                origin += f", no effect: {idle[described.key]}"
            yield f"  {described.name}: {_scalar(value)}".ljust(_COLUMN) + f"  # {origin}"


def _origin(described: Field, sources: Mapping[str, str]) -> str:
    source = sources.get(described.key, "default")
    return f"flag {described.flag}" if source == "flag" else source


def _always_lines(always: Mapping[str, str]) -> Iterator[str]:
    if always:
        yield "# Given flags whose effect is always on:"
    for flag, reason in always.items():
        yield f"#   {flag}: {reason}"


def _scalar(value: Any) -> str:
    import yaml  # imported here because only --print-config needs it

    plain = list(value) if isinstance(value, tuple) else value
    text: str = yaml.safe_dump(
        plain, default_flow_style=True, width=float("inf"), allow_unicode=True
    )
    return text.removesuffix("\n").removesuffix("\n...")
