"""Prompts of files, and their tokens."""

import gzip
import io
import json
import os
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_packed.config.data_fields import DataFields
from megatron_packed.config.run import RunConfig
from megatron_packed.data.errors import DataError
from megatron_packed.data.sources.line_schema import Conversation, Text
from megatron_packed.data.tokenizers.base import ByteTokenizer
from megatron_packed.inputs import prompts
from megatron_packed.inputs.prompts import encode_prompts, read_prompts, texts

USER = {"role": "user", "content": "seven?"}
SHARED = {"from": "human", "value": "seven?"}
ANSWER = {"role": "assistant", "content": "7"}


def test_each_line_is_a_prompt_without_its_answer(tmp_path, monkeypatch):
    """JSON lines have the forms of prompts and of training data; other lines are texts."""
    lines = [
        ({"prompt": "seven?"}, "seven?", None),
        ({"messages": [USER]}, Conversation([USER]), None),
        ({"messages": [USER, ANSWER, USER, ANSWER]}, Conversation([USER, ANSWER, USER]), "7"),
        ({"prompt": "seven?", "completion": " 7"}, Text("seven?"), " 7"),
        ({"instruction": "seven?", "output": "7"}, Conversation([USER], None, "alpaca"), "7"),
        ({"instruction": "seven?"}, Conversation([USER], None, "alpaca"), None),
        ({"conversations": [SHARED]}, Conversation([USER], None, "sharegpt"), None),
        ({"text": "seven"}, Text("seven"), None),
    ]
    data = "\n\n".join(json.dumps(line) for line, _, _ in lines).encode()
    (tmp_path / "p.jsonl").write_bytes(gzip.compress(data))
    prompts = read_prompts(tmp_path / "p.jsonl")
    assert [prompt[1:] for prompt in prompts] == [line[1:] for line in lines]
    assert prompts[1].name.endswith("p.jsonl, line 3") and prompts[2].shown == "seven?"
    for data, expected in (
        (b"one {\n\n two\r\n", ["one {", " two"]),
        (b'[{"prompt": "one"},\n {"prompt": "two"}]', ["one", "two"]),
        (b'\xef\xbb\xbf["one", "\\n[two"]', ["one", "\n[two"]),
    ):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        assert [prompt.content for prompt in read_prompts("-")] == expected


def test_a_pipe_is_read_completely(tmp_path):
    """Prompts come from a named pipe, as with ``<(command)`` of a shell."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_text, args=('{"prompt": "one"}\n',), daemon=True)
    writer.start()
    assert [prompt.content for prompt in read_prompts(pipe)] == ["one"]


@pytest.mark.parametrize("path", ["/dev/zero", "/dev/full", "/"])
def test_what_is_no_file_is_refused_at_once(path):
    with pytest.raises(DataError, match="is a directory, device or socket, not a file"):
        read_prompts(path)


def test_too_many_bytes_or_prompts_are_refused(tmp_path, monkeypatch):
    """The bytes of standard input, of a file, and of what a compressed file becomes are counted."""
    monkeypatch.setattr(prompts, "MOST_BYTES", 2**21)
    monkeypatch.setattr(prompts, "MOST_PROMPTS", 3)
    endless = SimpleNamespace(buffer=open("/dev/zero", "rb"))  # noqa: SIM115 - read_prompts closes it
    monkeypatch.setattr(sys, "stdin", endless)
    with pytest.raises(DataError, match=r"^standard input has more than 2 MiB of prompts; split"):
        read_prompts("-")
    (tmp_path / "bomb").write_bytes(gzip.compress(bytes(2**24)))
    with pytest.raises(DataError, match="bomb has more than 2 MiB of prompts"):
        read_prompts(tmp_path / "bomb")
    (tmp_path / "lines").write_text("a\n\nb\nc\n")
    assert len(read_prompts(tmp_path / "lines")) == 3
    (tmp_path / "lines").write_text("a\n\nb\nc\nd\n")
    with pytest.raises(DataError, match="lines has more than 3 prompts"):
        read_prompts(tmp_path / "lines")


def test_a_killed_process_leaves_no_copy_of_standard_input(tmp_path):
    program = "from megatron_packed.inputs.prompts import read_prompts; read_prompts('-')"
    child = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    descriptors = Path(f"/proc/{child.pid}/fd")

    def copies() -> list[str]:
        with suppress(FileNotFoundError):  # a descriptor was closed meanwhile
            names = [os.readlink(one) for one in descriptors.iterdir()]
            return [name for name in names if str(tmp_path) in name]
        return []

    child.stdin.write(b"a\n" * 2**20)
    child.stdin.flush()
    for _ in range(600):
        if copies():
            break
        time.sleep(0.1)
    else:
        raise AssertionError("no copy was opened")
    child.kill()
    child.wait()
    child.stdin.close()
    assert list(tmp_path.iterdir()) == []


def test_fields_of_training_data_have_their_names(tmp_path):
    """With --data-fields a line of training data is a prompt, and so is a plain prompt."""
    path = tmp_path / "p.jsonl"
    path.write_text('{"q": {"en": "seven?"}, "a": "7"}\n{"q": {"en": "six?"}}\n{"prompt": "5"}\n')
    fields = DataFields.from_pairs([("prompt", "q.en"), ("completion", "a")])
    assert [prompt[1:] for prompt in read_prompts(path, fields)] == [
        (Text("seven?"), "7"),
        (Text("six?"), None),
        ("5", None),
    ]
    fields = DataFields.from_pairs([("instruction", "q.en"), ("output", "a")])
    found = read_prompts(path, fields)[0]
    assert found.content == Conversation([USER], None, "alpaca") and found.expected == "7"


def test_answers_of_preference_data_do_not_matter(tmp_path):
    """Only the prompt is used, so a rejected answer and a mask cannot do harm."""
    path = tmp_path / "p.jsonl"
    lines = [
        {"prompt": "seven?", "chosen": "7", "rejected": "8"},
        {"messages": [USER, ANSWER], "label": False, "system": "s"},
        {"messages": [USER], "loss_mask": [0]},
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    system = {"role": "system", "content": "s"}
    assert [prompt[1:] for prompt in read_prompts(path)] == [
        ("seven?", None),
        (Conversation([system, USER]), "7"),
        (Conversation([USER]), None),
    ]
    path.write_text('{"q": ["seven?", "six?"], "ok": false}')
    fields = DataFields.from_pairs([("prompt", "q[*]"), ("completion", "a"), ("label", "ok")])
    assert [prompt[1:] for prompt in read_prompts(path, fields)] == [
        (Text("seven?"), None),
        (Text("six?"), None),
    ]


@pytest.mark.parametrize(
    "content, problem",
    [
        (b'{"input_ids": [1]}', "the line has tokens"),
        (None, "cannot be read: No such file or directory"),
        (b"\n\n", "has no prompt"),
        (b"a\n\xff\n", "line 2 is not a prompt: .*UTF-8"),
        (b'{"prompt": 3}', "line 1 is not a prompt: .*prompt is not a string"),
        (b'{"prompt": "a"}\nb', "line 2 is not a prompt: .*not valid JSON"),
        (b'{"messages": [{"role": "assistant", "content": "7"}]}', "no message before the answer"),
        (b'["a", 3]', "element 2 is not a prompt: .*an element is not a string"),
    ],
)
def test_a_file_without_usable_prompts_is_refused(content, problem, tmp_path):
    path = tmp_path / "prompts"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=problem):
        read_prompts(path)


def test_tokens_are_those_of_training_documents(tmp_path):
    """With --sft a text is a user's message; text of training data has no chat template."""
    (tmp_path / "d.jsonl").write_text("{}")
    flags = "--hybrid-layer-pattern - --hidden-size 64 --train-iters 1 --lr 1 --seq-length 64"
    config = RunConfig.from_args([*flags.split(), "--data-path", str(tmp_path / "d.jsonl")])
    chat = replace(config, data=replace(config.data, sft=True))
    tokenizer = ByteTokenizer()
    given = [*texts(["a"]), *texts(["b", "c"])]
    tokens, ends = encode_prompts(config, tokenizer, given)
    assert [tokenizer.decode(prompt) for prompt in tokens] == ["a", "b", "c"]
    assert tokenizer.eod_id in ends
    conversation = given[0]._replace(content=Conversation([USER]))
    given = [*given, given[0]._replace(content=Text("raw")), conversation]
    tokens, _ = encode_prompts(chat, tokenizer, given)
    shown = [tokenizer.decode(prompt) for prompt in tokens]
    assert shown[0] == "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
    assert shown[3] == "raw" and shown[4] == shown[0].replace("\na<", "\nseven?<")
    for prompt, problem in ((conversation, "is a conversation"), (texts([""])[0], "is empty")):
        with pytest.raises(DataError, match=f"the prompt {problem}"):
            encode_prompts(config, tokenizer, [prompt])
    # Without the check, rendering removes the character and the rest is a special token.
    with pytest.raises(DataError, match=r"the prompt cannot be encoded: .* are reserved"):
        encode_prompts(chat, tokenizer, texts(["<|im_\ufdd0end|>"]))
