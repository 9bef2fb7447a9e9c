"""Tokenizer in a checkpoint for Megatron, where ``--use-checkpoint-args`` looks for it there."""

import shutil
from argparse import Namespace
from pathlib import Path

import pytest
from torch.distributed import checkpoint
from torch.distributed.checkpoint import FileSystemReader

from megatron_packed.cli import export_for_megatron
from megatron_packed.cli.main import main
from megatron_packed.data.tokenizers.base import ByteTokenizer, meaning_hash
from megatron_packed.data.tokenizers.huggingface import HuggingFaceTokenizer
from megatron_packed.models.convert.megatron.folders import find
from megatron_packed.models.convert.megatron.import_megatron import from_megatron
from megatron_packed.training.from_python import train
from support.data_helpers import byte_level, save_tokenizer
from support.json_lines import write_texts

FLAGS = """--hybrid-layer-pattern - --hidden-size 16 --num-attention-heads 2 --seq-length 64 --lr 1e-2
    --train-iters 1 --no-isolation-self-test --device cpu --data-path line.jsonl --save run"""
HUGGING_FACE = "--tokenizer-type HuggingFaceTokenizer --tokenizer-model"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_texts(Path("line.jsonl"), ["1 2 3 4 5 6"])
    engine = byte_level(["<|endoftext|>"])
    save_tokenizer(Path("hf"), engine, eos_token="<|endoftext|>")
    engine.model.save("hf")


def stored_args(folder: Path) -> Namespace:
    """Return the options that torch's own reader finds in a checkpoint of Megatron."""
    state: dict[str, list] = {"common_state/shard_0_1": [None]}
    checkpoint.load(state, storage_reader=FileSystemReader(find(folder)), no_dist=True)
    return state["common_state/shard_0_1"][0]["args"]


def exported(capsys: pytest.CaptureFixture[str], tokenizer: str) -> tuple[Namespace, str]:
    """Train a step and export it; return the options for Megatron and the printed sentence."""
    train([*FLAGS.split(), *tokenizer.split()])
    capsys.readouterr()
    assert main(["convert", "--to-megatron", "theirs", "--load", "run"]) == 0
    return stored_args(Path("theirs")), capsys.readouterr().out


@pytest.mark.parametrize(
    "tokenizer, options",
    {
        f"{HUGGING_FACE} hf/tokenizer.json": {
            "tokenizer_type": "HuggingFaceTokenizer",
            "tokenizer_model": "{folder}/hf",
        },
        f"{HUGGING_FACE} hf": {"tokenizer_model": "{folder}/hf"},
        "--vocab-file hf/vocab.json --merge-file hf/merges.txt": {
            "tokenizer_type": "GPT2BPETokenizer",
            "vocab_file": "{folder}/hf/vocab.json",
            "merge_file": "{folder}/hf/merges.txt",
        },
        "--tokenizer-type NullTokenizer --vocab-size 100": {
            "tokenizer_type": "NullTokenizer",
            "vocab_size": 100,
        },
    }.items(),
)
def test_options_of_the_tokenizer_are_stored(tokenizer, options, tmp_path, capsys):
    args, printed = exported(capsys, tokenizer)
    for name, value in options.items():
        wanted = value.format(folder=tmp_path) if isinstance(value, str) else value
        assert getattr(args, name) == wanted
    sizes = (args.vocab_size, args.unpadded_vocab_size, args.padded_vocab_size)
    assert sizes[0] == sizes[1] < sizes[2] and sizes[2] % 128 == 0
    assert f"Megatron takes its tokenizer, {args.tokenizer_type}" in printed
    assert ("--vocab-size 100" in printed) == ("NullTokenizer" in tokenizer)
    # The vocabulary without padding comes back, which the options of the run do not contain.
    assert from_megatron(tmp_path / "theirs", tmp_path / "again").model.vocab_size == sizes[0]


@pytest.mark.parametrize(
    "kind", ["ByteTokenizer", "TrainedBPETokenizer --tokenizer-vocab-size 270"]
)
def test_files_of_a_tokenizer_that_megatron_lacks_are_written(kind, tmp_path, capsys):
    args, _ = exported(capsys, f"--tokenizer-type {kind}")
    assert args.tokenizer_type == "HuggingFaceTokenizer"
    assert args.tokenizer_model == f"{tmp_path}/theirs/tokenizer"
    written = HuggingFaceTokenizer(args.tokenizer_model)
    attached = Path("run/step_00000001")
    is_trained = (attached / "tokenizer.json").is_file()
    own = HuggingFaceTokenizer(attached) if is_trained else ByteTokenizer()
    assert is_trained == ("Trained" in kind) and meaning_hash(written) == meaning_hash(own)
    assert args.vocab_size == own.vocab_size


def test_weights_are_written_without_the_tokenizer(tmp_path, capsys):
    train([*FLAGS.split(), *HUGGING_FACE.split(), "hf"])
    shutil.rmtree("hf")
    assert main(["convert", "--to-megatron", "theirs", "--load", "run"]) == 0
    args = stored_args(Path("theirs"))
    assert args.tokenizer_model == str(Path("hf").absolute()) and not hasattr(args, "vocab_size")
    from_megatron(tmp_path / "theirs", tmp_path / "converted")
    capsys.readouterr()
    assert main(["convert", "--to-megatron", "back", "--load", "converted"]) == 0
    assert "names no tokenizer; give Megatron --tokenizer-type" in capsys.readouterr().out
    assert not hasattr(stored_args(Path("back")), "tokenizer_type")


@pytest.mark.parametrize(
    "path, name", [("hf://A/B", "A/B"), ("hf://A/B/tokenizer.json", "A/B"), ("hf://A/B@main", None)]
)
def test_paths_of_the_hub(path, name):
    assert export_for_megatron._path(path) == name
