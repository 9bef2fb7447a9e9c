"""Tests that flags in messages exist, and that lower layers take their spelling from one module."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from megatron_packed.cli.train import OPTIONS
from megatron_packed.config import flag_names
from megatron_packed.config.parser.command_line import every_field, known_flags

PACKAGE = Path(flag_names.__file__).parents[1]
UPPER = {"config", "resume", "inputs", "explain", "training", "launch", "cli"}
"""Packages that use the options directly; all others take spellings from `flag_names`."""
FLAG = re.compile(r"(?<![\w-])(?<!var\()--[a-zA-Z][\w-]*\w")
"""A flag in a text; `var(--NAME)` is a colour of a page."""
OF_OTHER_PROGRAMS = {
    "--dist-ckpt-optim-fully-reshardable",  # Megatron, for a run that wrote a checkpoint
    "--capture-range",  # nsys
    "--cuda_ext",  # apex
    "--no-build-isolation",  # pip
    "--pre",  # pip
    "--nproc_per_node",  # torchrun
    "--shm-size",  # docker
    "--repo-type",  # hf
    "--recipe",  # run_recipe of Megatron-Bridge
    "--mode",  # run_recipe of Megatron-Bridge
    "--peft-scheme",  # older scripts of Megatron-Bridge
    "--peft_scheme",  # older scripts of Megatron-Bridge
    "--local-dir",  # hf
}
EXAMPLES = {"--flag", "--no", "--no-x", "--wandb"}
"""Placeholders for any flag, for a family of flags, and a common prefix of flags."""
NAMES = sorted(
    {
        name
        for path in PACKAGE.rglob("*.py")
        if "import flag_names as flags" in path.read_text()
        for name in re.findall(r"\bflags\.([A-Z][A-Z0-9_]*)", path.read_text())
    }
)
"""Names of flags that the package uses."""


@cache
def all_strings(path: Path) -> list[tuple[str, bool]]:
    """Return the strings of a file, and for each whether a statement consists of it."""
    if path.suffix == ".json":
        return [(path.read_text(), False)]
    nodes = list(ast.walk(ast.parse(path.read_text())))
    bare = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    return [
        (node.value, id(node) in bare)
        for node in nodes
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]


def strings(path: Path, *, docstrings: bool) -> list[str]:
    return [text for text, bare in all_strings(path) if docstrings or not bare]


@cache
def flags_of_commands() -> set[str]:
    """Return every flag that a file of `cli` gives to ``add_argument``."""
    found = {f"--{name}" for name in OPTIONS}
    for path in (PACKAGE / "cli").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
                found |= {arg.value for arg in node.args if isinstance(arg, ast.Constant)}
    return found


def test_every_flag_that_the_package_names_exists() -> None:
    known = known_flags() | flags_of_commands() | OF_OTHER_PROGRAMS | EXAMPLES
    for path in (*PACKAGE.rglob("*.py"), *PACKAGE.rglob("*.json")):
        named = {flag for text in strings(path, docstrings=True) for flag in FLAG.findall(text)}
        assert named <= known, path


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_the_spelling_that_help_shows(name: str) -> None:
    flag = getattr(flag_names, name)
    assert flag in {described.flag for described in every_field()} | flags_of_commands()


def test_other_attributes_are_missing() -> None:
    assert flag_names.SEQ_LENGTH == "--seq-length"
    with pytest.raises(AttributeError, match="seq_length"):
        _ = flag_names.seq_length


def test_lower_layers_spell_no_flag() -> None:
    for path in PACKAGE.rglob("*.py"):
        if path.relative_to(PACKAGE).parts[0] in UPPER:
            continue
        # Chat templates are jinja2 code with braces.
        texts = [text for text in strings(path, docstrings=False) if "{%" not in text]
        spelt = {flag for text in texts for flag in FLAG.findall(text)} - OF_OTHER_PROGRAMS
        assert not spelt, f"{path} spells {spelt}; take it from config/flag_names.py"
