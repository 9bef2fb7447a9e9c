"""Parts of a report page that say what was run: model, data, machine, versions, dates and flags."""

from __future__ import annotations

import html
from collections.abc import Iterator

from megatron_packed.reporting.curves import Record, Run, number_in
from megatron_packed.reporting.html_page import folded, named_rows
from megatron_packed.reporting.run_overview import (
    best_validation,
    compact,
    duration,
    moment,
)

_SAVED = 8
"""Largest number of saved steps that are listed."""


def what_was_run(run: Run) -> str:
    """Return tables of model, layout, data, machine, versions, checkpoints and dates."""
    facts = run.facts
    if not facts:
        return (
            "<p class='muted'>This log is of an older version, which did not describe the run.</p>"
        )
    rows = [
        *_model_rows(_mapping(facts, "model")),
        *_layout_rows(_mapping(facts, "layout")),
        *_data_rows(run),
        *_machine_rows(_mapping(facts, "machine")),
        ("versions", " · ".join(f"{name} {v}" for name, v in _mapping(facts, "versions").items())),
        ("kernels", " · ".join(f"{op} {name}" for op, name in run.kernels.items())),
        *_checkpoint_rows(run),
        *_date_rows(run),
    ]
    return named_rows([(name, value) for name, value in rows if value])


def _mapping(facts: Record, name: str) -> Record:
    mapping = facts.get(name)
    return mapping if isinstance(mapping, dict) else {}


def _count(facts: Record, name: str) -> str:
    """Return a count of the facts as text; a value that is no count as it is."""
    value = facts.get(name, "?")
    return f"{value:,}" if isinstance(value, int) else str(value)


def _model_rows(model: Record) -> Iterator[tuple[str, str]]:
    if not model:
        return
    yield (
        "model",
        f"{model.get('pattern')}: {_count(model, 'layers')} layers, hidden size {_count(model, 'hidden_size')}, "
        f"vocabulary {_count(model, 'vocabulary')}",
    )
    total = model.get("parameters")
    short = f" ({compact(total)})" if isinstance(total, int) else ""
    yield (
        "parameters",
        f"{_count(model, 'parameters')}{short}, {_count(model, 'active_parameters')} active per token; "
        f"{model.get('precision')}",
    )


def _layout_rows(layout: Record) -> Iterator[tuple[str, str]]:
    if not layout:
        return
    kinds = ("data", "tensor", "context", "expert")
    sizes = ", ".join(f"{kind} {_count(layout, f'{kind}_parallel')}" for kind in kinds)
    alone = layout.get("processes") == 1
    several = f"{_count(layout, 'processes')} processes: {sizes}"
    yield "parallel layout", "1 process" if alone else several
    yield (
        "packs",
        f"{_count(layout, 'tokens_per_pack')} tokens per pack, {_count(layout, 'packs_per_step')} packs per step, "
        f"documents of at most {_count(layout, 'seq_length')} tokens",
    )


def _data_rows(run: Run) -> Iterator[tuple[str, str]]:
    """Yield the files of each data set with the counts of documents, tokens and targets."""
    files = _mapping(run.facts, "files")
    for name, counts in run.data.items():
        if not isinstance(counts, dict):
            continue
        named = files.get(name)
        paths = [
            f"{path} ({100 * share:.3g} % of the tokens)" if share else str(path)
            for path, share in (named if isinstance(named, list) else [])
        ]
        text = "; ".join(paths) or "a share of the training files"
        text += (
            f": {_count(counts, 'documents_in')} documents, {_count(counts, 'tokens_kept')} tokens"
        )
        if "targets_kept" in counts:
            text += f", {_count(counts, 'targets_kept')} targets"
        yield f"{name} data", text


def _machine_rows(machine: Record) -> Iterator[tuple[str, str]]:
    if not machine:
        return
    hosts = machine.get("hosts")
    device = f"{_count(machine, 'devices')} x {machine.get('device')}, "
    others = f" and {hosts - 1:,} more" if isinstance(hosts, int) and hosts > 1 else ""
    yield (
        "machine",
        f"{device if machine.get('devices') else ''}{machine.get('cpu')}, {_count(machine, 'cores')} cores; host "
        f"{machine.get('host')}{others}; {machine.get('system')}",
    )


def _checkpoint_rows(run: Run) -> Iterator[tuple[str, str]]:
    saved = [record for record in run.records if "checkpoint" in record]
    if not saved:
        return
    steps = sorted({int(number_in(record, "iteration")) for record in saved})
    earlier = "..., " if len(steps) > _SAVED else ""
    shown = ", ".join(f"{step:,}" for step in steps[-_SAVED:])
    newest = saved[-1]
    yield (
        "checkpoints",
        f"saved at {'step' if len(steps) == 1 else 'steps'} {earlier}{shown}; newest "
        f"{newest['checkpoint']} ({newest.get('checkpoint_mib')} MiB)",
    )
    best = best_validation(run.validations)
    if best is not None and len(run.validations) > 1:
        near = "which was saved" if best[0] in steps else "which was not saved"
        yield "best validation", f"step {best[0]:,}, loss {best[1]:.4f}, {near}"


def _date_rows(run: Run) -> Iterator[tuple[str, str]]:
    for place, start in enumerate(run.starts):
        begun = moment(start.get("time"))
        if begun is not None:
            after = f" after step {_count(start, 'step')}" if start.get("step") else ""
            yield "restarted" if place else "started", f"{begun:%Y-%m-%d %H:%M:%S %z}{after}"
    begun = moment(run.starts[-1].get("time")) if run.starts else None
    ended = moment(run.end.get("time"))
    if begun and ended:
        took = duration((ended - begun).total_seconds())
        since = " since the last start" if len(run.starts) > 1 else ""
        yield "ended", f"{ended:%Y-%m-%d %H:%M:%S %z}, {took}{since}"
    seconds = sum(number_in(step, "step_time_ms") for step in run.steps) / 1e3
    yield "time in steps", duration(seconds)


def folded_parts(run: Run) -> str:
    """Return the flags, the packing report and the notes of the end of a run, each folded."""
    flags = run.facts.get("flags")
    parts = []
    if isinstance(flags, list) and flags:
        heading = f"Flags as given ({len(flags)})"
        parts.append((heading, "\n".join(map(str, flags))))
    packing = run.facts.get("packing")
    if isinstance(packing, list):
        parts.append(("Packing", "\n".join(map(str, packing))))
    notes = run.end.get("notes")
    parts += [
        (str(heading), str(text)) for heading, text in (notes if isinstance(notes, list) else [])
    ]
    # Tables of the profiler are wider than a window, so they scroll.
    return "".join(
        folded(heading, f"<div class='wide'><pre>{html.escape(text)}</pre></div>")
        if heading.startswith("Kernels")
        else folded(heading, f"<pre>{html.escape(text)}</pre>")
        for heading, text in parts
    )
