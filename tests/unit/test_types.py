"""Types are checked strictly in the whole package, users see them, and layers name their arguments."""

import ast
import os
import re
import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "megatron_packed"
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
PROGRAM = """\
from megatron_packed import NoSuchName
from megatron_packed import Packer, __version__
from megatron_packed.checkpoint import NoSuchError, read_manifest
from megatron_packed.config import parse

reveal_type(__version__)
reveal_type(Packer(slots=64).slots)
reveal_type(read_manifest)
reveal_type(parse(["@run.args"]))
parse(64)
"""
"""Program of a user, with two names that no package has and an argument of a wrong type."""
SEEN = {
    1: '"megatron_packed" has no attribute "NoSuchName"',
    3: '"megatron_packed.checkpoint" has no attribute "NoSuchError"',
    6: '"str"',
    7: '"int"',
    8: '"def (directory: pathlib.Path) -> megatron_packed.checkpoint.manifest.Manifest"',
    9: '"megatron_packed.config.run.RunConfig"',
    10: '"parse" has incompatible type "int"; expected "Sequence[str]"',
}
"""Ends of what a type checker reports of each line of `PROGRAM`."""


def functions(folder: Path):
    """Yield (place, function) for each function of a folder."""
    for path in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, FUNCTIONS):
                yield f"{path.relative_to(ROOT)}:{node.lineno} {node.name}", node


def test_mypy_checks_the_whole_package_strictly() -> None:
    config = ConfigParser()
    config.read(ROOT / "setup.cfg")
    assert config["mypy"]["files"] == "megatron_packed"
    assert config.getboolean("mypy", "strict")
    assert "ignore_errors" not in config["mypy"] and "exclude" not in config["mypy"]
    parts = [dict(config[name]) for name in config.sections() if name.startswith("mypy-")]
    # The only part reports imports of modules that the package does not have.
    assert parts == [{"ignore_missing_imports": "False"}]


def test_a_program_of_a_user_sees_the_types_of_public_names(
    tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    """Check it with a cache of mypy that stays from one run of the tests to the next.

    mypy reads changed modules again, and all that import them.
    """
    pytest.importorskip("mypy")
    cache = getattr(pytestconfig, "cache", None)  # none with -p no:cacheprovider
    kept = tmp_path / "cache" if cache is None else cache.mkdir("mypy_of_a_user")
    # Without the types of torch and numpy, mypy takes 5 s instead of 16 s.
    skipped = "".join(f"[mypy-{name}.*]\nfollow_imports = skip\n" for name in ("torch", "numpy"))
    settings = "[mypy]\nstrict = True\nhide_error_codes = True\n"
    (tmp_path / "mypy.ini").write_text(settings + skipped)
    (tmp_path / "program.py").write_text(PROGRAM)
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", "--cache-dir", str(kept), "program.py"],
        cwd=tmp_path,
        env=os.environ | {"MYPYPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    found = re.findall(r"^program.py:(\d+): \w+: (.*)", checked.stdout, re.MULTILINE)
    assert [int(line) for line, _ in found] == list(SEEN), checked.stdout + checked.stderr
    for line, said in found:
        assert said.endswith(SEEN[int(line)])


@pytest.mark.parametrize("folder", ["layers", "models"])
def test_layers_and_models_take_no_dictionary_of_arguments(folder: str) -> None:
    found = [
        place
        for place, function in functions(PACKAGE / folder)
        if function.name == "__init__" or function.name.startswith("build_")
        if function.args.kwarg is not None
    ]
    assert found == []


@pytest.mark.parametrize("folder", ["layers", "models"])
def test_layers_and_models_return_no_value_of_any_type(folder: str) -> None:
    found = [
        place
        for place, function in functions(PACKAGE / folder)
        if isinstance(function.returns, ast.Name) and function.returns.id == "Any"
    ]
    assert found == []
