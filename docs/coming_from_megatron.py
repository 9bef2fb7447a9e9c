"""Generator of the tables in docs/coming_from_megatron.md, from the parser's flags.

    python docs/coming_from_megatron.py [--check]

Every flag in ``tests/unit/config/megatron_flag_names.txt`` is in one of four tables. ``--check``
writes nothing and fails if the page differs from the generated page.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from megatron_packed.config.megatron.differences import differences
from megatron_packed.config.megatron.flags import ACCEPTED, REFUSAL_OF, REFUSED, TAKEN
from megatron_packed.config.options import Field
from megatron_packed.config.parser.command_line import Spelling, spellings
from megatron_packed.config.parser.help_text import default_text

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "coming_from_megatron.md"
NAMES = (ROOT / "tests" / "unit" / "config" / "megatron_flag_names.txt").read_text().split()
BEGIN, END = "<!-- begin: flags -->", "<!-- end -->"


def tables() -> str:
    """Return the four tables; each flag of Megatron-LM is in one of them."""
    different = {flag: row for flag, *row in differences()}
    same: list[tuple[str, str]] = []
    other: list[tuple[str, str, str, str]] = []
    for flag in NAMES:
        always, spelling = TAKEN.get(flag), spellings().get(flag)
        if flag in different:
            theirs, ours, why = different[flag]
            if spelling is not None and spelling.field.option.not_built:
                accepted, refused_values = _values(spelling.field)
                ours += f". Accepted: {accepted}" if accepted else ""
                why = f"{_sentence(why)} {refused_values}"
            other.append((flag, theirs, ours, _sentence(why)))
        elif always is not None and flag in REFUSAL_OF and always.values:
            refused = REFUSAL_OF[flag]
            accepted = " or ".join(f"`{value}`" for value in always.values)
            why = _sentence(always.reason)
            if refused.reason != always.reason:
                why += f" Other values are refused: {refused.reason}."
            why += f" Alternative: {refused.nearest}."
            other.append((flag, "more values", f"only {accepted}", why))
        elif flag in ACCEPTED:
            continue
        elif always is not None:
            same.append((flag, f"Always so: {always.reason}."))
        elif spelling is not None and spelling.field.option.not_built and spelling.sets is None:
            other.append((flag, "more values", *_values(spelling.field)))
        elif spelling is not None:
            same.append((flag, _meaning(flag, spelling)))
    refused = [flag for group in REFUSED for flag in group.flags if flag not in TAKEN]
    accepted = [flag for flag in ACCEPTED if flag not in REFUSAL_OF]
    listed = [*(flag for flag, _ in same), *(flag for flag, *_ in other), *accepted, *refused]
    assert sorted(listed) == sorted(NAMES), sorted({*listed} ^ {*NAMES})
    return "\n\n".join(
        [
            f"Megatron-LM has {len(NAMES)} flags: {len(same)} mean the same in this project, {len(other)} differ, "
            f"{len(accepted)} are accepted without effect, and {len(refused)} are refused.",
            "## Same",
            "The default of this project is in brackets.",
            markdown(("flag", "meaning"), ((_code(flag), text) for flag, text in same)),
            "## Different",
            markdown(
                (
                    "flag",
                    "Megatron-LM",
                    "this project",
                    "reason, and alternative to refused values",
                ),
                ((_code(flag), *texts) for flag, *texts in other),
            ),
            "## Accepted without effect",
            "The trained model is the same with and without these flags. A run prints a line for each.",
            markdown(
                ("flags", "in this project"),
                (
                    (", ".join(map(_code, flags)), _sentence(instead))
                    for instead, flags in _by_line(accepted).items()
                ),
            ),
            "## Refused",
            markdown(
                ("flags", "reason", "alternative"),
                (
                    (
                        ", ".join(_code(flag) for flag in group.flags if flag not in TAKEN),
                        group.reason,
                        group.nearest,
                    )
                    for group in sorted(REFUSED, key=lambda group: -len(group.flags))
                    if not set(group.flags) <= TAKEN.keys()
                ),
            ),
        ]
    )


def _meaning(flag: str, spelling: Spelling) -> str:
    """Return the help text and the default of a flag, or the preferred name."""
    described = spelling.field
    if spelling.deprecated:
        return f"Deprecated name of `{spelling.preferred}`."
    if flag != described.flag:
        return f"Other name of `{described.flag}`."
    # Markdown would take an unescaped < for HTML.
    return f"{described.option.help} [{default_text(described)}]".replace("<", "&lt;")


def _values(described: Field) -> tuple[str, str]:
    """Return the accepted values of an option, and the refused values with their alternatives."""
    option = described.option
    assert option.not_built is not None
    cures: dict[str, list[str]] = {}
    for value, cure in option.not_built.items():
        cures.setdefault(cure, []).append(f"`{value}`")
    words = [*option.choices, *(option.value_aliases or ())]
    known = ", ".join(f"`{word}`" for word in words)
    return known, " ".join(
        f"Refused: {', '.join(values)}; {cure}." for cure, values in cures.items()
    )


def _by_line(accepted: Iterable[str]) -> dict[str, list[str]]:
    """Return the flags of each line that a run prints for them."""
    lines: dict[str, list[str]] = {}
    for flag in accepted:
        lines.setdefault(ACCEPTED[flag].reason, []).append(flag)
    return lines


def _sentence(text: str) -> str:
    """Return ``text`` with a capital letter and a full stop."""
    return text[:1].upper() + text[1:].rstrip(".") + "."


def _code(flag: str) -> str:
    return f"`{flag}`"


def markdown(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a Markdown table."""
    lines = [list(head), *(list(row) for row in rows)]
    texts = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in lines]
    return "\n".join([texts[0], "|" + "---|" * len(lines[0]), *texts[1:]])


def filled(text: str) -> str:
    """Return the page ``text`` with new tables."""
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
