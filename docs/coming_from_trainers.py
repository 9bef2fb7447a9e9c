"""Generator of the table in docs/coming_from_trainers.md, from the answers of the parser.

    python docs/coming_from_trainers.py [--check]

``--check`` writes nothing and fails if the page differs from the generated page.
"""

from __future__ import annotations

import sys
from pathlib import Path

from megatron_packed.config.trainer_flags import ANOTHER, FLAG, TRAINER_FLAGS, trainer_cure

PAGE = Path(__file__).parent / "coming_from_trainers.md"
BEGIN, END = "<!-- begin: flags -->", "<!-- end -->"


def table() -> str:
    """Return the table of flags: their names, what to give, and the reason."""
    lines = ["| flags of other trainers | in this project | reason |", "|---|---|---|"]
    for group in TRAINER_FLAGS:
        names = ", ".join(f"`{name}`" for name in group.names)
        rule = "" if group.rule == ANOTHER else group.rule
        cells = (names, _with_code(trainer_cure(group, "")), _with_code(rule))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _with_code(text: str) -> str:
    """Put flags into backticks, except in a command that has backticks already."""
    parts = text.split("`")
    parts[::2] = [FLAG.sub(lambda found: f"`{found[0]}`", part) for part in parts[::2]]
    parts[1::2] = [f"`{part}`" for part in parts[1::2]]
    return "".join(parts)


def filled(text: str) -> str:
    """Return the text of the page with a new table."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}"


def main() -> None:
    text = PAGE.read_text()
    if filled(text) != text and "--check" in sys.argv:
        raise SystemExit(f"{PAGE.name} is not up to date; run python docs/{Path(__file__).name}.")
    PAGE.write_text(filled(text))


if __name__ == "__main__":
    main()
