"""Files that a user names or a download contains: no pipe, device or endless line is read."""

import json
import os

import pytest

from megatron_packed.cli.main import main
from megatron_packed.data.errors import DataError
from megatron_packed.data.packing.step_cost import StepCosts
from megatron_packed.data.tokenizers.base import MOST_TOKENIZER_BYTES, ByteTokenizer, read_bytes
from megatron_packed.data.tokenizers.chat_format import template_source
from megatron_packed.files.regular_files import limited_lines, open_regular
from megatron_packed.reporting.curves import read_jsonl, read_run
from support.json_lines import write_lines

PACK = {"capacity": 2, "documents": 1, "squares": 10.0, "ms": 1.0}
pytestmark = pytest.mark.timeout(60)


def sparse(path, size=2**40):
    with path.open("wb") as file:
        file.truncate(size)
    return path


def test_only_regular_files_are_opened(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    (tmp_path / "text").write_text("a")
    (tmp_path / "link").symlink_to("text")
    for name, kind in (("pipe", "a pipe or a device"), ("zero", "a pipe"), (".", "a directory")):
        with pytest.raises(OSError, match=f"it is {kind}.*not a regular file"):
            open_regular(tmp_path / name)
    with open_regular(tmp_path / "link", pipes=True) as file:
        assert file.read() == b"a"


def test_lines_have_a_limit(tmp_path):
    (tmp_path / "text").write_bytes(b"ab\n\ncd")
    with open_regular(tmp_path / "text") as file:
        assert list(limited_lines(file, 3)) == [b"ab\n", b"\n", b"cd"]
    with open_regular(tmp_path / "text") as file, pytest.raises(ValueError, match="more than 2"):
        list(limited_lines(file, 2))


def test_files_of_tokenizers_have_a_limit(tmp_path):
    with pytest.raises(DataError, match="has more than 256 MiB, too many for a file of a tok"):
        read_bytes(sparse(tmp_path / "tokenizer.json", MOST_TOKENIZER_BYTES + 1))
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match="cannot be read: it is a pipe or a device"):
        read_bytes(tmp_path / "pipe")


@pytest.mark.parametrize(
    ("name", "part"),
    [("large", "it has more than 16 MiB"), ("pipe", "it is a pipe"), ("bytes", "it is not UTF-8")],
)
def test_a_chat_template_is_a_small_file(tmp_path, name, part):
    sparse(tmp_path / "large")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "bytes").write_bytes(b"\xff")
    with pytest.raises(DataError, match=f"--chat-template .* cannot be read: {part}.*; give a jin"):
        template_source(ByteTokenizer(), tmp_path / name)


@pytest.mark.parametrize(
    ("flag", "device", "part"),
    [
        ("lengths", "/dev/zero", "it is a pipe or a device, not a regular file"),
        ("lengths", None, "has a line of more than 65,536 bytes; give a file with one number per"),
        ("costs", "/dev/zero", "it is a pipe or a device, not a regular file"),
        ("costs", None, "is not a table of step costs"),
    ],
)
def test_lengths_and_costs_are_files_with_an_end(tmp_path, capsys, flag, device, part):
    (tmp_path / "lengths").write_text("5\n")
    file = device or str(sparse(tmp_path / "file"))
    named = ["--lengths", str(tmp_path / "lengths"), f"--{flag}", file]
    assert main(["tune", "--seq-length", "64", *named]) in (2, 3)
    assert part in capsys.readouterr().err


def test_a_deep_table_of_costs_is_refused(tmp_path):
    (tmp_path / "costs.json").write_text("[" * 200_000)
    with pytest.raises(ValueError, match="is not a table of step costs"):
        StepCosts.load(tmp_path / "costs.json")


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"update_ms": float("nan")}, "that is no number"),
        ({"tokens": 10**400}, "a time or a count that is no number"),
        ({"packs": [{**PACK, "capacity": "2"}]}, "that is no number"),
        ({"packs": [{**PACK, "ms": float("inf")}]}, "that is no number"),
        ({"packs": [{**PACK, "capacity": -2}]}, "that is no number"),
    ],
)
def test_costs_are_numbers(tmp_path, change, part):
    table = {
        "format": "megatron_packed step costs 1",
        "tokens": 64,
        "update_ms": 1.0,
        "packs": [PACK],
        "device": "cpu",
    }
    (tmp_path / "costs.json").write_text(json.dumps(table))
    assert StepCosts.load(tmp_path / "costs.json").capacities == (2,)
    (tmp_path / "costs.json").write_text(json.dumps({**table, **change}))
    with pytest.raises(ValueError, match=part):
        StepCosts.load(tmp_path / "costs.json")


@pytest.mark.parametrize("field", ["iteration", "lm_loss"])
def test_a_number_that_no_float_holds_is_text(tmp_path, field):
    record = {"iteration": 1, "lm_loss": 1.0, field: 10**400}
    write_lines(tmp_path / "log", [record])
    assert read_jsonl(tmp_path / "log") == [{**record, field: str(10**400)}]


def test_a_log_is_a_file_with_lines(tmp_path, monkeypatch):
    monkeypatch.setattr("megatron_packed.reporting.curves._LINE_BYTES", 1000)
    with pytest.raises(ValueError, match="log has a line of more than 1,000 bytes; give a file th"):
        read_run(sparse(tmp_path / "log"))
    with pytest.raises(OSError, match="it is a pipe or a device, not a regular file"):
        read_run("/dev/zero")
