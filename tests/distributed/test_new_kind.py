"""A kind of layer is two new files: it trains, decodes and is isolated, also on two ranks."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import megatron_packed

PACKAGE = Path(megatron_packed.__file__).parent
TESTS = Path(__file__).parents[1]
NEW = TESTS / "data" / "new_kind"


def with_new_files(target: Path, package: Path, new: Path) -> None:
    """Make a package of links to the files of ``package`` and of ``new``."""
    target.mkdir()
    folders = {path.name for path in new.iterdir() if path.is_dir()}
    for path in package.iterdir():
        if path.name not in {*folders, "__pycache__"}:
            (target / path.name).symlink_to(path)
    for path in new.iterdir():
        if path.is_dir():
            with_new_files(target / path.name, package / path.name, path)
        else:
            (target / path.name).symlink_to(path)


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict:
    root = tmp_path_factory.mktemp("package")
    with_new_files(root / "megatron_packed", PACKAGE, NEW)
    done = subprocess.run(
        [sys.executable, "-B", "-m", "support.new_kind_runs"],
        cwd=root,
        env={"PYTHONPATH": f"{root}:{TESTS}", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_it_trains(results) -> None:
    losses = results["losses"]
    assert losses == sorted(losses, reverse=True) and losses[-1] < 0.99 * losses[0]


def test_recomputed_and_offloaded_layers_have_the_same_bits(results) -> None:
    assert results["other bits"] == []


def test_checkpoints_of_megatron_have_no_such_layer(results) -> None:
    assert results["not in Megatron"] == ["short-convolution layers (S)"]


def test_its_states_give_the_answers_of_the_whole_text(results) -> None:
    assert results["answers"] == results["answers without states"]


def test_documents_are_isolated_and_a_leak_is_found(results) -> None:
    assert results["leaks"] == [] and results["leaks without boundaries"] == ["S"]


def test_two_tensor_parallel_ranks_compute_the_same(results) -> None:
    assert results["worst difference of ranks"] < 1e-9
    assert results["leaks of ranks"] == [[], []]
    assert results["answers of ranks"] == [results["answers"]] * 2
