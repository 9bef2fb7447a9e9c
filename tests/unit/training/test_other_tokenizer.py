"""Weights whose token numbers have other texts are never used without a word.

A tokenizer that is trained on the data is another one if the data is another one, although no flag
of it has changed.
"""

import json
from pathlib import Path

import pytest

from megatron_packed.checkpoint.errors import CheckpointMismatchError
from megatron_packed.cli.main import main
from megatron_packed.config.run import RunConfig
from megatron_packed.data.tokenizers.base import ByteTokenizer, meaning_hash
from megatron_packed.data.tokenizers.exported_files import files_of_bytes
from megatron_packed.data.tokenizers.huggingface import HuggingFaceTokenizer
from megatron_packed.training.exit_codes import ExitCode
from megatron_packed.training.from_python import train
from megatron_packed.training.trained_model import TrainedModel

MODEL = (
    "--hybrid-layer-pattern *- --hidden-size 8 --num-attention-heads 2 --position-embedding-type rope --swiglu "
    "--normalization RMSNorm --disable-bias-linear --seq-length 64 --lr 1e-2 --no-isolation-self-test"
)
TRAINED_BPE = "--tokenizer-type TrainedBPETokenizer --tokenizer-vocab-size 280"
WORDS = {"colours": "red green blue ", "numbers": "one two three "}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of two texts, and of a run on the first of them."""
    folder = tmp_path_factory.mktemp("tokenizers")
    for name, words in WORDS.items():
        (folder / f"{name}.jsonl").write_text(json.dumps({"text": words * 9}) + "\n")
    assert run(folder, "colours", f"--train-iters 2 --save {folder}/run") is ExitCode.DONE
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
    phase = f"--load {folder}/run --begin-phase two --train-iters 3 --save {tmp_path}/own"
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
    begin = f"--finetune --load {folder}/run --train-iters 1 --save {tmp_path}/own"
    assert run(folder, data, begin) is ExitCode.DONE
    warned = ["was trained with another tokenizer" in capsys.readouterr().out]
    ask = ["--load", f"{folder}/run", "--prompt", "one", "--max-new-tokens", "1"]
    assert main(["generate", *flags(folder, data), *ask]) == 0
    warned.append("was trained with another tokenizer" in capsys.readouterr().err)
    files = tokenizer_of(folder, data).split()[-1]
    export = ["--to-hf", f"{tmp_path}/hf", "--load", f"{folder}/run", "--tokenizer-model", files]
    assert main(["convert", *export]) == 0
    warned.append("was trained with another tokenizer" in capsys.readouterr().err)
    assert warned == [data == "numbers"] * 3


def test_a_model_in_python_warns(folder: Path) -> None:
    files = tokenizer_of(folder, "numbers").split()[-1]
    with pytest.warns(UserWarning, match="was trained with another tokenizer"):
        TrainedModel.load(folder / "run", tokenizer=files)


def test_a_tokenizer_and_its_export_have_the_same_hash(tmp_path: Path) -> None:
    for name, text in files_of_bytes(ByteTokenizer(), None).items():
        (tmp_path / name).write_text(text)
    assert meaning_hash(HuggingFaceTokenizer(tmp_path)) == meaning_hash(ByteTokenizer())
