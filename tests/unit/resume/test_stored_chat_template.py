"""A run continues with the chat template of its checkpoint, whose file may be gone."""

import json
import shutil
from pathlib import Path

import pytest

from megatron_packed.checkpoint.errors import CheckpointMismatchError
from megatron_packed.cli.export_trained import export_trained
from megatron_packed.config.errors import ConfigError
from megatron_packed.config.parser.parse import parse_with_sources
from megatron_packed.config.run import RunConfig
from megatron_packed.data.tokenizers.huggingface import HuggingFaceTokenizer
from megatron_packed.resume.stored_options import stored_options
from megatron_packed.training.from_python import train

MODEL = "--hybrid-layer-pattern - --hidden-size 16 --seq-length 128"
REST = "--lr 1e-2 --lr-decay-style constant --no-isolation-self-test --device cpu --sft --save-interval 2"
TEMPLATE = (
    "{{ strftime_now('%Y') }}{{ style }}{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{{ eos_token }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
CHAT = (
    "--chat-template own.jinja --chat-template-date 2024-05-06 --multi-turn last "
    '--chat-template-kwargs {"style":"brief"} --answer-end document'
)
BPE = "--tokenizer-type TrainedBPETokenizer --tokenizer-vocab-size 280"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Train two steps of four, and return the losses of the last two of a run that goes on."""
    monkeypatch.chdir(tmp_path)
    Path("own.jinja").write_text(TEMPLATE)
    for name, answer in (("talk", "I am fine."), ("other", "You are kind.")):
        turns = [{"role": "user", "content": "How?"}, {"role": "assistant", "content": answer}]
        lines = [json.dumps({"messages": turns * (1 + number)}) for number in range(6)]
        Path(f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    losses = trained(f"{MODEL} {BPE} {CHAT} --save whole")
    trained(f"{MODEL} {BPE} {CHAT} --save run --exit-interval 2")
    return losses


def words_of(more: str, data: str = "talk") -> list[str]:
    return [*REST.split(), "--train-iters", "4", "--data-path", f"{data}.jsonl", *more.split()]


def trained(more: str, data: str = "talk") -> list[float]:
    """Train, and return the losses of the last two steps."""
    records: list[dict] = []
    parsed = parse_with_sources(words_of(more, data), read_stored=stored_options)
    train(parsed.config, records.append)
    return [one["lm_loss"] for one in records if one.get("iteration", 0) > 2]


def test_the_template_and_its_settings_come_from_the_checkpoint(run: list[float]) -> None:
    Path("own.jinja").unlink()
    words = words_of("--load run --save run --use-checkpoint-args")
    found = parse_with_sources(words, read_stored=stored_options)
    given = RunConfig.from_args(words_of(f"{MODEL} {BPE} {CHAT} --load run --save run"))
    assert found.config.data == given.data and found.config.model == given.model
    assert "--chat-template own.jinja" in found.taken_options
    assert trained("--load run --save run --use-checkpoint-args") == run != []


def test_given_flags_find_the_template_of_the_checkpoint(run: list[float]) -> None:
    Path("own.jinja").unlink()
    shutil.copytree("run", "empty", ignore=shutil.ignore_patterns("step_*"))
    with pytest.raises(ConfigError, match=r"own.jinja: does not exist"):
        RunConfig.from_args(words_of(f"{MODEL} {BPE} {CHAT} --load empty --save empty"))
    assert trained(f"{MODEL} {BPE} {CHAT} --load run --save run") == run
    for step in (2, 4):
        assert Path(f"run/step_{step:08d}/template.jinja").read_text() == TEMPLATE


def test_a_changed_template_is_named_and_that_of_the_checkpoint_can_be_taken(
    run: list[float],
) -> None:
    Path("own.jinja").write_text(TEMPLATE.replace("<", "["))
    with pytest.raises(CheckpointMismatchError, match=r"text of --chat-template own.jinja has"):
        trained(f"{MODEL} {BPE} {CHAT} --load run --save run")
    assert trained("--load run --save run --use-checkpoint-args") == run


@pytest.mark.parametrize("start", ["--begin-phase two --load", "--pretrained-checkpoint"])
def test_other_data_gets_the_template_and_the_tokenizer(run: list[float], start: str) -> None:
    Path("own.jinja").unlink()
    trained(f"{start} run --save new --use-checkpoint-args", "other")
    [first, *_] = sorted(Path("new").glob("step_*"))
    for name in ("template.jinja", "tokenizer.json"):
        assert (first / name).read_bytes() == Path("run/step_00000002", name).read_bytes()


def test_an_export_has_the_template_whose_file_is_gone(run: list[float], tmp_path: Path) -> None:
    model = (
        "--hybrid-layer-pattern *- --hidden-size 16 --num-attention-heads 2 --seq-length 128 --swiglu "
        "--normalization RMSNorm --disable-bias-linear --position-embedding-type rope "
        "--untie-embeddings-and-output-weights"
    )
    trained(f"{model} {BPE} {CHAT} --save exported --exit-interval 2")
    Path("own.jinja").unlink()
    Path("talk.jsonl").unlink()
    shutil.rmtree(".megatron_packed_cache")
    export_trained("exported", tmp_path / "hf")
    tokenizer = HuggingFaceTokenizer(tmp_path / "hf")
    # The export adds defaults of --chat-template-kwargs.
    assert tokenizer.chat_template is not None and tokenizer.chat_template.endswith(TEMPLATE)
    text = Path("exported/step_00000002/tokenizer.json").read_text()
    assert (tmp_path / "hf" / "tokenizer.json").read_text() == text


def test_given_settings_and_runs_without_conversations_do_not_take_them(run: list[float]) -> None:
    def found(more: str) -> RunConfig:
        words = words_of(f"--load run --save new --use-checkpoint-args {more}")
        return parse_with_sources(words, read_stored=stored_options).config

    assert found("--chat-template-date 2020-01-01").data.chat_template_date == "2020-01-01"
    other = found("--sft-tokenizer-prompt-format identity --answer-end turn").data
    assert (other.chat_template, other.multi_turn) == (None, "last")
    words = [
        word for word in words_of("--load run --save new --use-checkpoint-args") if word != "--sft"
    ]
    plain = parse_with_sources(words, read_stored=stored_options).config.data
    assert (plain.chat_template, plain.tokenizer_type) == (None, "TrainedBPETokenizer")
