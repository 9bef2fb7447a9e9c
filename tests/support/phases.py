"""A run of three phases: short packs, packs of twice the length, and another blend."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from support.runs import Data, tiny_options, write_conversations

STEPS = 5
"""Steps of each phase by default."""


def three_phases(
    data: Data, *, seq_length: int = 64, steps: int = STEPS, **more: Any
) -> list[dict[str, Any]]:
    """Return the options of each phase.

    Every step draws dropout masks, and validations and checkpoints happen at different steps. The
    last phase also changes the router and gives a new schedule.

    Args:
        data: data of the first phases.
        seq_length: tokens of a pack in the first phase.
        steps: steps of each phase.
        more: options of all phases.
    """
    other = write_conversations(data.folder / "other.jsonl", 60, seed=5)
    common = tiny_options(
        data,
        hidden_dropout=0.1,
        global_batch_size=2,
        valid_data_path=data.valid,
        eval_interval=2,
        eval_iters=2,
        save_interval=3,
        **more,
    )
    short = {**common, "begin_phase": "short", "seq_length": seq_length, "train_iters": steps}
    long = {**short, "begin_phase": "long", "seq_length": 2 * seq_length, "train_iters": 2 * steps}
    blend = {
        "begin_phase": "blend",
        "train_data_path": (1, data.train, 3, other),
        "moe_router_topk": 1,
        "train_iters": 3 * steps,
        "lr_decay_style": "WSD",
        "lr_wsd_decay_iters": steps,
    }
    return [short, long, {**long, **blend}]


def phase_options(folder: Path, **changes: Any) -> list[dict[str, Any]]:
    """Return `three_phases` with data that is written to ``folder``."""
    return three_phases(Data.make(folder), **changes)
