"""Packages import only from lower levels, and importing the package is cheap."""

import ast
import importlib
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from megatron_packed.lazy_exports import stub_imports

PACKAGE = Path(__file__).parents[2] / "megatron_packed"
LEVELS = {
    "lazy_exports": -1,  # single file that every package imports
    "torch_private": 0,  # single file
    "memory_purpose": 0,  # single file
    "files": -1,
    "config": 0,
    "packed": 1,
    "distributed": 1,
    "ops": 1,
    "memory": 1,
    "layers": 2,
    "cuda_graphs": 2,
    "data": 2,
    "optim": 2,
    "checkpoint": 2,
    "models": 3,
    "resume": 4,
    "inputs": 4,
    "reporting": 4,
    "explain": 4,
    "training": 5,
    "launch": 6,
    "cli": 7,  # entry point that no package imports
}
OPTIONAL = {
    "transformer_engine",
    "apex",
    "mamba_ssm",
    "causal_conv1d",
    "flash_attn",
    "triton",
    "fla",
    "transformers",
}


def imported_packages(path: Path) -> set[str]:
    """Return the packages of megatron_packed that a file imports, also inside functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} imports relatively; write the full name"
            names = [node.module or ""]
            if node.module == "megatron_packed":
                names = [f"megatron_packed.{alias.name}" for alias in node.names]
        found |= {name.split(".")[1] for name in names if name.startswith("megatron_packed.")}
    return found


def violations(root: Path) -> list[str]:
    problems = []
    for path in sorted(root.rglob("*.py")):
        here = path.relative_to(root).parts[0].removesuffix(".py")
        if here not in LEVELS:
            continue
        for other in imported_packages(path) - {here}:
            if other in LEVELS and LEVELS[other] >= LEVELS[here]:
                problems.append(
                    f"{path.relative_to(root)} (level {LEVELS[here]}) imports {other} ({LEVELS[other]})"
                )
    return problems


def test_packages_import_only_lower_levels():
    assert violations(PACKAGE) == []


def test_an_upward_and_a_sideways_import_are_seen(tmp_path):
    (tmp_path / "ops").mkdir()
    (tmp_path / "ops" / "a.py").write_text(
        "def f():\n    from megatron_packed.models import hybrid_model\n"
    )
    (tmp_path / "ops" / "b.py").write_text("from megatron_packed import packed\n")
    assert len(violations(tmp_path)) == 2


def imports_of_files(root: Path) -> dict[str, set[str]]:
    """Return the modules that each module of a package imports, also inside functions, but not those
    that only type checkers import.
    """
    modules = {
        ".".join(path.relative_to(root.parent).with_suffix("").parts).removesuffix(
            ".__init__"
        ): path
        for path in root.rglob("*.py")
    }
    return {
        name: {
            module
            for node in runtime_nodes(ast.parse(path.read_text()))
            for module in (*imported_modules(node), *imported_names(node))
            if module in modules
        }
        for name, path in modules.items()
    }


def imported_names(node: ast.AST) -> list[str]:
    """Return the full names that a ``from`` import binds; some are modules."""
    if not isinstance(node, ast.ImportFrom):
        return []
    return [f"{node.module}.{alias.name}" for alias in node.names]


def runtime_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a file, without branches of ``if TYPE_CHECKING``."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        yield node
        yield from runtime_nodes(node)


def test_files_import_each_other_in_no_circle():
    TopologicalSorter(imports_of_files(PACKAGE)).prepare()


def test_a_circle_by_a_local_import_is_seen(tmp_path):
    (tmp_path / "package").mkdir()
    (tmp_path / "package/a.py").write_text("from package.b import name\n")
    (tmp_path / "package/b.py").write_text("def f():\n    from package.a import other\n")
    with pytest.raises(CycleError):
        TopologicalSorter(imports_of_files(tmp_path / "package")).prepare()


def test_every_package_has_a_level():
    packages = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert packages <= set(LEVELS)


def test_no_test_module_imports_another():
    """Shared code is in ``tests/support`` or in a ``conftest.py``."""
    tests = Path(__file__).parents[1]
    found = [
        f"{path.relative_to(tests)}:{node.lineno} imports {name}"
        for path in sorted(tests.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        for name in imported_modules(node)
        if name.rpartition(".")[2].startswith("test_")
    ]
    assert found == []


def imported_modules(node: ast.AST) -> list[str]:
    """Return the names of the modules that a node imports."""
    if isinstance(node, ast.ImportFrom):
        return [node.module or ""]
    return [alias.name for alias in node.names] if isinstance(node, ast.Import) else []


PACKAGES = {
    ".".join(path.relative_to(PACKAGE.parent).parts[:-1]): path
    for path in sorted(PACKAGE.rglob("__init__.py"))
}


def test_packages_import_nothing_of_their_own():
    """Importing all packages loads no other module of the project than ``lazy_exports``."""
    code = f"import sys, {', '.join(PACKAGES)}; print(*sys.modules)"
    modules = set(run_python(code).split())
    ours = {name for name in modules if name.startswith("megatron_packed")}
    assert ours == {*PACKAGES, "megatron_packed.lazy_exports"}
    assert not modules & (OPTIONAL | {"torch", "numpy", "yaml"})


PUBLIC = [name for name, path in PACKAGES.items() if path.with_suffix(".pyi").is_file()]
"""Packages with public names, which their stubs list. Other names are imported from modules."""


def test_packages_without_public_names_are_a_docstring():
    assert "megatron_packed" in PUBLIC
    others = {name: ast.parse(PACKAGES[name].read_text()) for name in PACKAGES.keys() - {*PUBLIC}}
    assert [name for name, tree in others.items() if not ast.get_docstring(tree)] == []
    assert [name for name, tree in others.items() if len(tree.body) > 1] == []


@pytest.mark.parametrize("name", PUBLIC)
def test_every_name_of_a_stub_is_there(name):
    package, folder = importlib.import_module(name), PACKAGES[name].parent
    module_of = stub_imports(folder / "__init__.pyi")
    assert module_of and sorted(module_of) == package.__all__ == dir(package)
    for public, module in module_of.items():
        hidden = [folder / public, folder / f"{public}.py"]
        assert not any(place.exists() for place in hidden), f"{public} hides a module of {name}"
        there = getattr(importlib.import_module(module), public, None)
        assert there is not None, f"{module} has no {public}: correct the stub of {name}"
        assert getattr(package, public) is there


def run_python(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout


def test_import_is_lazy():
    modules = set(run_python("import megatron_packed, sys; print(*sys.modules)").split())
    assert not modules & (OPTIONAL | {"torch", "numpy"})


def test_no_optional_library_is_imported_by_the_cpu_path():
    code = "import sys, megatron_packed; megatron_packed.HybridModel; megatron_packed.MicroBatch; print(*sys.modules)"
    names = run_python(code).split()
    assert "megatron_packed.config.run" not in names  # all sections of options
    loaded = {name.split(".")[0] for name in names}
    # torch itself imports triton when it is installed
    allowed = (
        {"triton"} if "triton" in run_python("import sys, torch; print(*sys.modules)") else set()
    )
    assert not (loaded & OPTIONAL) - allowed


ONLY_IF_ASKED_FOR = tuple(
    f"megatron_packed.{name}"
    for name in (
        *("cuda_graphs.", "memory.", "models.decoder", "models.freeze", "models.sampling"),
        *("models.multi_token_prediction", "optim.statistics", "reporting.out_of_memory"),
        *("reporting.profiling", "training.answers", "training.build_graphs"),
        *("training.expert_bounds", "training.replica_checks"),
    )
)


def test_a_run_imports_only_the_capabilities_that_its_options_ask_for():
    names = run_python("import sys, megatron_packed.training.pretrain; print(*sys.modules)").split()
    assert [name for name in names if name.startswith(ONLY_IF_ASKED_FOR)] == []


def test_import_costs_at_most_a_third_of_the_import_of_torch():
    """Compare processor times: a slow or busy machine changes both."""
    code = (
        "import time; start = time.process_time(); import torch; between = time.process_time();"
        "import megatron_packed; megatron_packed.HybridModel; megatron_packed.MicroBatch;"
        "print((time.process_time() - between) / (between - start))"
    )
    assert any(float(run_python(code)) < 1 / 3 for _ in range(3))
