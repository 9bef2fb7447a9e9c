"""``--help``: every flag in groups, with default and unit, as wide as the terminal."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterator

from megatron_packed.config.options import Field, placeholder, section_fields
from megatron_packed.config.registry import META_FLAGS
from megatron_packed.config.run import SECTIONS

_TITLES = {
    "model": "Model",
    "parallel": "Parallelism",
    "packing": "Batches and packing",
    "data": "Data",
    "optim": "Optimizer and learning rate",
    "training": "Training",
    "cuda_graph": "CUDA graphs",
    "memory": "Memory",
    "checkpoint": "Checkpoints",
    "logging": "Logging",
}
_USAGE = """\
Train a hybrid Mamba-Transformer-MoE model on packed sequences.

  torchrun --nproc_per_node N pretrain_hybrid.py [@ARGS-FILE] [--config run.yaml] [--flag value ...]

Flags have Megatron-LM's names. The command line overrides an @file of flags, that overrides --config, and that
overrides the default, which is in brackets. --no-x takes a switch --x back. Megatron's flags that are true anyway are
accepted; those that are not built are refused, each by name."""
_FLAG_COLUMN = 30


def help_text(width: int | None = None) -> str:
    """The whole help.

    Args:
        width: in characters; by default the terminal's (COLUMNS), at least 60 and at most 120.
    """
    columns = shutil.get_terminal_size((100, 24)).columns if width is None else width
    columns = min(max(columns, 60), 120)
    blocks = ["\n\n".join(_wrapped(paragraph, columns) for paragraph in _USAGE.split("\n\n"))]
    general = [_entry(flag, text, columns) for flag, text in META_FLAGS.items()]
    general[0] = _entry("--config PATH", META_FLAGS["--config"], columns)
    blocks.append("\n".join(["General", *general]))
    for name, section in SECTIONS.items():
        blocks.append("\n".join(_section(_TITLES[name], section_fields(section), columns)))
    return "\n\n".join(blocks) + "\n"


def _section(title: str, fields: tuple[Field, ...], columns: int) -> Iterator[str]:
    group = ""
    if not fields[0].option.group:
        yield title
    for described in fields:
        if described.option.group != group:
            group = described.option.group
            yield f"{title}: {group}" if described is fields[0] else f"\n{title}: {group}"
        yield _entry(f"{described.flag} {placeholder(described)}".rstrip(), _explanation(described), columns)


def _entry(head: str, text: str, columns: int) -> str:
    indent = " " * (_FLAG_COLUMN + 2)
    body = textwrap.wrap(text, columns, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)
    if len(head) < _FLAG_COLUMN:
        return f"  {head}".ljust(len(indent)) + "\n".join(body).lstrip()
    return "\n".join([f"  {head}", *body])


def _explanation(described: Field) -> str:
    option = described.option
    known = [default_text(described)]
    if option.unit and not described.required and not option.derived and described.default not in (None, ()):
        known[0] += f" {option.unit[:-1] if described.default == 1 else option.unit}"
    elif option.unit:
        known.append(option.unit)
    if option.negated:
        known.append(f"taken back by {next(name for name, sets in described.switches.items() if sets)}")
    known += [f"also --{name}" for name in option.aliases]
    known += [f"deprecated: --{name}" for name in (*option.deprecated, *(option.shorthands or ()))]
    choices = f" One of {', '.join(option.choices)}." if placeholder(described) == "NAME" else ""
    return f"{option.help}{choices} [{'; '.join(known)}]"


def default_text(described: Field) -> str:
    """The default as a person writes it."""
    default = described.default
    if described.required:
        return "required"
    if described.option.derived:
        return described.option.derived
    if described.kind.base is bool:
        given = default is not described.option.negated  # whether the run behaves as if the flag had been given
        return "on" if given else "off"
    if default is None or default == ():
        return described.option.empty_word or "not set"
    return f"{default:g}" if isinstance(default, float) else str(default)


def _wrapped(paragraph: str, columns: int) -> str:
    """A paragraph as wide as the terminal; an indented one keeps its indentation."""
    indent = "  " if paragraph.startswith(" ") else ""
    text = " ".join(paragraph.split())
    return textwrap.fill(text, columns, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)
