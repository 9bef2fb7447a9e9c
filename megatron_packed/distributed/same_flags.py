"""Check that all ranks run with the same flags, which several machines get from several commands."""

from __future__ import annotations

import json
from hashlib import sha256

from megatron_packed.config.errors import ConfigError, Problem
from megatron_packed.config.run import SECTIONS, RunConfig
from megatron_packed.config.serialise import as_given, differing_options, to_dict
from megatron_packed.distributed.collectives import all_gather_json, barrier
from megatron_packed.distributed.groups import ParallelGroups

_MAY_DIFFER = {"data", "checkpoint", "logging", "profiling"}
"""Sections with paths, which may differ between machines."""


def check_same_flags(config: RunConfig, groups: ParallelGroups) -> None:
    """Check that the options of all ranks are equal; a collective of all ranks.

    Raises:
        ConfigError: on the first rank whose options differ from those of rank 0. The other ranks
            wait until this rank ends the run.
    """
    values = to_dict(config)
    digest = sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()
    digests = all_gather_json(digest, groups)
    if len(set(digests)) == 1:
        return
    keys = SECTIONS.keys() - _MAY_DIFFER
    of_ranks = all_gather_json({key: values[key] for key in sorted(keys)}, groups)
    differing = [list(differing_options(of_ranks[0], of_rank, keys)) for of_rank in of_ranks]
    first = next((rank for rank, found in enumerate(differing) if found), None)
    if first == groups.rank:
        cure = "start all machines with the same flags"
        raise ConfigError(
            [
                Problem(
                    about.flag, as_given(about, mine), f"is {as_given(about, of_0)} on rank 0", cure
                )
                for about, of_0, mine in differing[first]
            ]
        )
    if first is not None:
        barrier(groups)
