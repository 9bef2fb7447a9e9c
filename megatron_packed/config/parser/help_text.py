"""Text of ``--help`` (the flags of a first run) and of ``--help-all`` (every flag in groups, with
default, unit and choices).

Both are as wide as the terminal.
"""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterator

from megatron_packed.config.options import Field
from megatron_packed.config.parser.command_line import META_FLAGS, spellings
from megatron_packed.config.run import SECTIONS
from megatron_packed.config.section import section_fields
from megatron_packed.config.table_rows import table_rows
from megatron_packed.config.value_checks import placeholder

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
    "profiling": "Profiling",
    "logging": "Logging",
}
_USAGE = """\
Train a hybrid Mamba-Transformer-MoE model on packed sequences.

  megatron-packed train [--nproc-per-node N] [@ARGS-FILE] [--config run.yaml] [--flag value ...]

Flags have Megatron-LM's names; defaults are in brackets. Flags on the command line override an @file of flags, an
@file overrides --config, and --config overrides the defaults. --no-x undoes the switch --x. Flags of Megatron whose
effect is always on are accepted. Flags of Megatron that are not supported are refused with a reason."""
_SHORT_USAGE = """\
Train a hybrid Mamba-Transformer-MoE model on packed sequences.

  megatron-packed train [--nproc-per-node N] [@ARGS-FILE] [--config run.yaml] [--flag value ...]

These are the flags of a first run, with their defaults in brackets; --help-all lists every flag. Flags have
Megatron-LM's names. The directory examples/recipes has complete command lines, checked with megatron-packed plan."""
_FIRST_RUN = table_rows("first_run_flags.json")
"""Flags of ``--help``, in the order in which a user decides about them."""
_FLAG_COLUMN = 30


def help_text(width: int | None = None, *, everything: bool = False) -> str:
    """Return the help text: the flags of a first run, or every flag.

    Args:
        width: characters per line; by default the width of the terminal (COLUMNS), at least 60 and
            at most 120.
    """
    columns = shutil.get_terminal_size((100, 24)).columns if width is None else width
    columns = min(max(columns, 60), 120)
    return "\n\n".join(_everything(columns) if everything else _first_run(columns)) + "\n"


def _first_run(columns: int) -> Iterator[str]:
    yield _usage(_SHORT_USAGE, columns)
    for title, flags in _FIRST_RUN.items():
        fields = (spellings()[flag].field for flag in flags)
        yield "\n".join([title, *(_option(field, columns, brief=True) for field in fields)])
    asking = ("--print-config", "--explain", "--help-all")
    yield "\n".join(
        ["More information", *(_entry(flag, META_FLAGS[flag], columns) for flag in asking)]
    )


def _everything(columns: int) -> Iterator[str]:
    yield _usage(_USAGE, columns)
    general = [_entry(flag, text, columns) for flag, text in META_FLAGS.items()]
    general[0] = _entry("--config PATH", META_FLAGS["--config"], columns)
    yield "\n".join(["General", *general])
    for name, section in SECTIONS.items():
        yield "\n".join(_section(_TITLES[name], section_fields(section), columns))


def _usage(text: str, columns: int) -> str:
    return "\n\n".join(_wrapped(paragraph, columns) for paragraph in text.split("\n\n"))


def _section(title: str, fields: tuple[Field, ...], columns: int) -> Iterator[str]:
    # Options without a group come first, under the title of the section alone. Parts of a section
    # that are declared elsewhere may have put options with a group before the others, so the last
    # option of a group decides its place.
    last = {field.option.group: place for place, field in enumerate(fields)} | {"": -1}
    ordered = sorted(fields, key=lambda field: last[field.option.group])
    group = None
    for field in ordered:
        if field.option.group != group:
            group = field.option.group
            heading = f"{title}: {group}" if group else title
            yield heading if field is ordered[0] else f"\n{heading}"
        yield _option(field, columns)


def _option(field: Field, columns: int, *, brief: bool = False) -> str:
    value = placeholder(field)
    if len(field.flag) + len(value) + 3 > columns and field.option.choices:
        value = "NAME [NAME ...]" if field.kind.many else "NAME"
    return _entry(f"{field.flag} {value}".rstrip(), _explanation(field, value, brief), columns)


def _entry(head: str, text: str, columns: int) -> str:
    indent = " " * (_FLAG_COLUMN + 2)
    body = textwrap.wrap(
        text, columns, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
    )
    if len(head) < _FLAG_COLUMN:
        return f"  {head}".ljust(len(indent)) + "\n".join(body).lstrip()
    return "\n".join([f"  {head}", *body])


def _explanation(field: Field, value: str, brief: bool) -> str:
    """Return the help of an option. Brackets at its end list the default, the unit and, unless
    ``brief``, other spellings.

    Args:
        value: the placeholder that is shown after the flag.
    """
    option = field.option
    notes = [default_text(field)]
    if (
        option.unit
        and not field.required
        and not option.derived
        and field.default not in (None, ())
    ):
        notes[0] += f" {option.unit[:-1] if field.default == 1 else option.unit}"
    elif option.unit:
        notes.append(option.unit)
    if option.negated:
        notes.append(f"undone by {field.flag_for(True)}")
    if not brief:
        notes += [f"also --{name}" for name in option.aliases]
        notes += [
            f"deprecated: --{name}" for name in (*option.deprecated, *(option.shorthands or ()))
        ]
    choices = f" One of {', '.join(option.choices)}." if value.startswith("NAME") else ""
    return f"{option.help}{choices} [{'; '.join(notes)}]"


def default_text(field: Field) -> str:
    default = field.default
    if field.required:
        return "required"
    if field.option.derived:
        return field.option.derived
    if field.kind.base is bool and default is not None:
        # "on" if the run behaves as if the flag had been given.
        is_set = default is not field.option.negated
        return "on" if is_set else "off"
    if default is None or default == ():
        return field.option.empty_word or "not set"
    if isinstance(default, tuple):
        return " ".join(map(str, default))
    return f"{default:g}" if isinstance(default, float) else str(default)


def _wrapped(paragraph: str, columns: int) -> str:
    """Return a paragraph wrapped to the width of the terminal; an indented paragraph stays
    indented.
    """
    indent = "  " if paragraph.startswith(" ") else ""
    text = " ".join(paragraph.split())
    return textwrap.fill(
        text, columns, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
    )
