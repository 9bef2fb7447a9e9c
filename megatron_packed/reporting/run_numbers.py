"""Rows of numbers of a run: losses, rates, skipped steps, CUDA graphs, and dropped assignments."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Iterator, Sequence

from megatron_packed.reporting.curves import Record, Run, number_in, numbers_in, steady
from megatron_packed.reporting.loss_warnings import NO_TARGETS, NON_FINITE, SPIKE
from megatron_packed.reporting.run_warnings import (
    graph_counts,
    listed,
    share_of_waiting,
    skipped_for,
    spikes_of,
)


def numbers_of(run: Run) -> list[tuple[str, str]]:
    """Return the rows of a run's column in the table: name and value."""
    steps, last = run.steps, run.steps[-1]
    settled = steady(steps)

    def median(name: str) -> float:
        return statistics.median(numbers_in(settled, name))

    spikes, waiting = spikes_of(steps), share_of_waiting(steps)
    skipped = listed(skipped_for(steps, SPIKE)) or "0"
    rows = [
        ("steps", f"{last['iteration']:,}"),
        ("tokens consumed", f"{last['consumed_tokens']:,}"),
        *_loss_rows(run),
        ("median step time", f"{median('step_time_ms'):,.1f} ms"),
        ("median throughput", f"{median('tokens_per_second'):,.0f} real tokens/s"),
        ("median MFU", f"{100 * median('mfu'):.1f} %" if last.get("mfu") is not None else ""),
        ("mean pack fill", f"{100 * statistics.fmean(numbers_in(steps, 'pack_fill')):.2f} %"),
        ("peak memory", f"{max(numbers_in(steps, 'memory_gib')):.2f} GiB"),
        ("steps skipped as non-finite", listed(skipped_for(steps, NON_FINITE)) or "0"),
        ("plan hash", str(last["plan_hash"])),
        ("phases", _phases(run)),
        ("steps skipped without target tokens", listed(skipped_for(steps, NO_TARGETS))),
        ("steps with a spike of loss or gradient norm", listed(spikes)),
        ("steps skipped for a spike", skipped if spikes else ""),
        ("work of the busiest data-parallel rank, relative to the mean", _imbalance(steps)),
        ("waiting for data", "" if waiting is None else f"{100 * waiting:.1f} % of step time"),
        ("CUDA graphs in steps", _graphs(steps)),
        ("expert assignments dropped by capacity", _dropped(steps)),
        ("expert buffers", _expert_buffers(steps)),
        ("kernels", " · ".join(f"{op} {name}" for op, name in run.kernels.items())),
        *_target_rows(run.data),
    ]
    return [(name, value) for name, value in rows if value]


def _loss_rows(run: Run) -> Iterator[tuple[str, str]]:
    """Yield rows of the first and last training and validation losses, and of the test loss."""
    yield "first and last training loss", _first_and_last(run.steps, "lm_loss")
    for name in (name for name in run.steps[-1] if re.fullmatch(r"mtp_\d+_loss", name)):
        label = f"first and last training loss of depth {name.split('_')[1]}"
        yield label, _first_and_last(run.steps, name)
    yield "first and last validation loss", _first_and_last(run.validations, "valid_loss")
    for test in run.tests[-1:]:
        yield "test loss", f"{number_in(test, 'test_loss'):.4f} at step {test['iteration']:,}"


def _first_and_last(records: Sequence[Record], name: str) -> str:
    losses = numbers_in(records, name)
    return f"{losses[0]:.4f} → {losses[-1]:.4f}" if losses else ""


def _phases(run: Run) -> str:
    """Return the phases of the run and their first steps; empty without phases."""
    phases = run.facts.get("phases")
    if not isinstance(phases, list):
        return ""
    try:
        return ", ".join(
            f"{phase['name']} from step {phase['iteration'] + 1:,}" for phase in phases
        )
    except (KeyError, TypeError, ValueError):  # a damaged log
        return ""


def _imbalance(steps: Sequence[Record]) -> str:
    imbalances = numbers_in(steps, "dp_imbalance")
    if max(imbalances, default=1) <= 1:
        return ""
    return f"median {statistics.median(imbalances):.3f}, largest {max(imbalances):.3f}"


def _graphs(steps: Sequence[Record]) -> str:
    memory = numbers_in(steps, "graph_memory_mib")
    if not memory:
        return ""
    replays, eager = graph_counts(steps)
    share = 100 * replays / max(replays + eager, 1)
    counts = f"{replays:,} micro-batches replayed, {eager:,} eager (hit rate {share:.1f} %)"
    return f"{counts}, {memory[-1]:,.0f} MiB"


def _expert_buffers(steps: Sequence[Record]) -> str:
    bounds = numbers_in(steps, "expert_rank_bound")
    if not bounds:
        return ""
    load, repeats = max(numbers_in(steps, "expert_rank_load")), numbers_in(steps, "expert_repeats")
    of_load = f"largest load {load:.2f}, bound {bounds[-1]:.2f} of an even share"
    return f"{of_load}; repeated steps: {repeats[-1]:,.0f}"


def _target_rows(data: Record) -> list[tuple[str, str]]:
    """Return rows of each data set's target counts; empty for old logs."""
    return [
        (
            f"{name} targets",
            f"{of['targets_kept']:,} of {of['targets_in']:,} kept; {of['documents_without_targets']:,} of "
            f"{of['documents_in']:,} documents have none left",
        )
        for name, of in data.items()
        if isinstance(of, dict) and "targets_in" in of
    ]


def _dropped(steps: Sequence[Record]) -> str:
    """Return the share of expert assignments that were dropped, in all and in the worst layer."""
    capped = [step for step in steps if "expert_dropped_share" in step]
    if not capped:
        return ""
    tokens = numbers_in(capped, "real_tokens")

    def mean(values: Iterable[float]) -> float:
        return sum(value * count for value, count in zip(values, tokens)) / max(sum(tokens), 1)

    layers: list[tuple[float, ...]] = list(zip(*(r["expert_dropped_by_layer"] for r in capped)))
    most, layer = max((mean(shares), place) for place, shares in enumerate(layers))
    count = int(sum(numbers_in(capped, "expert_dropped")))
    total = mean(numbers_in(capped, "expert_dropped_share"))
    return f"{100 * total:.3g} % ({count:,}); most in E layer {layer}: {100 * most:.3g} %"
