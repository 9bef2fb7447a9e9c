"""Data for runs whose models are exported."""

import pytest

from support.damaged_megatron import one_reader
from support.json_lines import write_lines


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "answers.jsonl"
    lines = [{"prompt": f"What is {n}?", "completion": f"It is {n}."} for n in range(10, 50)]
    write_lines(path, lines)
    return path


@pytest.fixture(scope="module")
def reader():
    """Read the pickles of Megatron's checkpoints in one process."""
    with one_reader():
        yield
