"""Data sets and runs that several tests share. A run takes seconds, so each is done only once."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.runs import LAST, Data, in_folder, run, tiny_options


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Data:
    return Data.make(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="session")
def dropout_options(data: Data) -> dict[str, Any]:
    """Return the options of a run with dropout, so that every step draws random numbers.

    Validations and checkpoints happen at different steps. One process has two micro-batches a step.
    """
    return tiny_options(
        data,
        train_iters=LAST,
        global_batch_size=2,
        hidden_dropout=0.1,
        valid_data_path=data.valid,
        eval_interval=4,
        eval_iters=2,
        save_interval=3,
    )


@pytest.fixture(scope="session")
def uninterrupted(
    dropout_options: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[int], Path]:
    """Return a function that maps a number of processes to the folder of an undisturbed run."""
    made: dict[int, Path] = {}

    def folder_of(processes: int) -> Path:
        if processes not in made:
            folder = tmp_path_factory.mktemp(f"uninterrupted_{processes}")
            finished = run({**dropout_options, **in_folder(folder)}, folder, processes)
            assert finished.exit_code == 0, finished.console
            made[processes] = folder
        return made[processes]

    return folder_of
