"""Report of ``megatron-packed tune``: text for a terminal, JSON, charts and an HTML page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from megatron_packed.data.packing.pieces import Pieces
    from megatron_packed.data.packing.sizing import Expected, Packing
    from megatron_packed.data.packing.step_cost import StepCosts

_TIMES = ("micro-batch (ms)", "step (ms)", "tokens/s of a replica")


@dataclass(frozen=True, kw_only=True)
class TuneReport:
    """Comparison of packers and capacities, as text, JSON and charts."""

    lengths: NDArray[np.int64] | None
    """Lengths of documents in tokens; None if packs were given."""
    cut: Pieces | None
    packings: Sequence[Packing]
    choice: Expected
    """Recommended packer and capacities."""
    flags: list[str]
    """Flags of the recommendation."""
    prices: Sequence[Expected]
    """Expected cost for each capacity, if graphs are captured only for this capacity."""
    best: Sequence[Expected]
    """Expected cost of each packer, with capacities that cover all its packs."""
    costs: StepCosts | None
    world_size: int
    micro_batches_per_step: int
    """Micro-batches of each replica in one optimizer step."""
    capacities: list[int]

    def of_lengths(self) -> dict[str, Any]:
        import numpy as np

        assert self.lengths is not None
        p50, p90, p99 = (float(value) for value in np.quantile(self.lengths, (0.5, 0.9, 0.99)))
        return {
            "documents": int(self.lengths.size),
            "tokens": int(self.lengths.sum()),
            "mean": float(self.lengths.mean()),
            "p50": p50,
            "p90": p90,
            "p99": p99,
            "max": int(self.lengths.max()),
        }

    def as_dict(self) -> dict[str, Any]:
        from megatron_packed.data.packing.sizing import as_dict

        return {
            "lengths": None if self.lengths is None else self.of_lengths(),
            "accounts": None if self.cut is None else self.cut.as_dict(),
            "packers": [as_dict(packing, self.capacities) for packing in self.packings],
            "world_size": self.world_size,
            "micro_batches_per_step": self.micro_batches_per_step,
            "measured": self.costs is not None,
            "device": None if self.costs is None else self.costs.device,
            "update_ms": None if self.costs is None else self.costs.update_ms,
            "best_of_packers": [asdict(expected) for expected in self.best],
            "by_capacity": {
                str(expected.capacities[-1]): asdict(expected) for expected in self.prices
            },
            "recommended": {**asdict(self.choice), "flags": self.flags},
        }

    def lines(self) -> list[str]:
        lines = []
        if self.lengths is not None:
            of = self.of_lengths()
            lines.append(
                f"{of['documents']:,} documents, {of['tokens']:,} tokens: mean {of['mean']:,.1f}, "
                f"P50 {of['p50']:,.0f}, P90 {of['p90']:,.0f}, P99 {of['p99']:,.0f}, longest {of['max']:,}."
            )
        lines += [] if self.cut is None else self.cut.sentences()
        for title, rows in self.tables().items():
            lines += ["", title, *_aligned(rows)]
        lines += ["", *self._notes()]
        if self.costs is None:
            lines += [
                "The cost of a step is not measured. As in the packers, each document of "
                "capacity is assumed to cost 0.001 of the time of a pack.",
                "To measure it on this machine's GPU, give --measure TABLE.json and the model's "
                "flags.",
            ]
        else:
            lines.append(
                f"Times of {self.costs.device}: {self.costs.update_ms:.3g} ms of a step in "
                f"addition to its {self.micro_batches_per_step} micro-batches; capacities "
                f"{', '.join(map(str, self.costs.capacities))} were measured, and times between "
                "them are interpolated."
            )
        eagerly = (
            "none of these packs runs eagerly"
            if self.lengths is None
            else "no pack of any epoch runs eagerly"
        )
        lines += ["", f"Recommended{self._gain()}; {eagerly}:", f"  {' '.join(self.flags)}"]
        return lines

    def _gain(self) -> str:
        if self.choice.step_ms is None:
            return ""
        return (
            f", {self.choice.step_ms:,.4g} ms a step, {self.choice.tokens_per_second:,.0f} tokens/s"
        )

    def tables(self) -> dict[str, list[dict[str, str]]]:
        """Return the tables of the report: rows of cells by heading."""
        share = "{:.2f} %".format
        full = max(packing.most for packing in self.packings)
        sizes = {size for packing in self.packings for size in packing.coverage(self.capacities)}
        tables = {
            "Documents per pack": [
                {
                    "packer": packing.method,
                    "packs": f"{packing.documents.size:,}",
                    "fill": "" if packing.fill is None else share(100 * packing.fill),
                    **{
                        name if name == "max" else name.upper(): str(value)
                        for name, value in packing.percentiles().items()
                    },
                }
                for packing in self.packings
            ],
            "Packs that a capacity covers": [
                {
                    "capacity (documents)": str(size),
                    **{
                        packing.method: share(100 * float((packing.documents <= size).mean()))
                        for packing in self.packings
                    },
                }
                for size in sorted(sizes)
                if size <= full
            ],
        }
        heading = "Expected cost" if self.costs else "Expected cost (not measured)"
        tables[f"{heading}: capacities that cover every pack"] = _prices(self.best)
        if self.costs is not None:
            tables[f"{heading}: one capacity, {self.choice.method}"] = _prices(self.prices)
        return tables

    def _notes(self) -> list[str]:
        """Return sentences about the units of the tables of costs."""
        unit = "at capacity 0"
        if self.costs is not None:
            unit = f"at capacity {self.costs.capacities[0]}, the lowest of the table"
        notes = [f"Cost of a token: 1.0 is the cost in a full pack {unit}."]
        if self.costs is not None and any(expected.step_ms is None for expected in self.prices):
            notes.append(
                "Times of capacities that do not cover every pack are unknown (-), because the "
                "table has no times of packs that run eagerly."
            )
        if self.world_size > 1:
            count = self.micro_batches_per_step
            of_one = f"{count} micro-batch{'es' if count > 1 else ''}"
            times = "" if self.costs is None else "; times do not include communication"
            notes.append(
                f"In a step of {self.world_size:,} processes each replica has {of_one}{times}."
            )
        return notes

    def write_pictures(self, plot: str | None, html: str | None) -> None:
        """Write the charts to ``plot`` and an HTML page to ``html``, if they are given."""
        if plot is None and html is None:
            return
        from megatron_packed.reporting import charts, html_page, sizing_page

        drawn = sizing_page.drawings(self.lengths, self.packings, self.choice, self.prices)
        if html is not None:
            figures = [sizing_page.chart_of_page(*drawing) for drawing in drawn]
            title = "Packing and capacities"
            page = html_page.render("sizing_page.html", title=title, report=self, figures=figures)
            html_page.write_page(html, page)
        if plot is not None:
            charts.write_png(sizing_page.figure(drawn), plot)


def _prices(choices: Sequence[Expected]) -> list[dict[str, str]]:
    """Return the rows of a table of costs, with columns of times only if a time is known."""
    timed = any(choice.step_ms is not None for choice in choices)
    return [
        {
            "packer": choice.method,
            "capacities (documents)": " ".join(map(str, choice.capacities)),
            "packs that run eagerly": f"{100 * choice.eager_share:.2f} %",
            "cost of a token": f"{choice.relative:.4f}",
            **(_times(choice) if timed else {}),
        }
        for choice in choices
    ]


def _times(expected: Expected) -> dict[str, str]:
    if expected.step_ms is None:
        return dict.fromkeys(_TIMES, "-")
    times = (
        f"{expected.micro_batch_ms:,.2f}",
        f"{expected.step_ms:,.2f}",
        f"{expected.tokens_per_second:,.0f}",
    )
    return dict(zip(_TIMES, times, strict=True))


def _aligned(rows: Sequence[dict[str, str]]) -> list[str]:
    """Return a heading and rows, which all have the same columns, as lines of aligned cells."""
    lines = [list(rows[0]), *(list(row.values()) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  " + "  ".join(map(str.rjust, line, widths)) for line in lines]
