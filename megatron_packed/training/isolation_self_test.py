"""The self-test at the start of a run: no document may see another through the kernels in use."""

from __future__ import annotations

from functools import partial

from megatron_packed.config.run import RunConfig
from megatron_packed.distributed.collectives import in_turns
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.models.hybrid_model import HybridModel
from megatron_packed.models.isolation import check_isolation, coupled_by_design
from megatron_packed.training.console import Console
from megatron_packed.training.failures import IsolationLeak


def self_test(
    config: RunConfig, groups: ParallelGroups, model: HybridModel, console: Console
) -> None:
    """Refuse to train when a document can see another through the kernels in use.

    Raises:
        IsolationLeak: naming the checks that failed.
    """
    check = partial(
        check_isolation,
        config.model,
        groups.device,
        model.dtype,
        model.backends,
        groups=groups,
        cp_comm_type=config.parallel.cp_comm_type,
        sequence_parallel=config.parallel.sequence_parallel,
    )
    # The first use compiles and tunes kernels: ranks of one machine would do it all at once.
    results = in_turns(groups, check) if groups.device.type == "cuda" else check()
    # Every rank judges its own kernels; one that leaks ends the job.
    leaks = [str(result) for result in results if not result.passed]
    if leaks:
        raise IsolationLeak(
            "the self-test refuses to train, because documents of a pack are not kept apart:\n  "
            + "\n  ".join(leaks)
            + "\ndocs/isolation.md lists the kernels that keep them apart; --no-isolation-self-test trains on a leak"
        )
    coupled = coupled_by_design(config.model)
    left_out = (
        f"; not checked, since it couples the documents of a pack by design: {', '.join(coupled)}"
    )
    console.say(f"isolation self-test: {len(results)} checks passed{left_out if coupled else ''}")
