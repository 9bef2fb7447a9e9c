"""Rows of numbers of a run: losses, rates, skipped steps, CUDA graphs, and dropped assignments."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Sequence

from megatron_packed.reporting.curves import (
    NO_TARGETS,
    NON_FINITE,
    SPIKE,
    Record,
    Run,
    number_in,
    steady,
)
from megatron_packed.reporting.run_warnings import listed, skipped_for, spikes_of


def numbers_of(run: Run) -> list[tuple[str, str]]:
    """Return the rows of a run's column in the table: name and value."""
    steps = run.steps
    settled, last = steady(steps), run.steps[-1]

    def median(name: str) -> float:
        return statistics.median(number_in(r, name) for r in settled)

    fill = statistics.fmean(number_in(r, "pack_fill") for r in steps)
    rows = [
        ("steps", f"{last['iteration']:,}"),
        ("tokens consumed", f"{last['consumed_tokens']:,}"),
        *_loss_rows(run),
        ("median step time", f"{median('step_time_ms'):,.1f} ms"),
        ("median throughput", f"{median('tokens_per_second'):,.0f} real tokens/s"),
        ("mean pack fill", f"{100 * fill:.2f} %"),
        ("peak memory", f"{max(number_in(r, 'memory_gib') for r in steps):.2f} GiB"),
        ("steps skipped as non-finite", listed(skipped_for(steps, NON_FINITE)) or "0"),
        ("plan hash", str(last["plan_hash"])),
        *_phase_rows(run),
        *_skipped_rows(steps),
    ]
    if last.get("mfu") is not None:
        rows.insert(
            5 + bool(run.validations) + bool(run.tests),
            ("median MFU", f"{100 * median('mfu'):.1f} %"),
        )
    rows += _machine_rows(steps, settled)
    if run.kernels:
        rows.append(("kernels", " · ".join(f"{op} {name}" for op, name in run.kernels.items())))
    return rows + _target_rows(run.data)


def _loss_rows(run: Run) -> list[tuple[str, str]]:
    """Return rows of the first and last training and validation losses, and of the test loss."""
    first, last = (number_in(run.steps[at], "lm_loss") for at in (0, -1))
    rows = [("first and last training loss", f"{first:.4f} → {last:.4f}")]
    for name in (name for name in run.steps[-1] if re.fullmatch(r"mtp_\d+_loss", name)):
        at = [number_in(step, name) for step in run.steps if name in step]
        label = f"first and last training loss of depth {name.split('_')[1]}"
        rows.append((label, f"{at[0]:.4f} → {at[-1]:.4f}"))
    losses = [number_in(r, "valid_loss") for r in run.validations]
    if losses:
        rows.append(("first and last validation loss", f"{losses[0]:.4f} → {losses[-1]:.4f}"))
    if run.tests:
        last_test = run.tests[-1]
        text = f"{number_in(last_test, 'test_loss'):.4f} at step {last_test['iteration']:,}"
        rows.append(("test loss", text))
    return rows


def _phase_rows(run: Run) -> list[tuple[str, str]]:
    """Return a row with the phases of the run and their first steps; empty without phases."""
    phases = run.facts.get("phases")
    if not isinstance(phases, list):
        return []
    try:
        texts = [f"{phase['name']} from step {phase['iteration'] + 1:,}" for phase in phases]
    except (KeyError, TypeError, ValueError):  # a damaged log
        return []
    return [("phases", ", ".join(texts))] if texts else []


def _skipped_rows(steps: Sequence[Record]) -> list[tuple[str, str]]:
    """Return rows about steps without targets and about spikes; empty if there were none."""
    rows = []
    without_targets = listed(skipped_for(steps, NO_TARGETS))
    if without_targets:
        rows.append(("steps skipped without target tokens", without_targets))
    spikes = spikes_of(steps)
    if spikes:
        left_out = listed(skipped_for(steps, SPIKE))
        rows.append(("steps with a spike of loss or gradient norm", listed(spikes)))
        rows.append(("steps skipped for a spike", left_out or "0"))
    return rows


def _machine_rows(steps: Sequence[Record], settled: Sequence[Record]) -> list[tuple[str, str]]:
    """Return rows about imbalance, data waits, CUDA graphs and dropped assignments, if logged."""
    rows = []
    imbalances = sorted(number_in(r, "dp_imbalance") for r in steps if "dp_imbalance" in r)
    if imbalances and imbalances[-1] > 1:
        text = f"median {statistics.median(imbalances):.3f}, largest {imbalances[-1]:.3f}"
        rows.append(("work of the busiest data-parallel rank, relative to the mean", text))
    waits = [r for r in settled if "data_wait_ms" in r]
    if waits:
        waited = sum(number_in(r, "data_wait_ms") for r in waits)
        share = waited / sum(number_in(r, "step_time_ms") for r in waits)
        rows.append(("waiting for data", f"{100 * share:.1f} % of step time"))
    graphed = [r for r in steps if "graph_replays" in r]
    if graphed:
        replays = sum(int(number_in(r, "graph_replays")) for r in graphed)
        fallbacks = sum(int(number_in(r, "graph_fallbacks")) for r in graphed)
        share = 100 * replays / max(replays + fallbacks, 1)
        text = f"{replays:,} micro-batches replayed, {fallbacks:,} eager (hit rate {share:.1f} %)"
        rows.append(
            (
                "CUDA graphs in steps",
                f"{text}, {number_in(graphed[-1], 'graph_memory_mib'):,.0f} MiB",
            )
        )
    capped = [r for r in steps if "expert_dropped_share" in r]
    if capped:
        rows.append(("expert assignments dropped by capacity", _dropped(capped)))
    bounded = [r for r in steps if "expert_rank_bound" in r]
    if bounded:
        load = max(number_in(r, "expert_rank_load") for r in bounded)
        text = f"largest load {load:.2f}, bound {number_in(bounded[-1], 'expert_rank_bound'):.2f} of an even share"
        repeats = f"{text}; repeated steps: {number_in(bounded[-1], 'expert_repeats'):,.0f}"
        rows.append(("expert buffers", repeats))
    return rows


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
    """Return the share of expert assignments dropped in ``steps``, in all and in the worst layer."""
    tokens = sum(number_in(r, "real_tokens") for r in steps)

    def mean(values: Iterable[float]) -> float:
        return sum(value * number_in(r, "real_tokens") for value, r in zip(values, steps)) / max(
            tokens, 1
        )

    layers: list[tuple[float, ...]] = list(zip(*(r["expert_dropped_by_layer"] for r in steps)))
    most, layer = max((mean(shares), place) for place, shares in enumerate(layers))
    count = sum(int(number_in(r, "expert_dropped")) for r in steps)
    total = mean(number_in(r, "expert_dropped_share") for r in steps)
    return f"{100 * total:.3g} % ({count:,}); most in E layer {layer}: {100 * most:.3g} %"
