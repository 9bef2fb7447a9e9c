"""Test that the page 'Coming from Megatron-LM' agrees with the parser."""

import re
import runpy
from pathlib import Path

from megatron_packed.config.parser.precedence import gather

DOCS = Path(__file__).parents[3] / "docs"
NAMES = (Path(__file__).parent / "megatron_flag_names.txt").read_text().split()


def test_the_page_is_up_to_date() -> None:
    script = runpy.run_path(str(DOCS / "coming_from_megatron.py"))
    text = script["PAGE"].read_text()
    assert script["filled"](text) == text, "run python docs/coming_from_megatron.py"


def test_what_the_page_refuses_is_refused_and_nothing_else() -> None:
    text = (DOCS / "coming_from_megatron.md").read_text()
    accepted, _, refused = text.partition("## Refused")
    first_cells = [line.split(" | ")[0] for line in accepted.partition("## Same")[2].splitlines()]
    known = {flag for cell in first_cells for flag in re.findall(r"^\| `(--[\w-]+)`$", cell)}
    not_built = {
        flag
        for line in refused.splitlines()
        for flag in re.findall(r"`(--[\w-]+)`", line.split(" | ")[0])
    }
    assert known | not_built == {*NAMES} and not known & not_built
    for flag in NAMES:
        problems = [problem for problem in gather([flag, "3"]).problems if problem.cure in refused]
        assert bool(problems) == (flag in not_built) or flag in text.partition("## Different")[2], (
            flag
        )
