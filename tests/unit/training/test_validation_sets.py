"""Validations on all documents with ``--full-validation``."""

import json
from pathlib import Path

import pytest

from megatron_packed.config.run import RunConfig
from megatron_packed.training.exit_codes import ExitCode
from megatron_packed.training.from_python import train

MODEL = """--hybrid-layer-pattern - --hidden-size 8 --no-isolation-self-test --seq-length 64 --lr 1e-2
    --global-batch-size 2 --train-iters 4 --eval-interval 2"""
FIRST, SECOND = (30, 3), (14, 5)
"""Number of documents of a validation file, and repetitions of their word."""
TARGETS = [count * 6 * words for count, words in (FIRST, SECOND)]
"""Targets of each file: ``hello `` has six bytes, and the end of the document is a target."""


def write(path: Path, count: int, words: int) -> str:
    path.write_text(f"{json.dumps({'text': 'hello ' * words})}\n" * count)
    return str(path)


@pytest.fixture
def validations(tmp_path: Path):
    """Return a function that trains and returns the records of the validations and tests."""
    data = write(tmp_path / "documents.jsonl", 20, 4)
    first, second = write(tmp_path / "a.jsonl", *FIRST), write(tmp_path / "b.jsonl", *SECOND)

    def trained(words: str) -> list[dict]:
        seen: list[dict] = []
        given = words.replace("FIRST", first).replace("SECOND", second)
        argv = [*MODEL.split(), "--train-data-path", data, *given.split()]
        assert train(RunConfig.from_args(argv), seen.append) is ExitCode.DONE
        return [one for one in seen if "valid_loss" in one or "test_loss" in one]

    return trained


@pytest.mark.parametrize("paths", ["FIRST SECOND", "9 FIRST 1 SECOND"])
def test_full_validation_reads_each_document_once(validations, paths: str) -> None:
    few = validations(f"--valid-data-path {paths} --eval-iters 2")
    assert few[0]["valid_target_tokens"] < sum(TARGETS)
    words = f"--valid-data-path {paths} --test-data-path {paths} --eval-iters 2 --full-validation"
    *whole, test = validations(words)
    assert [one["iteration"] for one in whole] == [2, 4]
    assert [one["valid_target_tokens"] for one in whole] == [sum(TARGETS)] * 2
    assert test["test_target_tokens"] == few[0]["valid_target_tokens"]
