"""Content and layout of ``--help`` and ``--help-all``."""

import re

import pytest

from megatron_packed.config.parser.command_line import META_FLAGS, every_field
from megatron_packed.config.parser.help_text import help_text
from megatron_packed.config.parser.parse import parse_or_exit


@pytest.mark.parametrize("columns", [80, 120])
def test_every_flag_has_its_default_unit_and_choices(columns: int) -> None:
    text = help_text(columns, everything=True)
    lines = text.splitlines()
    assert max(map(len, lines)) <= columns
    flags = [line.split()[0] for line in lines if line.startswith("  --")]
    assert flags[: len(META_FLAGS)] == list(META_FLAGS)
    assert sorted(flags[len(META_FLAGS) :]) == sorted(field.flag for field in every_field())
    entries = {
        entry.split()[0]: " ".join(entry.split()) for entry in re.split(r"\n(?=  --)|\n\n", text)
    }
    for described in every_field():
        entry = entries[described.flag]
        assert entry.endswith("]") and " [" in entry, entry
        choices = described.option.choices
        assert all(str(choice) in entry for choice in choices), entry
        assert "NAME" in entry or "|".join(map(str, choices)) in entry
        assert described.option.unit.rstrip("s") in entry, entry
        undone = f"undone by {described.flag_for(True)}"
        assert (undone in entry) == bool(described.option.negated), entry
        assert all(f"--{name}" in entry for name in described.option.aliases)
        assert all(
            f"deprecated: --{name}" in entry
            for name in (*described.option.deprecated, *(described.option.shorthands or ()))
        )
    assert "[4096 documents]" in entries["--packing-window"]
    assert "[required; tokens]" in entries["--seq-length"]


def test_a_narrow_terminal_breaks_all_lines_but_long_flags() -> None:
    lines = help_text(60, everything=True).splitlines()
    assert max(len(line) for line in lines if not line.startswith("  --")) <= 60


def test_every_heading_names_its_flags_once() -> None:
    """A heading is the title of a section, or the title and a group, and has no flags elsewhere."""
    text = help_text(100, everything=True)
    headings = re.findall(r"^([A-Z][^.]*)\n  --", text, re.MULTILINE)
    assert len(headings) == len(set(headings)) > 20
    assert not [heading for heading in headings if heading.rstrip().endswith(":")]
    some = {"General", "Model: Mamba-2", "Batches and packing", "Training: kernels", "Checkpoints"}
    assert some <= {*headings}
    [sizes] = re.findall(r"^Parallelism\n(.*?)\n\n", text, re.MULTILINE | re.DOTALL)
    assert "--tensor-model-parallel-size N" in sizes and "--tp-comm-overlap " not in sizes
    assert "Ranks to profile. [0]" in text


def test_help_is_the_flags_of_a_first_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for words, everything in ((["--help"], False), (["-h"], False), (["--x", "--help-all"], True)):
        with pytest.raises(SystemExit) as ended:
            parse_or_exit(words)
        assert ended.value.code == 0
        assert capsys.readouterr().out == help_text(80, everything=everything)
    lines = help_text(80).splitlines()
    assert max(map(len, lines)) <= 80 and len(lines) < 155
    listed = {line.split()[0] for line in lines if line.startswith("  --")}
    assert {described.flag for described in every_field() if described.required} <= listed
