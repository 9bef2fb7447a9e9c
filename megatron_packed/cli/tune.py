"""Chooses the packer and the capacities of CUDA graphs for a data set, and says what they cost.

Takes the flags of pretrain_hybrid.py, also by --config and @files, --data being short for
--data-path; those of model, optimizer and loop may be left out unless --measure is given. Data is
tokenised first if the cache does not hold it. In the place of data --lengths takes tokens of
documents, and --documents-per-pack, alone, documents of packs that something else made.
docs/tune.md says how costs are measured and what is recommended.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any

from megatron_packed.cli.errors import EXIT_DATA, UsageError, check_ending
from megatron_packed.cli.lengths import read_numbers
from megatron_packed.cli.packing import with_unused_flags
from megatron_packed.cli.plan import NO_DATA
from megatron_packed.config.environment_variables import apply_environment
from megatron_packed.config.parser.parse import parse_or_exit
from megatron_packed.config.parser.precedence import gather
from megatron_packed.config.run import RunConfig
from megatron_packed.config.sections.cuda_graph import CudaGraphConfig
from megatron_packed.config.sections.data import TRAINING_DATA

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from megatron_packed.data.packing.pieces import Pieces
    from megatron_packed.data.packing.sizing import Expected, Packing
    from megatron_packed.data.packing.step_cost import StepCosts

NAME = "tune"
HELP = "choose packer and capacities for a data set"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = (
        "megatron-packed tune FLAGS_OF_A_RUN [--data F ... | --lengths F | --documents-per-pack F] "
        "[--capacities N ...] [--measure F | --costs F] [--plot F.png] [--html F.html] [--json]"
    )
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--data", nargs="+", metavar="F", help="training data, as --data-path")
    source.add_argument(
        "--lengths",
        metavar="F",
        help="tokens of each document, one to a line, or a histogram: "
        "a number and how often it occurs",
    )
    source.add_argument(
        "--documents-per-pack",
        metavar="F",
        help="documents of each pack, in the same way; no flags of a run belong to it",
    )
    parser.add_argument(
        "--capacities",
        nargs="+",
        type=int,
        default=(),
        metavar="N",
        help="more capacities to look at, in documents",
    )
    costs = parser.add_mutually_exclusive_group()
    costs.add_argument(
        "--measure", metavar="F", help="time steps of the run's model here and keep the table in F"
    )
    costs.add_argument("--costs", metavar="F", help="a table that --measure made")
    parser.add_argument("--plot", metavar="F.png", help="write the charts")
    parser.add_argument(
        "--html", metavar="F.html", help="write a page with charts, tables and flags"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace, run_flags: Sequence[str]) -> int:
    _check(arguments, run_flags)
    from megatron_packed.data.packing.sizing import expected, flags_for, recommended

    config, lengths, costs, again, cut = None, None, None, None, None
    if arguments.documents_per_pack is not None:
        packings = [_given(arguments.documents_per_pack)]
    else:
        config, cut, lengths, packings, again = _packed(arguments, run_flags)
        costs = _costs(
            arguments, config, packings, "model.hybrid_layer_pattern" in gather(run_flags).values
        )
    steps = 1 if config is None else config.packs_per_step()
    choice = recommended(packings, costs, steps)
    impl = (
        config.cuda_graph.cuda_graph_impl
        if config is not None and config.cuda_graph.enabled
        else "local"
    )
    flags = flags_for(choice, impl)
    if config is None:  # nobody knows who packed them
        flags = flags[flags.index("--cuda-graph-impl") : flags.index("--max-documents-per-pack")]
    given = {
        "--packing-method": "packing.packing_method",
        "--cuda-graph-impl": "cuda_graph.cuda_graph_impl",
    }
    for flag, key in given.items():
        if key in gather(run_flags).values:  # it is the same, and given twice it would be refused
            at = flags.index(flag)
            flags = flags[:at] + flags[at + 2 :]
    chosen = next(packing for packing in packings if packing.method == choice.method)
    singles = sorted(
        {*arguments.capacities, *choice.capacities, *(() if costs is None else costs.capacities)}
    )
    keeps = (
        chosen.method == "balanced"
    )  # it keeps to the room there is, and others run eagerly beyond it
    prices = [
        expected(
            again(chosen.method, size) if keeps and again and size < chosen.most else chosen,
            [size],
            costs,
            steps,
        )
        for size in singles
    ]
    best = [expected(packing, _capacities(packing, costs), costs, steps) for packing in packings]
    report = _Report(arguments, lengths, cut, packings, choice, flags, prices, best, costs, steps)
    try:
        report.write_pictures()
    except OSError as error:
        raise UsageError(f"{error.filename}: {error.strerror}; correct the path.") from None
    print(json.dumps(report.as_dict()) if arguments.json else "\n".join(report.lines()))
    return 0


def _check(arguments: argparse.Namespace, run_flags: Sequence[str]) -> None:
    if any(capacity < 1 for capacity in arguments.capacities):
        raise UsageError(f"--capacities {min(arguments.capacities)}: must be at least 1.")
    check_ending("--plot", arguments.plot, ".png")
    check_ending("--html", arguments.html, ".html")
    for flag, value in (("--plot", arguments.plot), ("--html", arguments.html)):
        if value is not None and find_spec("matplotlib") is None:
            raise UsageError(
                f"{flag} needs matplotlib, which is not installed: pip install 'megatron-packed[plot]'."
            )
    if arguments.documents_per_pack is not None:
        for flag in ("measure", "costs"):
            if getattr(arguments, flag) is not None:
                raise UsageError(
                    f"--{flag} needs the lengths of documents; give --lengths or --data."
                )
        if run_flags:
            raise UsageError(
                f"--documents-per-pack takes no {run_flags[0]}: the packs are made already; leave it out."
            )


def _given(file: str) -> Packing:
    from megatron_packed.data.packing.sizing import Packing

    return Packing(
        method="given",
        documents=read_numbers("--documents-per-pack", file, "a number of documents"),
    )


def _packed(
    arguments: argparse.Namespace, run_flags: Sequence[str]
) -> tuple[RunConfig, Pieces, NDArray[np.int64], list[Packing], Callable[[str, int], Packing]]:
    """The run's configuration, the pieces of its documents, tokens of its documents, an epoch by
    every packer or the one that was given, and what packs once more by a method with a cap on
    documents.
    """
    flags = [*run_flags, *([] if arguments.data is None else ["--data-path", *arguments.data])]
    given = gather(flags).values
    if arguments.data is not None and "data.data_path" in gather(run_flags).values:
        raise UsageError("--data-path: name the files by it or by --data, not by both.")
    if arguments.measure is not None and "model.hybrid_layer_pattern" not in given:
        raise UsageError(
            "--measure needs the flags of the model, --hybrid-layer-pattern and its sizes."
        )
    here = arguments.lengths is None
    if not here and not set(TRAINING_DATA) & set(given):
        flags += NO_DATA
    typed = {} if arguments.data is None else {"--data-path": "--data"}
    config = parse_or_exit(with_unused_flags(flags), launched=False, here=here, typed=typed)
    if arguments.measure is not None:
        apply_environment(config.training)  # as in a run, before torch is imported
    from megatron_packed.data.packing.packer import METHODS, Packer
    from megatron_packed.data.packing.sizing import Packing, packings_of

    if here:
        lengths, pieces, cut = _tokenized(config)
    else:
        lengths = read_numbers("--lengths", arguments.lengths)
        cut = _cut(config, lengths)
        pieces = cut.length
    packing = config.packing
    room = packing.tokens_per_pack // config.document_alignment
    if arguments.capacities and max(arguments.capacities) > room:
        raise UsageError(
            f"--capacities {max(arguments.capacities)}: no pack holds more than {room} documents."
        )
    methods = (packing.packing_method,) if "packing.packing_method" in given else METHODS
    packer = Packer.from_config(packing, config.document_alignment)
    seed = config.training.seed

    def capped(method: str, documents: int) -> Packing:
        return Packing.of(replace(packer, method=method, max_documents=documents), pieces, seed)

    return config, cut, lengths, packings_of(packer, pieces, methods, seed), capped


def _tokenized(config: RunConfig) -> tuple[NDArray[np.int64], NDArray[np.int64], Pieces]:
    """Tokens of the documents, those of the pieces of the first epoch (all, or what a blend draws),
    and all lengths.
    """
    from megatron_packed.data.errors import DataError
    from megatron_packed.training.open_documents import build_tokenizer, open_documents
    from megatron_packed.training.pack_plans import plan_data

    try:
        tokenizer = build_tokenizer(config.data, config.model.vocab_size)
        documents = open_documents(
            config.data,
            tokenizer,
            validates=config.validates,
            tests=config.tests,
            shorten_to=config.shorten_to,
            show=sys.stderr.isatty(),
        )
        plan = plan_data(replace(config, cuda_graph=CudaGraphConfig()), documents).train
    except DataError as error:
        raise UsageError(f"data error: {error}", EXIT_DATA) from None
    lengths = plan.pieces.length
    return (
        documents.train.lengths,
        lengths if plan.blend is None else lengths[plan.blend.epoch(0)],
        plan.pieces,
    )


def _cut(config: RunConfig, lengths: NDArray[np.int64]) -> Pieces:
    """The pieces of documents of these lengths."""
    from megatron_packed.data.packing.pieces import Pieces

    packing = config.packing
    try:
        pieces = Pieces.cut(lengths, packing.max_document_length, packing.overlong_policy)
    except ValueError as error:
        raise UsageError(f"data error: {error}", EXIT_DATA) from None
    if not len(pieces):
        raise UsageError(
            f"no document has at most --max-document-length ({packing.max_document_length}) tokens.",
            EXIT_DATA,
        )
    return pieces


def _costs(
    arguments: argparse.Namespace, config: RunConfig, packings: Sequence[Packing], has_model: bool
) -> StepCosts | None:
    """A table for this run: read, or measured and kept.

    Args:
        has_model: whether the model of ``config`` is one that somebody named.
    """
    if arguments.costs is not None:
        return _read_costs(arguments.costs, config, has_model)
    if arguments.measure is None:
        return None
    _check_place(arguments.measure)
    import torch

    from megatron_packed.cuda_graphs.step_graphs import GraphFallbackError
    from megatron_packed.data.packing.sizing import capacities_to_measure
    from megatron_packed.data.tokenizers.base import vocabulary
    from megatron_packed.training.measure_capacities import measure
    from megatron_packed.training.open_documents import build_tokenizer

    vocab_size = config.model.vocab_size
    if arguments.lengths is None:
        vocab_size = vocabulary(build_tokenizer(config.data, vocab_size), vocab_size)
    if vocab_size is None:
        raise UsageError("--vocab-size is required: there is no data to make a tokenizer of.")
    capacities = capacities_to_measure(packings, arguments.capacities)
    try:
        costs = measure(
            config, vocab_size, capacities, lambda line: print(line, file=sys.stderr, flush=True)
        )
    except (ValueError, GraphFallbackError) as error:
        raise UsageError(f"--measure: {error}") from None
    except torch.OutOfMemoryError as error:
        raise UsageError(
            f"--measure: the model does not fit on this GPU ({str(error).splitlines()[0]}); megatron-packed plan with "
            "these flags says what helps."
        ) from None
    try:
        costs.save(arguments.measure)
    except OSError as error:
        raise UsageError(
            f"--measure {arguments.measure}: {error.strerror}; correct the path."
        ) from None
    return costs


def _check_place(file: str) -> None:
    """Before minutes of measuring: whether a table can be written, and what would be lost."""
    from megatron_packed.data.packing.step_cost import StepCosts

    try:
        if Path(file).exists():
            StepCosts.load(file)
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=Path(file).parent).close()
    except OSError as error:
        raise UsageError(f"--measure {file}: {error.strerror}; correct the path.") from None
    except ValueError:
        raise UsageError(
            f"--measure {file} is no table of step costs, and would be lost; give a new name."
        ) from None


def _read_costs(file: str, config: RunConfig, has_model: bool) -> StepCosts:
    from megatron_packed.data.packing.step_cost import StepCosts
    from megatron_packed.training.measure_capacities import signature

    try:
        costs = StepCosts.load(file)
    except OSError as error:
        raise UsageError(f"--costs {file}: {error.strerror}; correct the path.") from None
    except ValueError as error:
        raise UsageError(f"--costs: {error}", EXIT_DATA) from None
    if costs.tokens != config.packing.tokens_per_pack:
        raise UsageError(
            f"--costs {file} was measured with packs of {costs.tokens} tokens, and these have "
            f"{config.packing.tokens_per_pack}; measure again, or change --seq-length."
        )
    if has_model and (
        other := sorted(k for k, v in signature(config).items() if costs.model.get(k, v) != v)
    ):
        name = other[0]
        raise UsageError(
            f"--costs {file} was measured with another {name} ({costs.model[name]}, here {signature(config)[name]}); "
            "measure again, or leave the model's flags out."
        )
    return costs


def _capacities(packing: Packing, costs: StepCosts | None) -> tuple[int, ...]:
    from megatron_packed.data.packing.sizing import capacities_for

    return capacities_for(packing, costs)


class _Report:
    """What was found, as lines, as JSON and as pictures."""

    def __init__(
        self,
        arguments: argparse.Namespace,
        lengths: NDArray[np.int64] | None,
        cut: Pieces | None,
        packings: Sequence[Packing],
        choice: Expected,
        flags: list[str],
        prices: Sequence[Expected],
        best: Sequence[Expected],
        costs: StepCosts | None,
        packs_per_step: int,
    ) -> None:
        self.arguments, self.lengths, self.cut, self.packings, self.choice = (
            arguments,
            lengths,
            cut,
            packings,
            choice,
        )
        self.flags, self.prices, self.best, self.costs, self.packs_per_step = (
            flags,
            prices,
            best,
            costs,
            packs_per_step,
        )
        self.capacities = sorted({*arguments.capacities, *choice.capacities})

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
                "The cost of a step is not measured. Assumed, as the packers do: room for a document costs 0.001 of a "
                "pack's time.",
                "--measure TABLE.json with the model's flags takes it on this machine's GPU.",
            ]
        else:
            lines.append(
                f"By times of {self.costs.device}: {self.costs.update_ms:.3g} ms of a step beside its "
                f"{self.packs_per_step} micro-batches; capacities {', '.join(map(str, self.costs.capacities))} were "
                "measured, what lies between them is interpolated."
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
        """Rows of cells by heading."""
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

    def write_pictures(self) -> None:
        if self.arguments.plot is None and self.arguments.html is None:
            return
        from megatron_packed.reporting.sizing_page import figure, write_page, write_png

        made = figure(self.lengths, self.packings, self.choice, self.prices)
        if self.arguments.html is not None:
            write_page(
                made,
                self.arguments.html,
                title="Packing and capacities",
                flags=" ".join(self.flags),
                tables=self.tables(),
                text=self.lines(),
            )
        if self.arguments.plot is not None:
            write_png(made, self.arguments.plot)


def _aligned(rows: Sequence[dict[str, str]]) -> list[str]:
    names = list(rows[0])
    widths = {name: max(len(name), *(len(row[name]) for row in rows)) for name in names}
    lines = [names, *([row[name] for name in names] for row in rows)]
    width_of = list(widths.values())
    return [
        "  " + "  ".join(cell.rjust(width) for width, cell in zip(width_of, line, strict=True))
        for line in lines
    ]
