"""Export of fine-tuned models: template and ends of the training take the place of the original's."""

import json
import shutil

import pytest
import torch

from megatron_packed.cli.export_tuned import export_tuned
from megatron_packed.cli.main import main
from megatron_packed.data.errors import DataError
from megatron_packed.data.tokenizers.base import ByteTokenizer
from megatron_packed.data.tokenizers.huggingface import HuggingFaceTokenizer
from megatron_packed.data.tokenizers.served_template import served_template
from megatron_packed.inputs.prompts import encode_prompts, texts
from megatron_packed.models.convert.answer_ends import ends_of, with_ids
from megatron_packed.models.convert.huggingface_files import SINGLE
from megatron_packed.models.convert.trained_config import SpecialIds
from megatron_packed.training.from_python import train
from megatron_packed.training.trained_model import TrainedModel
from support.converted_model import change_fields, contents, from_hf, write_model
from support.data_helpers import byte_level
from support.json_lines import read_json

TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MESSAGES = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
CHATML = """\
{%- for m in messages -%}
{{ '<|im_start|>' + m.role + mark | default('') + '\\n' }}
{%- if m.role == 'assistant' -%}{%- generation -%}{{ m.content + '<|im_end|>' }}{%- endgeneration -%}
{%- else -%}{{ m.content + '<|im_end|>' }}{%- endif -%}
{{ '\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant' + mark | default('') + '\\n' }}{%- endif -%}
"""
DATED = CHATML + "{%- if strftime_now is defined -%}{{ strftime_now('%Y') }}{%- endif -%}"
PLAIN = CHATML.replace("{%- generation -%}", "").replace("{%- endgeneration -%}", "")
GENERATION = '{"eos_token_id": 0, "temperature": 0.6}'


def write_base(folder, tokens=TOKENS, template=None):
    """Write a Llama model with a tokenizer whose only end is that of a document."""
    engine = byte_level(tokens)
    write_model(folder, "llama", vocab_size=engine.get_vocab_size() + 4, max_file_bytes=10**9)
    change_fields(folder, eos_token_id=0)
    (folder / "generation_config.json").write_text(GENERATION)
    write_tokenizer(folder, tokens, template)
    return folder


def write_tokenizer(folder, tokens=TOKENS, template=None):
    folder.mkdir(exist_ok=True)
    byte_level(tokens).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>", "a": 1}')
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


def tune(base, folder, *flags, sft=True, tokenizer=None):
    """Convert a base and fine-tune it for one step; return the checkpoints."""
    weights, run = folder / "weights", folder / "run"
    if not weights.exists():
        assert from_hf(base, weights) == 0
    data = folder / "data.jsonl"
    line = {"messages": MESSAGES} if sft else {"text": "a b"}
    data.write_text((json.dumps(line) + "\n") * 4)
    argv = [f"@{weights / 'model.args'}", "--pretrained-checkpoint", weights, "--save", run]
    argv += ["--data-path", data, "--data-cache-path", folder / "cache", "--seq-length", 64]
    argv += ["--global-batch-size", 2, "--train-iters", 1, "--lr", 0.01, "--device", "cpu"]
    argv += ["--no-isolation-self-test", *["--sft"] * sft, *flags]
    argv += [] if tokenizer is None else ["--tokenizer-model", tokenizer]
    train(list(map(str, argv)))
    return run


def export(run, base, out, **more):
    return export_tuned(run, out, base / "config.json", base=base, **more)


@pytest.fixture
def base(tmp_path):
    return write_base(tmp_path / "base")


@pytest.fixture
def template(tmp_path):
    (tmp_path / "my.jinja").write_text(CHATML)
    return tmp_path / "my.jinja"


def test_template_and_ends_of_the_training_replace_those_of_the_base(base, template, tmp_path):
    transformers = pytest.importorskip("transformers")
    kwargs = '{"mark": "!"}'
    run = tune(base, tmp_path, "--chat-template", template, "--chat-template-kwargs", kwargs)
    out = tmp_path / "out"
    found = export(run, base, out)
    assert found.sentences == (
        "Unlike the original: the chat template is that of the training; answers end at <|im_end|> or "
        "<|endoftext|> (eos_token_id). --keep-base-template keeps the original's template.",
    )
    assert found.warning is None
    config = read_json(out / "config.json")
    assert config == {
        **read_json(base / "config.json"),
        "eos_token_id": [2, 0],
    }
    generation = read_json(out / "generation_config.json")
    assert generation == {"eos_token_id": [2, 0], "temperature": 0.6}
    settings = read_json(out / "tokenizer_config.json")
    assert settings.pop("chat_template") == (out / "chat_template.jinja").read_text()
    assert settings == read_json(base / "tokenizer_config.json")
    assert "generation" not in (out / "chat_template.jinja").read_text().replace("generation_", "")
    theirs = transformers.AutoTokenizer.from_pretrained(out)
    assert theirs.apply_chat_template(MESSAGES, tokenize=False) == (
        "<|im_start|>user!\na<|im_end|>\n<|im_start|>assistant!\nb<|im_end|>\n"
    )
    read = transformers.GenerationConfig.from_pretrained(out)
    assert read.eos_token_id == [2, 0] and read.temperature == 0.6
    before, after = contents(base), contents(out)
    assert before.keys() == after.keys()
    assert not all(torch.equal(before[name], after[name]) for name in before)


def test_the_template_of_the_base_may_be_kept(base, template, tmp_path, capsys):
    (base / "chat_template.jinja").write_text(PLAIN + "!")
    run = tune(base, tmp_path, "--chat-template", template)
    argv = ["convert", "--to-hf", tmp_path / "out", "--load", run, "--hf-base", base]
    assert main([*map(str, argv), "--keep-base-template"]) == 0
    for name in ("chat_template.jinja", "tokenizer_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (base / name).read_bytes()
    assert read_json(tmp_path / "out" / "config.json")["eos_token_id"] == [2, 0]
    said = capsys.readouterr().out
    assert "The chat template is the original's (--keep-base-template); the training had" in said
    assert (
        "Unlike the original: answers end at <|im_end|> or <|endoftext|> (eos_token_id).\n" in said
    )


def test_files_that_say_the_same_stay_as_they_are(tmp_path):
    """The model's own template, and ends that the base has: each file keeps every byte."""
    base = write_base(tmp_path / "base", template=CHATML)
    (base / "generation_config.json").write_text('{"eos_token_id": [1, 0, 2]}')
    (base / "additional_chat_templates").mkdir()
    (base / "additional_chat_templates" / "tool_use.jinja").write_text(CHATML)
    run = tune(base, tmp_path, "--chat-template-kwargs", '{"unused": 1}')
    assert export(run, base, tmp_path / "out").sentences == ()
    names = {path.relative_to(base) for path in base.rglob("*") if path.is_file()}
    assert names == {p.relative_to(tmp_path / "out") for p in (tmp_path / "out").rglob("*.*")}
    for name in names - {tmp_path.relative_to(tmp_path) / SINGLE}:
        assert (tmp_path / "out" / name).read_bytes() == (base / name).read_bytes(), name


def test_a_run_on_texts_changes_no_file(base, tmp_path):
    run = tune(base, tmp_path, sft=False)
    assert export(run, base, tmp_path / "out").sentences == ()
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (base / name).read_bytes()
    assert not (tmp_path / "out" / "chat_template.jinja").exists()


def test_a_run_with_another_tokenizer_exports_its_files(base, tmp_path):
    """Tokens that a user added are tokens of the export, too."""
    other = write_tokenizer(tmp_path / "other", (*TOKENS, "<extra>"), CHATML)
    (base / "special_tokens_map.json").write_text("{}")
    run = tune(base, tmp_path, tokenizer=other)
    [sentence] = export(run, base, tmp_path / "out").sentences
    assert sentence.startswith(
        "Unlike the original: the tokenizer is that of the training; the chat"
    )
    out = tmp_path / "out"
    assert (out / "tokenizer.json").read_bytes() == (other / "tokenizer.json").read_bytes()
    assert not (out / "special_tokens_map.json").exists()
    assert "generation -" not in (out / "chat_template.jinja").read_text()


@pytest.mark.parametrize("others", [None, '{"eos_token": "<|endoftext|>", "b": 2}'])
def test_a_replaced_tokenizer_keeps_its_settings_beside_a_template(base, tmp_path, others):
    """Its special tokens are named there; the original may have other ones, or no such file."""
    own = write_tokenizer(tmp_path / "own", ("<|im_end|>", "<|im_start|>", "<s>"), CHATML)
    settings = {"bos_token": "<s>", "eos_token": "<|im_end|>"}
    (own / "tokenizer_config.json").write_text(json.dumps(settings))
    run = tune(base, tmp_path, tokenizer=own)
    for file in base.glob("tokenizer*"):
        file.unlink()
    if others is not None:
        (base / "tokenizer_config.json").write_text(others)
    export(run, base, tmp_path / "out")
    found = read_json(tmp_path / "out" / "tokenizer_config.json")
    assert found.pop("chat_template") == (tmp_path / "out" / "chat_template.jinja").read_text()
    assert {name: found[name] for name in settings} == settings
    assert "b" not in found


def test_a_tokenizer_that_was_moved_is_the_base_s_or_named(base, template, tmp_path, capsys):
    moved = write_tokenizer(tmp_path / "moved")
    run = tune(base, tmp_path, "--chat-template", template, tokenizer=moved)
    shutil.rmtree(moved)
    assert "answers end at <|im_end|>" in export(run, base, tmp_path / "a").sentences[0]
    write_tokenizer(moved, template=CHATML)
    run = tune(base, tmp_path, "--save", tmp_path / "own", tokenizer=moved)
    shutil.rmtree(moved)
    export(tmp_path / "own", base, tmp_path / "c")
    assert (tmp_path / "c" / "chat_template.jinja").read_text() == served_template(CHATML)
    (base / "tokenizer.json").unlink()
    with pytest.raises(DataError, match="moved"):
        export(tmp_path / "own", base, tmp_path / "b")
    argv = ["convert", "--to-hf", tmp_path / "b", "--load", tmp_path / "own", "--hf-base", base]
    assert main([*map(str, argv)]) == 3 and not (tmp_path / "b").exists()
    assert "give its path with --tokenizer-model" in capsys.readouterr().err
    there = write_tokenizer(tmp_path / "there", template=CHATML)
    assert main([*map(str, argv), "--tokenizer-model", str(there)]) == 0
    assert (tmp_path / "b" / "chat_template.jinja").exists()


@pytest.mark.parametrize("date, given", [(None, "got none"), ("2026-11-28", "got 2026-11-28")])
def test_a_template_that_prints_the_date_is_named(base, tmp_path, date, given):
    (tmp_path / "dated.jinja").write_text(DATED)
    flags = [] if date is None else ["--chat-template-date", date]
    run = tune(base, tmp_path, "--chat-template", tmp_path / "dated.jinja", *flags)
    assert export(run, base, tmp_path / "out").sentences[1] == (
        f"The chat template prints the date: the training {given} (--chat-template-date), and a server gives "
        "today's."
    )


@pytest.mark.parametrize(
    "config, generation, known, changed",
    [
        ({"eos_token_id": 2}, None, (2,), ({"eos_token_id": [7, 2]}, {"eos_token_id": [7, 2]})),
        ({}, {"a": 1}, (), ({"eos_token_id": 7}, {"a": 1, "eos_token_id": 7})),
        (
            {"eos_token_id": 1, "bos_token_id": 0, "text_config": {"eos_token_id": [3, 4], "b": 5}},
            None,
            (3, 4),
            (
                {
                    "eos_token_id": [7, 3, 4],
                    "bos_token_id": 0,
                    "text_config": {"eos_token_id": [7, 3, 4], "b": 5},
                },
                {"eos_token_id": [7, 3, 4]},
            ),
        ),
        (
            {"text_config": {"pad_token_id": 9}},
            {"eos_token_id": [7, True, None, "2", 5]},
            (7, 5),
            (
                {"text_config": {"pad_token_id": 9, "eos_token_id": [7, 5]}},
                {"eos_token_id": [7, 5]},
            ),
        ),
    ],
)
def test_ends_of_the_training_come_first_in_both_files(config, generation, known, changed):
    assert ends_of(config, generation) == known
    assert with_ids(config, generation, SpecialIds(ends=(7,)), keeping=True) == changed


def test_numbers_of_another_tokenizer_replace_all_of_the_original():
    config = {"bos_token_id": 1, "eos_token_id": 2, "text_config": {"eos_token_id": 2, "b": 5}}
    generation = {"bos_token_id": 1, "eos_token_id": [2, 3], "pad_token_id": 0, "top_k": 4}
    ids = SpecialIds(bos=None, pad=8, ends=(7,))
    assert with_ids(config, generation, ids, keeping=False) == (
        {
            "bos_token_id": None,
            "eos_token_id": 7,
            "text_config": {"b": 5, "bos_token_id": None, "eos_token_id": 7, "pad_token_id": 8},
        },
        {"eos_token_id": 7, "pad_token_id": 8, "top_k": 4},
    )


def test_a_run_on_bytes_exports_bytes(base, tmp_path):
    """The default tokenizer has other tokens than the base, whose numbers would mean other text."""
    (base / "tokenizer.json").rename(tmp_path / "tokenizer.json")
    run = tune(base, tmp_path)
    (tmp_path / "tokenizer.json").rename(base / "tokenizer.json")
    [sentence, *_] = export(run, base, tmp_path / "out").sentences
    assert "the tokenizer is that of the training" in sentence
    written = HuggingFaceTokenizer(tmp_path / "out")
    assert written.encode("ab").tolist() == ByteTokenizer().encode("ab").tolist()
    config = read_json(tmp_path / "out" / "config.json")
    assert set(config["eos_token_id"]) <= set(ByteTokenizer().special_tokens.values())


def test_a_kept_template_stays_beside_another_tokenizer(base, tmp_path):
    other = write_tokenizer(tmp_path / "other", (*TOKENS, "<extra>"), CHATML)
    run = tune(base, tmp_path, tokenizer=other)
    export(run, base, tmp_path / "out", keep_base_template=True)
    settings = read_json(tmp_path / "out" / "tokenizer_config.json")
    assert (
        "chat_template" not in settings and not (tmp_path / "out" / "chat_template.jinja").exists()
    )
    named = read_json(base / "tokenizer_config.json")
    (base / "tokenizer_config.json").write_text(json.dumps({**named, "chat_template": PLAIN + "!"}))
    export(run, base, tmp_path / "again", keep_base_template=True)
    settings = read_json(tmp_path / "again" / "tokenizer_config.json")
    assert settings["chat_template"] == PLAIN + "!"


def test_the_template_of_the_training_counts_though_the_model_s_has_changed(base, tmp_path):
    """An updated download must not change the prompts of a model that is trained already."""
    (base / "chat_template.jinja").write_text(CHATML)
    run = tune(base, tmp_path)
    (base / "chat_template.jinja").write_text(CHATML.replace("|im_start|>'", "|im_start|>!'"))
    [sentence, *_] = export(run, base, tmp_path / "out").sentences
    assert "the chat template is that of the training" in sentence
    written = (tmp_path / "out" / "chat_template.jinja").read_text()
    assert written == served_template(CHATML)
    loaded = TrainedModel.load(run, device="cpu")
    [prompt], _ = encode_prompts(loaded.config, loaded.tokenizer, texts(["a"]))
    assert "!" not in loaded.tokenizer.decode(prompt)


def test_conversations_that_came_rendered_are_named(base, tmp_path):
    run = tune(base, tmp_path, "--sft-tokenizer-prompt-format", "identity")
    assert any("came rendered" in one for one in export(run, base, tmp_path / "out").sentences)
