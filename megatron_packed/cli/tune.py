"""Choose the packer and the CUDA graph capacities for a data set, and report their expected cost.

Takes the flags of pretrain_hybrid.py, also from --config and @files; --data is short for
--data-path. Flags of the model, the optimizer and the training loop may be left out, unless
--measure is given. --load DIR --use-checkpoint-args takes model, length, tokenizer and chat
template of a checkpoint. Data is tokenised first if it is not in the cache. Instead of data,
--lengths gives the lengths of documents, or --documents-per-pack the documents of packs made
elsewhere. --world-size gives the number of processes, whose replicas divide a global batch.
docs/tune.md explains how costs are measured and how the recommendation is chosen.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING

from megatron_packed.cli.command import (
    EXIT_DATA,
    UsageError,
    check_ending,
    command,
    input_failures,
    show,
)
from megatron_packed.cli.lengths import read_numbers
from megatron_packed.cli.packing import with_unused_flags
from megatron_packed.cli.plan import DATA_PLACEHOLDER, add_world_size, check_world_size
from megatron_packed.cli.tune_costs import costs_of
from megatron_packed.cli.tune_report import TuneReport
from megatron_packed.config.environment_variables import apply_environment
from megatron_packed.config.parser.parse import parse_or_exit
from megatron_packed.config.parser.precedence import GivenOptions, gather
from megatron_packed.config.run import RunConfig
from megatron_packed.config.sections.cuda_graph import CudaGraphConfig
from megatron_packed.config.sections.data import TRAINING_DATA
from megatron_packed.config.sections.parallel import fewest_processes
from megatron_packed.resume.stored_options import stored_options

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from megatron_packed.data.packing.pieces import Pieces
    from megatron_packed.data.packing.sizing import Expected, Packing
    from megatron_packed.data.packing.step_cost import StepCosts


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = (
        "megatron-packed tune FLAGS_OF_A_RUN [--data F ... | --lengths F | --documents-per-pack F] "
        "[--capacities N ...] [--measure F | --costs F] [--world-size N] [--plot F.png] [--html F.html] "
        "[--json]"
    )
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--data", nargs="+", metavar="F", help="training data, given like --data-path"
    )
    source.add_argument(
        "--lengths",
        metavar="F",
        help="file with the number of tokens of each document, one number per line, or a histogram (a "
        "number and its count)",
    )
    source.add_argument(
        "--documents-per-pack",
        metavar="F",
        help="file with the number of documents of each pack, in the same format; cannot be combined with "
        "flags of a run",
    )
    parser.add_argument(
        "--capacities",
        nargs="+",
        type=int,
        default=(),
        metavar="N",
        help="additional capacities to evaluate, in documents",
    )
    costs = parser.add_mutually_exclusive_group()
    costs.add_argument(
        "--measure",
        metavar="F",
        help="time steps of the run's model on this machine, and save the table to F",
    )
    costs.add_argument("--costs", metavar="F", help="cost table that --measure saved")
    add_world_size(parser)
    parser.add_argument("--plot", metavar="F.png", help="write the charts as an image")
    parser.add_argument(
        "--html", metavar="F.html", help="write an HTML page with charts, tables and flags"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


@command("tune", "choose the packer and CUDA graph capacities for a data set", _add_arguments)
def tune_command(arguments: argparse.Namespace, run_flags: Sequence[str]) -> int:
    _check(arguments, run_flags)
    from megatron_packed.data.packing.sizing import expected, recommended

    config, lengths, costs, again, cut = None, None, None, None, None
    world_size, steps = 1, 1
    if arguments.documents_per_pack is not None:
        packings = [_given(arguments.documents_per_pack)]
    else:
        config, cut, lengths, packings, again = _packed(arguments, run_flags)
        world_size = arguments.world_size or fewest_processes(config.parallel)
        steps = config.micro_batches_per_step(config.layout(world_size).dp_size)
        costs = costs_of(
            arguments, _of_one_replica(config, steps), packings, _has_model(gather(run_flags))
        )
    choice = recommended(packings, costs, steps)
    flags = _flags_of(choice, config, gather(run_flags).values)
    chosen = next(packing for packing in packings if packing.method == choice.method)
    singles = sorted(
        {*arguments.capacities, *choice.capacities, *(() if costs is None else costs.capacities)}
    )
    # The balanced packer respects the capacity. With other packers, packs beyond the capacity run
    # eagerly.
    keeps = chosen.method == "balanced"
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
    report = TuneReport(
        lengths=lengths,
        cut=cut,
        packings=packings,
        choice=choice,
        flags=flags,
        prices=prices,
        best=best,
        costs=costs,
        world_size=world_size,
        micro_batches_per_step=steps,
        capacities=sorted({*arguments.capacities, *choice.capacities}),
    )
    try:
        report.write_pictures(arguments.plot, arguments.html)
    except OSError as error:
        raise UsageError(f"{error.filename}: {error.strerror}; correct the path.") from None
    show(json.dumps(report.as_dict()) if arguments.json else "\n".join(report.lines()))
    return 0


def _has_model(options: GivenOptions) -> bool:
    """Return whether flags of the run, or a checkpoint that they name, describe the model."""
    return "model.hybrid_layer_pattern" in options.values or options.uses_checkpoint


def _of_one_replica(config: RunConfig, micro_batches: int) -> RunConfig:
    """Return the configuration with the batch of one replica, because one process is measured.

    Args:
        micro_batches: micro-batches of each replica in a step.
    """
    packing = config.packing
    size = micro_batches * packing.micro_batch_size
    if packing.global_batch_size == size:
        return config
    return replace(config, packing=replace(packing, global_batch_size=size, rampup_batch_size=()))


def _flags_of(choice: Expected, config: RunConfig | None, given_keys: Collection[str]) -> list[str]:
    """Return the flags that the recommended choice adds to the flags of the run.

    Args:
        config: None for packs made elsewhere, whose packer is unknown.
        given: keys of the run's flags, which are not repeated.
    """
    from megatron_packed.data.packing.sizing import flags_for

    graphs = None if config is None else config.cuda_graph
    impl = "local" if graphs is None or not graphs.enabled else graphs.cuda_graph_impl
    flags = flags_for(choice, impl)
    if config is None:
        flags = flags[flags.index("--cuda-graph-impl") : flags.index("--max-documents-per-pack")]
    for flag, key in (
        ("--packing-method", "packing.packing_method"),
        ("--cuda-graph-impl", "cuda_graph.cuda_graph_impl"),
    ):
        if key in given_keys:
            at = flags.index(flag)
            flags = flags[:at] + flags[at + 2 :]
    return flags


def _check(arguments: argparse.Namespace, run_flags: Sequence[str]) -> None:
    if any(capacity < 1 for capacity in arguments.capacities):
        raise UsageError(f"--capacities {min(arguments.capacities)}: must be at least 1.")
    check_world_size(arguments.world_size)
    check_ending("--plot", arguments.plot, ".png")
    check_ending("--html", arguments.html, ".html")
    for flag, value in (("--plot", arguments.plot), ("--html", arguments.html)):
        if value is not None and find_spec("matplotlib") is None:
            raise UsageError(
                f"{flag} needs matplotlib, which is not installed: pip install matplotlib."
            )
    if arguments.documents_per_pack is not None:
        for flag in ("measure", "costs"):
            if getattr(arguments, flag) is not None:
                raise UsageError(
                    f"--{flag} needs the lengths of documents; give --lengths or --data."
                )
        if arguments.world_size is not None:
            raise UsageError(
                "--world-size has no effect with --documents-per-pack, which names no run; leave it out."
            )
        if run_flags:
            raise UsageError(
                f"--documents-per-pack cannot be combined with {run_flags[0]}, because the packs "
                "are already made; leave it out."
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
    """Return the run's configuration, the pieces of its documents, the lengths of its documents,
    its packings, and a function that packs again.

    The packings are one epoch for each packer, or only for the given packer. The function packs by
    a method with a limit on documents per pack.
    """
    flags = [*run_flags, *([] if arguments.data is None else ["--data-path", *arguments.data])]
    gathered = gather(flags)
    values = gathered.values
    if arguments.data is not None and "data.data_path" in gather(run_flags).values:
        raise UsageError("--data-path: give the files with --data-path or --data, not with both.")
    if arguments.measure is not None and not _has_model(gathered):
        raise UsageError(
            "--measure needs the flags of the model: --hybrid-layer-pattern and its sizes."
        )
    on_this_machine = arguments.lengths is None
    if not on_this_machine and not set(TRAINING_DATA) & set(values):
        flags += DATA_PLACEHOLDER
    typed = {} if arguments.data is None else {"--data-path": "--data"}
    config = parse_or_exit(
        with_unused_flags(flags),
        launched=False,
        world_size=arguments.world_size,
        on_this_machine=on_this_machine,
        typed=typed,
        read_stored=stored_options,
    )
    if arguments.measure is not None:
        apply_environment(config.training)  # must precede the import of torch, as in a run
    from megatron_packed.data.packing.packer import METHODS, Packer
    from megatron_packed.data.packing.sizing import Packing
    from megatron_packed.models.estimate.run_estimate import with_partition

    if on_this_machine:
        config, lengths, pieces, cut = _tokenized(config)
    else:
        lengths = read_numbers("--lengths", arguments.lengths)
        # Without a vocabulary, the output layer has no share of the work.
        config, _ = with_partition(config, config.model.vocab_size or 1, lengths)
        cut = _cut(config, lengths)
        pieces = cut.length
    packing = config.packing
    room = packing.tokens_per_pack // config.document_alignment
    if arguments.capacities and max(arguments.capacities) > room:
        raise UsageError(
            f"--capacities {max(arguments.capacities)}: a pack holds at most {room} documents."
        )
    methods = (packing.packing_method,) if "packing.packing_method" in values else METHODS
    packer = Packer.from_config(packing, config.document_alignment)
    seed = config.training.seed

    def capped(method: str, documents: int | None) -> Packing:
        return Packing.of_first_epoch(
            replace(packer, method=method, max_documents=documents), pieces, seed
        )

    packings = [capped(method, packer.max_documents) for method in methods]
    return config, cut, lengths, packings, capped


def _tokenized(
    config: RunConfig,
) -> tuple[RunConfig, NDArray[np.int64], NDArray[np.int64], Pieces]:
    """Return the configuration of the run, the lengths of documents, the lengths of the pieces of the
    first epoch, and all pieces. With a blend, the first epoch has only the pieces that the blend draws.
    """
    from megatron_packed.data.tokenizers.base import vocabulary
    from megatron_packed.inputs.open_documents import open_run_documents
    from megatron_packed.inputs.plan_packs import plan_data
    from megatron_packed.inputs.stored_files import with_tokenizer
    from megatron_packed.models.estimate.run_estimate import with_partition

    with input_failures():
        config, tokenizer = with_tokenizer(config)
        documents = open_run_documents(config, tokenizer, show=sys.stderr.isatty())
        if config.parallel.chooses_partition:
            entries = vocabulary(tokenizer, config.model.vocab_size)
            config, _ = with_partition(config, entries, documents.train.lengths)
        plan = plan_data(replace(config, cuda_graph=CudaGraphConfig()), documents).train
    lengths = plan.pieces.length
    return (
        config,
        documents.train.lengths,
        lengths if plan.blend is None else lengths[plan.blend.epoch(0)],
        plan.pieces,
    )


def _cut(config: RunConfig, lengths: NDArray[np.int64]) -> Pieces:
    """Return the pieces of documents of these lengths."""
    from megatron_packed.data.packing.pieces import Pieces

    packing = config.packing
    try:
        pieces = Pieces.cut(lengths, packing.max_document_length, packing.overlong_policy)
    except ValueError as error:
        raise UsageError(f"data error: {error}", EXIT_DATA) from None
    if not len(pieces):
        raise UsageError(
            f"every document is longer than --max-document-length ({packing.max_document_length}).",
            EXIT_DATA,
        )
    return pieces


def _capacities(packing: Packing, costs: StepCosts | None) -> tuple[int, ...]:
    from megatron_packed.data.packing.sizing import capacities_for

    return capacities_for(packing, costs)
