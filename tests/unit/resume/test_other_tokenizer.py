"""Weights whose token numbers have other texts are never used without a word.

A tokenizer that is trained on the data would be another one if the data is another one, although no
flag of it has changed. Checkpoints contain it, so later runs use it. Those of earlier versions do
not; another tokenizer is then refused, or named in a warning.
"""

import shutil
from pathlib import Path

import pytest

from megatron_packed.checkpoint.errors import CheckpointMismatchError
from megatron_packed.cli.main import main
from megatron_packed.config.exit_codes import ExitCode
from megatron_packed.config.run import RunConfig
from megatron_packed.data.tokenizers import bpe_training
from megatron_packed.data.tokenizers.base import ByteTokenizer, NullTokenizer, meaning_hash
from megatron_packed.data.tokenizers.exported_files import files_of_bytes
from megatron_packed.data.tokenizers.huggingface import HuggingFaceTokenizer
from megatron_packed.inputs.open_documents import build_tokenizer
from megatron_packed.training.from_python import train
from megatron_packed.training.trained_model import TrainedModel
from support.attached_files import remove_attached_files
from support.json_lines import write_texts

MODEL = (
    "--hybrid-layer-pattern *- --hidden-size 8 --num-attention-heads 2 --position-embedding-type rope --swiglu "
    "--normalization RMSNorm --disable-bias-linear --seq-length 64 --lr 1e-2 --no-isolation-self-test"
)
VOCAB_SIZE = 268
"""Size that both texts reach, so that the number of tokens does not tell the tokenizers apart."""
TRAINED_BPE = f"--tokenizer-type TrainedBPETokenizer --tokenizer-vocab-size {VOCAB_SIZE}"
WORDS = {"colours": "red green blue ", "numbers": "one two three "}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of two texts, and of a run on the first of them, also as of an earlier version."""
    folder = tmp_path_factory.mktemp("tokenizers")
    for name, words in WORDS.items():
        write_texts(folder / f"{name}.jsonl", [words * 9])
    assert run(folder, "colours", f"--train-iters 2 --save {folder}/run") is ExitCode.DONE
    shutil.copytree(folder / "run", folder / "earlier")
    remove_attached_files(folder / "earlier")
    other = RunConfig.from_args([*flags(folder, "numbers"), "--train-iters", "1"])
    build_tokenizer(other.data, None)  # fills the cache
    return folder


def flags(folder: Path, data: str, tokenizer: str = TRAINED_BPE) -> list[str]:
    places = f"--data-path {folder}/{data}.jsonl --data-cache-path {folder}/{data}"
    return f"{MODEL} {places} {tokenizer}".split()


def run(folder: Path, data: str, words: str, tokenizer: str = TRAINED_BPE) -> ExitCode:
    return train(RunConfig.from_args([*flags(folder, data, tokenizer), *words.split()]))


def tokenizer_of(folder: Path, data: str) -> str:
    """Return the flags of the tokenizer in the cache of some data, as a file."""
    (files,) = (path for path in (folder / data).glob("tokenizer-*") if path.is_dir())
    return f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {files}"


def test_a_phase_refuses_another_tokenizer_and_takes_the_same_one_from_a_file(
    folder: Path, tmp_path: Path
) -> None:
    phase = f"--load {folder}/earlier --begin-phase two --train-iters 3 --save {tmp_path}/own"
    with pytest.raises(CheckpointMismatchError, match=r"another tokenizer, .*: its options are"):
        run(folder, "numbers", phase)
    with pytest.raises(CheckpointMismatchError, match=r"another tokenizer, .*, was TrainedBPE"):
        run(folder, "numbers", phase, tokenizer_of(folder, "numbers"))
    assert run(folder, "numbers", phase, tokenizer_of(folder, "colours")) is ExitCode.DONE


@pytest.mark.parametrize("data", WORDS)
def test_other_uses_of_the_weights_warn(
    data: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fine-tuning, text generation and an export warn, and only with another tokenizer."""
    begin = f"--finetune --load {folder}/earlier --train-iters 1 --save {tmp_path}/own"
    assert run(folder, data, begin) is ExitCode.DONE
    warned = ["was trained with another tokenizer" in capsys.readouterr().out]
    ask = ["--load", f"{folder}/earlier", "--prompt", "one", "--max-new-tokens", "1"]
    assert main(["generate", *flags(folder, data), *ask]) == 0
    warned.append("was trained with another tokenizer" in capsys.readouterr().err)
    files = tokenizer_of(folder, data).split()[-1]
    export = ["--to-hf", f"{tmp_path}/hf", "--load", f"{folder}/run", "--tokenizer-model", files]
    assert main(["convert", *export]) == 0
    warned.append("was trained with another tokenizer" in capsys.readouterr().err)
    assert warned == [data == "numbers"] * 3


@pytest.mark.parametrize(
    "start", ["--begin-phase two --load", "--finetune --load", "--pretrained-checkpoint"]
)
def test_later_runs_on_other_data_use_the_tokenizer_of_the_checkpoint(
    start: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    begin = f"{start} {folder}/run --train-iters 3 --save {tmp_path}/own"
    begin += f" --data-cache-path {tmp_path}/cache"
    assert run(folder, "numbers", begin) is ExitCode.DONE
    printed = capsys.readouterr().out
    assert "another tokenizer" not in printed
    assert f"tokenizer: the TrainedBPETokenizer of {folder}/run/step_00000002" in printed
    assert list((tmp_path / "cache").glob("tokenizer-*")) == []  # none was trained
    attached = f"step_{3:08d}/tokenizer.json"
    expected = (folder / "run" / "step_00000002" / "tokenizer.json").read_bytes()
    assert (tmp_path / "own" / attached).read_bytes() == expected
    other = f"--tokenizer-type TrainedBPETokenizer --tokenizer-vocab-size {VOCAB_SIZE + 1}"
    if start.startswith("--begin"):
        with pytest.raises(CheckpointMismatchError, match=r"was trained with another tokenizer"):
            run(folder, "numbers", begin, other)


def test_a_run_resumes_without_its_cache_as_if_it_had_not_stopped(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses: dict[str, list[float]] = {}
    shutil.copy(folder / "colours.jsonl", tmp_path)
    for name in ("whole", "resumed"):
        records: list[dict] = []
        how = ["--async-save"] if name == "whole" else []
        places = f"--save {tmp_path}/{name} --load {tmp_path}/{name} --save-interval 2"
        words = [*flags(tmp_path, "colours"), *places.split(), *how, "--train-iters", "4"]
        if name == "resumed":
            train(RunConfig.from_args([*words, "--exit-interval", "2"]))
            shutil.rmtree(tmp_path / "colours")
            monkeypatch.setattr(bpe_training, "train_bpe", pytest.fail)
        train(RunConfig.from_args(words), records.append)
        losses[name] = [one["lm_loss"] for one in records if one.get("iteration", 0) > 2]
    assert losses["whole"] == losses["resumed"] and len(losses["whole"]) == 2
    whole, resumed = (tmp_path / name / "step_00000004" for name in losses)
    for file in ("rank_00000.safetensors", "tokenizer.json", "tokenizer_config.json"):
        saved, other = ((path / file).read_bytes()[-1000:] for path in (whole, resumed))
        assert saved == other


def test_a_model_in_python_warns(folder: Path) -> None:
    files = tokenizer_of(folder, "numbers").split()[-1]
    with pytest.warns(UserWarning, match="was trained with another tokenizer"):
        TrainedModel.load(folder / "run", tokenizer=files)


def test_a_tokenizer_and_its_export_have_the_same_hash(tmp_path: Path) -> None:
    for name, text in files_of_bytes(ByteTokenizer(), None).items():
        (tmp_path / name).write_text(text)
    assert meaning_hash(HuggingFaceTokenizer(tmp_path)) == meaning_hash(ByteTokenizer())


def test_vocabularies_of_one_size_with_other_texts_have_other_hashes(folder: Path) -> None:
    trained = [HuggingFaceTokenizer(tokenizer_of(folder, data).split()[-1]) for data in WORDS]
    assert [tokenizer.vocab_size for tokenizer in trained] == [VOCAB_SIZE] * 2
    assert meaning_hash(trained[0]) != meaning_hash(trained[1])
    numbers = NullTokenizer(ByteTokenizer.vocab_size)
    assert meaning_hash(numbers) != meaning_hash(ByteTokenizer())
