"""Types are checked strictly in the whole package, and layers name their arguments."""

import ast
from configparser import ConfigParser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "megatron_packed"
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


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
    assert [name for name in config.sections() if name.startswith("mypy-")] == []


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
