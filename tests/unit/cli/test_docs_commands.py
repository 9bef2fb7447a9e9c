"""Commands and Python examples in docs/: every flag exists, every named script exists, and the
examples of the guides about configuration and data do what the guides say.
"""

import argparse
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser as torchrun_parser

from megatron_packed.cli.main import COMMANDS, main
from megatron_packed.config.parser.parse import parse, parse_or_exit
from megatron_packed.config.parser.precedence import gather
from megatron_packed.data.sources.line_schema import FIELDS, parse_line, schema_name
from support.json_lines import write_lines

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
PAGES = sorted(
    page for page in DOCS.rglob("*.md") if re.search(r"^```(sh|bash)$", page.read_text(), re.M)
)
TRAINING = "pretrain_hybrid.py"
WITHOUT_RUN_FLAGS = ("convert", "doctor", "from-megatron", "plot", "report")
SHELL = shlex.split("""bash cat cd conda cp do diff docker done export for git hf kill mkdir module
    nsys nvidia-smi pip printf prlimit rm source srun uv true wait""")
"""First words of command lines that run other programs than this project's."""
PLACEHOLDERS = ("YOUR_FLAGS", "FLAGS_OF_A_RUN", "FLAGS", "...")
RUN = """--hybrid-layer-pattern M*- --hidden-size 64 --num-attention-heads 4 --mamba-head-dim 16
--mamba-num-groups 1 --seq-length 512 --train-iters 20 --lr 3e-3 --data-path data/chat.jsonl"""
"""Flags that replace a file of flags which a page uses but does not show."""


def blocks(page: Path, *languages: str) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    return [text for language, text in found if language in languages]


def sh_blocks(page: Path) -> list[str]:
    return blocks(page, "sh", "bash")


def write_heredocs(block: str) -> str:
    """Write the files that a block makes by `cat > FILE <<'END'`, and return the other lines."""
    for name, text in re.findall(r"^cat > (\S+) <<'END'\n(.*?)^END$", block, re.M | re.S):
        Path(name).write_text(text)
    return re.sub(r"<<'END'(.*?)\n.*?^END$", r"\1", block, flags=re.MULTILINE | re.DOTALL)


def command_words(block: str) -> Iterator[list[str]]:
    """Yield the words of each command, without variables before it, redirections and comments."""
    for line in re.sub(r"\\\n", " ", write_heredocs(block)).splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;<>")
        lexer.whitespace_split = True
        command: list[str] = []
        for word in [*lexer, ";"]:
            if re.fullmatch(r"[|&;]+", word):
                if command:
                    yield command
                command = []
            elif command or not re.fullmatch(r"\w+=.*", word, re.DOTALL):
                command.append(word)


def without_redirections(words: list[str]) -> list[str]:
    kept: list[str] = []
    words = [word for word in words if word.strip("[]") not in PLACEHOLDERS]
    while words:
        word = words.pop(0)
        if re.fullmatch(r"[<>]+", word):
            words = words[1:]
        else:
            kept.append(word)
    return kept


def check_run_flags(words: list[str]) -> None:
    """Check that every flag exists and its value can be read; named files of flags are read."""
    named = [Path(word.removeprefix("@")) for word in words if word.startswith("@")]
    for name in named:
        if name.exists():
            named += map(Path, re.findall(r"^@(\S+)$", name.read_text(), re.MULTILINE))
        else:
            name.parent.mkdir(parents=True, exist_ok=True)
            name.write_text(RUN)
    assert [str(problem) for problem in gather(words).problems] == []


def check_subcommand(words: list[str]) -> None:
    """Check the words after `megatron-packed`: the command's own options, then flags of a run."""
    parser = argparse.ArgumentParser("megatron-packed")
    subparsers = parser.add_subparsers(required=True, dest="name")
    for command in COMMANDS:
        command.add_arguments(subparsers.add_parser(command.name, allow_abbrev=False))
    arguments, run_flags = parser.parse_known_args(words)
    if arguments.name in WITHOUT_RUN_FLAGS:
        assert run_flags == []
    check_run_flags(run_flags)


def check_command(words: list[str]) -> None:
    """Check one command of a page.

    Raises:
        AssertionError: a flag, a script or the command does not exist.
    """
    words = without_redirections(words)
    if not words or (
        words[0] in ("megatron-packed", "python", "torchrun", "sbatch") and not words[1:]
    ):
        return
    if TRAINING in words:
        at = words.index(TRAINING)
        if "torchrun" in words:
            torchrun_parser().parse_args(words[words.index("torchrun") + 1 : at + 1])
        check_run_flags(words[at + 1 :])
    elif "megatron-packed" in words:
        check_subcommand(words[words.index("megatron-packed") + 1 :])
    elif words[0] == "sbatch":
        script = next(at for at, word in enumerate(words) if word.endswith(".sbatch"))
        assert (ROOT / words[script]).is_file(), words[script]
        check_run_flags(words[script + 2 :])
    elif (words[0] == "python" and words[1].endswith(".py")) or (
        words[0] == "bash" and words[1].endswith(".sh")
    ):
        assert (ROOT / words[1]).is_file(), words[1]
    elif words[0] in ("python", "python3"):
        assert words[1] in ("-", "-m", "-c"), words
    else:
        assert words[0] in SHELL, f"{words[0]}: add the command to SHELL if it is right"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_commands_of_a_page_can_be_typed(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every command in an ``sh`` block of a page has flags that exist, with values of their type."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for tutorial in ("sft", "pretrain"):
        for block in sh_blocks(DOCS / "tutorials" / f"{tutorial}.md"):
            write_heredocs(block)
    for block in sh_blocks(page):
        for words in command_words(block):
            check_command(words)


@pytest.mark.parametrize("page", ["sft", "pretrain"])
def test_plans_in_the_text_of_a_tutorial_fit_its_flags(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of processes and the batch of a command outside of blocks go together."""
    monkeypatch.chdir(tmp_path)
    tutorial = DOCS / "tutorials" / f"{page}.md"
    for block in sh_blocks(tutorial):
        write_heredocs(block)
    [command] = re.findall(r"`megatron-packed (plan [^`]+)`", tutorial.read_text())
    assert main(command.split()) == 0


@pytest.mark.parametrize(
    "line",
    [
        "megatron-packed packing --no-such-flag",
        "megatron-packed report --no-such-flag log.jsonl",
        "megatron-packed no-such-command",
        "python pretrain_hybrid.py --seq-length many",
        "torchrun --no-such-flag 2 pretrain_hybrid.py",
        "python benchmarks/no_such_script.py",
        "no-such-command",
    ],
)
def test_a_wrong_command_is_found(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check of pages fails for a flag, a value, a script or a command that does not exist."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises((AssertionError, SystemExit)):
        for words in command_words(line):
            check_command(words)


def write_run(folder: Path, flags: str = RUN) -> None:
    (folder / "data").mkdir()
    (folder / "data" / "chat.jsonl").write_text('{"text": "a"}\n')
    (folder / "run.args").write_text(flags)


def test_python_example_of_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first Python example parses a file of flags and builds a section."""
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path)
    names: dict[str, object] = {}
    exec(blocks(DOCS / "configuration.md", "python")[0], names)
    assert names["config"] == parse(["@run.args"])


def test_messages_of_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The page quotes the report of problems, and the line about options without effect."""
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path)
    problems, without_effect = blocks(DOCS / "configuration.md", "")
    with pytest.raises(SystemExit):
        parse_or_exit(["@run.args", "--fp8-format", "hybrid", "--num-query-groups", "3"])
    assert capsys.readouterr().err == problems
    parse_or_exit(["@run.args", "--rotary-base", "100"])
    assert without_effect in capsys.readouterr().err


RENAMED = {
    "dialogs.jsonl": {
        "dialog": [{"speaker": "customer", "text": "Hi"}, {"speaker": "agent", "text": "Hello"}]
    },
}
"""Input lines for the conversion script in the guide about data, by file name."""


def test_conversions_of_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The script that renames roles writes lines that a run accepts."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    for name, line in RENAMED.items():
        write_lines(tmp_path / "data" / name, [line])
    for script in blocks(DOCS / "data.md", "python"):
        exec(script, {})
    schemas = {
        path.name: [schema_name(parse_line(line)[0]) for line in path.read_bytes().splitlines()]
        for path in (tmp_path / "data").glob("*.jsonl")
        if path.name not in RENAMED
    }
    assert schemas == {"chat.jsonl": ["messages"]}


def test_lines_of_data_are_accepted() -> None:
    """The example lines of the guide about data are lines of the schemas that the table lists."""
    page = (DOCS / "data.md").read_text()
    [examples] = [text for text in blocks(DOCS / "data.md", "") if text.startswith('{"messages"')]
    samples = [parse_line(line.encode())[0] for line in examples.splitlines()]
    assert [schema_name(sample) for sample in samples] == ["messages", "prompt/completion", "text"]
    table = page.partition("## Use the accepted fields")[2].partition("\n## ")[0]
    named_by_cures = {"answer", "answers", "assistant", "solution", "functions", "system_prompt"}
    missing = {field for field in FIELDS if f"`{field}`" not in table}
    assert missing == named_by_cures  # read only where --data-fields names them


REPORTS = {
    "packing": ("data.md", "packing.md", "tutorials/sft.md"),
    "tune": ("tune.md", "tutorials/capacities.md"),
}
"""Pages that quote the report of a command, by command."""
QUOTED = re.compile(r"^(200 lines|12 packs|Recommended)")
"""First words of the quoted reports."""


def test_reports_in_the_guides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The commands print the reports that guides quote, for the data and flags of the tutorial
    about chat data."""
    monkeypatch.chdir(tmp_path)
    for block in sh_blocks(DOCS / "tutorials" / "sft.md"):
        if block.startswith("mkdir"):
            subprocess.run(["bash", "-euc", block], check=True)
        write_heredocs(block)
    for command, pages in REPORTS.items():
        assert main([command, "@chat.args"]) == 0
        printed = capsys.readouterr().out.splitlines()
        for page in pages:
            [quoted] = [text for text in blocks(DOCS / page, "") if QUOTED.search(text)]
            missing = [line for line in quoted.splitlines() if line not in [*printed, "..."]]
            assert missing == [], page
