"""Reader of run logs, and definition of the curves: which fields of a log share a chart."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from pathlib import Path

from megatron_packed.config import flag_names as flags
from megatron_packed.files.regular_files import limited_lines, open_regular

Record = dict[str, object]
_LINE_BYTES = 64 << 20
"""Maximum bytes of a line; the answers of a run to its sample prompts take far fewer."""
_DIGITS = 300
"""Digits from which a whole number may be larger than the largest float."""


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
    low: float | None = 0.0
    """Lowest value of the y axis; None where zero has no meaning."""
    high: float | None = None
    """Highest value of the y axis, for shares; None for a limit from the values."""
    smooth: bool = False
    """Draw the first curve as a mean over neighbouring steps, drawn over the pale values."""
    cut: bool = False
    """Leave out a few values that are far above all others, and report how many."""
    logarithmic: bool = False
    """Use a logarithmic axis if the values span more than a factor of `LOGARITHMIC_FROM`."""


@dataclass(frozen=True)
class Run:
    """Log of one run."""

    name: str
    records: list[Record]

    @property
    def steps(self) -> list[Record]:
        """Records of training steps; records of validations are left out."""
        return self._having("lm_loss")

    @property
    def validations(self) -> list[Record]:
        return self._having("valid_loss")

    @property
    def validation_losses(self) -> list[tuple[int, float]]:
        """(step, loss) of all validations, in order; a loss may be non-finite."""
        return [
            (int(number_in(record, "iteration")), number_in(record, "valid_loss"))
            for record in self.validations
        ]

    @property
    def tests(self) -> list[Record]:
        """Records of evaluations on the test data."""
        return self._having("test_loss")

    @property
    def answers(self) -> list[Record]:
        """Records with answers to sample prompts, as a list ``samples``."""
        return [record for record in self.records if isinstance(record.get("samples"), list)]

    @property
    def checkpoints(self) -> list[Record]:
        return self._having("checkpoint")

    @property
    def facts(self) -> Record:
        """Facts about the run from its last start; empty for a log of an older version."""
        return self._last("run")

    @property
    def kernels(self) -> Record:
        """Kernel of each op in the run's last start."""
        return self._last("kernels")

    @property
    def data(self) -> Record:
        """Counts of tokens and targets of training, validation and test data."""
        return self._last("data")

    @property
    def starts(self) -> list[Record]:
        """Starts of the run: ``step`` that was finished before, and ``time``."""
        lists = [record["starts"] for record in self._having("starts")]
        last = lists[-1] if lists and isinstance(lists[-1], list) else []
        return [start for start in last if isinstance(start, dict)]

    @property
    def restarts(self) -> list[int]:
        """Steps after which the run was started again, each once."""
        steps = (start.get("step") for start in self.starts[1:])
        return sorted({step for step in steps if isinstance(step, int)})

    @property
    def end(self) -> Record:
        """End of the run after its last start: time, exit code and notes; empty without an end."""
        last: Record = {}
        for record in self.records:
            if "starts" in record:
                last = {}
            if isinstance(end := record.get("end"), dict):
                last = end
        return last

    def _having(self, field: str) -> list[Record]:
        return [record for record in self.records if field in record]

    def _last(self, field: str) -> Record:
        records = [record[field] for record in self.records if isinstance(record.get(field), dict)]
        return records[-1] if records else {}  # type: ignore[return-value]


LOGARITHMIC_FROM = 100.0
"""Ratio of the highest and the lowest value of a loss, above which its axis is logarithmic."""
_loss_panel = partial(Panel, low=None, smooth=True, cut=True, logarithmic=True)
_percent = partial(Curve, scale=100)
PANELS = (
    _loss_panel(
        "Loss",
        "nats per target token",
        (
            Curve("lm_loss", "training"),
            Curve("valid_loss", "validation", dots=True),
            Curve("test_loss", "test", dots=True),
        ),
    ),
    _loss_panel(
        "Loss of later tokens",
        "nats per target token of a depth",
        tuple(Curve(f"mtp_{depth}_loss", f"depth {depth}") for depth in range(1, 9)),
    ),
    Panel(
        "Exact match",
        "% of the answers to validation conversations",
        (_percent("valid_exact_match", dots=True),),
        high=100.0,
    ),
    Panel("Throughput", "real tokens per second", (Curve("tokens_per_second"),)),
    Panel("MFU", "% of the dense bf16 peak", (_percent("mfu"),)),
    Panel("Gradient norm", "before clipping", (Curve("grad_norm"),), smooth=True, cut=True),
    Panel("Learning rate", "", (Curve("learning_rate"),)),
    Panel("Weight decay", "", (Curve("weight_decay"),)),
    Panel("Pack fill", "% of slots with a real token", (_percent("pack_fill"),), high=100.0),
    Panel("Documents per pack", "mean of the step", (Curve("docs_per_pack"),)),
    Panel(
        "Graph hit rate",
        "% of micro-batches replayed",
        (_percent("graph_hit_rate"),),
        high=100.0,
    ),
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
        (_percent("expert_dropped_share"),),
    ),
    Panel("Step time", "ms", (Curve("step_time_ms"),), cut=True),
    Panel("Waiting for data", "ms per step", (Curve("data_wait_ms"),), cut=True),
    Panel("Parameter norm", "after the update", (Curve("params_norm"),), low=None),
    Panel("Zeros in the gradient", "elements", (Curve("num_zeros"),)),
)
OF_A_SET = "valid_loss_"
"""Begin of the field with the loss of one validation set; the name of the set follows."""
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
        (float(record["iteration"]), float(value) * curve.scale)  # type: ignore[arg-type]
        for record in records
        if isinstance(value := record.get(curve.field), (int, float))
        and math.isfinite(value)
        and isinstance(record.get("iteration"), int)
    ]


def steady(steps: Sequence[Record]) -> Sequence[Record]:
    """Return the steps for medians: without the first five, which compile kernels and warm up."""
    return steps[min(5, len(steps) - 1) :]


def number_in(record: Record, name: str) -> float:
    """Return a field as a number; non-finite numbers are text in the log, since JSON lacks them."""
    return float(record[name])  # type: ignore[arg-type]


def numbers_in(records: Sequence[Record], name: str) -> list[float]:
    """Return a field of the records that have it; see `number_in`."""
    return [number_in(record, name) for record in records if record.get(name) is not None]


SMOOTHED_FROM = 20
"""Smallest number of points that are smoothed."""


def smoothed(points: Sequence[tuple[float, float]]) -> tuple[int, list[tuple[float, float]]]:
    """Return a window and the points as means over that many neighbours.

    The window is about a fortieth of the points. Near both ends it becomes smaller, so that it is
    symmetric and the first and last value stay.

    Returns:
        The window in points, an odd number, and the points. The window is 1 for fewer than
        `SMOOTHED_FROM` points, which stay the same.
    """
    half = max(2, len(points) // 80) if len(points) >= SMOOTHED_FROM else 0
    sums = list(accumulate((y for _, y in points), initial=0.0))
    means = []
    for place, (x, _) in enumerate(points):
        beside = min(half, place, len(points) - 1 - place)
        first, end = place - beside, place + beside + 1
        means.append((x, (sums[end] - sums[first]) / (end - first)))
    return 2 * half + 1, means


def limit_of(lines: Sequence[Sequence[tuple[float, float]]], *, keeps_first: bool) -> float | None:
    """Return the upper limit of a chart that leaves out a few very high values; None for all values.

    Values of a line are left out if at most one in a hundred is more than three times all others.

    Args:
        lines: points of each line.
        keeps_first: never leave out a value below the first one of a line: a loss begins high.
    """
    highest = max((y for line in lines for _, y in line), default=0.0)
    limit = max((_limit_of_line(line, keeps_first) for line in lines if line), default=highest)
    return limit if limit < highest else None


def _limit_of_line(line: Sequence[tuple[float, float]], keeps_first: bool) -> float:
    values = sorted(y for _, y in line)
    if len(values) < 10:
        return values[-1]
    usual = values[-1 - max(1, len(values) // 100)]
    if keeps_first:
        usual = max(usual, line[0][1])
    return values[-1] if values[-1] <= 3 * usual else 1.1 * usual


def panels_of(runs: Sequence[Run]) -> list[Panel]:
    """Return the panels and curves for which at least one run has numbers."""
    panels = []
    loss, *others = PANELS
    for panel in (loss, _validation_sets(runs), *others):
        curves = tuple(
            curve for curve in panel.curves if any(points(run.records, curve) for run in runs)
        )
        if curves:
            panels.append(replace(panel, curves=curves))
    return panels


def _validation_sets(runs: Sequence[Run]) -> Panel:
    """Return the panel with the loss of each validation set, without curves for a single set."""
    fields = dict.fromkeys(field for run in runs for record in run.validations for field in record)
    sets = [field for field in fields if field.startswith(OF_A_SET)]
    curves = (Curve(field, field.removeprefix(OF_A_SET), dots=True) for field in sets)
    return Panel(
        "Loss of validation sets",
        "nats per target token",
        tuple(curves),
        low=None,
        logarithmic=True,
    )


def read_jsonl(path: str | os.PathLike[str]) -> list[Record]:
    """Return the records of a run's log; a line that a killed run has cut off is skipped.

    The loads of single experts (``expert_load``) are dropped except for the last record that has
    them. Otherwise, they would take most of the memory of a long log.

    Raises:
        OSError: the log cannot be read, or is a directory or a device.
        ValueError: a clause, because a line is too long for a record.
    """
    records: list[Record] = []
    loaded: Record = {}
    with open_regular(path, pipes=True) as file:
        for line in limited_lines(file, _LINE_BYTES):
            try:
                record = json.loads(line.decode(errors="replace"), parse_int=_number)
            except (ValueError, RecursionError):
                continue
            if isinstance(record, dict):
                records.append(record)
                if record.get("expert_load"):
                    loaded.pop("expert_load", None)
                    loaded = record
    return records


def _number(text: str) -> int | str:
    """Return a whole number, or its text if no float can hold the number."""
    return int(text) if len(text) < _DIGITS else text


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
        named = [file for file in logs if file.name == "log.jsonl"]
        if len(named or logs) != 1:
            contents = f"{len(logs)} .jsonl files and no log.jsonl" if logs else "no .jsonl file"
            raise ValueError(
                f"{log} holds {contents}; give the file that the run wrote by {flags.LOG_JSONL}."
            )
        log = (named or logs)[0]
    try:
        records = read_jsonl(log)
    except ValueError as error:
        raise ValueError(f"{log} {error}; give a file that {flags.LOG_JSONL} wrote.") from None
    run = Run(str(path) if name is None else name, records)
    if not run.steps:
        raise ValueError(f"{log} holds no training step; at least one is needed.")
    for step in run.steps:
        wrong_fields = [name for name in OF_A_STEP if name not in step]
        wrong_fields += [name for name in OF_A_STEP[:2] if not isinstance(step.get(name, 0), int)]
        if wrong_fields:
            raise ValueError(
                f"{log}: {wrong_fields[0]} of a step is missing or is no number; "
                f"give a file that {flags.LOG_JSONL} wrote."
            )
    return run
