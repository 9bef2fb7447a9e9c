"""Estimate the GPU memory of each rank, the options that reduce it, and the time of a step.

Takes the flags of pretrain_hybrid.py, also from --config and @files. Needs neither a GPU nor other
processes; the layout is checked for --world-size processes. Flags of data, optimizer and training
loop may be left out. --load DIR --use-checkpoint-args takes model, length, precision and tokenizer
of a checkpoint. Paths and packages of the training machine are not checked. docs/memory.md
lists what is counted and what is assumed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from math import inf
from typing import TYPE_CHECKING, Any

from megatron_packed.cli.command import (
    EXIT_DATA,
    UsageError,
    command,
    input_failures,
    show,
    show_aside,
)
from megatron_packed.cli.lengths import read_numbers
from megatron_packed.cli.packing import with_unused_flags
from megatron_packed.cli.plan_search import RunToPlan, search_command
from megatron_packed.cli.plan_time import (
    MEMORY_GIB,
    memory_gib_of,
    peak_of_named,
    reason_without_rates,
    time_lines,
    time_of_run,
)
from megatron_packed.config.errors import ConfigError
from megatron_packed.config.kinds.attention import zigzag_kernel_problem
from megatron_packed.config.parser.parse import parse_or_exit
from megatron_packed.config.parser.precedence import gather
from megatron_packed.config.parser.stored_options import NO_DATA
from megatron_packed.config.run import RunConfig
from megatron_packed.config.sections.data import TRAINING_DATA
from megatron_packed.config.sections.packing import BatchStage, PackingConfig
from megatron_packed.config.sections.parallel import fewest_processes
from megatron_packed.resume.stored_options import stored_options

if TYPE_CHECKING:
    from megatron_packed.models.estimate.rank_memory import Estimate
    from megatron_packed.models.estimate.run_estimate import Change, Lengths, StepWork

_GIB = 2**30
_MIB = 2**20
MOST_PROCESSES = 2**20
"""Maximum number of processes, because all their ranks are listed."""
DATA_PLACEHOLDER = ("--data-path", *NO_DATA)
"""Placeholder for data when only lengths are used; the file is never opened."""


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = (
        "megatron-packed plan FLAGS_OF_A_RUN [--world-size N] [--gpu NAME] [--gpu-memory-gib G] [--mfu P] "
        "[--search] [--lengths F] [--json]"
    )
    add_world_size(parser)
    parser.add_argument(
        "--gpu",
        metavar="NAME",
        help="GPU of the run (default H200). With H100 or H200, kernels are those of such a machine with "
        "all packages; by default, those of this machine. The time of a step is computed by rates "
        "measured on H200; other names, such as B200 or A100, have a peak FLOP/s for --mfu",
    )
    parser.add_argument(
        "--gpu-memory-gib",
        type=float,
        metavar="G",
        help="memory of each GPU in GiB (default: that of --gpu, 139 for H200 and 79 for H100)",
    )
    parser.add_argument(
        "--mfu",
        type=float,
        metavar="P",
        help="percent of the GPU's peak that a step reaches, from which its time follows instead of "
        "from measured rates",
    )
    parser.add_argument(
        "--search",
        action="store_true",
        help="list the ten fastest layouts that fit on --world-size GPUs of one host: sizes of tensor, "
        "context and expert parallelism, recomputation and offload",
    )
    parser.add_argument(
        "--lengths",
        metavar="F",
        help="file with the number of tokens of each document, one number per line or a histogram; by "
        "default the lengths of tokenised data, else --seq-length for each document",
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object instead of tables"
    )


@command("plan", "estimate the GPU memory of every rank and the time of a step", _add_arguments)
def plan_command(arguments: argparse.Namespace, run_flags: Sequence[str]) -> int:
    named = arguments.gpu
    arguments.gpu = named or "H200"
    memory_gib = _check(arguments)
    config = parse_or_exit(
        without_data(run_flags, uses=("model",)),
        launched=False,
        world_size=arguments.world_size,
        on_this_machine=False,
        read_stored=stored_options,
    )
    world_size = arguments.world_size or fewest_processes(config.parallel)
    reason = reason_without_rates(config, world_size, arguments.gpu)
    if arguments.search and reason:
        raise UsageError(f"--search orders layouts by time. {reason}{_cure_of_search(arguments)}")
    from megatron_packed.models.estimate.run_estimate import (
        documents_in_pack,
        step_work,
        with_partition,
    )
    from megatron_packed.ops.backend_dispatch import complete_machine

    gpu = peak_of_named(arguments.gpu)
    as_resumed, lines = options_as_resumed(config, world_size)
    config = as_resumed(config)
    for line in lines:
        show_aside(line)
    vocab_size, lengths, source = _data(config, arguments.lengths)
    try:
        work = step_work(config, vocab_size, lengths)
    except ValueError as error:
        raise UsageError(f"{source}: {error}", EXIT_DATA) from None
    given, (config, _) = config.parallel, with_partition(config, vocab_size, lengths)
    # On GPUs without a kernel for the cheaper partition, a run takes the other one.
    if given.chooses_partition and zigzag_kernel_problem(config) is not None:
        config = replace(config, parallel=replace(given, cp_partition_mode="contiguous"))
    # A search has layouts of its own.
    if not arguments.search and (problem := zigzag_kernel_problem(config)) is not None:
        raise UsageError(str(problem))
    run = RunToPlan(
        config=config,
        world_size=world_size,
        vocab_size=vocab_size,
        documents=documents_in_pack(config, work),
        lengths=lengths,
        source=source,
        work=work,
        limit=int(memory_gib * _GIB),
    )
    of_named = named is not None and gpu[0] in MEMORY_GIB
    with complete_machine() if of_named else nullcontext():
        if arguments.search:
            flags = without_data(run_flags, uses=("model",))
            return search_command(run, flags, gpu, arguments.json, as_resumed)
        return _report(run, run_flags, gpu, reason, arguments, kernels_of=gpu[0] * of_named)


def options_as_resumed(
    config: RunConfig, world_size: int
) -> tuple[Callable[[RunConfig], RunConfig], list[str]]:
    """Return a function that takes the options with which a run would continue its checkpoint, and
    lines about them.

    The function applies to any layout of the run. It raises `ConfigError` if the schedule of the
    checkpoint does not fit.

    Raises:
        UsageError: the checkpoint cannot be read.
    """
    if not config.checkpoint.resumes:
        return lambda run: run, []
    from megatron_packed.resume.compared_runs import checkpoint_to_resume, continued_options

    with input_failures():
        resumed = checkpoint_to_resume(config)
        if resumed is None:
            return lambda run: run, []
        try:
            _, lines = continued_options(config, resumed, world_size)
        except ConfigError as error:
            raise UsageError(str(error)) from None
    return lambda run: continued_options(run, resumed, world_size)[0], lines


def _check(arguments: argparse.Namespace) -> float:
    """Check the values of options, and return the memory of a GPU in GiB."""
    check_world_size(arguments.world_size)
    given = arguments.gpu_memory_gib
    if given is not None and not 0 < given * _GIB < inf:
        raise UsageError(f"--gpu-memory-gib {given}: must be a finite number above 0.")
    if arguments.mfu is not None and not 0 < arguments.mfu <= 100:
        raise UsageError(f"--mfu {arguments.mfu:g}: must be above 0 and at most 100 percent.")
    if arguments.search:
        if arguments.world_size is None:
            raise UsageError("--search needs the number of GPUs; give --world-size.")
        if arguments.mfu is not None:
            raise UsageError("--mfu is the same for every layout; leave it out with --search.")
    return memory_gib_of(arguments.gpu) if given is None else given


def _cure_of_search(arguments: argparse.Namespace) -> str:
    """Return the flags with which a search for a GPU without rates can use those of an H200."""
    if arguments.gpu.upper() != "H100":
        return ""
    return " --gpu H200 --gpu-memory-gib 79 orders layouts of 79 GiB by the rates of H200."


def _report(
    run: RunToPlan,
    run_flags: Sequence[str],
    gpu: tuple[str, float],
    reason: str,
    arguments: argparse.Namespace,
    kernels_of: str,
) -> int:
    """Print the report of one layout.

    Args:
        kernels_of: GPU whose default kernels are assumed; empty for the kernels of this machine.
    """
    from megatron_packed.models.estimate.run_estimate import changes, estimates, measured_time

    sizes = (run.config, run.world_size, run.vocab_size, run.documents)
    ranks = estimates(*sizes)
    cures = changes(*sizes, limit=run.limit)
    measured = None
    if arguments.mfu is None and not reason:
        measured = measured_time(*sizes, run.lengths, gpu[0])
    flops = run.work.flops.total / run.world_size
    time = None
    if run.config.training.bf16:  # the peaks are those of bf16
        time = time_of_run(
            run.config, run_flags, gpu=gpu, flops=flops, mfu=arguments.mfu, measured=measured
        )
    if arguments.json:
        estimate = _as_json(run, ranks, cures)
        without = reason if time is None else None
        of_run = None if time is None else time._asdict()
        print(json.dumps({**estimate, "time": of_run, "reason_without_time": without}))
    else:
        lines = _lines(run, ranks, cures, kernels_of)
        show("\n".join([*lines, *time_lines(time, reason, run.work, run.world_size)]))
    return 0


def add_world_size(parser: argparse.ArgumentParser) -> None:
    """Add ``--world-size``; `check_world_size` checks its value."""
    parser.add_argument(
        "--world-size",
        type=int,
        metavar="N",
        help="number of processes of the run (default: the fewest that form its layout)",
    )


def check_world_size(world_size: int | None) -> None:
    """Check the value of ``--world-size``.

    Raises:
        UsageError: the number is too small or too large.
    """
    if world_size is not None and not 1 <= world_size <= MOST_PROCESSES:
        raise UsageError(
            f"--world-size {world_size}: must be at least 1 and at most {MOST_PROCESSES:,}."
        )


def without_data(run_flags: Sequence[str], uses: Collection[str] = ()) -> list[str]:
    """Return the flags of a run with missing required flags added, as `with_unused_flags`, and a
    placeholder for missing data.
    """
    values = gather(run_flags).values
    has_data = set(TRAINING_DATA) & set(values)
    return with_unused_flags([*([] if has_data else DATA_PLACEHOLDER), *run_flags], uses)


def _data(config: RunConfig, file: str | None) -> tuple[int, Lengths, str]:
    """Return the vocabulary size, the lengths of documents, and a description of their source."""
    import numpy as np

    from megatron_packed.inputs.known_data import known_data

    paths = config.data.train_paths
    vocab_size, lengths, reason, _ = known_data(config, given=paths != DATA_PLACEHOLDER[1:])
    if vocab_size is None:
        raise UsageError(
            f"--vocab-size is required: the tokenizer cannot be read on this machine ({reason}).",
            EXIT_DATA,
        )
    if file is not None:
        return vocab_size, read_numbers("--lengths", file), f"the lengths in {file}"
    if config.data.mock_data and lengths is not None:
        return vocab_size, lengths, "the made documents of --mock-data"
    if lengths is not None:
        return vocab_size, lengths, f"the tokenised documents of {' '.join(paths)}"
    full_length = np.array([config.packing.seq_length], dtype=np.int64)
    return (
        vocab_size,
        full_length,
        f"documents of --seq-length ({config.packing.seq_length}) tokens each: {reason}",
    )


def _rows(estimate: Estimate) -> dict[str, int]:
    static = estimate.static
    return {
        "parameters": static.parameters,
        "gradients": static.gradients,
        "optimizer state": static.optimizer,
        "tables and micro-batch": static.tables,
        "cuBLAS workspaces": static.workspaces,
        **{kind.value: amount for kind, amount in estimate.peak.amounts.items()},
        "peak in torch's allocator": estimate.allocated,
        "  of it the CUDA graphs' pool": estimate.graph_pool,
        "symmetric memory": estimate.symmetric,
        "CUDA context, NCCL (assumed)": estimate.outside - estimate.symmetric,
        "total": estimate.total,
        "pinned on the host, beside it": estimate.host_bytes,
    }


def _lines(
    run: RunToPlan, ranks: dict[str, Estimate], cures: Sequence[Change], kernels_of: str
) -> list[str]:
    from megatron_packed.config.kinds.experts import MEASURE
    from megatron_packed.layers.moe.expert_room import PLANNED_FACTOR
    from megatron_packed.models.estimate.parameter_count import count_parameters
    from megatron_packed.models.trace import complete_model
    from megatron_packed.models.trained_share import adapter_line

    config, world_size, vocab_size = run.config, run.world_size, run.vocab_size
    layout, packing = config.layout(world_size), config.packing
    parameters = count_parameters(config.model, vocab_size)
    micro_batches = config.micro_batches_per_step(layout.dp_size)
    frozen = f", {parameters.frozen:,} frozen" if parameters.frozen else ""
    adapters = adapter_line(complete_model(config.model, vocab_size))
    growth = "" if packing.batch_ramp is None else packing.batch_ramp.sentence()
    lines = [
        f"{parameters.total:,} parameters ({parameters.active:,} active{frozen}), vocabulary {vocab_size:,}; "
        f"{world_size:,} rank{'s' if world_size > 1 else ''}: "
        f"TP {layout.tp_size} x CP {layout.cp_size} x DP {layout.dp_size}, "
        f"experts TP {layout.expert_tp_size} x EP {layout.ep_size} x DP {layout.expert_dp_size}.",
        f"Packs of {packing.tokens_per_pack:,} slots, capacity {run.documents:,} documents; "
        f"{micro_batches} micro-batch{'es' if micro_batches > 1 else ''} of each rank in a step.",
        *([adapters] if adapters else []),
        *([growth] if growth else []),
        "",
        *_table(ranks),
        "",
    ]
    lines += [
        f"{kind}: the memory peak occurs during {estimate.peak.where}."
        for kind, estimate in ranks.items()
    ]
    first = next(iter(ranks.values()))
    lines.append(
        f"The memory contains CUDA's context{_communicators(first.communicators)}. It does not "
        "contain memory that the allocator loses to fragmentation."
    )
    if config.model.num_experts and config.expert_rank_capacity_factor == MEASURE:
        lines.append(
            f"Rows of experts are counted with {PLANNED_FACTOR} even shares; a run bounds them by its "
            "routing (--moe-expert-rank-capacity-factor auto)."
        )
    lines += _state_lines(config)
    if config.memory.offloads and not first.host_bytes:
        lines.append(
            "Nothing would be offloaded: no selected tensor has "
            f"{config.memory.min_offloaded_tensor_size:,} elements (--min-offloaded-tensor-size)."
        )
    lines += [
        *_kernel_lines(config, kernels_of),
        *_verdict(ranks, run.limit, cures),
        "",
        f"Lengths: {run.source}.",
    ]
    lines += _step_lines(run.work, world_size)
    lines += _partition_lines(run.work, config)
    return lines


def _kernel_lines(config: RunConfig, kernels_of: str) -> list[str]:
    """Return the lines about kernels that need more or less memory than is counted."""
    from megatron_packed.explain.op_requests import lacks_joined_kernels, may_join_products

    if not config.training.bf16:
        return [
            "Without --bf16 other attention kernels run, which may need more memory than is "
            "counted."
        ]
    if kernels_of and may_join_products(config):
        return [
            f"Activations of squared ReLU are counted as not saved: {kernels_of} with quack-kernels is assumed, "
            "which flash-attn 4 installs. Without this package a run needs more memory."
        ]
    if not kernels_of and lacks_joined_kernels(config):
        return [
            "Activations of squared ReLU are counted as saved, because this machine has no Hopper "
            "GPU with quack-kernels. A run with these kernels may need less memory; --gpu H100 or H200 "
            "counts it."
        ]
    return []


def _communicators(number: int) -> str:
    """Return what the line about CUDA's context says about NCCL's memory; empty without NCCL."""
    from megatron_packed.models.estimate.rank_memory import COMMUNICATOR

    whose = f"each of {number} NCCL communicators" if number > 1 else "the rank's NCCL communicator"
    return f", and {COMMUNICATOR // _MIB} MiB for {whose}" if number else ""


def _state_lines(config: RunConfig) -> list[str]:
    """Return the lines about the bytes of passed states; empty if no layer passes states."""
    from megatron_packed.explain.state_messages import state_messages

    sent = state_messages(config)
    if sent is None:
        return []
    moved = ""
    if sent.reordering:
        moved = f", and {sent.reordering / _MIB:,.2f} MiB to reorder the rows of each * layer"
    each = [
        f"{(layer.states + layer.halo) / _MIB:,.2f} MiB for each {symbol} layer (states "
        f"{layer.states / _MIB:,.2f}, halo {layer.halo / _MIB:,.2f})"
        for symbol, layer in sent.layers.items()
    ]
    return [
        "In each pass a rank sends at most the following to other context-parallel ranks: "
        f"{', '.join(each)}{moved}."
    ]


def _step_lines(work: StepWork, world_size: int) -> list[str]:
    """Return the lines about the documents and about the FLOPs of a step."""
    shares = ", ".join(
        f"{name} {100 * amount / work.flops.total:.1f} %"
        for name, amount in vars(work.flops).items()
    )
    return [
        f"{work.documents:,} documents: mean {work.mean:,.0f} tokens, P50 {work.p50:,.0f}, P90 {work.p90:,.0f}, P99 "
        f"{work.p99:,.0f}, longest {work.longest:,}; {work.documents_per_pack:,.1f} in a full pack.",
        f"A step of {work.tokens:,} tokens: {work.flops.total:.4g} FLOPs ({shares}), "
        f"{work.flops.total / world_size:.4g} on each rank.",
        _six_n_t_sentence(work),
    ]


def _partition_lines(work: StepWork, config: RunConfig) -> list[str]:
    """Return the line that compares the partitions of a pack; empty if there is one partition."""
    rows = work.rows_of_ranks
    if rows is None:
        return []
    slowest = f"the slowest rank has {rows.slowest_contiguous:.2f} times the mean work in attention"
    zigzag = replace(config, parallel=replace(config.parallel, cp_partition_mode="zigzag"))
    if zigzag_kernel_problem(zigzag) is not None:
        layers = "these layers" if config.training.bf16 else "these layers without --bf16"
        return [
            f"--cp-partition-mode: with contiguous rows {slowest}. GPUs have no kernel for a zigzag of {layers}."
        ]
    return [
        f"--cp-partition-mode: a zigzag pads these documents by {100 * rows.zigzag_padding:.1f} % of their tokens; "
        f"with contiguous rows {slowest}, {100 * rows.contiguous_flops:.1f} % more FLOPs. "
        f"This run takes {config.parallel.cp_partition_mode}."
    ]


def _six_n_t_sentence(work: StepWork) -> str:
    """Return what the approximation 6 N T counts, its share of all FLOPs, and what it leaves out."""
    share = 100 / work.flops.total
    left_out = {
        "attention scores": work.flops.attention,
        "the scan": work.flops.scan,
        "another use of the same weights by multi-token prediction": work.repeated,
    }
    parts = [f"{name} ({share * amount:.1f} %)" for name, amount in left_out.items() if amount]
    without = f" It leaves out {' and '.join(filter(None, [', '.join(parts[:-1]), *parts[-1:]]))}."
    all_parameters, frozen = work.multiplied_parameters, work.multiplied_frozen
    sum_of, counted = "6 N T", f"6 for each of N = {all_parameters:,} active parameters"
    if frozen:
        sum_of = "4 F T + 6 N T"
        counted = (
            f"4 for each of F = {frozen:,} frozen parameters that a token uses, whose own gradients are "
            f"not computed, 6 for each of N = {all_parameters - frozen:,} trained ones,"
        )
    sentence = (
        f"The approximation {sum_of} gives {work.six_n_t:.4g} FLOPs, {share * work.six_n_t:.1f} % of that. It counts "
        f"{counted} and each of T = {work.tokens:,} tokens. "
        f"{'F' if frozen else 'N'} has norms, but no table that is only looked up.{without if parts else ''}"
    )
    return f"{sentence} MFU counts frozen weights in the same way." if frozen else sentence


def _table(ranks: dict[str, Estimate]) -> list[str]:
    columns = {kind: _rows(estimate) for kind, estimate in ranks.items()}
    names = list(next(iter(columns.values())))
    width, widths = max(map(len, names)), {kind: max(len(kind), 10) for kind in columns}
    lines = [" ".join(["GiB".ljust(width), *(kind.rjust(widths[kind]) for kind in columns)])]
    for name in names:
        if any(rows[name] for rows in columns.values()):
            cells = (
                f"{rows[name] / _GIB:.3f}".rjust(widths[kind]) for kind, rows in columns.items()
            )
            lines.append(" ".join([name.ljust(width), *cells]))
    return lines


def _verdict(ranks: dict[str, Estimate], limit: int, cures: Sequence[Change]) -> list[str]:
    kind, total = next((kind, estimate.total) for kind, estimate in ranks.items())
    of, gib = f" with {kind}" if len(ranks) > 1 else "", limit / _GIB
    if total <= limit:
        lines = [
            f"Fits{of}: {total / _GIB:.1f} of {gib:g} GiB used, {(limit - total) / _GIB:.1f} GiB "
            "free."
        ]
    else:
        lines = [f"Does not fit{of}: {total / _GIB:.1f} GiB needed, {gib:g} GiB available."]
    for number, cure in enumerate(cures):
        fits = ", which fits" if cure.total <= limit else ""
        lines.append(
            f"  {'then' if number else 'helps most:'} {cure.flag} saves {cure.saves / _GIB:.1f} GiB: "
            f"{cure.total / _GIB:.1f} GiB{fits}"
        )
    if total > limit and (not cures or cures[-1].total > limit):
        lines.append(
            "  No option makes the run fit on this number of ranks; use more ranks, or a "
            "smaller model or batch."
        )
    if (
        len(ranks) > 1
        and (worst := max(estimate.total for estimate in ranks.values())) > limit >= total
    ):
        lines.append(
            "If all tokens went to the experts of one rank, that rank would need "
            f"{worst / _GIB:.1f} GiB; --moe-expert-capacity-factor limits this."
        )
    return lines


def _stages(packing: PackingConfig) -> Sequence[BatchStage]:
    """Return the stages of the batch size: one, or those of ``--rampup-batch-size``."""
    ramp = packing.batch_ramp
    full = BatchStage(0, 0, packing.global_batch_size // packing.micro_batch_size)
    return [full] if ramp is None else ramp.stages()


def _as_json(run: RunToPlan, ranks: dict[str, Estimate], cures: Sequence[Change]) -> dict[str, Any]:
    from megatron_packed.explain.state_messages import state_messages

    config, world_size, work, limit = run.config, run.world_size, run.work, run.limit
    sent = state_messages(config)
    return {
        "world_size": world_size,
        "layout": asdict(config.layout(world_size)),
        "vocab_size": run.vocab_size,
        "documents": run.documents,
        "ranks": {
            kind: {
                "bytes": {name.strip(): value for name, value in _rows(estimate).items()},
                "peak": estimate.peak.where,
            }
            for kind, estimate in ranks.items()
        },
        "gpu_bytes": limit,
        "fits": {kind: estimate.total <= limit for kind, estimate in ranks.items()},
        "changes": [asdict(cure) for cure in cures],
        "lengths": run.source,
        "passed_states": None if sent is None else asdict(sent),
        "batch_stages": [
            {"step": stage.step, "packs": stage.packs} for stage in _stages(config.packing)
        ],
        "step": {
            **asdict(work),
            "total_flops": work.flops.total,
            "flops_per_rank": work.flops.total / world_size,
        },
    }
