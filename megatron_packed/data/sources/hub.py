"""Download of files from the Hugging Face Hub into the cache of huggingface_hub.

All paths of a process use the same commit of a data set or model, even if its branch moves during
the run. If several processes of a machine need a file, huggingface_hub locks the file: one process
downloads it, and the others wait and use the copy.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megatron_packed.config.data_files import DATA_SUFFIXES, TABLE_SUFFIXES
from megatron_packed.config.hub_paths import (
    DATASET,
    TOKENIZER_FILES,
    HubPath,
    hub_problem,
    is_hub_path,
    parse_hub_path,
)
from megatron_packed.data.errors import DataError, NotTokenizedError, printable

_SECONDS = 20.0
"""Time limit of a request."""
_COMMIT = re.compile("[0-9a-f]{40}")


class Commit(NamedTuple):
    """Commit of a data set or model."""

    name: str
    is_offline: bool = False
    """True if only the local copy can be used, because there is no network."""


_commits: dict[str, Commit] = {}
"""Commit of each data set or model, by `_repository`, that this process uses."""
_local: dict[str, str] = {}
"""Local copy of each path that this process downloaded."""


def local_path(
    path: str,
    kind: str = DATASET,
    say: Callable[[str], None] = lambda line: None,
    files: Sequence[str] = TOKENIZER_FILES,
    download: bool = True,
) -> str:
    """Return a path, or the local copy of an ``hf://`` path, which is downloaded first.

    Args:
        kind: ``dataset`` or ``model``.
        say: receives a line with the commit.
        files: names or patterns of the files to download if the path names a complete model.
        download: False sends no request and uses the latest download.
    Raises:
        DataError: the files cannot be downloaded.
        NotTokenizedError: ``download`` is False, and the files were not downloaded before.
    """
    if not is_hub_path(path):
        return path
    if path not in _local:
        problem, source = hub_problem(path, kind), parse_hub_path(path)
        if problem is not None or source is None:
            rule, cure = problem or ("", "")
            raise DataError(f"{path} {rule}; {cure}.")
        if not download:
            _commits.setdefault(_repository(source), _commit_of_copy(path, source))
        commit = commit_of(path)
        _local[path] = _copy_of(path, source, commit, files)
        say(f"{path}: commit {commit.name}, in {_local[path]}")
    return _local[path]


def commit_of(path: str) -> Commit:
    """Return the commit of the data set or model of an ``hf://`` path.

    Without a network, this is the commit of the latest download.

    Raises:
        DataError: the Hub refuses the request, or there is no network and no earlier download.
    """
    source = parse_hub_path(path)
    assert source is not None, path  # checked by `hub_problem`
    key = _repository(source)
    if key not in _commits:
        _commits[key] = _resolved(path, source)
    return _commits[key]


def known_commits() -> dict[str, Commit]:
    """Return the commits that this process uses."""
    return dict(_commits)


def use_commits(commits: Mapping[str, Sequence[Any]]) -> None:
    """Use the commits of another process, which called `known_commits`."""
    _commits.update({key: Commit(*commit) for key, commit in commits.items()})


def _repository(source: HubPath) -> str:
    return f"{source.kind} {source.name}@{source.revision or ''}"


def _resolved(path: str, source: HubPath) -> Commit:
    if source.revision is not None and _COMMIT.fullmatch(source.revision):
        return Commit(source.revision)
    from huggingface_hub import HfApi

    try:
        info = HfApi().repo_info(
            source.name, repo_type=source.kind, revision=source.revision, timeout=_SECONDS
        )
        sha = str(info.sha)
    except Exception as error:  # the network library of huggingface_hub differs between versions
        refusal = _refusal(path, source, error)
        if refusal is not None:
            raise refusal from None
        problem = error
    else:
        # The name becomes a folder of the cache, so it must not be a path.
        if not _COMMIT.fullmatch(sha):
            raise DataError(
                f"{path} cannot be downloaded: the Hub answered with the commit "
                f"{printable(sha, 80)!r}, not with 40 hexadecimal digits; check HF_ENDPOINT."
            )
        return Commit(sha)
    try:
        return _commit_of_copy(path, source)
    except NotTokenizedError:
        raise _unreachable(path, source, problem) from None


def _commit_of_copy(path: str, source: HubPath) -> Commit:
    """Return the commit of the latest download, without a request.

    Raises:
        NotTokenizedError: nothing was downloaded.
    """
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(
            source.name,
            repo_type=source.kind,
            revision=source.revision,
            allow_patterns=[],
            local_files_only=True,
        )
    except Exception:
        raise _absent(path, source) from None
    return Commit(Path(folder).name, is_offline=True)


def _copy_of(path: str, source: HubPath, commit: Commit, files: Sequence[str]) -> str:
    """Return the path of the local copy, which is downloaded if there is a network.

    Raises:
        NotTokenizedError: there is no network and no complete copy.
    """
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(
            source.name,
            repo_type=source.kind,
            revision=commit.name,
            allow_patterns=_patterns(source, files),
            etag_timeout=_SECONDS,
            local_files_only=commit.is_offline,
        )
    except Exception as error:
        if commit.is_offline:
            raise _absent(path, source) from None
        raise _refusal(path, source, error) or _unreachable(path, source, error) from None
    local = Path(folder) / source.inside
    if not local.exists() and not any(c in source.inside for c in "*?["):
        if commit.is_offline:
            raise _absent(path, source)
        tree = f"{_page(source)}/tree/{commit.name}"
        raise DataError(
            f"{path} does not exist at commit {commit.name}; check the names at {tree}."
        )
    return str(local)


def _patterns(source: HubPath, files: Sequence[str]) -> list[str]:
    """Return patterns of the files to download, in which ``*`` matches ``/``, too."""
    names = [f"*{suffix}" for suffix in (*DATA_SUFFIXES, *TABLE_SUFFIXES)]
    if source.kind != DATASET:
        names = list(files)
    if not source.inside:
        return names
    return [source.inside, *(f"{source.inside}/{name}" for name in names)]


def _refusal(path: str, source: HubPath, error: Exception) -> DataError | None:
    """Return the error for an answer of the Hub that no later try changes; None for others."""
    names = {parent.__name__ for parent in type(error).__mro__}
    if "GatedRepoError" in names:
        return DataError(
            f"{path} needs a permission; accept the conditions at {_page(source)}, then run `hf auth login`."
        )
    if "RepositoryNotFoundError" in names:
        return DataError(
            f"{path}: the Hugging Face Hub has no such {source.kind}, or it is private; correct the name, or run "
            "`hf auth login`."
        )
    if "RevisionNotFoundError" in names:
        return DataError(
            f"{path}: the {source.kind} has no revision {source.revision}; see {_page(source)}/commits/main."
        )
    return None


def _absent(path: str, source: HubPath) -> NotTokenizedError:
    return NotTokenizedError(
        f"{path} is not downloaded yet; run `{_command(source)}` on a machine with a network."
    )


def _unreachable(path: str, source: HubPath, error: Exception) -> DataError:
    reason = f"{type(error).__name__}: {printable(str(error).strip().partition(chr(10))[0], 120)}"
    return DataError(
        f"{path} cannot be downloaded ({reason}); run `{_command(source)}` on a machine with a network that shares "
        f"{_cache()}."
    )


def _command(source: HubPath) -> str:
    return f"hf download {source.name}{f' --repo-type {DATASET}' * (source.kind == DATASET)}"


def _cache() -> str:
    try:
        from huggingface_hub.constants import HF_HUB_CACHE
    except ImportError:
        return "its cache"
    return os.fspath(HF_HUB_CACHE)


def _page(source: HubPath) -> str:
    return f"https://huggingface.co/{'datasets/' * (source.kind == DATASET)}{source.name}"
