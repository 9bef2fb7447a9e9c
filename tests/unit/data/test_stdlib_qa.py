"""Tests of the quickstart's data: made from docstrings, deterministic, split by object, and
readable.
"""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from megatron_packed.data.sources.line_schema import parse_line

SCRIPT = Path(__file__).parents[3] / "examples" / "quickstart" / "stdlib_qa.py"
MODULE = '''
"""A module about parrots.

It has two paragraphs.
"""

class Parrot(object):
    """A bird that is resting. It is not dead."""

    def speak(self, words: str, *, loud=False) -> None:
        """Say the words aloud, or not at all."""

    @property
    def colour(self):
        """Norwegian blue, with beautiful plumage."""

    def _hidden(self):
        """Nobody asks about this."""

async def buy(price, /, *coins):
    """Buy a parrot for the price that is asked."""

def copied():
    """Buy a parrot for the price that is asked."""

def silent(): pass
'''


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("stdlib_qa", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["stdlib_qa"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["stdlib_qa"]


@pytest.fixture
def library(tmp_path):
    for name in (
        "shop/__init__.py",
        "test/inner.py",
        "site-packages/other.py",
        "not-a-module.py",
        "test_x.py",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(MODULE)
    (tmp_path / "broken.py").write_text("def (")
    (tmp_path / "latin.py").write_bytes(b'# -*- coding: latin-1 -*-\n"""Caf\xe9."""\n')
    (tmp_path / "surrogate.py").write_text('"""Half a pair: \\ud800."""\n')
    return tmp_path


def test_what_is_read(script, library):
    items = {item.name: item for item in script.documented_items(library)}
    assert list(items) == [
        "latin",
        "shop",
        "shop.Parrot",
        "shop.Parrot.speak",
        "shop.Parrot.colour",
        "shop.buy",
        "shop.copied",
    ]
    assert items["latin"].doc == "Café."
    assert items["shop.Parrot"].signature == "class Parrot(object)"
    assert (
        items["shop.Parrot.speak"].signature == "def speak(self, words: str, *, loud=False) -> None"
    )
    assert items["shop.buy"].signature == "async def buy(price, /, *coins)"
    assert items["shop.Parrot.colour"].kind == "property"
    assert items["shop.Parrot"].members == (
        "- `speak`: Say the words aloud, or not at all.",
        "- `colour`: Norwegian blue, with beautiful plumage.",
    )
    assert "- `silent`" in items["shop"].members


def test_questions_are_answered_by_the_docstrings_and_no_answer_is_given_twice(script, library):
    items = list(script.documented_items(library))
    pairs = list(script.unique(pair for item in items for pair in script.questions(item)))
    text = json.dumps([pair.messages for pair in pairs])
    assert (
        "It has two paragraphs." in text and "Norwegian blue" in text and "Nobody asks" not in text
    )
    answers = [
        message["content"]
        for pair in pairs
        for message in pair.messages
        if message["role"] == "assistant"
    ]
    assert len(set(answers)) == len(answers)
    assert sum("Buy a parrot" in answer for answer in answers if answer.startswith("Buy")) <= 1
    for pair in pairs:
        [sample] = parse_line(json.dumps({"messages": pair.messages}).encode())
        assert sample.messages[-1]["role"] == "assistant"


def test_the_files_are_the_same_every_time_and_an_object_is_on_one_side(script, tmp_path):
    items = [
        script.Item(
            "function", f"m.f{n}", "m", f"def f{n}()", f"Does the thing number {n} for you."
        )
        for n in range(900)
    ]
    pairs = list(script.unique(pair for item in items for pair in script.questions(item)))
    counts = script.write_split(pairs, tmp_path / "a", 0.1)
    script.write_split(pairs[::-1], tmp_path / "b", 0.1)
    for name in ("train.jsonl", "valid.jsonl"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    assert sum(counts.values()) == len(pairs) > 900
    assert 0.05 < counts["valid.jsonl"] / len(pairs) < 0.15
    train, valid = ((tmp_path / "a" / name).read_text() for name in ("train.jsonl", "valid.jsonl"))
    asked = {number for number in range(900) if f"thing number {number} " in valid}
    assert asked and not {number for number in asked if f"thing number {number} " in train}


def test_a_part_of_the_real_library_gives_many_questions(script):
    import json as package

    items = list(script.documented_items(Path(package.__file__).parent))
    pairs = list(script.unique(pair for item in items for pair in script.questions(item)))
    assert len(pairs) >= 10
    assert any("JSONDecoder" in message["content"] for pair in pairs for message in pair.messages)
