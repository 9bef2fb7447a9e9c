"""A kind of layer that new files alone add is captured and replayed on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.changed_package import NEW_KIND, TESTS, changed_package, new_files, run_tests


@pytest.mark.gpu
def test_a_kind_of_new_files_replays_what_eager_layers_compute(tmp_path: Path) -> None:
    folder = changed_package(tmp_path, new_files=new_files(NEW_KIND))
    run_tests(folder, TESTS / "changed" / "new_kind.py", only="graphs_replay")
