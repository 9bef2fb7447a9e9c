"""The troubleshooting guide quotes messages, log fields and exit codes that exist in the code."""

import ast
import re
from dataclasses import fields
from pathlib import Path

import pytest

from megatron_packed.config.exit_codes import ExitCode
from megatron_packed.reporting.step_record import StepRecord

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
VALUES = r"\.\.\.|\d[\d.,e+]*|: |non-finite|loss or gradient in|reference|random|another order of the data|other data"
"""Parts of messages that the code fills in."""
CHAT = (
    '{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "You"}]}\n'
)


def strings_of_the_package() -> str:
    """Return all string constants of the package, one after the other."""
    return "\n".join(
        node.value
        for path in (ROOT / "megatron_packed").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )


def test_messages_exist() -> None:
    """Each quoted message and each line of output consists of string constants of the package."""
    prose = re.sub(r"^```(\w+)\n.*?^```$", "", PAGE, flags=re.MULTILINE | re.DOTALL)
    quoted = [text for text in re.findall(r"`([^`\n]+)`", prose) if " " in text]
    quoted += list(re.findall(r"^WARNING: (.*)$", prose, re.MULTILINE))
    messages = [text for text in quoted if not text.startswith("--")]
    assert len(messages) > 15
    known = strings_of_the_package()
    missing = [
        (message, part)
        for message in messages
        for part in re.split(VALUES, message)
        if part.strip() not in known
    ]
    assert missing == []


def test_fields_of_the_log_exist() -> None:
    """Names with an underscore in the guide are fields of a log line."""
    names = set(re.findall(r"`([a-z]+(?:_[a-z]+)+)`", PAGE))
    known = {field.name for field in fields(StepRecord)} | {"offload_hidden"}
    assert names and names <= known


def test_every_exit_code_is_listed() -> None:
    """The last table lists every exit code except that of a complete run."""
    listed = {int(code) for code in re.findall(r"^\| (\d+) \|", PAGE, re.MULTILINE)}
    assert listed == {*ExitCode} - {ExitCode.DONE}


def test_the_example_prints_what_is_learned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The example shows that the answer is a target and the question is not."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "chat.jsonl").write_text(CHAT)
    [code] = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(compile(code, "troubleshooting.md", "exec"), {})
    lines = capsys.readouterr().out
    all_text, learned = lines.split("learned:")
    assert "Hi" in all_text and "You" in learned and "Hi" not in learned
