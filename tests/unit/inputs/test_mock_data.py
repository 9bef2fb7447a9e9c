"""Runs on the made documents of ``--mock-data``."""

from pathlib import Path

import numpy as np
import pytest

from megatron_packed.cli.main import main
from megatron_packed.config.exit_codes import ExitCode
from megatron_packed.config.parser.parse import parse
from megatron_packed.config.run import RunConfig
from megatron_packed.data.made_documents import MadeDocuments, MadeFrom
from megatron_packed.data.packing.pieces import cut_documents
from megatron_packed.training.from_python import train
from support.explained import explain

MODEL = """--hybrid-layer-pattern M- --hidden-size 16 --mamba-head-dim 16 --mamba-state-dim 16
    --mamba-num-groups 1 --no-isolation-self-test --lr 3e-2 --seq-length 128 --mock-data
    --global-batch-size 4 --device cpu"""


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def records(words: str) -> list[dict]:
    seen: list[dict] = []
    assert train(RunConfig.from_args([*MODEL.split(), *words.split()]), seen.append) is (
        ExitCode.DONE
    )
    return seen


def losses(words: str) -> list[tuple[int, float]]:
    return [(one["iteration"], one["lm_loss"]) for one in records(words) if "lm_loss" in one]


def test_a_run_needs_no_file_and_depends_on_the_seed(empty_folder: Path) -> None:
    seen = records("--train-iters 12 --eval-interval 12 --eval-iters 1")
    steps = [one for one in seen if "lm_loss" in one]
    assert list(empty_folder.iterdir()) == []
    assert all(one["num_seqs"] > 2 * 4 for one in steps)  # packs hold several documents
    assert steps[-1]["lm_loss"] < 0.9 * steps[0]["lm_loss"]  # the next number can be learned
    assert [one["iteration"] for one in seen if "valid_loss" in one] == [12]
    again = [(one["iteration"], one["lm_loss"]) for one in steps]
    assert losses("--train-iters 12") == again
    assert losses("--train-iters 12 --seed 7")[0] != again[0]
    begun = losses("--train-iters 12 --save s --load s --exit-interval 5")
    assert begun + losses("--train-iters 12 --save s --load s") == again


def test_split_decides_whether_there_is_a_test() -> None:
    words = "--train-iters 1 --eval-iters 1 --eval-interval 1"
    for split, tested, validated in (("9,1,0", 0, 1), ("8,1,1", 1, 1), ("1", 0, 0)):
        of_run = words if validated else "--train-iters 1"
        seen = records(f"{of_run} --split {split}")
        assert sum("test_loss" in one for one in seen) == tested
        assert sum("valid_loss" in one for one in seen) == validated


@pytest.mark.parametrize("sft", [False, True])
def test_documents_count_up_and_end(sft: bool) -> None:
    made = MadeDocuments(MadeFrom(3, 300, sft), "training", vocab_size=50, eod_id=49)
    assert made.lengths.max() <= 300 and made.lengths.min() >= 2
    assert np.mean(made.lengths) < 100
    for index in (0, 17, len(made) - 1):
        tokens, targets = made.document(index)
        assert tokens[-1] == 49 and (np.diff(tokens[:-1]) % 50 == 1).all()
        assert targets.sum() == made.source_targets[index]
        assert (targets[0], targets[-1]) == (0, 1)
        if sft and len(tokens) > 5:
            assert targets[: len(tokens) // 3].sum() == 0
        middle = len(tokens) // 2
        if middle:
            piece, marks = made.document(index, middle, len(tokens) - middle)
            assert (piece == tokens[middle:]).all() and (marks == targets[middle:]).all()
    # The packer counts the targets of pieces as the documents mark them.
    pieces, counted = cut_documents(made, 40, "split", only_with_targets=False)
    for number in range(0, len(pieces), 4001):
        document, start, length = (
            int(values[number]) for values in (pieces.document, pieces.start, pieces.length)
        )
        assert counted[number] == made.document(document, start, length)[1][1:].sum()
    other = MadeDocuments(MadeFrom(3, 300, sft), "validation", vocab_size=50, eod_id=49)
    assert other.lengths.tolist() != made.lengths[: len(other)].tolist()
    assert other.content_hash != made.content_hash


def test_sft_trains_on_answers_only() -> None:
    [text] = [one for one in records("--train-iters 1") if "lm_loss" in one]
    [answers] = [one for one in records("--train-iters 1 --sft") if "lm_loss" in one]
    share = answers["target_tokens"] / answers["real_tokens"]
    assert 0.5 < share < 0.8 < text["target_tokens"] / text["real_tokens"]


def test_explain_and_plan_say_that_documents_are_made(capsys) -> None:
    words = [*MODEL.split(), "--train-iters", "2"]
    assert "made documents (--mock-data): 16,384 with" in explain(parse(words))
    assert main(["plan", *words]) == 0
    assert "the made documents of --mock-data" in capsys.readouterr().out
    assert main(["packing", *words]) == 0
    assert "made training data (--mock-data)" in capsys.readouterr().out
