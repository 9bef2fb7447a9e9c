"""Rules of language for all that the repository says, and how `language.py` finds what breaks them."""

import re
from pathlib import Path

import language
import pytest

import megatron_packed

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def everything() -> list[language.Passage]:
    return list(language.passages(language.repository_files()))


def test_no_passage_breaks_a_rule(everything) -> None:
    found = [
        f"{passage} {rule}: {fault}"
        for passage in everything
        if not language.excepted(passage)
        for rule, fault in language.faults(passage)
    ]
    assert found == []


def test_exceptions_are_few_and_used(everything) -> None:
    assert len(language.EXCEPTIONS) <= 20
    for path, part in language.EXCEPTIONS:
        matching = [p for p in everything if p.path == path and part in " ".join(p.text.split())]
        assert any(list(language.faults(passage)) for passage in matching), (path, part)


def test_the_changelog_begins_with_the_version_of_the_package() -> None:
    headings = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == megatron_packed.__version__


def test_entries_of_the_changelog_have_two_lines() -> None:
    lines = (ROOT / "CHANGELOG.md").read_text().splitlines()
    long = [
        number
        for number, (first, second, third) in enumerate(zip(lines, lines[1:], lines[2:]), 1)
        if first.startswith("- ") and second.startswith("  ") and third.startswith("  ")
    ]
    assert long == []


PYTHON = '''"""What is in a module."""


class Pool:
    """Whether it is a pool."""

    size = 1
    """Of the pool."""

    @property
    def total(self):
        """Sum of all sizes."""

    def fill(self):
        """The tokens of a document."""
        # Nobody reads this.
        raise ValueError(f"--size {self.size} was told to nobody")


def test_nobody_told():
    """Run the steps."""
    name = "so many"
    return "import os; nobody"
'''


def faults_of(path: str, text: str) -> set[tuple[int, str]]:
    found = language.python_passages(path, text)
    if path.endswith(".md"):
        found = language.page_passages(path, text)
    return {(passage.line, rule) for passage in found for rule, _ in language.faults(passage)}


def test_faults_of_python() -> None:
    expected = {(1, "opening"), (5, "opening"), (8, "opening"), (15, "verb"), (16, "banned")}
    expected |= {(17, "banned"), (20, "banned")}
    assert faults_of("megatron_packed/a.py", PYTHON) == expected


def test_strings_and_verbs_of_tests_are_free() -> None:
    expected = {(1, "opening"), (5, "opening"), (8, "opening"), (16, "banned"), (20, "banned")}
    assert faults_of("tests/a.py", PYTHON) == expected


@pytest.mark.parametrize(
    "text, rules",
    [
        ("word " * 30 + "end.", {"long"}),
        ("word " * 29 + "end.", set()),
        ("word " * 20 + "end. " + "Word " * 20 + "end.", set()),
        ("- word " * 20 + "\n- word" + " word" * 20, set()),
        ("What is not there is made.", {"question"}),
        ("What is a pack?", set()),
        ("# What is a pack", set()),
        ("The memory `behind` it is ``told``.", set()),
        ("The wait behind it.", {"banned"}),
        ("```sh\nnobody\n```", set()),
        ("| a | nobody |", {"banned"}),
    ],
)
def test_faults_of_a_page(text: str, rules: set[str]) -> None:
    assert {rule for _, rule in faults_of("docs/a.md", text)} == rules


def test_a_draw_repeats_with_its_seed(everything) -> None:
    first = language.draw(everything, "comments", seed=3, count=5)
    assert len(set(first)) == 5
    assert first == language.draw(reversed(everything), "comments", seed=3, count=5)
    assert first != language.draw(everything, "comments", seed=4, count=5)
