"""Tests of the options that ``test_changed_package.py`` adds to the package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_packed.config.errors import ConfigError
from megatron_packed.config.sections.model import ModelConfig
from support.runs import Data, final_state, in_folder, run, saved_steps, tiny_options


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Data:
    return Data.make(tmp_path_factory.mktemp("data"))


def options(data: Data, folder: Path, **changes: Any) -> dict[str, Any]:
    new = {"tail_slots": 16, "mamba_heads_without_skip": 2, "count_packs": True}
    return (
        tiny_options(
            data,
            **in_folder(folder),
            lr_warmup_iters=0,
            lr_decay_style="constant",
            max_document_length=96,
            **new,
        )
        | changes
    )


def test_a_run_uses_the_options_and_goes_on(data: Data, tmp_path: Path) -> None:
    first = run(options(data, tmp_path, train_iters=2), tmp_path / "first")
    assert first.exit_code == 0, first.console
    assert "no effect" not in first.console
    again = run(options(data, tmp_path, train_iters=4), tmp_path / "again")
    assert again.exit_code == 0, again.console
    assert saved_steps(tmp_path)[0] == 4
    tensors, _ = final_state(tmp_path / "checkpoints", 4)
    assert tensors["model/packs"] == 4 * 4  # four packs a step
    skip_N = tensors["model/layers.0.mixer.D"]
    assert skip_N[:2].abs().max() < 0.5 < skip_N[2:].min()


def test_a_resumed_run_keeps_its_packs(data: Data, tmp_path: Path) -> None:
    first = run(options(data, tmp_path, train_iters=2), tmp_path / "first")
    assert first.exit_code == 0, first.console
    changed = run(options(data, tmp_path, train_iters=4, tail_slots=8), tmp_path / "changed")
    assert changed.exit_code != 0
    assert "--tail-slots" in changed.console, changed.console


def test_a_number_of_heads_is_a_multiple_of_the_groups() -> None:
    with pytest.raises(ConfigError, match="--mamba-heads-without-skip") as error:
        ModelConfig(
            hybrid_layer_pattern="M",
            hidden_size=64,
            mamba_head_dim=16,
            mamba_num_groups=4,
            mamba_heads_without_skip=3,
        )
    [problem] = error.value.problems
    assert problem.cure
