"""Test that each of Megatron's flags that works is in a test of its effect."""

import re
from pathlib import Path

from megatron_packed.config.parser.command_line import spellings

TESTS = Path(__file__).parents[3]
NAMES = (Path(__file__).parents[1] / "megatron_flag_names.txt").read_text().split()
OF_THE_PARSER = "tests/unit/config/"
"""Folder of tests that only parse, check or list flags."""
EFFECTS_IN_THE_PARSER = {"--data-args-path", "--per-split-data-args-path"}
"""Flags whose whole effect is in the parser: it reads files that name data."""
GIVEN = re.compile(r'(--[a-z][\w-]*)|\b(\w+)\s*=(?!=)|"(\w+)"\s*:')
"""Flag, argument of a call, or key of a dictionary."""


def test_each_flag_that_works_is_in_a_test_of_its_effect() -> None:
    given: set[str] = set()
    for path in TESTS.rglob("*.py"):
        if OF_THE_PARSER not in path.as_posix():
            given |= {
                flag or "--" + (argument or key).replace("_", "-")
                for flag, argument, key in GIVEN.findall(path.read_text())
            }
    works = [name for name in NAMES if name in spellings()]
    assert len(works) > 180
    untested = []
    for name in works:
        field = spellings()[name].field
        names = {*field.spellings, "--" + field.name.replace("_", "-")}
        if not names & given and name not in EFFECTS_IN_THE_PARSER:
            untested.append(name)
    assert untested == []
