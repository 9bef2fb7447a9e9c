"""Choice of the ptxas that makes Triton's machine code."""

from importlib.machinery import ModuleSpec

import pytest

from megatron_packed.config import triton_assembler
from megatron_packed.config.environment_variables import environment
from megatron_packed.config.sections.training import TrainingConfig


@pytest.fixture
def variables(tmp_path, monkeypatch):
    """Return a function that makes a folder of Triton and returns the variables."""

    def made(usual, second, driver):
        folder = tmp_path / "backends" / "nvidia" / "bin"
        folder.mkdir(parents=True)
        for name, release in (("ptxas", usual), ("ptxas-blackwell", second)):
            if release is not None:
                (folder / name).write_text(f"#!/bin/sh\necho 'tools, release {release}, V1'\n")
                (folder / name).chmod(0o755)
        spec = ModuleSpec("triton", None, origin=str(tmp_path / "__init__.py"))
        monkeypatch.setattr(triton_assembler, "find_spec", lambda name: spec)
        monkeypatch.setattr(triton_assembler, "may_have_gpu", lambda environ: driver is not None)
        monkeypatch.setattr(triton_assembler, "_driver_version", lambda: driver)
        triton_assembler.assembler_variables.cache_clear()
        return environment(TrainingConfig(train_iters=1)).get("TRITON_PTXAS_PATH", "-")

    yield made
    triton_assembler.assembler_variables.cache_clear()


@pytest.mark.parametrize(
    ("usual", "second", "driver", "chosen"),
    [
        ("12.8", "12.9", 12040, True),
        ("12.8", "13.1", 13000, True),
        ("12.8", "13.1", 12080, False),
        ("12.8", "12.8", 13000, False),
        ("12.9", "13.1", 13000, False),
        ("12.8", None, 13000, False),
        ("12.8", "unknown", 13000, False),
        (None, "12.9", 13000, False),
        ("12.8", "12.9", None, False),
    ],
)
def test_the_second_ptxas_is_chosen_if_the_first_is_wrong(
    variables, tmp_path, usual, second, driver, chosen
):
    path = tmp_path / "backends" / "nvidia" / "bin" / "ptxas-blackwell"
    assert variables(usual, second, driver) == (str(path) if chosen else "-")
