"""`docs/default_kernels.json` names the backends that are the default, and tests know their ops."""

import re
import sys
from pathlib import Path

import pytest

from support import kernel_code
from support.code_prints import Sources

ROOT = Path(__file__).parents[2]
OPS = {path.parent.name for path in (ROOT / "megatron_packed" / "ops").glob("*/api.py")}


def test_the_table_has_every_op():
    assert {*kernel_code.table()} == OPS


@pytest.mark.parametrize("name", sorted(OPS))
def test_the_newest_entry_of_an_op_is_what_auto_tries_first(name):
    defaults = kernel_code.table()[name]["defaults"]
    backend = kernel_code.default_backend(name, gpu=True)
    assert defaults[-1]["backend"] == backend.name, (
        f"add the new default of {name} to docs/default_kernels.json, with its date and commit"
    )
    assert [entry["since"] for entry in defaults] == sorted(entry["since"] for entry in defaults)


@pytest.mark.parametrize("name", sorted(OPS))
def test_a_backend_without_reasons_is_plain_pytorch(name):
    """A kernel without reasons would run on inputs that it does not support."""
    for backend in kernel_code.op_of(name).backends:
        text = (ROOT / f"{backend.module.replace('.', '/')}.py").read_text()
        if "not_supported_reasons" in text:
            continue
        packages = set(re.findall(r"^(?:from|import) (\w+)", text, re.MULTILINE))
        assert packages <= {*sys.stdlib_module_names, "torch", "megatron_packed"}, backend.name


def test_ops_of_a_test_are_those_of_its_layers():
    layers = ("Mamba", "attention")
    every = {name for name, entry in kernel_code.table().items() if "every model" in entry["parts"]}
    mamba = {*kernel_code.ops_of({"eager": ["Mamba", "TP"]}, layers)}
    assert mamba == every | {"ssd", "causal_conv1d", "gated_rms_norm"}
    ring = {*kernel_code.ops_of({"eager": ["attention", "CP p2p"]}, layers)}
    assert ring == every | {"varlen_attention", "rope", "context_parallel_attention"}
    # A test that names no layer may run any op, and a test of data runs none.
    assert {*kernel_code.ops_of({"eager": ["TP"]}, layers)} == OPS
    assert kernel_code.ops_of({"Data": ["text"]}, layers) == []


@pytest.mark.parametrize(
    ("file", "old", "new", "changed"),
    [
        ("triton_kernel.py", "return kernel(x)", "return kernel(x + 1)", True),
        ("tiles.py", "return x", "return x + 1", True),
        ("triton_kernel.py", "return []", "return ['reason']", False),
        ("triton_kernel.py", "Run it.", "Run the kernel.", False),
    ],
)
def test_a_changed_kernel_changes_the_fingerprint(file, old, new, changed, tmp_path, monkeypatch):
    """Kernels and their helpers count; reasons against inputs and docstrings do not."""
    folder = tmp_path / "megatron_packed" / "ops" / "rms_norm"
    texts = {
        "triton_kernel.py": "from megatron_packed.ops.rms_norm.tiles import kernel\n"
        "def not_supported_reasons(inputs):\n    return []\n"
        "def run(x):\n    '''Run it.'''\n    return kernel(x)\n",
        "tiles.py": "def kernel(x):\n    return x\n",
    }

    def written(**changes):
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in {**texts, **changes}.items():
            (folder / name).write_text(text)
        sources = Sources(tmp_path / "megatron_packed" / "ops", tmp_path)
        return kernel_code.fingerprint(sources, ["rms_norm"], gpu=True)

    monkeypatch.setattr(kernel_code, "ROOT", tmp_path)
    before = written()
    assert (before != written(**{file: texts[file].replace(old, new)})) == changed


def test_another_default_changes_the_fingerprint(monkeypatch):
    sources = kernel_code.ops_sources()
    before = kernel_code.fingerprint(sources, ["ssd"], gpu=True)
    op = kernel_code.op_of("ssd")
    monkeypatch.setattr(op, "backends", op.backends[1:])
    assert kernel_code.fingerprint(sources, ["ssd"], gpu=True) != before
    assert kernel_code.fingerprint(sources, [], gpu=True) == ""
