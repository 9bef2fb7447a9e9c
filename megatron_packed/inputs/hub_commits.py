"""Agreement of all ranks on the commits of data and tokenizers on the Hugging Face Hub."""

from __future__ import annotations

from typing import Any

from megatron_packed.config.hub_paths import is_hub_path
from megatron_packed.config.sections.data import DataConfig
from megatron_packed.data.errors import DataError
from megatron_packed.data.sources.hub import commit_of, known_commits, use_commits
from megatron_packed.distributed.collectives import all_gather_json
from megatron_packed.distributed.groups import ParallelGroups


def agree_on_commits(options: DataConfig, groups: ParallelGroups) -> None:
    """Let rank 0 find the commits of all ``hf://`` paths, and use these commits on every rank.

    A collective if the options have such a path. Without this agreement, ranks would read different
    data if a branch of the Hub moved while they start.

    Raises:
        DataError: on all ranks; rank 0 cannot find a commit.
    """
    blends = (options.train_blend, options.valid_blend, options.test_blend)
    named_paths = [path for blend in blends for path in blend.paths] + [
        options.tokenizer_model or ""
    ]
    paths = [path for path in named_paths if is_hub_path(path)]
    if not paths:
        return
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
