"""Isolation self-test at the start of a run: documents of a pack must not influence each other."""

from __future__ import annotations

from functools import partial

from megatron_packed.config.run import RunConfig
from megatron_packed.distributed.collectives import in_turns
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.explain.op_requests import op_requests
from megatron_packed.layers.context_parallel import communication_of
from megatron_packed.models.hybrid_model import HybridModel
from megatron_packed.models.isolation import check_isolation, coupled_by_design
from megatron_packed.reporting.console import Console
from megatron_packed.training.failures import IsolationLeak


def self_test(
    config: RunConfig,
    groups: ParallelGroups,
    model: HybridModel,
    console: Console,
    documents: int | None = None,
) -> None:
    """Check that the kernels in use keep the documents of a pack isolated, and print the result.

    Args:
        documents: largest number of documents in a pack, as for `op_requests`.
    Raises:
        IsolationLeak: a document influences another; the message lists the failed checks.
    """
    check = partial(
        check_isolation,
        config.model,
        groups.device,
        model.dtype,
        model.backends,
        groups=groups,
        **communication_of(config.parallel),
        requests=op_requests(config, groups.device, documents),
    )
    # The first use compiles and tunes kernels. On GPUs, rank 0 does so first, and other ranks reuse
    # the results on disk.
    results = in_turns(groups, check) if groups.device.type == "cuda" else check()
    # Every rank checks its own kernels. A leak on one rank ends the job.
    leaks = [result for result in results if not result.passed]
    if leaks:
        reason = "documents of a pack influence each other"
        if all(result.isolated and result.seeing for result in leaks):
            reason = "a layer reads later tokens"
        raise IsolationLeak(
            f"the isolation self-test failed, because {reason}:\n  "
            + "\n  ".join(map(str, leaks))
            + "\ndocs/isolation.md lists kernels without leaks; --no-isolation-self-test trains despite the leak"
        )
    coupled = coupled_by_design(config.model)
    left_out = (
        f"; not checked, because it couples the documents of a pack by design: {', '.join(coupled)}"
    )
    console.detail(
        f"isolation self-test: {len(results)} checks passed{left_out if coupled else ''}"
    )
