"""Agreement of all ranks on the commits of data and tokenizers on the Hugging Face Hub."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_packed.data.errors import DataError
from megatron_packed.data.sources.hub import commit_of, known_commits, use_commits
from megatron_packed.distributed.collectives import all_gather_json
from megatron_packed.distributed.groups import ParallelGroups


def agree_on_commits(paths: Sequence[str], groups: ParallelGroups) -> None:
    """Let rank 0 find the commits of ``hf://`` paths, and use them on every rank; a collective.

    Without this agreement, ranks would read different data if a branch of the Hub moved while they
    start.

    Args:
        paths: paths on the Hub (`DataConfig.hub_paths`).
    Raises:
        DataError: on all ranks; rank 0 cannot find a commit.
    """
    mine: dict[str, Any] = {"commits": {}, "error": ""}
    if groups.rank == 0:
        try:
            for path in paths:
                commit_of(path)
        except DataError as error:
            mine["error"] = str(error)
        mine["commits"] = known_commits()
    commits = all_gather_json(mine, groups)[0]
    if commits["error"]:
        raise DataError(commits["error"])
    use_commits(commits["commits"])
