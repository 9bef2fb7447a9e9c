"""Questions and answers of the quickstart, read from docstrings."""

import json
from pathlib import Path

import pytest

from megatron_packed.cli.main import main
from megatron_packed.cli.quickstart import questions
from megatron_packed.data.sources.line_schema import parse_line

TRAIN_WORDINGS = len(questions.WORDINGS) - 2
MODULE = '''
"""A shop for parrots. It also sells slugs."""

class Parrot(object):
    """Resting bird with beautiful plumage."""

    def speak(self, words: str, *, loud=False) -> None:
        """Say the words aloud, or not.

        The parrot may be dead.
        """

    def _hidden(self):
        """No question is asked about this method."""

async def buy(price, /, *coins):
    """Buy a parrot for the price."""

def copied():
    """Buy a parrot for the price."""

def silent(): pass

def called():
    """called(parrot) -> None"""

def long():
    """This description is so long that a small model would need more than two minutes to learn it."""
'''


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(questions, "MODULES", ("shop", "posixpath", "broken", "missing"))
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop" / "__init__.py").write_text(MODULE)
    (tmp_path / "posixpath.py").write_text('"""Work with names of files."""')
    (tmp_path / "broken.py").write_text("def (")
    return tmp_path


def test_public_objects_with_a_short_sentence_have_a_question(library: Path) -> None:
    """Hidden, silent and long descriptions are left out, and modules get their usual names."""
    assert [tuple(thing) for thing in questions.documented(library)] == [
        ("shop", "A shop for parrots."),
        ("shop.Parrot", "Resting bird with beautiful plumage."),
        ("shop.Parrot.speak", "Say the words aloud, or not."),
        ("shop.buy", "Buy a parrot for the price."),
        ("shop.copied", "Buy a parrot for the price."),
        ("os.path", "Work with names of files."),
    ]
    kept = {thing.name for thing in questions.chosen_objects(questions.documented(library))}
    assert kept == {"shop", "shop.Parrot", "shop.Parrot.speak", "shop.buy", "os.path"}


def test_validation_asks_about_known_objects_in_another_wording(
    library: Path, tmp_path: Path
) -> None:
    """Two wordings of each object are kept for validation; each file has the same bytes each time."""
    assert questions.write_questions(library, tmp_path / "data") == (
        5,
        5 * TRAIN_WORDINGS,
    )
    files = [(tmp_path / "data" / name).read_bytes() for name in ("train.jsonl", "valid.jsonl")]
    questions.write_questions(library, tmp_path / "again")
    again = [(tmp_path / "again" / name).read_bytes() for name in ("train.jsonl", "valid.jsonl")]
    assert files == again
    for line in b"".join(files).splitlines():
        parse_line(line)
    train = {
        (turns[at]["content"], turns[at + 1]["content"])
        for turns in (json.loads(line)["messages"] for line in files[0].splitlines())
        for at in range(0, len(turns), 2)
    }
    valid = {tuple(one) for one in questions.read_questions(tmp_path / "data" / "valid.jsonl")}
    assert len(train) == 5 * TRAIN_WORDINGS and len(valid) == 10
    assert not {question for question, _ in train} & {question for question, _ in valid}
    assert {answer for _, answer in valid} <= {answer for _, answer in train}


def test_a_library_without_docstrings_is_refused(library: Path, tmp_path: Path) -> None:
    (library / "shop" / "__init__.py").write_text("")
    (library / "posixpath.py").write_text("")
    with pytest.raises(ValueError, match="has no docstrings"):
        questions.write_questions(library, tmp_path / "data")


def test_this_interpreter_has_enough_questions() -> None:
    """The standard library of every Python has more objects than the quickstart asks about."""
    import sysconfig

    found = questions.chosen_objects(questions.documented(Path(sysconfig.get_paths()["stdlib"])))
    assert len(found) == questions.MOST_OBJECTS


def test_a_directory_that_cannot_be_written_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").write_text("a file in place of the directory")
    assert main(["quickstart", "--prepare"]) == 2
    assert "runs/quickstart cannot be written: Not a directory" in capsys.readouterr().err
