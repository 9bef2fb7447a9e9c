"""Exchanges of equal parts in a run: of heads, with the parts in which they travel, and of rows."""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd
from typing import TYPE_CHECKING

from megatron_packed.config.kinds.layer_kind import LayerKind

if TYPE_CHECKING:  # Layers import this module, and all sections would double the time of an import.
    from megatron_packed.config.run import RunConfig


def number_of_parts(wanted: int, ranks: int, counts: Sequence[int]) -> int:
    """Return the largest number of parts, at most ``wanted``, of which each has complete heads.

    Args:
        wanted: number of parts that the user requests.
        ranks: number of ranks that exchange heads.
        counts: numbers of heads, and of groups that heads share; each part has equally many.
    Example:
        64 heads in 8 groups over 2 ranks: up to 4 parts, of 8 heads and one group each.
    """
    most = gcd(*counts)
    possible = range(1, min(wanted, most) + 1)
    return max(parts for parts in possible if parts == 1 or most % (ranks * parts) == 0)


def parts_of_layers(run: RunConfig) -> dict[LayerKind, int]:
    """Return the number of parts of each kind of layer that exchanges heads."""
    model, parallel = run.model, run.parallel
    ranks, tp = parallel.context_parallel_size, parallel.tensor_model_parallel_size
    if ranks == 1:
        return {}
    parts = {}
    for kind in model.kinds:
        if kind.exchanges(parallel) == "heads":
            rank_counts = [max(getattr(model, name) // tp, 1) for name in kind.heads]
            parts[kind] = number_of_parts(parallel.cp_comm_overlap_parts, ranks, rank_counts)
    return parts


def reorders_rows(run: RunConfig) -> bool:
    """Return whether attention reorders rows, because other layers pass states between ranks."""
    exchanged = {kind.exchanges(run.parallel) for kind in run.model.kinds}
    return {"states", "keys and values"} <= exchanged and run.parallel.uses_zigzag


def exchanges_of_run(run: RunConfig) -> dict[str, int]:
    """Return the axes whose ranks exchange parts of equal, static size: axis -> number of ranks.

    ``cp`` exchanges heads for tokens, and ``ep`` exchanges rows for experts.
    """
    parallel, model = run.parallel, run.model
    axis_sizes = {}
    # To reorder rows, attention over a zigzag exchanges heads.
    if parts_of_layers(run) or reorders_rows(run):
        axis_sizes["cp"] = parallel.context_parallel_size
    shared = parallel.expert_model_parallel_size > 1 and model.has_experts
    sends = model.moe_token_dispatcher_type == "alltoall"  # noqa: S105
    if shared and sends and not run.asks_for_expert_rows:
        axis_sizes["ep"] = parallel.expert_model_parallel_size
    return axis_sizes
