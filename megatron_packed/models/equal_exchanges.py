"""Backend of all-to-alls of equal parts in a run: choice, set-up and messages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from megatron_packed.config import flag_names as flags
from megatron_packed.config.errors import ConfigError, Problem
from megatron_packed.config.exchanged_heads import exchanges_of_run
from megatron_packed.config.run import RunConfig
from megatron_packed.config.sections.collectives import AUTO, SYMMETRIC_MEMORY
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.models.hybrid_model import HybridModel

if TYPE_CHECKING:
    from megatron_packed.distributed.all_to_all import EqualExchange

OPTION = flags.ALL_TO_ALL_BACKEND
EXCHANGES = "all-to-alls of equal parts"
_EXCHANGED = {"cp": "heads", "ep": "rows for experts"}
"""Parts that the ranks of an axis exchange."""


def uses_symmetric_memory(config: RunConfig) -> bool:
    """Return whether the configuration requests symmetric memory, if the machine supports it."""
    backend = config.parallel.all_to_all_backend
    return backend == SYMMETRIC_MEMORY or (backend == AUTO and config.cuda_graph.enabled)


def exchange_bytes(config: RunConfig) -> int:
    """Return the bytes of a rank's staging buffers; 0 without symmetric memory."""
    if not uses_symmetric_memory(config):
        return 0
    from megatron_packed.distributed.symmetric_exchange import staging_bytes
    from megatron_packed.distributed.symmetric_memory import MOST_RANKS

    sizes = exchanges_of_run(config).values()
    return sum(staging_bytes(size) for size in sizes if size <= MOST_RANKS)


def connect_exchanges(model: HybridModel, config: RunConfig, groups: ParallelGroups) -> None:
    """Set up symmetric memory for a model's exchanges of equal parts, before the first capture.

    This is a collective call. If ``auto`` finds that symmetric memory cannot be used, the collective
    is used, and ``exchange.reason`` has the reason.

    Raises:
        ConfigError: ``--all-to-all-backend symmetric_memory`` cannot be used.
    """
    # The configuration decides, so all ranks return here, or all take part in the messages below.
    if not uses_symmetric_memory(config):
        return
    from megatron_packed.distributed.symmetric_exchange import connect_exchange

    for exchange in exchanges_of_model(model, config):
        found = connect_exchange(exchange.group, groups)
        if not isinstance(found, str):
            exchange.memory = found
            continue
        exchange.reason = found
        if config.parallel.all_to_all_backend == SYMMETRIC_MEMORY:
            raise ConfigError([Problem(OPTION, SYMMETRIC_MEMORY, found, f"give {OPTION} auto")])


def exchanges_of_model(model: HybridModel, config: RunConfig) -> Iterator[EqualExchange]:
    """Yield the exchanges of equal parts of a model, in an order that is equal on all ranks."""
    by_axis = {"cp": model.cp.exchange, "ep": model.ep.exchange}
    for axis in exchanges_of_run(config):
        exchange = by_axis[axis]
        assert exchange is not None, f"the model has no group of {axis} ranks"
        yield exchange


def exchange_line(model: HybridModel, config: RunConfig) -> str:
    """Return the line of the start of a run about its exchanges; empty for the collective."""
    if not uses_symmetric_memory(config):
        return ""
    reasons = [
        "" if exchange.memory is not None else exchange.reason
        for exchange in exchanges_of_model(model, config)
    ]
    if not reasons:
        return ""
    reason = next(filter(None, reasons), "")
    return f"{EXCHANGES}: {by_collective(config, reason) if reason else by_copies(config)}"


def by_collective(config: RunConfig, reason: str = "") -> str:
    """Return what travels by the collective, and why it is not copied if there is a reason."""
    return f"{_exchanged(config)} travel by the collective{reason and f', because {reason}'}"


def by_copies(config: RunConfig) -> str:
    """Return what is copied."""
    return f"{_exchanged(config)} are copied through symmetric memory"


def _exchanged(config: RunConfig) -> str:
    return " and ".join(_EXCHANGED[axis] for axis in exchanges_of_run(config))
