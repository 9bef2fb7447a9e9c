"""Choice of the ptxas that makes Triton's machine code."""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest

from megatron_packed.config import environment_variables
from megatron_packed.config.environment_variables import environment
from megatron_packed.config.sections.training import TrainingConfig


@pytest.fixture(autouse=True)
def fresh():
    environment_variables.assembler_variables.cache_clear()
    yield
    environment_variables.assembler_variables.cache_clear()


@pytest.fixture
def triton(tmp_path, monkeypatch):
    """Return a function that makes a folder of Triton with two scripts in the place of ptxas."""
    folder = tmp_path / "backends" / "nvidia" / "bin"
    folder.mkdir(parents=True)
    spec = ModuleSpec("triton", None, origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(environment_variables, "find_spec", {"triton": spec}.get)
    monkeypatch.setattr(
        environment_variables, "may_have_gpu", lambda environ: "NO_GPU" not in environ
    )
    monkeypatch.delenv("NO_GPU", raising=False)

    def make(usual, second):
        for name, script in (("ptxas", usual), ("ptxas-blackwell", second)):
            if script is not None:
                (folder / name).write_bytes(b"#!/bin/sh\n" + script)
                (folder / name).chmod(0o755)
        return folder / "ptxas-blackwell"

    return make


def says(release, code=0):
    return b"echo 'Cuda compilation tools, release %s, V1'; exit %d" % (release, code)


def chosen(**options):
    return environment(TrainingConfig(train_iters=1, **options)).get("TRITON_PTXAS_PATH")


@pytest.mark.parametrize("deterministic", [False, True])
def test_ptxas_12_9_replaces_an_older_one(triton, deterministic):
    path = triton(says(b"12.8"), says(b"12.9"))
    assert chosen(deterministic_mode=deterministic) == str(path)


@pytest.mark.parametrize(
    ("usual", "second"),
    [
        (says(b"12.8"), says(b"13.1")),
        (says(b"12.8"), says(b"12.8")),
        (says(b"12.9"), says(b"12.9")),
        (says(b"12.10"), says(b"12.9")),
        (says(b"12.8"), None),
        (says(b"12.8"), b"printf '\\377'"),
        (says(b"12.8"), says(b"12.9", 1)),
        (None, says(b"12.9")),
    ],
    ids=["not tried", "both old", "both right", "later", "no second", "bytes", "fails", "no usual"],
)
def test_other_versions_stay(triton, usual, second):
    triton(usual, second)
    assert chosen() is None


def test_nothing_is_chosen_without_a_gpu(triton, monkeypatch):
    triton(says(b"12.8"), says(b"12.9"))
    monkeypatch.setenv("NO_GPU", "1")
    assert chosen() is None


def test_nothing_is_chosen_without_triton(monkeypatch):
    monkeypatch.setattr(environment_variables, "may_have_gpu", lambda environ: True)
    monkeypatch.setattr(environment_variables, "find_spec", lambda name: None)
    assert chosen() is None
    monkeypatch.undo()
    environment_variables.assembler_variables.cache_clear()
    monkeypatch.setattr(environment_variables, "may_have_gpu", lambda environ: True)
    monkeypatch.setitem(sys.modules, "triton", ModuleType("triton"))
    assert chosen() is None
