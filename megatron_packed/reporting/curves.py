"""Reader of run logs, and definition of the curves: which fields of a log share a chart."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_packed.config import flag_names as flags

Record = dict[str, object]
NON_FINITE, NO_TARGETS, SPIKE = "non-finite", "no targets", "spike"
"""Values of ``skip_reason`` in a log: reasons why the update of a step was not applied."""


@dataclass(frozen=True)
class Curve:
    """Curve of one field of the log, multiplied by ``scale``."""

    field: str
    legend: str = ""
    scale: float = 1.0
    dots: bool = False
    """Draw a dot at each point, for fields that only a few steps have."""


@dataclass(frozen=True)
class Panel:
    """Chart of curves that share axes; the x axis is the step."""

    title: str
    unit: str
    curves: tuple[Curve, ...]


@dataclass(frozen=True)
class Run:
    """Log of one run."""

    name: str
    records: list[Record]

    @property
    def steps(self) -> list[Record]:
        """Records of training steps; records of validations are left out."""
        return [record for record in self.records if "lm_loss" in record]


PANELS = (
    Panel(
        "Loss",
        "nats per target token",
        (
            Curve("lm_loss", "training"),
            Curve("valid_loss", "validation", dots=True),
            Curve("test_loss", "test", dots=True),
        ),
    ),
    Panel("Throughput", "real tokens per second", (Curve("tokens_per_second"),)),
    Panel("MFU", "% of the dense bf16 peak", (Curve("mfu", scale=100),)),
    Panel("Pack fill", "% of slots with a real token", (Curve("pack_fill", scale=100),)),
    Panel("Documents per pack", "mean of the step", (Curve("docs_per_pack"),)),
    Panel("Graph hit rate", "% of micro-batches replayed", (Curve("graph_hit_rate", scale=100),)),
    Panel(
        "Memory",
        "peak in GiB",
        (
            Curve("memory_gib", "used"),
            Curve("memory_reserved_gib", "reserved"),
            Curve("host_memory_gib", "host"),
        ),
    ),
    Panel(
        "Load of experts",
        "relative to the mean of the layer",
        (Curve("expert_load_max", "busiest"), Curve("expert_load_min", "least busy")),
    ),
    Panel(
        "Expert assignments dropped",
        "% of the assignments of real tokens",
        (Curve("expert_dropped_share", scale=100),),
    ),
    Panel("Waiting for data", "ms per step", (Curve("data_wait_ms"),)),
    Panel("Step time", "ms", (Curve("step_time_ms"),)),
    Panel("Gradient norm", "before clipping", (Curve("grad_norm"),)),
    Panel("Parameter norm", "after the update", (Curve("params_norm"),)),
    Panel("Zeros in the gradient", "elements", (Curve("num_zeros"),)),
    Panel("Learning rate", "", (Curve("learning_rate"),)),
)


OF_A_STEP = (
    "iteration",
    "consumed_tokens",
    "lm_loss",
    "step_time_ms",
    "tokens_per_second",
    "pack_fill",
    "memory_gib",
    "skipped",
    "plan_hash",
)
"""Fields that every record of a training step has."""


def points(records: Sequence[Record], curve: Curve) -> list[tuple[float, float]]:
    """Return (step, value) of all records with a finite number.

    A log stores a non-finite number as text, so it is left out here.
    """
    return [
        (float(record["iteration"]), float(record[curve.field]) * curve.scale)  # type: ignore[arg-type]
        for record in records
        if isinstance(record.get(curve.field), (int, float))
        and isinstance(record.get("iteration"), int)
    ]


def panels_of(runs: Sequence[Run]) -> list[Panel]:
    """Return the panels and curves for which at least one run has numbers."""
    found = []
    for panel in PANELS:
        curves = tuple(
            curve for curve in panel.curves if any(points(run.records, curve) for run in runs)
        )
        if curves:
            found.append(Panel(panel.title, panel.unit, curves))
    return found


def read_jsonl(path: str | os.PathLike[str]) -> list[Record]:
    """Return the records of a run's log; a line that a killed run has cut off is skipped.

    The loads of single experts (``expert_load``) are dropped except for the last record that has
    them. Otherwise, they would take most of the memory of a long log.
    """
    records: list[Record] = []
    loaded: Record = {}
    with open(path, errors="replace") as lines:
        for line in lines:
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(record, dict):
                records.append(record)
                if record.get("expert_load"):
                    loaded.pop("expert_load", None)
                    loaded = record
    return records


def read_run(path: str | os.PathLike[str], name: str | None = None) -> Run:
    """Read a run from its log.

    Args:
        path: the ``--log-jsonl`` file, or a folder with ``log.jsonl`` or a single ``.jsonl`` file.
        name: name of the run in legends; by default the path.
    Raises:
        OSError: the log cannot be read.
        ValueError: there is no log, or the log holds no training step.
    """
    log = Path(path)
    if log.is_dir():
        logs = sorted(log.glob("*.jsonl"))
        named = [one for one in logs if one.name == "log.jsonl"]
        if len(named or logs) != 1:
            found = f"{len(logs)} .jsonl files and no log.jsonl" if logs else "no .jsonl file"
            raise ValueError(
                f"{log} holds {found}; give the file that the run wrote by {flags.LOG_JSONL}."
            )
        log = (named or logs)[0]
    run = Run(str(path) if name is None else name, read_jsonl(log))
    if not run.steps:
        raise ValueError(f"{log} holds no training step; at least one is needed.")
    for step in run.steps:
        wrong = [name for name in OF_A_STEP if name not in step]
        wrong += [name for name in OF_A_STEP[:2] if not isinstance(step.get(name, 0), int)]
        if wrong:
            raise ValueError(
                f"{log}: {wrong[0]} of a step is missing or is no number; give a file that {flags.LOG_JSONL} wrote."
            )
    return run
