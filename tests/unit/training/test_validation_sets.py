"""Validations on all documents with ``--full-validation``."""

import json
from pathlib import Path

import pytest

from megatron_packed.config.errors import ConfigError
from megatron_packed.config.exit_codes import ExitCode
from megatron_packed.config.run import RunConfig
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
        assert train(argv, seen.append) is ExitCode.DONE
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


@pytest.mark.parametrize("paths", ["FIRST SECOND", "9 FIRST 1 SECOND"])
def test_each_validation_set_has_its_loss(validations, capsys, tmp_path: Path, paths: str) -> None:
    words = f"--valid-data-path {paths} --full-validation"
    together = validations(words)
    log, page = tmp_path / "log.jsonl", tmp_path / "page.html"
    capsys.readouterr()
    apart = validations(
        f"{words} --multiple-validation-sets --log-jsonl {log} --report {page} --save-best --save {tmp_path / 's'}"
    )
    said = capsys.readouterr().out
    alone = [
        validations(f"--valid-data-path {path} --full-validation")
        for path in paths.split()
        if path.isupper()
    ]
    for number, (all_of_it, sets) in enumerate(zip(together, apart, strict=True)):
        losses = [sets["valid_loss_a"], sets["valid_loss_b"]]
        assert losses == [pytest.approx(one[number]["valid_loss"]) for one in alone]
        assert losses[0] != pytest.approx(losses[1], rel=1e-4)
        mean = (losses[0] * TARGETS[0] + losses[1] * TARGETS[1]) / sum(TARGETS)
        assert sets["valid_loss"] == pytest.approx(mean)
        assert sets["valid_loss"] == pytest.approx(all_of_it["valid_loss"])
        step = sets["iteration"]
        assert f"validation (a) at step {step}: loss {losses[0]:.4f} over {TARGETS[0]} tok" in said
        assert f"validation at step {step}: loss {sets['valid_loss']:.4f} over" in said
    logged = [one for one in map(json.loads, log.read_text().splitlines()) if "valid_loss" in one]
    assert [one["valid_loss_b"] for one in logged] == [one["valid_loss_b"] for one in apart]
    assert ">loss a<" in page.read_text() and ">loss b<" in page.read_text()


def test_names_and_limits_of_validation_sets(validations) -> None:
    words = "--eval-iters 1 --multiple-validation-sets"
    given = validations(f"--valid-data-path FIRST SECOND {words} --validation-set-names x y")
    assert {"valid_loss_x", "valid_loss_y"} < given[0].keys()
    whole = validations("--valid-data-path FIRST SECOND --eval-iters 1")
    # --eval-iters limits each set.
    assert given[0]["valid_target_tokens"] > whole[0]["valid_target_tokens"]
    for names in ("x", "x x", "x y z"):
        with pytest.raises(ConfigError, match="must be 2 different names"):
            validations(f"--valid-data-path FIRST SECOND {words} --validation-set-names {names}")


def test_sets_of_a_divided_blend_have_the_names_of_its_paths(tmp_path: Path) -> None:
    paths = []
    for number in (1, 2):
        (tmp_path / str(number)).mkdir()
        paths.append(write(tmp_path / str(number) / "text.jsonl", 20, number))
    seen: list[dict] = []
    words = [*MODEL.split(), "--split", "8,2", "--data-path", *paths, "--multiple-validation-sets"]
    assert train(words, seen.append) is ExitCode.DONE
    [first, _] = [one for one in seen if "valid_loss" in one]
    assert {"valid_loss_text_0", "valid_loss_text_1"} < first.keys()
    assert first["valid_target_tokens"] == 4 * 6 + 4 * 12


def test_sets_have_different_names(tmp_path: Path) -> None:
    for folder in ("x", "y"):
        (tmp_path / folder).mkdir()
    data = write(tmp_path / "documents.jsonl", 20, 4)

    def names(*files: str) -> tuple[str, ...]:
        paths = [write(tmp_path / file, 3, 2) for file in files]
        argv = [*MODEL.split(), "--train-data-path", data, "--multiple-validation-sets"]
        return RunConfig.from_args([*argv, "--valid-data-path", *paths]).validation_sets

    assert names("x/e.jsonl", "f.jsonl") == ("e", "f")
    assert names("x/e.jsonl", "y/e.jsonl", "f.jsonl") == ("e_0", "e_1", "f")
    assert names("x/e.jsonl", "y/e.jsonl", "e_0.jsonl") == ("e_0", "e_1", "e_0_2")
