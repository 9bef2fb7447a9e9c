"""Commands of ``megatron-packed``: their output and their exit codes."""

import base64
import json
import os
import re
import shlex
import subprocess
import sys
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
import torch

from megatron_packed.__main__ import run_program
from megatron_packed.cli.main import main
from megatron_packed.cli.packing import with_unused_flags
from megatron_packed.config.parser.parse import parse
from megatron_packed.data.tokenizers.base import ByteTokenizer
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.models.generate import generate
from megatron_packed.reporting.curves import OF_A_STEP
from megatron_packed.resume.compared_runs import AskedRun
from megatron_packed.resume.run_and_random_state import RunState
from megatron_packed.training.build_job import build_job
from support.commands import exit_code
from support.explained import explain
from support.json_lines import write_lines, write_texts

MODEL = shlex.split(
    "--hybrid-layer-pattern M*- --hidden-size 16 --num-attention-heads 2 --mamba-head-dim 8 "
    "--mamba-num-groups 1 --mamba-state-dim 8 --disable-bias-linear --device cpu"
)
LOOP = shlex.split("--lr 1e-3 --train-iters 3 --seq-length 64")
WHOLE = ["--append-eod", "--workers", 1]
"""Options of ``preprocess`` in one process."""


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "data.jsonl"
    write_texts(path, ("a" * length for length in (100, 31, 30, 20, 5)))
    return ["--data-path", path, "--data-cache-path", tmp_path / "cache"]


@pytest.fixture
def run_flags(data, tmp_path):
    return [
        str(word)
        for word in [*MODEL, *LOOP, *data, "--load", tmp_path / "save", "--save", tmp_path / "save"]
    ]


def save_checkpoint(run_flags, seed, vocab_size=ByteTokenizer.vocab_size):
    """Save a checkpoint of an untrained model. Its weights depend on ``seed``, which is not among
    the flags of the command under test.
    """
    config = parse([*map(str, run_flags), "--seed", str(seed)])
    groups = ParallelGroups.single()
    job = build_job(config, groups, vocab_size)
    state = RunState(job.model, job.optimizer, groups, AskedRun(config=config))
    state.save(config.checkpoint)
    return job.model


def test_packing_reports_the_data_and_its_packs(data, capsys):
    assert exit_code("packing", *data, "--seq-length", 64) == 0
    lines, documents, packs, per_pack, tokens, targets, epoch = capsys.readouterr().out.splitlines()
    # Each document has one end-of-document token: 101 + 32 + 31 + 21 + 6 tokens. The first document
    # is split into 64 and 37.
    assert lines.startswith("5 lines in 1 file: 5 used (5 text)")
    assert documents.startswith("5 documents, 191 tokens")
    assert packs.startswith("3 packs of 64 slots, 99.48% full")
    assert per_pack.startswith("Documents per pack: P50 2, ")
    assert tokens.startswith(
        "191 tokens of 5 documents in = 191 kept + 0 truncated (0 documents) + 0 dropped"
    )
    assert tokens.endswith("; 1 documents split.")
    assert targets == (
        "186 targets of 5 documents in = 185 kept + 0 lost by truncation + 1 by splitting + 0 by dropping; "
        "0 documents keep no target."
    )
    assert epoch == "An epoch takes 3.0 steps of 1 pack."


def test_a_reader_that_has_seen_enough_is_no_error(data, monkeypatch):
    """`megatron-packed packing ... | head -1` prints no traceback."""
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as output:
        monkeypatch.setattr(sys, "stdout", output)
        assert exit_code("packing", *data, "--seq-length", 64) == 141


@pytest.mark.parametrize(
    ("streams", "code", "said"),
    [
        (
            ">/dev/full",
            1,
            "standard output cannot be written: [Errno 28] No space left on device.\n",
        ),
        (">&-", 0, ""),
    ],
)
def test_an_output_that_is_full_or_closed_ends_in_no_traceback(tmp_path, streams, code, said):
    (tmp_path / "data.jsonl").write_text('{"text": "abc"}\n')
    command = f'"{sys.executable}" -m megatron_packed.cli.main packing --data-path data.jsonl --seq-length 64'
    done = subprocess.run(
        ["bash", "-c", f"{command} {streams}"], capture_output=True, text=True, cwd=tmp_path
    )
    usable = "1 of 1 lines of data.jsonl are usable (1 text)\n"
    assert (done.returncode, done.stderr) == (code, usable + said)


@pytest.mark.parametrize("imported", [True, False])
def test_ctrl_c_ends_a_command_with_one_sentence(imported, monkeypatch, capsys):
    """Ctrl-C ends with code 130 and no traceback, in a command and while modules are imported."""

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(sys, "argv", ["megatron-packed", "packing"])
    monkeypatch.setattr("megatron_packed.cli.packing.with_unused_flags", interrupted)
    if not imported:
        monkeypatch.delitem(sys.modules, "megatron_packed.cli.main")
        monkeypatch.setattr(sys, "meta_path", [SimpleNamespace(find_spec=interrupted)])
    assert run_program() == 130
    assert capsys.readouterr().err == "interrupted.\n"


@pytest.mark.parametrize("name", ["torch", "elsewhere"])
def test_an_absent_package_ends_a_command_with_one_sentence(name, monkeypatch, capsys):
    """Only a required package has a sentence; another absent module is a defect."""

    def absent(*_):
        raise ModuleNotFoundError(name=name)

    monkeypatch.setattr(sys, "argv", ["megatron-packed", "packing"])
    monkeypatch.setattr("megatron_packed.cli.packing.with_unused_flags", absent)
    with pytest.raises(SystemExit if name == "torch" else ModuleNotFoundError):
        run_program()
    said = capsys.readouterr().err
    assert said.startswith(f"torch is not installed for {sys.executable}") == (name == "torch")


@pytest.mark.parametrize(
    "more, said", [((), " (unused without --eval-interval)"), (("--eval-interval", 2), "")]
)
def test_packing_says_who_validates_as_the_run_does(more, said, data, capsys):
    assert exit_code("packing", *data, "--seq-length", 64, "--split", "80,20", *more) == 0
    line = f"Divided by --split 80,20, in file order: 4 documents train, 1 validate{said}, 0 are left out."
    assert line in capsys.readouterr().out.splitlines()


def test_packing_refuses_a_tokenizer_that_training_refuses(data, capsys):
    """The cure fits weights that were converted, whose tables have a fixed number of rows."""
    assert exit_code("packing", *data, "--seq-length", 64, "--vocab-size", 256) == 3
    said = capsys.readouterr().err
    assert (
        "--vocab-size 256 is less than the 260 entries of the tokenizer. Weights that were" in said
    )
    assert "take the tokenizer of these weights, or enlarge their tables with " in said
    assert "resize_token_embeddings(260)" in said


def test_packing_obeys_the_packing_flags(data, capsys):
    assert exit_code("packing", *data, "--seq-length", 64, "--overlong-policy", "drop") == 0
    assert "+ 101 dropped (1 documents)" in capsys.readouterr().out
    assert exit_code("packing", *data, "--seq-length", 64, "--max-documents-per-pack", 1) == 0
    assert "6 packs of 64 slots" in capsys.readouterr().out


def test_packing_of_a_run_of_several_processes(data, capsys):
    """The report shows the alignment of context-parallel ranks: documents of 64, 32, 31, 21 and 6
    tokens take 64, 32, 32, 24 and 8 of 64 slots.
    """
    ring = ["--context-parallel-size", 4, "--cp-comm-type", "p2p", "--overlong-policy", "truncate"]
    ring += ["--cp-partition-mode", "zigzag"]
    assert exit_code("packing", *data, "--seq-length", 64, *ring) == 0
    *_, padding, _ = capsys.readouterr().out.splitlines()
    assert padding.startswith(
        "Documents begin at multiples of 8 slots: 6 slots (3.12%) are padding after documents"
    )


def test_preprocess_makes_what_data_path_takes(data, tmp_path, capsys):
    made = ["preprocess", "--input", data[1], "--output-prefix", tmp_path / "out" / "d", *WHOLE]
    assert exit_code(*made) == 0
    said = capsys.readouterr().out
    assert (
        "5 documents, 191 tokens" in said and f"written: {tmp_path}/out/d_text_document.bin" in said
    )
    assert (
        exit_code(
            "packing", "--data-path", tmp_path / "out" / "d_text_document", "--seq-length", 64
        )
        == 0
    )
    assert "3 packs of 64 slots, 99.48% full" in capsys.readouterr().out
    assert exit_code(*made, "--json-keys", "title") == 3
    assert "5 missing_key" in capsys.readouterr().err
    assert exit_code(*made, "--split-sentences") == 2
    pages = tmp_path / "pages.jsonl"
    pages.write_text('{"page": {"body": ["abc", "de"]}}\n' * 2)
    made[2] = pages
    assert exit_code(*made, "--data-fields", "text=page.body") == 0
    assert "2 documents, 14 tokens" in capsys.readouterr().out
    for wrong in (
        ["--data-fields", "text=page.body", "--json-keys", "text"],
        ["--data-fields", "prompt=page.body,completion=page"],
    ):
        assert exit_code(*made, *wrong) == 2
        assert "preprocess writes text; give --data-fields text=FIELD" in capsys.readouterr().err


def test_preprocess_names_the_tokenizer_that_it_trained(data, tmp_path, capsys):
    """The flags that it prints read the files that it wrote."""
    prefix = tmp_path / "out" / "d"
    made = ["preprocess", "--input", data[1], "--output-prefix", prefix, *WHOLE]
    trained = ["--tokenizer-type", "TrainedBPETokenizer", "--tokenizer-vocab-size", 270]
    assert exit_code(*made, *trained) == 0
    [flags] = re.findall(r"^Train on these files with (.*)$", capsys.readouterr().out, re.MULTILINE)
    read = ["packing", "--data-path", f"{prefix}_text_document", "--seq-length", 64]
    assert exit_code(*read, *trained) == 3
    assert exit_code(*read, *flags.split()) == 0


@pytest.mark.parametrize("kind", ["NullTokenizer", "TikTokenizer", "SentencePieceTokenizer"])
def test_every_command_takes_every_tokenizer(kind, tmp_path, capsys):
    """Every tokenizer works for preprocessing text and for the report of packs; `test_generate_command`
    generates answers with each.
    """
    flags = ["--tokenizer-type", kind, "--data-cache-path", tmp_path]
    if kind == "NullTokenizer":
        flags += ["--vocab-size", 300]
    else:
        flags += ["--tokenizer-model", tokenizer_file(kind, tmp_path / "model")]
        flags += ["--tiktoken-num-special-tokens", 10]
    text = tmp_path / "d.jsonl"
    write_texts(text, ("7 " * length + "8" for length in (20, 5, 9)))
    made = ["preprocess", "--input", text, "--output-prefix", tmp_path / "d", *WHOLE, *flags]
    assert exit_code(*made) == 0
    assert "3 documents" in capsys.readouterr().out
    said = []
    for path in (text, tmp_path / "d_text_document"):
        assert exit_code("packing", "--data-path", path, "--seq-length", 64, *flags) == 0
        said.append(capsys.readouterr().out.splitlines()[-3:])
    assert said[0] == said[1]


@pytest.mark.parametrize(
    "form, stops", [("nemotron-nano-v2", {2, 12}), ("nemotron-h-aligned", {2}), ("identity", {2})]
)
def test_generate_stops_where_answers_end(form, stops, tmp_path, monkeypatch, capsys):
    """Generation stops at the end of document and at the end of a turn of formats that have one.

    An empty answer prints a message.
    """
    seen = []
    load_model = "megatron_packed.resume.load_for_inference.load_model"
    loaded = tmp_path / "step_00000000"
    monkeypatch.setattr(load_model, lambda *_, on_loaded, **__: on_loaded(loaded))
    monkeypatch.setattr(
        "megatron_packed.models.generate.generate",
        lambda *_, ends, on_token, **__: seen.append(ends) or on_token(0, 2),
    )
    (tmp_path / "d.jsonl").write_text("{}")
    model = tokenizer_file("TikTokenizer", tmp_path / "model")
    flags = [
        "--data-path",
        tmp_path / "d.jsonl",
        "--load",
        tmp_path,
        "--sft",
        "--sft-tokenizer-prompt-format",
        form,
        "--tokenizer-type",
        "TikTokenizer",
        "--tokenizer-model",
        model,
    ]
    save_checkpoint([*MODEL, *LOOP, *flags, "--save", tmp_path], 3, 1256)
    assert exit_code("generate", *MODEL, *LOOP, *flags, "--prompt", "7") == 0
    assert seen == [stops]
    printed = capsys.readouterr()
    assert printed.out == "\n" and printed.err == (
        f"{tmp_path}/step_00000000: TikTokenizer, float32, chat template {form}\n"
        "no text: the model generated only white space and special tokens (1 in all).\n"
    )


def tokenizer_file(kind, path):
    """Write a small vocabulary that contains all bytes, and return its path."""
    if kind == "TikTokenizer":
        pytest.importorskip("tiktoken")
        path.write_bytes(
            b"".join(base64.b64encode(bytes([value])) + b" %d\n" % value for value in range(256))
        )
    else:
        pytest.importorskip("sentencepiece").SentencePieceTrainer.train(
            sentence_iterator=iter(["7 8 9 10"]),
            model_prefix=path,
            vocab_size=265,
            minloglevel=2,
            byte_fallback=True,
        )
    return path if path.exists() else path.with_suffix(".model")


def test_packing_fills_in_only_what_is_missing():
    given = ["--lr", "1", "--hybrid-layer-pattern", "M", "--hidden-size", "8"]
    assert with_unused_flags(given) == ["--train-iters", str(2**31 - 1), *given]


@pytest.mark.parametrize("policy, code", [("error", 3), ("drop", 3), ("truncate", 0)])
def test_data_that_cannot_be_packed_is_a_data_error(tmp_path, policy, code, capsys):
    write_texts(tmp_path / "long.jsonl", ["a" * 100])
    flags = ["--seq-length", 64, "--overlong-policy", policy]
    assert exit_code("packing", "--data-path", tmp_path / "long.jsonl", *flags) == code
    assert ("data error: " in capsys.readouterr().err) == (code == 3)


def test_wrong_flags_are_all_reported(capsys):
    assert exit_code("packing", "--seq-lenth", 64, "--data-path", "nowhere") == 2
    problems = capsys.readouterr().err
    assert "--seq-lenth" in problems and "nowhere" in problems and "2 problems" in problems


def test_generate_reads_the_checkpoint(run_flags, capsys):
    trained = save_checkpoint(run_flags, seed=7)
    tokenizer = ByteTokenizer()
    prompt = [int(token) for token in tokenizer.encode("-1 the")]
    expected = tokenizer.decode(
        generate(trained, [prompt], 5, ends={tokenizer.eod_id})[0], skip_special=True
    ).strip()
    layout = shlex.split(
        "--tensor-model-parallel-size 2 --context-parallel-size 2 --cp-comm-type p2p"
    )
    for more in ([], layout):  # generation runs in one process, whatever the run did
        words = [*run_flags, *more, "--prompt=-1 the", "--max-new-tokens", 5]
        assert exit_code("generate", *words) == 0
        assert capsys.readouterr().out == visible(expected) + "\n"


def test_generate_answers_several_prompts(run_flags, tmp_path, monkeypatch, capsys):
    """Answers are JSON lines in the order of the prompts, or labelled text in a terminal. They do
    not depend on the other prompts, also if tokens are drawn; another seed draws other tokens."""
    save_checkpoint(run_flags, seed=7)
    (tmp_path / "more.jsonl").write_text('{"text": "once"}\n{"prompt": "two", "completion": "2"}\n')
    command = ["generate", *run_flags, "--max-new-tokens", 5, "--prompt", "the"]
    several = [*command, "--prompts-file", tmp_path / "more.jsonl"]
    drawn = ["--temperature", 2, "--top-p", 0.9]
    outputs = []
    for flags in ([], drawn, drawn, [*drawn, "--seed", 5]):
        assert exit_code(*several, *flags) == 0
        outputs.append(capsys.readouterr().out)
    lines = [[json.loads(line) for line in output.splitlines()] for output in outputs]
    assert [line["prompt"] for line in lines[0]] == ["the", "once", "two"]
    assert "expected" not in lines[0][1] and lines[0][2]["expected"] == "2"
    assert outputs[1] == outputs[2] and len({outputs[0], outputs[1], outputs[3]}) == 3
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    for flags, answers in (([], lines[0]), (drawn, lines[1])):
        assert exit_code(*command, *flags) == 0
        assert capsys.readouterr().out == visible(answers[0]["answer"]) + "\n"
    assert exit_code(*several) == 0
    shown = visible(lines[0][2]["answer"])
    assert capsys.readouterr().out.endswith(f"\n3. two\n{shown}\n(expected: 2)\n\n")


def visible(text):
    """Return text as ``generate`` shows it, with ``?`` for control characters."""
    return "".join(c if c.isprintable() or c in "\n\t" else "?" for c in text)


def test_wrong_options_of_generate_are_one_sentence(run_flags, capsys):
    save_checkpoint(run_flags, 3)
    command = ["generate", *run_flags]
    for flags, code, problem in (
        ([], 2, "--prompt or --prompts-file is required: the texts to answer."),
        (["--prompt", ""], 3, "data error: --prompt is empty; give at least one character."),
        (["--prompt", "a", "--top-p", 0.5], 2, "--top-p is 0.5, but at temperature 0 no token"),
        (["--prompt", "a", "--temperature", -1], 2, "--temperature is -1.0; give 0 for the most"),
        (["--prompts-file", "absent"], 3, "data error: absent cannot be read: No such file"),
    ):
        assert exit_code(*command, *flags) == code
        *_, line = capsys.readouterr().err.splitlines()
        assert line.startswith(problem)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
@pytest.mark.parametrize("command", ["generate", "tune", "explain"])
def test_a_gpu_that_is_not_here_is_reported(command, run_flags, tmp_path, capsys):
    flags = ["cuda" if word == "cpu" else word for word in run_flags]
    if command == "explain":
        with pytest.raises(SystemExit) as ended:
            explain(parse(flags))
        assert ended.value.code == 2
    else:
        save_checkpoint(run_flags, 3)
        more = {"generate": ["--prompt", "a"], "tune": ["--measure", tmp_path / "costs.json"]}[
            command
        ]
        assert exit_code(command, *flags, *more) == 2
    assert "--device cuda: torch sees no GPU here" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_generate_refuses_a_kernel_that_cannot_run_here(run_flags, capsys):
    flags = ["auto" if word == "cpu" else word for word in run_flags]
    save_checkpoint(run_flags, 3)
    assert (
        exit_code("generate", *flags, "--attention-backend", "torch_varlen", "--prompt", "a") == 2
    )
    said = capsys.readouterr().err
    assert (
        "--attention-backend torch_varlen: cannot be used for attention: the kernel needs CUDA capability 8 or later"
        in said
    )


def test_generate_without_a_checkpoint(run_flags, capsys):
    assert exit_code("generate", *run_flags, "--prompt", "the") == 4
    assert "checkpoint error" in capsys.readouterr().err


def test_generate_refuses_what_the_rotary_tables_do_not_reach(run_flags, capsys):
    rope = [*run_flags, "--position-embedding-type", "rope"]
    save_checkpoint(rope, seed=7)
    assert exit_code("generate", *rope, "--prompt", "the", "--max-new-tokens", 61) == 0
    assert exit_code("generate", *rope, "--prompt", "the", "--max-new-tokens", 62) == 2
    assert "64 positions" in capsys.readouterr().err


def test_report(tmp_path, capsys):
    log = tmp_path / "log.jsonl"
    step = {
        "iteration": 1,
        "lm_loss": 2.5,
        "grad_norm": 1.0,
        "learning_rate": 1e-3,
        "step_time_ms": 9.0,
        "docs_per_pack": 2,
        "consumed_tokens": 7,
        "pack_fill": 0.9,
        "tokens_per_second": 8,
        "memory_gib": 1,
        "skipped": False,
        "plan_hash": "f00",
    }
    write_lines(log, [step])
    assert exit_code("report", log) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "log.html")
    assert (
        exit_code("report", log, "--out", tmp_path / "r" / "page.html", "--title", "A <run>") == 0
    )
    assert "<h1>A &lt;run&gt;</h1>" in (tmp_path / "r" / "page.html").read_text()


def test_plot(tmp_path, capsys):
    """The page shows two runs, with fewer points for the longer one, and the same plots are written
    as an image.
    """
    for name, steps in (("a<b", 1500), ("c", 2)):
        (tmp_path / name).mkdir()
        lines = [
            {
                "iteration": step,
                "lm_loss": 3 - step / 1000,
                "step_time_ms": 9.0,
                "docs_per_pack": 2,
                "skipped": False,
                "consumed_tokens": 7,
                "pack_fill": 0.9,
                "tokens_per_second": 8,
                "memory_gib": 1,
                "plan_hash": "f00",
                "mfu": 0.4,
                "graph_hit_rate": 1.0,
                "graph_replays": 2,
                "graph_fallbacks": 0,
                "graph_memory_mib": 5,
                "data_wait_ms": 0.9,
                "expert_load_max": 1.5,
                "expert_load_min": 0.5,
                "expert_load": [[1.5, 0.5]],
            }
            for step in range(1, steps + 1)
        ]
        write_lines(tmp_path / name / "log.jsonl", lines)
    assert (
        exit_code(
            "plot",
            tmp_path / "a<b",
            tmp_path / "c" / "log.jsonl",
            "--out",
            tmp_path / "p" / "q.html",
        )
        == 0
    )
    assert capsys.readouterr().out.strip() == str(tmp_path / "p" / "q.html")
    page = (tmp_path / "p" / "q.html").read_text()
    for part in (
        "Loss",
        "Throughput",
        "MFU",
        "Pack fill",
        "Documents per pack",
        "Graph hit rate",
        "Memory",
        "Load of experts",
        "Load of each expert",
        "Waiting for data",
        "10.0 % of step time",
        "a&lt;b",
        "E layer 0, expert 1: 0.50",
    ):
        assert part in page, part
    assert (
        "http" not in page and "<script" not in page and "a<b" not in page and len(page) < 300_000
    )
    assert "Gradient norm" not in page  # these runs do not log the gradient norm
    assert (
        "name='viewport'" in page and page.count("<div class='wide'><table") == 1
    )  # wide tables scroll on a phone
    tree = ElementTree.fromstring(page[page.index('<div class="charts">') : page.index("</html>")])
    assert len(tree.findall("figure")) == 10 + 2
    assert exit_code("plot", tmp_path / "a<b", "--png", tmp_path / "x.png") == 0
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG") and (
        tmp_path / "a<b" / "plot.html"
    ).exists()


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["plot"],
        ["plot", "."],
        ["plot", "nowhere"],
        ["report"],
        ["report", "nowhere.jsonl"],
        ["report", "a.jsonl", "--x"],
    ],
)
def test_usage_errors_end_with_2(argv, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert exit_code(*argv) == 2
    assert capsys.readouterr().err


@pytest.mark.parametrize(
    ("word", "cure"),
    [
        ("pakcing", "did you mean packing?"),
        ("export", "did you mean convert?"),
        ("xyz", "choose from train, "),
    ],
)
def test_a_misspelt_command_has_a_suggestion(word, cure, capsys):
    """A word that is not a command gets one sentence with the nearest command."""
    assert main([word]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1
    assert printed.err.startswith(f"megatron-packed {word}: is not a command; {cure}")


def test_a_log_without_steps_is_a_usage_error(tmp_path, capsys):
    (tmp_path / "log.jsonl").write_text("{}\n")
    assert exit_code("report", tmp_path / "log.jsonl") == 2
    assert "no training step" in capsys.readouterr().err


@pytest.mark.parametrize(
    "line", [{"iteration": 1, "lm_loss": 2}, {**dict.fromkeys(OF_A_STEP, 1), "iteration": "x"}]
)
def test_a_log_of_something_else_is_a_usage_error(line, tmp_path, capsys):
    write_lines(tmp_path / "log.jsonl", [line])
    for command in ("report", "plot"):
        assert exit_code(command, tmp_path / "log.jsonl") == 2
        assert "of a step is missing or is no number" in capsys.readouterr().err


def test_a_log_that_is_nested_without_end_is_a_usage_error(tmp_path, capsys):
    (tmp_path / "log.jsonl").write_text("[" * 200_000)
    for command in ("report", "plot"):
        assert exit_code(command, tmp_path / "log.jsonl") == 2
        assert "no training step" in capsys.readouterr().err


def test_words_that_are_no_text_are_one_sentence(tmp_path, run_flags, capsys):
    assert exit_code("generate", *run_flags, "--prompt", "\udcff") == 2
    assert (
        capsys.readouterr().err
        == "--prompt '\\udcff' is not UTF-8 text; give it in that encoding.\n"
    )
    step = json.dumps(dict.fromkeys(OF_A_STEP, 1)) + "\n"
    (tmp_path / "log.jsonl").write_text(step)
    page = os.fsencode(tmp_path) + b"/\xff.html"
    command = [
        sys.executable,
        "-m",
        "megatron_packed.cli.main",
        "report",
        tmp_path / "log.jsonl",
        "--out",
        page,
    ]
    done = subprocess.run([*command, "--title", b"\xff"], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.endswith("\\udcff.html\n"), done


def test_files_are_what_their_names_say(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for argv in (
        ["plot", "a", "--png", "a.pdf"],
        ["plot", "a", "--out", "a.png"],
        ["report", "a", "--out", "a"],
        ["tune", "--plot", "a.svg"],
        ["tune", "--html", "a.png"],
    ):
        assert exit_code(*argv) == 2
        assert f"{argv[-2]} {argv[-1]}: give a name that ends in " in capsys.readouterr().err


@pytest.mark.parametrize("prefix", [".", "..", "", "out/"])
def test_a_prefix_that_is_a_directory(prefix, tmp_path, monkeypatch, capsys):
    """A prefix that is a directory is refused, because it gives no file name."""
    monkeypatch.chdir(tmp_path)
    assert exit_code("preprocess", "--input", "a.jsonl", "--output-prefix", prefix) == 2
    assert "give the beginning of file names" in capsys.readouterr().err


def test_problems_name_what_was_typed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    for argv, option in (
        (["preprocess", "--input", "nowhere", "--output-prefix", "a"], "--input nowhere"),
        (["preprocess", "--input", "nowhere", "--output-prefix", "file/a"], "--output-prefix file"),
        (["tune", "--data", "nowhere", "--seq-length", "8"], "--data nowhere"),
    ):
        assert exit_code(*argv) == 2
        problems = capsys.readouterr().err
        assert (
            option in problems
            and "--data-path" not in problems
            and "--data-cache-path" not in problems
        )


@pytest.mark.parametrize(
    "command", ["preprocess --input a.jsonl --output-prefix b", "tune --data a.jsonl"]
)
def test_files_are_named_once_by_one_flag(command, capsys):
    """Data given with two flags is refused, because one of the two would be ignored."""
    assert exit_code(*command.split(), "--seq-length", "8", "--data-path", "c.jsonl") == 2
    assert capsys.readouterr().err.startswith("--data-path: give the files with ")


@pytest.mark.parametrize(
    ("words", "code"),
    [(["packing", "--seq-length", "0"], 2), (["from-megatron", "model_config.yaml"], 0)],
)
def test_torch_is_not_imported_for(words, code, tmp_path):
    """Problems are reported before, and flags of Megatron-LM are translated without it."""
    flags = "--hybrid-layer-pattern: '-', --hidden-size: 64, --seq-length: 64, --data-path: a_b"
    (tmp_path / "model_config.yaml").write_text(
        f"MODEL_ARGS: {{{flags}, --lr: 1, --train-iters: 1, --split: '1'}}"
    )
    program = (
        "import sys\nfrom megatron_packed.cli.main import main\n"
        f"try: code = main({words})\nexcept SystemExit as ended: code = ended.code\n"
        "print(code, 'torch' in sys.modules, file=sys.stderr)"
    )
    command = [sys.executable, "-c", program]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=True)
    assert ran.stderr.splitlines()[-1] == f"{code} False"
