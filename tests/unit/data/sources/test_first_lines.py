"""Tests of the check of first lines, of empty answers, and of tokens that outlast a refusal."""

import json
import shutil

import pytest

from megatron_packed.config.data_fields import DataFields, pairs_of
from megatron_packed.data.errors import DataError
from megatron_packed.data.sources import first_lines, tokenized_dataset
from megatron_packed.data.tokenizers.encode import SampleEncoder
from support.data_helpers import open_files, open_lines
from support.json_lines import read_lines
from support.messages import assistant, user

GOOD = '{"prompt": "a", "completion": "b"}'
EMPTY = '{"prompt": "a", "completion": ""}'


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch):
    monkeypatch.setattr(first_lines, "_said", set())


@pytest.fixture
def no_encoding(monkeypatch):
    """Let a test fail if a line is tokenised."""
    monkeypatch.setattr(SampleEncoder, "encode", lambda *_: pytest.fail("tokenised"))


def fields(words):
    return DataFields.from_pairs(pairs_of([words]))


def test_usable_lines_are_said_before_anything_is_tokenised(tmp_path, capsys):
    open_lines(tmp_path, [GOOD] * 7 + [EMPTY, "{", "", GOOD], show=True)
    first, *_ = capsys.readouterr().err.splitlines()
    assert first == (
        f"8 of 10 lines of {tmp_path}/data.jsonl are usable (8 prompt/completion); "
        "left out: 1 empty_completion, 1 malformed_json"
    )


@pytest.mark.parametrize(
    ("lines", "options", "message"),
    [
        ([GOOD] * 97 + ["{"] * 3, {"max_bad_fraction": 0.01}, "3 of 100 lines are unusable"),
        (["{"] * 9000, {"max_bad_fraction": 0.4}, "4096 of the first 4096 lines are unusable"),
        (['{"text": "a"}'], {}, "remove --sft"),
        (["", " "], {}, "the data contains no document: 2 lines, 2 blank"),
        ([EMPTY] * 5, {"max_bad_fraction": 0.0}, "all of its 5 lines have an empty answer"),
    ],
    ids=["small", "large", "kind", "nothing", "empty"],
)
def test_hopeless_data_is_refused_before_it_is_tokenised(
    tmp_path, no_encoding, lines, options, message
):
    with pytest.raises(DataError, match=message):
        open_lines(tmp_path, lines, **options)


def test_the_first_lines_of_a_large_file_decide_only_if_most_are_bad(tmp_path, monkeypatch):
    """A small file of bad lines beside a large good file does not stop the run."""
    monkeypatch.setattr(first_lines, "_LINES", 10)
    large, small = tmp_path / "0.jsonl", tmp_path / "1.jsonl"
    large.write_text((GOOD + "\n") * 200)
    small.write_text("{\n" * 10)
    dataset = open_files([large, small], max_bad_fraction=0.05)
    assert (len(dataset), dataset.report.num_bad) == (200, 10)


def test_a_path_that_no_line_has_is_refused_with_the_fields_of_the_first_line(
    tmp_path, no_encoding
):
    line = json.dumps({"question": "q", "answers": {"text": ["a"], "start": [0]}})
    with pytest.raises(
        DataError,
        match=r"^--data-fields completion=answer\.text: none of the 3 lines has this field; the first "
        r"line has the fields question, answers\.text, answers\.start; did you mean answers\.text\?$",
    ):
        open_lines(tmp_path, [line] * 3, fields=fields("prompt=question,completion=answer.text"))


def test_an_optional_path_that_the_first_lines_lack_is_a_warning(tmp_path, monkeypatch, capsys):
    """A large file may have its first system message far from its beginning."""
    monkeypatch.setattr(first_lines, "_LINES", 2)
    line = json.dumps({"q": "q", "a": "a"})
    given = fields("instruction=q,output=a,system=s")
    assert len(open_lines(tmp_path, [line] * 3, fields=given, show=True)) == 3
    said = capsys.readouterr().err
    assert "WARNING: none of the first 2 lines has s (system)" in said
    with pytest.raises(DataError, match="system=s: none of the 2 lines has this field"):
        open_lines(tmp_path, [line] * 2, fields=given)


def test_fields_are_part_of_the_key_and_the_limit_is_not(tmp_path):
    lines = [json.dumps({"q": "q", "a": "a", "b": "bb"})]
    first, second = (
        open_lines(tmp_path, lines, fields=fields(f"prompt=q,completion={name}")) for name in "ab"
    )
    assert first.key != second.key and first.content_hash != second.content_hash
    again = open_lines(
        tmp_path, lines, fields=fields("completion=a,prompt=q"), max_bad_fraction=0.5
    )
    assert again.key == first.key


# -------------------------------------------------------------------------------------------------
# empty answers


def test_empty_answers_do_not_count_as_bad(tmp_path, capsys):
    """Half of the lines may be empty without a warning; the report and the quarantine name them."""
    talk = {"messages": [user("q"), assistant("a")]}
    two = {"messages": [*talk["messages"], talk["messages"][0], assistant("")]}
    lines = [json.dumps(talk)] * 2 + [json.dumps(two), EMPTY]
    dataset = open_lines(tmp_path, lines, max_bad_fraction=0.0, show=True)
    report = dataset.report
    assert (report.good, report.num_bad, report.bad_fraction) == (2, 0, 0.0)
    assert report.empty == {"empty_assistant": 1, "empty_completion": 1}
    text = dataset.sentences()
    assert text[0] == "4 lines in 1 file: 2 used (2 messages), 0 blank, 2 empty, 0 in quarantine"
    [listed] = (tmp_path / "cache").glob("*.quarantine.jsonl")
    assert text[-1].endswith(str(listed))
    reasons = [line["reason"] for line in read_lines(listed)]
    assert reasons == ["empty_assistant", "empty_completion"]
    assert "WARNING" not in capsys.readouterr().err


def test_a_file_of_mostly_empty_answers_is_a_warning_each_time(tmp_path, capsys):
    for _ in range(2):  # tokenised, then read from the cache
        open_lines(tmp_path, [GOOD] * 2 + [EMPTY] * 3, max_bad_fraction=0.0, show=True)
        assert (
            f"WARNING: 3 of 5 lines of {tmp_path}/data.jsonl have an empty answer or text and are "
            "left out; only 2 lines are used." in capsys.readouterr().err
        )


def test_one_file_of_empty_answers_is_an_error_beside_good_files(tmp_path, no_encoding):
    (tmp_path / "0.jsonl").write_text(GOOD)
    (tmp_path / "1.jsonl").write_text(EMPTY + "\n" + EMPTY)
    with pytest.raises(DataError, match=r"1\.jsonl has nothing to learn: all of its 2 lines"):
        open_files([tmp_path / "0.jsonl", tmp_path / "1.jsonl"])


# -------------------------------------------------------------------------------------------------
# tokenised work after a refusal


def test_a_refused_run_leaves_its_tokens_to_the_next_run(tmp_path, monkeypatch):
    """Bad lines beyond the first lines are found by tokenising, which is done once."""
    monkeypatch.setattr(first_lines, "_LINES", 50)
    lines = [GOOD] * 100 + ["{"] * 5
    for _ in range(2):
        with pytest.raises(
            DataError, match=r"(?s)5 of 105 lines are unusable .* cure: correct the data"
        ):
            open_lines(tmp_path, lines, max_bad_fraction=0.01)
        monkeypatch.setattr(tokenized_dataset, "build_arrays", None)  # calling None would fail
    dataset = open_lines(tmp_path, lines, max_bad_fraction=0.1)
    dataset.verify()
    assert len(dataset) == 100 and dataset.report.bad == {"malformed_json": 5}
    monkeypatch.undo()
    shutil.rmtree(dataset.directory)
    monkeypatch.setattr(first_lines, "_LINES", 50)
    again = open_lines(tmp_path, lines, max_bad_fraction=0.1)
    assert (again.key, again.content_hash) == (dataset.key, dataset.content_hash)


def test_a_cache_of_another_format_is_built_again(tmp_path, monkeypatch):
    """The counts of an older cache are not read as counts of this version."""
    older = tokenized_dataset.CACHE_FORMAT - 1
    with monkeypatch.context() as before:
        before.setattr(tokenized_dataset, "CACHE_FORMAT", older)
        old = open_lines(tmp_path, [GOOD] * 3 + [EMPTY])
    new = open_lines(tmp_path, [GOOD] * 3 + [EMPTY])
    assert new.directory != old.directory and new.content_hash == old.content_hash
    with pytest.raises(DataError, match="has format"):
        tokenized_dataset.TokenizedDataset(old.directory)
