"""The direction of imports, read from the source of every file, and what importing the package
costs.
"""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "megatron_packed"
LEVELS = {
    "torch_private": 0,  # one file
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
    "convert": 3,
    "reporting": 4,
    "training": 5,
    "cli": 6,  # a door: nothing imports it
}
OPTIONAL = {
    "transformer_engine",
    "apex",
    "mamba_ssm",
    "causal_conv1d",
    "flash_attn",
    "triton",
    "transformers",
}


def imported_packages(path: Path) -> set[str]:
    """Names of megatron_packed's packages that a file imports, anywhere in it, also inside
    functions.
    """
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


def test_every_package_has_a_level():
    packages = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert packages <= set(LEVELS)


def run_python(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout


def test_import_is_lazy():
    modules = set(run_python("import megatron_packed, sys; print(*sys.modules)").split())
    assert not modules & (OPTIONAL | {"torch", "numpy"})


def test_no_optional_library_is_imported_by_the_cpu_path():
    code = "import sys, megatron_packed; megatron_packed.HybridModel; megatron_packed.MicroBatch; print(*sys.modules)"
    loaded = {name.split(".")[0] for name in run_python(code).split()}
    # torch itself imports triton when it is installed
    allowed = (
        {"triton"} if "triton" in run_python("import sys, torch; print(*sys.modules)") else set()
    )
    assert not (loaded & OPTIONAL) - allowed


@pytest.mark.parametrize("attempts", [3])
def test_import_costs_at_most_half_a_second_over_torch(attempts):
    code = (
        "import time, torch, sys; start = time.perf_counter(); import megatron_packed;"
        "megatron_packed.HybridModel; megatron_packed.MicroBatch; print(time.perf_counter() - start)"
    )
    assert any(float(run_python(code)) < 0.5 for _ in range(attempts))
