"""Checkpoints of adapters alone, and the base weights that they belong to.

Such a checkpoint names its base: the hash of the base's weights and the checkpoint from which they
were loaded. A load takes the base from there, or from another folder that the user names, and
compares the hash before any adapter is loaded.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from os import PathLike
from pathlib import Path

from megatron_packed.checkpoint.errors import CheckpointError, CheckpointMismatchError
from megatron_packed.checkpoint.load import Step, find_checkpoints, newest_metadata
from megatron_packed.checkpoint.manifest import MANIFEST
from megatron_packed.checkpoint.rank_agreement import ONE_PROCESS, Ranks
from megatron_packed.checkpoint.run_metadata import (
    ADAPTERS,
    BaseWeights,
    Metadata,
    metadata_problem,
)
from megatron_packed.checkpoint.tensor_shard import TensorShard
from megatron_packed.checkpoint.weights_hash import sums_of, weights_hash

_CURE = "give --pretrained-checkpoint with the folder of its base"
_MERGE = "merge them with their base first (megatron-packed convert --merge)"


def stored_base(
    folder: str | PathLike[str], step: Step = None, ranks: Ranks = ONE_PROCESS
) -> BaseWeights | None:
    """Return the base of the adapters that a load of ``folder`` tries first.

    A collective of ``ranks``. Returns None if there is no checkpoint, or one of whole weights.

    Raises:
        CheckpointError: on all ranks: the metadata is invalid, or the directory cannot be listed.
    """
    keys = (ADAPTERS,)
    metadata = newest_metadata(folder, keys, ranks=ranks, step=step, problem=metadata_problem)
    return None if not metadata else BaseWeights(**metadata[ADAPTERS])


def found_base(
    path: str | PathLike[str] | None,
    shards: Iterable[TensorShard],
    *,
    seed: int,
    ranks: Ranks = ONE_PROCESS,
) -> BaseWeights:
    """Return the identity of the base weights that a model holds; a collective of ``ranks``.

    Args:
        path: the checkpoint from which they were loaded; None for random weights.
        shards: ranges of this rank; together the ranks hold each element exactly once.
        seed: seed of the run.
    """
    parts = ranks.gather(sums_of(shards))
    where = None if path is None else str(Path(path).absolute())
    return BaseWeights(weights_hash(parts), where, seed)


def base_refusal(metadata: Metadata, base: BaseWeights) -> str | None:
    """Return why adapters with this metadata do not belong to the loaded base; None if they do."""
    if ADAPTERS not in metadata:
        return "holds whole weights in place of adapters; load them with --load and --finetune"
    stored = BaseWeights(**metadata[ADAPTERS])
    if stored.hash == base.hash:
        return None
    if stored.name == base.name:
        return f"holds adapters of {stored.name}, whose weights have changed since; {_CURE}"
    cure = f"give --seed {stored.seed}" if stored.path is None else _CURE
    return (
        f"holds adapters of another base: {stored.name} (hash {stored.hash[:8]}), and this run has "
        f"{base.name} (hash {base.hash[:8]}); {cure}"
    )


def refusal_as_base(metadata: Metadata) -> str | None:
    """Return why a checkpoint cannot be the base of adapters; None if it can."""
    if ADAPTERS not in metadata:
        return None
    return f"holds adapters alone, and a base needs whole weights; {_MERGE}"


def refusal_as_whole(metadata: Metadata) -> str | None:
    """Return why a checkpoint cannot be exported as a model; None if it can."""
    if ADAPTERS not in metadata:
        return None
    name = BaseWeights(**metadata[ADAPTERS]).name
    return f"holds adapters alone, whose base is {name}; {_MERGE}"


def base_folder(
    adapters: str | PathLike[str],
    stored: BaseWeights,
    given: str | None,
    ranks: Ranks = ONE_PROCESS,
) -> str | None:
    """Return the folder of the base to load; None for random weights. A collective of ``ranks``.

    Args:
        adapters: folder of the adapters, for messages.
        stored: base that they name.
        given: folder that the user names; None for that in ``stored``.
    Raises:
        CheckpointError: on all ranks: no checkpoint is there.
    """
    folder = given or stored.path

    def check() -> None:
        if folder is None or os.path.lexists(Path(folder) / MANIFEST) or find_checkpoints(folder):
            return
        raise CheckpointError(
            f"holds adapters of {stored.name}, and {folder} has no checkpoint",
            path=adapters,
            cure=_CURE,
        )

    ranks.agree_with_rank_0(check, f"looking for the base of {adapters}", cure=_CURE)
    return folder


def no_adapters(folder: str | PathLike[str]) -> CheckpointMismatchError:
    """Return the error for a folder in ``--load-adapter`` that holds whole weights."""
    return CheckpointMismatchError(
        "--load-adapter names whole weights; give a folder of adapters, or load it with --load",
        path=folder,
    )
