"""Tests that ``packing`` and ``tune`` report all tokens and targets, and refuse data without a
target.
"""

import json

import numpy as np
import pytest

from megatron_packed.cli.main import main
from megatron_packed.config.parser.parse import parse
from megatron_packed.data.tokenizers.base import ByteTokenizer
from megatron_packed.inputs.open_documents import open_documents
from megatron_packed.inputs.plan_packs import plan_training
from support import commands
from support.json_lines import write_texts

MODEL = "--hybrid-layer-pattern - --hidden-size 8"
SFT = ["--sft", "--seq-length", "64"]


def answers(path, prompts, answer=10):
    """Write prompts of the given numbers of bytes, each with an answer; a chat template adds bytes
    to both.
    """
    lines = (
        json.dumps({"prompt": "p" * length, "completion": "c" * answer}) + "\n"
        for length in prompts
    )
    path.write_text("".join(lines))
    return str(path)


def parts(folder, *valid, answer=10):
    """Return flags of 40 prompts for training, and of prompts of the given sizes for validation."""
    train = answers(folder / "train.jsonl", [5] * 40)
    given = answers(folder / f"valid{len(valid)}.jsonl", valid, answer)
    return [*SFT, "--eval-interval", 2, "--train-data-path", train, "--valid-data-path", given]


def packing(capsys, *argv):
    code = main(["packing", *map(str, argv)])
    return code, capsys.readouterr()


def as_json(capsys, *argv):
    code, output = packing(capsys, *argv, "--json")
    assert code == 0
    return json.loads(output.out)


def adds_up(counts, targets):
    parts = ("kept", "truncated", "dropped", "without_targets")
    assert counts["tokens_in"] == sum(counts[f"tokens_{part}"] for part in parts)
    parts = ("kept", "truncated", "split", "dropped")
    assert targets["targets_in"] == sum(targets[f"targets_{part}"] for part in parts)


@pytest.mark.parametrize("command", ["packing", "tune"])
def test_data_without_a_target_is_refused_with_its_counts(tmp_path, capsys, command):
    """Data is refused if prompts are so long that truncation removes every answer."""
    data = answers(tmp_path / "data.jsonl", [300] * 20)
    assert main([command, "--data-path", data, *SFT, "--overlong-policy", "truncate"]) == 3
    [line] = capsys.readouterr().err.splitlines()[-1:]
    assert line.startswith("data error: the training data has no target left")
    assert "targets of 20 documents in = 0 kept" in line and "20 documents keep no target" in line
    assert "give --overlong-policy truncate_prompt" in line


def test_validation_without_a_target_is_refused_by_its_name(tmp_path, capsys):
    argv = [*parts(tmp_path, 300, 300, 300), "--overlong-policy", "truncate"]
    code, output = packing(capsys, *argv)
    assert code == 3 and "data error: the validation data has no target left" in output.err


def test_few_targets_of_a_validation_are_said(tmp_path, capsys):
    argv = parts(tmp_path, 5, 5, 5)
    lines = packing(capsys, *argv)[1].out.splitlines()
    [few] = [line for line in lines if "noisy" in line]
    assert few.startswith(
        "validation data: 33 targets are fewer than 1,000"
    )  # 3 x (10 bytes and the end-of-document token)
    assert not any("lost by truncation" in line for line in lines)  # nothing is lost
    assert few.endswith("noisy; add documents to it.")
    # Twenty documents are five packs, which also have too few targets.
    argv = parts(tmp_path, *[5] * 20)
    ended = packing(capsys, *argv, "--eval-iters", 1)[1].out
    assert (
        "raise --eval-iters, which stops before the last document, and add documents to it."
        in ended
    )
    argv = parts(tmp_path, *[5] * 30, answer=40)
    assert "noisy" not in packing(capsys, *argv)[1].out
    ended = packing(capsys, *argv, "--eval-iters", 1)[
        1
    ].out  # the validation ends after its first pack of one or two documents
    assert "noisy; raise --eval-iters, which stops before the last document.\n" in ended


@pytest.mark.parametrize("policy", ["truncate_prompt", "truncate", "split", "drop"])
def test_mixed_data_adds_up(tmp_path, capsys, policy):
    """Pieces of long prompts without an answer are not packed, and all counts add up."""
    data = answers(tmp_path / "data.jsonl", [5] * 30 + [900] * 10)
    sft = [*SFT, "--seq-length", 256]
    found = as_json(capsys, "--data-path", data, *sft, "--overlong-policy", policy)["training"]
    counts, targets = found["counts"], found["targets"]
    adds_up(counts, targets)
    assert targets["targets_in"] == 40 * 11
    assert targets["documents_without_targets"] == (
        0 if policy in ("split", "truncate_prompt") else 10
    )
    assert (counts["pieces_without_targets"] > 0) == (policy in ("truncate", "split"))
    assert found["packs"] * found["slots"] == counts["tokens_kept"] + found["padded_tokens"]
    lines = packing(capsys, "--data-path", data, *sft, "--overlong-policy", policy)[1].out
    assert ("of pieces without a target (" in lines) == (policy in ("truncate", "split"))
    if policy == "truncate_prompt":
        assert (counts["tokens_truncated"], counts["documents_truncated"]) == (10 * (911 - 256), 10)
        assert "lost by truncation" not in lines  # all targets are kept
    if policy == "truncate":
        assert (
            "330 kept + 110 lost by truncation + 0 by splitting + 0 by dropping; 10 documents keep no target."
            in lines
        )


def test_over_long_conversations_keep_their_last_answer_by_default(tmp_path, capsys):
    """The last answer is kept in training and validation data, in packing and in tune; `plan` reads
    the data that packing tokenised.
    """
    turns = [
        {"role": role, "content": f"{role} {n} "}
        for n in range(40)
        for role in ("user", "assistant")
    ]
    train, valid = tmp_path / "train.jsonl", tmp_path / "valid.jsonl"
    train.write_text(
        (json.dumps({"messages": [{"role": "system", "content": "Be nice."}, *turns]}) + "\n") * 9
    )
    valid.write_text((json.dumps({"messages": turns}) + "\n") * 2)
    argv = ["--train-data-path", train, "--valid-data-path", valid, "--eval-interval", 2]
    argv += ["--sft", "--seq-length", 256]
    lines = packing(capsys, *argv, "--micro-batch-size", 2)[1].out.splitlines()
    said = [
        line
        for line in lines
        if "of them were shortened so that they keep their last answer" in line
    ]
    assert [line.split()[0] for line in said] == ["9", "2"]
    found = as_json(capsys, *argv)
    for name, each in (("training", 9), ("validation", 2)):
        counts = found[name]["counts"] if name == "training" else found[name]
        targets = found[name]["targets"] if name == "training" else found[name]
        assert counts["documents_truncated"] == each == counts["documents_in"]
        assert (
            0 < targets["targets_truncated"] < targets["targets_in"]
            and targets["documents_without_targets"] == 0
        )
    accounts = commands.report(capsys, "tune", *argv)["accounts"]
    assert accounts["targets_truncated"] == found["training"]["targets"]["targets_truncated"]
    assert main(["plan", *MODEL.split(), *map(str, argv)]) == 0
    assert "the tokenised documents of" in capsys.readouterr().out


def test_pieces_without_targets_are_kept_for_the_packs_of_runs_begun_before(tmp_path):
    data = answers(tmp_path / "data.jsonl", [5] * 30 + [300] * 10)
    short = answers(tmp_path / "short.jsonl", [5] * 30)

    def plan(path, *more):
        given = f"{MODEL} --lr 0 --train-iters 1 --overlong-policy truncate --data-path {path}"
        config = parse([*SFT, *given.split(), *more])
        documents = open_documents(config.data, ByteTokenizer(), validates=False, show=False).train
        return plan_training(config, documents)[0]

    kept, dropped = plan(data, "--keep-pieces-without-targets"), plan(data)
    assert (len(kept.pieces), len(dropped.pieces)) == (40, 30)
    assert np.array_equal(kept.pieces.document[:30], dropped.pieces.document)
    assert kept.hash != dropped.hash
    assert plan(short, "--keep-pieces-without-targets").hash == plan(short).hash


def test_text_loses_no_token_whatever_the_micro_batch_size(tmp_path, capsys):
    """The micro-batch size does not change which tokens are trained on, as in Megatron."""
    text = tmp_path / "text.jsonl"
    write_texts(text, ("a" * length for length in (999, 10, 300, 64, 700)))
    argv = ["--data-path", text, "--seq-length", 64]
    for samples in (1, 4):
        found = as_json(capsys, *argv, "--micro-batch-size", samples)["training"]
        adds_up(found["counts"], found["targets"])
        assert found["counts"]["tokens_kept"] == found["counts"]["tokens_in"] == 2078
        assert (found["slots"], found["targets"]["targets_split"]) == (
            64 * samples,
            15 + 0 + 4 + 1 + 10,
        )
    old = ["--micro-batch-size", 4, "--max-document-length", 256, "--overlong-policy", "truncate"]
    assert as_json(capsys, *argv, *old)["training"]["counts"]["tokens_kept"] == 3 * 256 + 11 + 65


def test_control_characters_of_file_names_are_escaped(tmp_path, capsys):
    """A data set of others may name its files so that they rewrite the terminal."""
    (tmp_path / "d").mkdir()
    answers(tmp_path / "d" / "\x1b[31mred.jsonl", [5, 5, 5])
    code, output = packing(capsys, *SFT, "--train-data-path", tmp_path / "d")
    assert code == 0 and "\x1b" not in output.out + output.err
    assert "(\\x1b[31mred.jsonl) read" in output.err
