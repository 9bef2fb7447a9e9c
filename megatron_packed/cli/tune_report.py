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
    packs_per_step: int
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
            "packs_per_step": self.packs_per_step,
            "measured": self.costs is not None,
            "device": None if self.costs is None else self.costs.device,
            "update_ms": None if self.costs is None else self.costs.update_ms,
            "best_of_packers": [asdict(one) for one in self.best],
            "by_capacity": {str(one.capacities[-1]): asdict(one) for one in self.prices},
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
        lines.append("")
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
                f"addition to its {self.packs_per_step} micro-batches; capacities "
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
        coverages = {packing.method: packing.coverage(self.capacities) for packing in self.packings}
        full = max(packing.most for packing in self.packings)
        sizes = [
            size
            for size in sorted({size for of in coverages.values() for size in of})
            if size <= full
        ]
        found = {
            "Documents per pack": [
                {
                    "packer": one.method,
                    "packs": f"{one.documents.size:,}",
                    "fill": "" if one.fill is None else share(100 * one.fill),
                    **{
                        {"max": "max"}.get(name, name.upper()): str(value)
                        for name, value in one.percentiles().items()
                    },
                }
                for one in self.packings
            ],
            "Packs that a capacity covers": [
                {
                    "capacity": str(size),
                    **{
                        method: share(100 * float((packing.documents <= size).mean()))
                        for method, packing in zip(coverages, self.packings, strict=True)
                    },
                }
                for size in sizes
            ],
        }
        heading = "Expected cost" if self.costs else "Expected cost (not measured)"
        found[f"{heading}: capacities that cover every pack"] = [
            self._price(one) for one in self.best
        ]
        if self.costs is not None:
            found[f"{heading}: one capacity, {self.choice.method}"] = [
                self._price(one) for one in self.prices
            ]
        return found

    @staticmethod
    def _price(one: Expected) -> dict[str, str]:
        cells = {"packer": one.method, "capacities": " ".join(map(str, one.capacities))}
        cells |= {
            "eager": f"{100 * one.eager_share:.2f} %",
            "relative cost of a token": f"{one.relative:.4f}",
        }
        if one.step_ms is None:
            return cells | {"micro-batch ms": "-", "step ms": "-", "tokens/s": "-"}
        return cells | {
            "micro-batch ms": f"{one.micro_batch_ms:,.2f}",
            "step ms": f"{one.step_ms:,.2f}",
            "tokens/s": f"{one.tokens_per_second:,.0f}",
        }

    def write_pictures(self, plot: str | None, html: str | None) -> None:
        """Write the charts to ``plot`` and an HTML page to ``html``, if they are given."""
        if plot is None and html is None:
            return
        from megatron_packed.reporting.charts import write_png
        from megatron_packed.reporting.sizing_page import drawings, figure, write_page

        drawn = drawings(self.lengths, self.packings, self.choice, self.prices)
        if html is not None:
            write_page(
                drawn,
                html,
                title="Packing and capacities",
                flags=" ".join(self.flags),
                tables=self.tables(),
                text=self.lines(),
            )
        if plot is not None:
            write_png(figure(drawn), plot)


def _aligned(rows: Sequence[dict[str, str]]) -> list[str]:
    names = list(rows[0])
    widths = {name: max(len(name), *(len(row[name]) for row in rows)) for name in names}
    lines = [names, *([row[name] for name in names] for row in rows)]
    width_of = list(widths.values())
    return [
        "  " + "  ".join(cell.rjust(width) for width, cell in zip(width_of, line, strict=True))
        for line in lines
    ]
