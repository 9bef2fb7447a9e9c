"""Tests that the pages 'Coming from ...' agree with the parser."""

import re
import runpy
from pathlib import Path

import pytest

from megatron_packed.config.parser.precedence import gather

DOCS = Path(__file__).parents[3] / "docs"
NAMES = (Path(__file__).parent / "megatron_flag_names.txt").read_text().split()


@pytest.mark.parametrize("name", ["coming_from_megatron", "coming_from_trainers"])
def test_the_page_is_up_to_date(name: str) -> None:
    script = runpy.run_path(str(DOCS / f"{name}.py"))
    text = script["PAGE"].read_text()
    assert script["filled"](text) == text, f"run python docs/{name}.py"


def test_what_the_page_refuses_is_refused_and_nothing_else() -> None:
    text = (DOCS / "coming_from_megatron.md").read_text()
    tables, _, refused = text.partition("## Refused")
    tables, _, without_effect = tables.partition("## Accepted without effect")
    rows = [line.split(" | ")[0] for line in tables.partition("## Same")[2].splitlines()]
    known = {flag for cell in rows for flag in re.findall(r"^\| `(--[\w-]+)`$", cell)}
    accepted, not_built = flags_of_first_cells(without_effect), flags_of_first_cells(refused)
    assert known | accepted | not_built == {*NAMES}
    assert len(known) + len(accepted) + len(not_built) == len(NAMES)
    for flag in NAMES:
        problems = [problem for problem in gather([flag, "3"]).problems if problem.cure in refused]
        assert bool(problems) == (flag in not_built) or flag in text.partition("## Different")[2], (
            flag
        )


def flags_of_first_cells(table: str) -> set[str]:
    cells = (line.split(" | ")[0] for line in table.splitlines())
    return {flag for cell in cells for flag in re.findall(r"`(--[\w-]+)`", cell)}
