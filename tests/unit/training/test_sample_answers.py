"""Answers during training: sample prompts, and the share of exact matches of a validation."""

from pathlib import Path

import pytest

from megatron_packed.config.errors import ConfigError
from megatron_packed.config.exit_codes import ExitCode
from megatron_packed.config.run import RunConfig
from megatron_packed.data.errors import DataError
from megatron_packed.data.tokenizers.base import ByteTokenizer
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.inputs.open_documents import open_documents
from megatron_packed.inputs.sample_and_metric_prompts import metric_questions, sample_questions
from megatron_packed.reporting.console import answer_lines
from megatron_packed.training import answers as answers_module
from megatron_packed.training.from_python import train
from support.data_helpers import conversation
from support.json_lines import write_lines

MODEL = "--hybrid-layer-pattern M* --hidden-size 16 --num-attention-heads 2 --mamba-head-dim 8"
MODEL += " --mamba-num-groups 1 --mamba-state-dim 8 --no-isolation-self-test --seq-length 96"
MODEL += " --position-embedding-type rope --lr 1e-2 --train-iters 4 --sft --eval-interval 2"
MODEL += " --hidden-dropout 0.1 --sample-max-new-tokens 12"
RIGHT = ["yes", "no", "yes"]


@pytest.fixture
def flags(tmp_path: Path) -> list[str]:
    """Flags of a run of four steps with two validations, of which three answers are short."""
    lines = [conversation(f"ask {n}", answer) for n, answer in enumerate([*RIGHT, "long " * 9])]
    (tmp_path / "train.jsonl").write_text("".join(line + "\n" for line in lines))
    (tmp_path / "valid.jsonl").write_text("".join(line + "\n" for line in lines[::-1]))
    data = f"--train-data-path {tmp_path}/train.jsonl --valid-data-path {tmp_path}/valid.jsonl"
    return f"{MODEL} {data}".split()


def records(flags: list[str], *more: str) -> list[dict]:
    seen: list[dict] = []
    assert train([*flags, *more], seen.append) is ExitCode.DONE
    return seen


def test_answers_are_shown_and_change_no_step(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Losses with dropout are those of a run without answers, and each validation has answers."""
    (tmp_path / "prompts.jsonl").write_text(conversation("ask 1", "no") + '\n{"prompt": "hm?"}\n')
    plain = records(flags)
    capsys.readouterr()
    asked = ["--sample-prompts", str(tmp_path / "prompts.jsonl"), "--valid-metric", "exact_match"]
    found = records(flags, *asked)
    said = capsys.readouterr().out
    samples = [one for one in found if "samples" in one]
    assert [one["iteration"] for one in samples] == [2, 4]
    assert [one["prompt"] for one in samples[-1]["samples"]] == ["ask 1", "hm?"]
    assert samples[-1]["samples"][0]["expected"] == "no"
    assert "answer at step 4: hm? -> " in said
    losses = [
        [one.get("lm_loss", one.get("valid_loss")) for one in run if "samples" not in one]
        for run in (plain, found)
    ]
    assert losses[0] == losses[1] and len(losses[0]) == 6


def test_exact_matches_are_counted(
    flags: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Two of three answers are right; the long answer of the data is left out."""
    calls = []

    def two_are_right(model, prompts, max_new_tokens, *, ends, group):
        calls.append(len(prompts))
        words = [f" {RIGHT[-1 - place]} " if place else "else" for place in range(len(prompts))]
        return [ByteTokenizer().encode(word).tolist() for word in words]

    monkeypatch.setattr(answers_module, "generate", two_are_right)
    found = records(flags, "--valid-metric", "exact_match")
    validations = [one for one in found if "valid_loss" in one]
    assert calls == [3, 3]
    for one in validations:
        assert one["valid_exact_match"] == pytest.approx(2 / 3)
        assert one["valid_exact_match_count"] == 3
    said = capsys.readouterr().out
    assert "tokens, exact match 66.7 % of 3 answers\n" in said
    assert " | exact match 66.7 % of 3 answers at step 4 | " in said.splitlines()[-1]
    records(flags, "--valid-metric", "exact_match", "--valid-metric-samples", "2")
    assert calls[2:] == [2, 2]


def test_the_metric_asks_for_the_last_turn(flags: list[str], tmp_path: Path) -> None:
    """The prompt of a conversation with two answers ends where the second answer begins."""
    turns = [("user", "a?"), ("assistant", "A"), ("user", "b?"), ("assistant", " B ")]
    line = {"messages": [{"role": role, "content": text} for role, text in turns]}
    write_lines(tmp_path / "valid.jsonl", [line])
    config, tokenizer = (
        RunConfig.from_args([*flags, "--valid-metric", "exact_match"]),
        ByteTokenizer(),
    )
    documents = open_documents(config.data, tokenizer, validates=True, show=False)
    asked = metric_questions(config, tokenizer, documents.valid)
    assert asked is not None and asked.expected == ["B"]
    prompt = tokenizer.decode(asked.prompts[0])
    assert prompt.endswith("b?<|im_end|>\n<|im_start|>assistant\n") and "\nA<|im_end|>" in prompt
    assert tokenizer.special_tokens["<|im_end|>"] in asked.ends


def test_prompts_that_cannot_be_used_end_the_run_before_training(
    flags: list[str], tmp_path: Path
) -> None:
    """A missing file, a wrong line, a long prompt, and validation data without a short answer."""
    prompts = tmp_path / "prompts.txt"
    with pytest.raises(ConfigError, match=r"--sample-prompts .*does not exist"):
        RunConfig.from_args([*flags, "--sample-prompts", str(prompts)])
    for text, said in (
        ('{"question": 1}\n', r"prompts.txt, line 1 is not a prompt"),
        ("x" * 90, r"with --sample-max-new-tokens 12 exceed the 96 positions"),
    ):
        prompts.write_text(text)
        with pytest.raises(DataError, match=said):
            train([*flags, "--sample-prompts", str(prompts)])
    short = ["--valid-metric", "exact_match", "--sample-max-new-tokens", "2"]
    with pytest.raises(
        DataError, match="no validation conversation ends with an answer of at most 2"
    ):
        train([*flags, *short])


def test_a_prompt_and_its_answer_fill_the_rotary_tables(flags: list[str], tmp_path: Path) -> None:
    """The last of 12 new tokens needs none of the 96 positions, so a prompt has at most 85 tokens."""
    path, groups = tmp_path / "prompts.txt", ParallelGroups.single()

    def tokens(letters: int) -> int:
        path.write_text("x" * letters)
        config = RunConfig.from_args([*flags, "--sample-prompts", str(path)])
        asked = sample_questions(config, ByteTokenizer(), groups)
        assert asked is not None
        return len(asked.prompts[0])

    letters = 85 - (tokens(1) - 1)
    assert tokens(letters) == 85
    with pytest.raises(DataError, match="line 1 has 86 tokens, which with"):
        tokens(letters + 1)


def test_answers_as_text() -> None:
    """The console has one short line for each of the first answers."""
    samples = [{"prompt": "a\n b", "answer": "x" * 300}, *[{"prompt": "c", "answer": ""}] * 4]
    lines = answer_lines(7, samples)
    assert lines[0].startswith("answer at step 7: a b -> xxx") and len(lines[0]) < 130
    assert lines[-1] == "and 1 more answers in the log" and len(lines) == 5
    assert not any("\n" in line for line in lines)
