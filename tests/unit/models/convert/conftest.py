"""Data for runs whose models are exported."""

import json

import pytest


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "answers.jsonl"
    lines = [{"prompt": f"What is {n}?", "completion": f"It is {n}."} for n in range(10, 50)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path
