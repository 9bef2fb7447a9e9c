"""Processes of a run on one machine, with small scripts in place of ranks."""

import os
from pathlib import Path

import pytest

from megatron_packed.launch.local_ranks import LocalRanks, Placement


@pytest.mark.parametrize(("killed", "fails"), [(0, 1), (1, 0)])
def test_an_exit_code_is_reported_rather_than_the_signal_of_another_rank(
    killed: int, fails: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both ranks have ended before the launcher looks, so it cannot know which ended first."""
    script = tmp_path / "rank"
    script.write_text(f"#!/bin/sh\n[ $RANK = {fails} ] && exit 3\nkill -KILL $$\n")
    script.chmod(0o755)
    monkeypatch.setenv("PYTHON_EXEC", str(script))
    with LocalRanks(Placement(world_size=2), 2, [], None) as ranks:
        for process in ranks._processes.values():
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        failure = ranks.poll()
        codes = [ranks._processes[rank].returncode for rank in (killed, fails)]
    assert codes == [-9, 3]
    assert failure is not None and (failure.exit_code, failure.sentence) == (3, "")
