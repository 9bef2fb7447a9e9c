"""Bounds of expert buffers in the metadata of checkpoints."""

from __future__ import annotations

from typing import Any

from megatron_packed.checkpoint.run_metadata import EXPERT_BOUNDS, Metadata
from megatron_packed.layers.moe.expert_room import Load
from megatron_packed.models.hybrid_model import HybridModel


def stored_bounds(model: HybridModel) -> dict[str, Any]:
    """Return the metadata of a checkpoint that keeps the bounds; empty without observed bounds."""
    room = model.expert_room
    if room.bounds is None or not (room.observed or room.repeats):
        return {}
    values = {"ep_size": model.ep.size, **room.bounds._asdict(), "repeats": room.repeats}
    return {EXPERT_BOUNDS: values}


def restore_bounds(model: HybridModel, metadata: Metadata) -> None:
    """Take over the bounds of a checkpoint.

    Given bounds are kept. Bounds of another number of expert-parallel ranks are ignored, because the
    loads of those ranks differ. So are bounds of the other dispatcher: only `alltoall` has a bound of
    its parts, and other checkpoints store 0 for it.
    """
    room, stored = model.expert_room, metadata.get(EXPERT_BOUNDS)
    if stored is None or room.bounds is None:
        return
    room.repeats = stored["repeats"]
    # Factors of even shares are kept, so packs of another size get bounds of their size.
    sends_parts = model.config.moe_token_dispatcher_type == "alltoall"  # noqa: S105
    same = stored["ep_size"] == model.ep.size and (stored["peer"] > 0) == sends_parts
    if room.measured and same:
        room.bounds = Load(stored["rank"], stored["peer"])
        room.observed = True
