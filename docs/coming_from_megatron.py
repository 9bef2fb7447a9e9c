"""Fills the tables of docs/coming_from_megatron.md from what the parser knows of each of
Megatron-LM's flags.

    python docs/coming_from_megatron.py [--check]

Every flag of ``tests/unit/config/megatron_flag_names.txt`` is in one of three tables. ``--check``
writes nothing and fails if the page is not what the parser gives.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from megatron_packed.config.megatron.differences import differences
from megatron_packed.config.megatron.flags import ALWAYS, REFUSAL_OF, REFUSED
from megatron_packed.config.options import Field
from megatron_packed.config.parser.flag_registry import Spelling, spellings
from megatron_packed.config.parser.help_text import default_text

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "coming_from_megatron.md"
NAMES = (ROOT / "tests" / "unit" / "config" / "megatron_flag_names.txt").read_text().split()
BEGIN, END = "<!-- begin: flags -->", "<!-- end -->"


def tables() -> str:
    """The three groups, each flag of Megatron in one of them."""
    different = {flag: (theirs, f"{ours}: {why}") for flag, theirs, ours, why in differences()}
    same: list[tuple[str, str]] = []
    other: list[tuple[str, str, str]] = []
    for flag in NAMES:
        always, spelling = ALWAYS.get(flag), spellings().get(flag)
        if flag in different:
            theirs, ours = different[flag]
            if spelling is not None and spelling.field.option.not_built:
                ours += f"; {_values(spelling.field)}"
            other.append((flag, theirs, ours))
        elif always is not None and flag in REFUSAL_OF and always.values:
            refused = REFUSAL_OF[flag]
            accepted = " or ".join(f"`{value}`" for value in always.values)
            text = f"{accepted}, as {always.reason}; else {refused.reason}: {refused.nearest}"
            other.append((flag, "other values", text))
        elif always is not None:
            same.append((flag, f"always: {always.reason}"))
        elif spelling is not None and spelling.field.option.not_built and spelling.sets is None:
            other.append((flag, "other values", _values(spelling.field)))
        elif spelling is not None:
            same.append((flag, _meaning(flag, spelling)))
    refused = [flag for group in REFUSED for flag in group.flags if flag not in ALWAYS]
    listed = [*(flag for flag, _ in same), *(flag for flag, *_ in other), *refused]
    assert sorted(listed) == sorted(NAMES), sorted({*listed} ^ {*NAMES})
    return "\n\n".join(
        [
            f"Of {len(NAMES)} flags {len(same)} mean the same here, {len(other)} differ as said, and "
            f"{len(refused)} are refused, each with the sentence below.",
            "## Same",
            markdown(("flag", "here"), ((_code(flag), text) for flag, text in same)),
            "## Different",
            markdown(
                ("flag", "Megatron-LM", "here"), ((_code(flag), *texts) for flag, *texts in other)
            ),
            "## Refused",
            markdown(
                ("flags", "because", "instead"),
                (
                    (
                        ", ".join(_code(flag) for flag in group.flags if flag not in ALWAYS),
                        group.reason,
                        group.nearest,
                    )
                    for group in sorted(REFUSED, key=lambda group: -len(group.flags))
                    if not set(group.flags) <= ALWAYS.keys()
                ),
            ),
        ]
    )


def _meaning(flag: str, spelling: Spelling) -> str:
    described = spelling.field
    if spelling.deprecated:
        return f"deprecated: write `{spelling.preferred}`"
    if flag != described.flag:
        return f"the same as `{described.flag}`"
    return f"{described.option.help} [{default_text(described)}]".replace(
        "<", "&lt;"
    )  # else it is taken for HTML


def _values(described: Field) -> str:
    option = described.option
    assert option.not_built is not None
    cures: dict[str, list[str]] = {}
    for value, cure in option.not_built.items():
        cures.setdefault(cure, []).append(f"`{value}`")
    words = [*option.choices, *(option.value_aliases or ())]
    known = f"{', '.join(f'`{word}`' for word in words)}; " if words else ""
    return known + "; ".join(f"not {', '.join(values)}: {cure}" for cure, values in cures.items())


def _code(flag: str) -> str:
    return f"`{flag}`"


def markdown(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [list(head), *(list(row) for row in rows)]
    texts = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in lines]
    return "\n".join([texts[0], "|" + "---|" * len(lines[0]), *texts[1:]])


def filled(text: str) -> str:
    """The page with its tables."""
    before, marker, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    assert marker and end, f"{PAGE.name} needs a line {BEGIN} and a line {END}"
    return f"{before}{BEGIN}\n\n{tables()}\n\n{END}{after}"


if __name__ == "__main__":
    text = PAGE.read_text()
    new = filled(text)
    if "--check" in sys.argv:
        sys.exit(new != text)
    PAGE.write_text(new)
