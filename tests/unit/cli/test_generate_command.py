"""``megatron-packed generate --load DIR`` alone answers as the run was trained.

Data, cache and template file are deleted before, and the working directory is another one.
"""

import base64
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

from megatron_packed.checkpoint.sealed_json import seal, unseal
from megatron_packed.cli.main import main
from megatron_packed.config.run import RunConfig
from megatron_packed.inputs.open_documents import build_tokenizer, open_documents
from megatron_packed.models import generate as generation
from megatron_packed.training.from_python import train
from megatron_packed.training.trained_model import TrainedModel
from support.attached_files import remove_attached_files
from support.data_helpers import byte_level, save_tokenizer
from support.json_lines import write_texts

MODEL = (
    "--hybrid-layer-pattern *- --hidden-size 16 --num-attention-heads 2 --swiglu --seq-length 256 "
    "--position-embedding-type rope --normalization RMSNorm --disable-bias-linear"
)
LOOP = "--lr 1e-2 --train-iters 1 --no-isolation-self-test --device cpu"
QUESTION, ANSWER = "How are you?", "I am fine."
TEXT = f"Hello there. {QUESTION} {ANSWER}"
TEMPLATE = (
    "{% if style is defined %}{{ style }}{% endif %}{{ strftime_now('%Y') }}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
MARKED = "<|im_start|>user\nHow are you?<|im_end|>\n"
BPE = "--tokenizer-type TrainedBPETokenizer --tokenizer-vocab-size 280"


def save_huggingface(folder: Path) -> str:
    engine = byte_level(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    save_tokenizer(folder / "hf", engine, eos_token="<|endoftext|>")
    return f"HuggingFaceTokenizer --tokenizer-model {folder}/hf"


def save_gpt2(folder: Path) -> str:
    (folder / "gpt2").mkdir()
    byte_level(["<|endoftext|>"]).model.save(str(folder / "gpt2"))
    files = folder / "gpt2"
    return f"GPT2BPETokenizer --vocab-file {files}/vocab.json --merge-file {files}/merges.txt"


def save_tiktoken(folder: Path) -> str:
    pytest.importorskip("tiktoken")
    lines = (base64.b64encode(bytes([value])) + b" %d\n" % value for value in range(256))
    (folder / "all.tiktoken").write_bytes(b"".join(lines))
    more = "--tiktoken-num-special-tokens 20 --tiktoken-pattern v1"
    names = "--tokenizer-special-tokens <unk> <s> </s> <|im_start|> <|im_end|>"
    return f"TikTokenizer --tokenizer-model {folder}/all.tiktoken {more} {names}"


def save_sentencepiece(folder: Path) -> str:
    pytest.importorskip("sentencepiece").SentencePieceTrainer.train(
        sentence_iterator=iter([TEXT]),
        model_prefix=folder / "sp",
        vocab_size=290,
        hard_vocab_limit=False,
        minloglevel=2,
        byte_fallback=True,
    )
    more = "--tokenizer-special-tokens <extra>"
    return f"SentencePieceTokenizer --tokenizer-model {folder}/sp.model {more}"


TOKENIZERS: dict[str, Callable[[Path], str]] = {
    "ByteTokenizer": lambda folder: "ByteTokenizer",
    "TrainedBPETokenizer": lambda folder: BPE.removeprefix("--tokenizer-type "),
    "HuggingFaceTokenizer": save_huggingface,
    "GPT2BPETokenizer": save_gpt2,
    "TikTokenizer": save_tiktoken,
    "SentencePieceTokenizer": save_sentencepiece,
    "NullTokenizer": lambda folder: "NullTokenizer --null-tokenizer-eod-id 7 --vocab-size 100",
}
CHATS = {
    "a template file": "--chat-template {file} --chat-template-date 2024-05-06",
    "variables": """--chat-template {file} --chat-template-date 2025-01-02
        --chat-template-kwargs {{"style":"brief"}} --answer-end document""",
    "the built-in template": "--chat-template chatml",
    "the template of the tokenizer": "",
    "a prompt format": "--sft-tokenizer-prompt-format nemotron-h-aligned --tokenizer-type"
    " TikTokenizer",
}


class Asked(NamedTuple):
    """Call of the generation."""

    prompts: list[list[int]]
    ends: frozenset[int]
    dtype: torch.dtype


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Asked]:
    """Return the list of calls, which grows while the test generates."""
    calls: list[Asked] = []
    original = generation.generate

    def recorded(model, prompts, *arguments, ends, **options):
        calls.append(Asked(prompts, ends, model.dtype))
        return original(model, prompts, *arguments, ends=ends, **options)

    monkeypatch.setattr(generation, "generate", recorded)
    return calls


class Trained(NamedTuple):
    """A run of one step, whose data is gone."""

    run: Path
    flags: list[str]
    document: list[int]
    """Tokens of the first document."""
    prompt: list[int]
    """Tokens of it before the first target that is learned; the first token never is one."""


class Printed(NamedTuple):
    """Standard output and standard error of a command."""

    out: str
    err: str


def trained(folder: Path, flags: list[str], line: dict[str, object]) -> Trained:
    """Train a step on one line, then delete the line, its tokens and the template file."""
    data = folder / "data"
    data.mkdir(exist_ok=True)
    (data / "line.jsonl").write_text(json.dumps(line) + "\n")
    (data / "own.jinja").write_text(TEMPLATE)
    flags = [*MODEL.split(), *LOOP.split(), *flags, "--data-path", f"{data}/line.jsonl"]
    config = RunConfig.from_args([*flags, "--save", f"{folder}/run"])
    train(config)
    tokenizer = build_tokenizer(config.data, config.model.vocab_size)
    documents = open_documents(config.data, tokenizer, validates=False, show=False)
    tokens, targets = documents.train.document(0)
    first = int(np.flatnonzero(targets)[0])
    shutil.rmtree(data)
    return Trained(folder / "run", flags, tokens.tolist(), tokens[:first].tolist())


def edit_config(run: Path, edit: Callable[[dict[str, dict]], None]) -> None:
    """Change the stored configuration of the only checkpoint of a run."""
    [path] = run.glob("step_*/manifest.json")
    fields = unseal(path.read_bytes(), path)
    edit(fields["metadata"]["config"])
    path.write_bytes(seal(fields))


def answer(capsys: pytest.CaptureFixture[str], run: Path, prompt: str, *more: str) -> Printed:
    """Return what ``generate`` prints."""
    capsys.readouterr()
    words = ["generate", "--load", str(run), "--device", "cpu", "--prompt", prompt]
    assert main([*words, "--max-new-tokens", "4", *more]) == 0
    return Printed(*capsys.readouterr())


@pytest.mark.parametrize(
    ("kind", "precision"),
    [*((kind, "float32") for kind in TOKENIZERS), ("ByteTokenizer", "bf16")],
)
def test_each_tokenizer_and_precision_comes_from_the_checkpoint(
    kind: str,
    precision: str,
    tmp_path: Path,
    asked: list[Asked],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = "1 2 3 4 5" if kind == "NullTokenizer" else TEXT
    flags = ["--tokenizer-type", *TOKENIZERS[kind](tmp_path).split()]
    flags += ["--bf16"] if precision == "bf16" else []
    found = trained(tmp_path, flags, {"text": text})
    fresh = tmp_path / "fresh"
    fresh.mkdir()
    monkeypatch.chdir(fresh)
    out, err = answer(capsys, found.run, text)
    assert err == f"{found.run}/step_00000001: {kind}, {precision}\n"
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    assert asked == [Asked([found.document[:-1]], frozenset(found.document[-1:]), dtype)]
    again = TrainedModel.load(found.run, device="cpu").generate(text, max_new_tokens=4)
    assert again == out.strip()
    assert list(fresh.iterdir()) == []
    if kind == "NullTokenizer":
        assert main(["generate", "--load", str(found.run), "--prompt", "seven"]) == 3
        assert "'seven' is not a number below 100" in capsys.readouterr().err


@pytest.mark.parametrize("chat", CHATS)
def test_the_chat_format_comes_from_the_checkpoint(
    chat: str,
    tmp_path: Path,
    asked: list[Asked],
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = CHATS[chat].format(file=tmp_path / "data" / "own.jinja").split()
    if flags[-1:] == ["TikTokenizer"]:
        flags[-1:] = save_tiktoken(tmp_path).split()
    else:
        flags += BPE.split()
    messages = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": ANSWER},
    ]
    found = trained(tmp_path, ["--sft", *flags], {"messages": messages})
    _, err = answer(capsys, found.run, QUESTION)
    assert err.startswith(f"{found.run}/step_00000001: ") and err.count("\n") <= 2
    [call] = asked
    [prompt] = call.prompts
    assert prompt == found.document[: len(prompt)] and len(prompt) > len(QUESTION.split())
    if chat != "a prompt format":  # there, all tokens are targets
        assert prompt == found.prompt
    if chat == "a template file":
        assert "2024" in TrainedModel.load(found.run, device="cpu").tokenizer.decode(prompt)
    ends_at_document = chat == "variables"
    assert (found.document[-1] in call.ends) or not ends_at_document


def test_special_tokens_in_a_text_act_as_in_the_training(
    tmp_path: Path, asked: list[Asked], capsys: pytest.CaptureFixture[str]
) -> None:
    found = trained(tmp_path, ["--special-tokens-in-text", "tokens"], {"text": MARKED})
    answer(capsys, found.run, MARKED)
    answer(capsys, found.run, MARKED, "--special-tokens-in-text", "letters")
    as_tokens, as_letters = (call.prompts[0] for call in asked)
    assert as_tokens == found.document[:-1]
    assert len(as_letters) == len(MARKED) > len(as_tokens)


def test_given_flags_win_and_contradictions_are_refused_by_name(
    tmp_path: Path, asked: list[Asked], capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--tokenizer-type", *save_huggingface(tmp_path).split()]
    found = trained(tmp_path, flags, {"text": TEXT})
    (tmp_path / "hf").rename(tmp_path / "moved")
    words = ["generate", "--load", str(found.run), "--prompt", TEXT, "--max-new-tokens", "1"]
    assert main(words) == 3
    assert f"{tmp_path}/hf" in capsys.readouterr().err
    moved = [*words, "--tokenizer-model", f"{tmp_path}/moved"]
    assert main(moved) == 0
    assert asked[-1].prompts == [found.document[:-1]]
    for contradiction, code, sentence in (
        ("--hidden-size 32", 4, "--hidden-size is 32, and the checkpoint was made with 16"),
        (
            "--norm-epsilon 1e-6",
            4,
            "--norm-epsilon is 1e-06, and the checkpoint was made with 1e-05",
        ),
        ("--qk-layernorm", 4, "--qk-layernorm is on, and the checkpoint was made with off"),
        (
            "--bf16",
            4,
            "was trained without --bf16, and a load does not change precisions; leave it",
        ),
        ("--chat-template chatml", 2, "it applies to conversations only"),
        ("--tokenizer-type GPT2BPETokenizer", 2, "GPT2BPETokenizer does not use a model file"),
        ("--hiden-size 16", 2, "--hidden-size"),
    ):
        capsys.readouterr()
        try:
            assert main([*moved, *contradiction.split()]) == code
        except SystemExit as ended:
            assert ended.code == code
        err = capsys.readouterr().err
        # The line with the precision is that of a checkpoint that was loaded.
        assert sentence in err and ", bf16" not in err and "float32" not in err
    assert main([*moved, "--hidden-size", "32", "--use-checkpoint-args"]) == 0
    capsys.readouterr()
    assert main(["generate", "--prompt", TEXT]) == 2
    assert "--load is required" in capsys.readouterr().err


def test_relative_paths_of_a_tokenizer_are_those_of_the_training(
    tmp_path: Path,
    asked: list[Asked],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    save_huggingface(Path())
    flags = "--tokenizer-type HuggingFaceTokenizer --tokenizer-model hf"
    found = trained(tmp_path, flags.split(), {"text": TEXT})
    fresh = tmp_path / "fresh"
    fresh.mkdir()
    monkeypatch.chdir(fresh)
    answer(capsys, found.run, TEXT)
    assert asked[0].prompts == [found.document[:-1]]
    assert TrainedModel.load(found.run, device="cpu").config.data.tokenizer_model == str(
        tmp_path / "hf"
    )


def test_an_args_file_of_the_run_needs_no_part_of_the_training(
    tmp_path: Path, asked: list[Asked], capsys: pytest.CaptureFixture[str]
) -> None:
    """Flags of the loop, the layout and the data are not used, so they may disagree."""
    found = trained(tmp_path, BPE.split(), {"text": TEXT})
    (tmp_path / "run.args").write_text("\n".join(found.flags))
    more = "--valid-data-path nowhere --tensor-model-parallel-size 2 --context-parallel-size 4"
    out, err = answer(capsys, found.run, TEXT, f"@{tmp_path}/run.args", *more.split())
    assert err.count("\n") == 1
    assert asked[-1].prompts == [found.document[:-1]]
    assert out == answer(capsys, found.run, TEXT).out


def test_a_damaged_tokenizer_is_named_and_the_checkpoint_before_it_is_used(
    tmp_path: Path, asked: list[Asked], capsys: pytest.CaptureFixture[str]
) -> None:
    found = trained(tmp_path, BPE.split(), {"text": TEXT})
    step, other = found.run / "step_00000001", tmp_path / "copy"
    shutil.copytree(found.run, other)
    file = other / step.name / "tokenizer.json"
    content = file.read_bytes()
    for damage in (content[:-1], content.replace(b"h", b"k", 1), None):
        file.unlink(missing_ok=True)
        if damage is not None:
            file.write_bytes(damage)
        assert main(["generate", "--load", str(other), "--prompt", TEXT]) == 4
        err = capsys.readouterr().err
        assert f"{file}" in err and "expected" in err and "Traceback" not in err
        assert asked == []


def test_checkpoints_of_earlier_versions_find_their_tokenizer_in_the_cache(
    tmp_path: Path, asked: list[Asked], capsys: pytest.CaptureFixture[str]
) -> None:
    write_texts(tmp_path / "kept.jsonl", [TEXT])
    flags = [*MODEL.split(), *LOOP.split(), *BPE.split(), "--data-path", f"{tmp_path}/kept.jsonl"]
    train([*flags, "--save", f"{tmp_path}/run"])
    answer(capsys, tmp_path / "run", TEXT)
    remove_attached_files(tmp_path / "run")
    answer(capsys, tmp_path / "run", TEXT)
    assert asked[0] == asked[1]
    (tmp_path / "kept.jsonl").unlink()
    assert main(["generate", "--load", f"{tmp_path}/run", "--prompt", TEXT]) == 3
    assert "kept.jsonl" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_layers_that_cannot_run_here_are_replaced_unless_their_flag_is_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = trained(tmp_path, ["--bf16"], {"text": TEXT})
    expected = answer(capsys, found.run, TEXT).out
    name = "transformer_engine"
    edit_config(found.run, lambda config: config["training"].update(transformer_impl=name))
    assert answer(capsys, found.run, TEXT).out == expected
    assert TrainedModel.load(found.run).config.training.transformer_impl == "local"
    words = ["generate", "--load", str(found.run), "--prompt", TEXT, "--transformer-impl", name]
    assert main(words) == 2
    assert "TransformerEngine runs on CUDA GPUs only; give local" in capsys.readouterr().err


def test_converted_weights_need_the_name_of_a_tokenizer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = trained(tmp_path, ["--vocab-size", "300"], {"text": TEXT})

    def convert(config: dict[str, dict]) -> None:
        for name in config.keys() - {"model", "training"}:
            del config[name]

    edit_config(found.run, convert)
    words = ["generate", "--load", str(found.run), "--prompt", TEXT, "--max-new-tokens", "1"]
    with pytest.raises(SystemExit):
        main(words)
    assert "holds converted weights, which name no tokenizer" in capsys.readouterr().err
    assert main([*words, "--tokenizer-type", "TrainedBPETokenizer"]) == 2
    assert "--data-path is required" in capsys.readouterr().err
    assert main([*words, "--tokenizer-type", "ByteTokenizer"]) == 0
