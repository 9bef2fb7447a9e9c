"""Files and modules that docstrings, comments and guides name in backticks exist."""

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "megatron_packed"
FOREIGN = ("torch", "nn.", "megatron.", "transformer_engine", "pretrain_mamba.py")
"""Prefixes of names, and files, that belong to other projects."""
FILE = re.compile(r"`([\w/]+\.(?:py|md|sh))`")
DOTTED = re.compile(r"(?<!`)`([a-z_]\w*(?:\.\w+)+)`(?!`)")
NOTE = re.compile(r"\[Note: ([^]]+)\]")


def texts() -> dict[str, str]:
    guides = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    files = [*PACKAGE.rglob("*.py"), *PACKAGE.rglob("*.md"), *guides]
    return {str(path.relative_to(ROOT)): path.read_text() for path in files}


def top_names(source: str) -> set[str]:
    """Return all names that a module binds or imports at its top level, also inside branches."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {alias.asname or alias.name for alias in node.names}
    return names


class Modules:
    """Modules of the package by each end of their path: ``a.b.c`` is also ``b.c`` and ``c``."""

    def __init__(self, sources: dict[str, str]) -> None:
        self.names: dict[str, set[str]] = {}
        for path, source in sources.items():
            parts = path.removesuffix(".py").removesuffix("/__init__").split("/")
            found = top_names(source)
            for first in range(len(parts)):
                self.names.setdefault(".".join(parts[first:]), set()).update(found)

    def holds(self, name: str) -> bool:
        """Return True if a dotted name is a module or a name inside a module."""
        parts = name.split(".")
        ends = [".".join(parts[:count]) for count in range(len(parts), 0, -1)]
        longest = next((end for end in ends if end in self.names), None)
        if longest is None:
            return False
        inside = parts[longest.count(".") + 1 :]
        return not inside or inside[0] in self.names[longest]


@pytest.fixture(scope="module")
def read() -> dict[str, str]:
    return texts()


@pytest.fixture(scope="module")
def modules(read) -> Modules:
    return Modules({path: text for path, text in read.items() if path.endswith(".py")})


def test_files_that_are_named_exist(read) -> None:
    folders = ("megatron_packed", "docs", "tests", "benchmarks", "examples", "te_patches", "tools")
    there = {f"/{path.name}" for path in ROOT.iterdir()}
    there |= {
        f"/{path.relative_to(ROOT)}" for folder in folders for path in (ROOT / folder).rglob("*")
    }
    missing = [
        f"{path}: {name}"
        for path, text in read.items()
        for name in FILE.findall(text)
        if name not in FOREIGN and not any(file.endswith(f"/{name}") for file in there)
    ]
    assert missing == []


@pytest.mark.parametrize("page", ["README.md", "CHANGELOG.md", "CONTRIBUTING.md"])
def test_links_of_first_pages_lead_to_files(page: str, read) -> None:
    """The build of the site finds broken links of the other pages."""
    targets = re.findall(r"\]\((?!https?:)([^)#]+)", read[page])
    assert targets and [target for target in targets if not (ROOT / target).exists()] == []


def test_modules_that_docstrings_name_exist(read, modules) -> None:
    missing = [
        f"{path}: {name}"
        for path, text in read.items()
        if path.endswith(".py")
        for name in DOTTED.findall(text)
        if not name.endswith((".py", ".md", ".json", ".bin", ".idx"))
        and not name.startswith(FOREIGN)
        and not modules.holds(name)
    ]
    assert missing == []


def test_a_stale_name_is_found(modules) -> None:
    assert modules.holds("checkpoint.save.save_checkpoint") and modules.holds("packed.params")
    assert not modules.holds("save.no_such_name") and not modules.holds("no_such_module.name")


def test_every_note_is_referred_to(read) -> None:
    """The title of a note appears where it is explained, and at least once where a reader needs it."""
    lines = (re.sub(r"\n\s*(#\s*)?", " ", text) for text in read.values())
    counts = Counter(title for text in lines for title in NOTE.findall(text))
    assert [title for title, count in counts.items() if count == 1] == []
