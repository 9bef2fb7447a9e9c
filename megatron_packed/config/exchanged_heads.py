"""Exchanges of equal parts in a run: of heads, with the parts in which they travel, and of rows."""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd
from typing import TYPE_CHECKING

from megatron_packed.config.layer_pattern import ATTENTION, GATED_DELTA_NET, MAMBA, MOE

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


def parts_of_layers(run: RunConfig) -> dict[str, int]:
    """Return the number of parts of each kind of layer that exchanges heads, by symbol."""
    model, parallel = run.model, run.parallel
    ranks = parallel.context_parallel_size
    if ranks == 1:
        return {}
    counts: dict[str, tuple[int, int]] = {}
    if parallel.cp_comm_type == "a2a":
        counts[ATTENTION] = (model.num_attention_heads, model.num_query_groups)
    if not parallel.passes_states:
        counts[MAMBA] = (model.mamba_num_heads, model.mamba_num_groups)
    counts[GATED_DELTA_NET] = (model.linear_num_value_heads, model.linear_num_key_heads)
    found = {}
    for symbol, (heads, groups) in counts.items():
        if symbol in model.layer_types:
            tp = parallel.tensor_model_parallel_size
            own = (heads // tp, max(groups // tp, 1))
            found[symbol] = number_of_parts(parallel.cp_comm_overlap_parts, ranks, own)
    return found


def exchanges_of_run(run: RunConfig) -> dict[str, int]:
    """Return the axes whose ranks exchange parts of equal, static size: axis -> number of ranks.

    ``cp`` exchanges heads for tokens, and ``ep`` exchanges rows for experts.
    """
    parallel, model = run.parallel, run.model
    found = {}
    # Attention over a zigzag of rows exchanges heads if Mamba layers pass states, to reorder rows.
    reorders = parallel.passes_states and parallel.document_alignment > 1
    if parts_of_layers(run) or (reorders and {ATTENTION, MAMBA} <= set(model.layer_types)):
        found["cp"] = parallel.context_parallel_size
    shared = parallel.expert_model_parallel_size > 1 and MOE in model.layer_types
    sends = model.moe_token_dispatcher_type == "alltoall"  # noqa: S105
    if shared and sends and not run.asks_for_expert_rows:
        found["ep"] = parallel.expert_model_parallel_size
    return found
