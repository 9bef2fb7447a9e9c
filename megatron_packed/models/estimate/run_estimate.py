"""Estimates for a planned run: memory of its ranks, options that reduce memory, work of a step.

The estimates need no GPU, process group or other processes: the model of one rank is built on the
meta device.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from math import ceil
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_packed.config import flag_names as flags
from megatron_packed.config.errors import ConfigError
from megatron_packed.config.kinds.attention import zigzag_kernel_problem
from megatron_packed.config.run import RunConfig
from megatron_packed.config.sections.memory import MemoryConfig
from megatron_packed.data.packing.pieces import Pieces
from megatron_packed.distributed.flat_buffers import tail_elements
from megatron_packed.distributed.gradient_precision import GradientPrecision
from megatron_packed.models.equal_exchanges import exchange_bytes
from megatron_packed.models.estimate.gpu_rates import measured_rates
from megatron_packed.models.estimate.rank_memory import Estimate, communicators_of, estimate
from megatron_packed.models.estimate.rows_of_ranks import (
    RowsOfRanks,
    attention_share,
    choose_partition,
    rows_of_ranks,
)
from megatron_packed.models.estimate.step_memory import KnownUnits, Work
from megatron_packed.models.estimate.step_time import StepTime, owned_layout, step_time
from megatron_packed.models.flops import FlopCounter, Flops
from megatron_packed.models.metrics_layout import MetricsLayout
from megatron_packed.models.run_model import dtype_of
from megatron_packed.models.tensor_overlap import symmetric_bytes
from megatron_packed.models.trace import Imagined
from megatron_packed.optim.state_precision import StatePrecision
from megatron_packed.torch_private import compiler_not_imported

EVERY_RANK = "every rank"
BALANCED, WORST = "balanced experts", "all tokens here"
_ROUNDS = 6
"""Largest number of options that are suggested."""

Lengths = NDArray[np.int64]


def estimates(
    config: RunConfig,
    world_size: int,
    vocab_size: int,
    documents: int,
    known: KnownUnits | None = None,
) -> dict[str, Estimate]:
    """Return kind of rank -> estimate of its memory.

    All ranks need equal memory, so there is usually one kind. If the routing decides how many rows
    the experts of a rank get, there are two kinds: with balanced experts, and with all tokens routed
    to this rank's experts.

    Args:
        config: configuration of the run.
        world_size: number of processes.
        vocab_size: entries of the vocabulary.
        documents: capacity of a pack in documents.
        known: layers that estimates of other configurations have measured.
    """
    with no_collection(), compiler_not_imported():
        return estimates_of(
            config, Imagined.from_config(config, world_size, vocab_size), documents, known
        )


@contextmanager
def no_collection() -> Iterator[None]:
    """Return a context without the collector of cyclic garbage.

    It would walk over the objects of a model again and again, which takes a seventh of the time.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def estimates_of(
    config: RunConfig, imagined: Imagined, documents: int, known: KnownUnits | None = None
) -> dict[str, Estimate]:
    """Return the `estimates` of a rank of a planned run."""
    # The real modules on the meta device give the sizes, so the estimate follows changes of them.
    model, groups = imagined
    layout = owned_layout(config, imagined)
    precision = GradientPrecision.from_config(config.parallel)
    metrics = MetricsLayout.from_model(model, groups)
    tail = tail_elements(metrics.extras, metrics.counters)
    uneven = any(not layer.mixer.dispatcher.static for layer in model.moe_layers)
    kinds = {BALANCED: True, WORST: False} if uneven else {EVERY_RANK: True}
    return {
        kind: estimate(
            model,
            layout,
            Work(
                tokens=config.packing.tokens_per_pack,
                documents=documents,
                even=even,
            ),
            tail=tail,
            graphs=config.cuda_graph,
            precision=StatePrecision.from_config(config),
            communicators=communicators_of(groups),
            symmetric=symmetric_bytes(config, dtype_of(config)) + exchange_bytes(config),
            known_units=known,
            rounds_once=precision.rounds_once and groups.dp_cp.size > 1,
        )
        for kind, even in kinds.items()
    }


def measured_time(
    config: RunConfig,
    world_size: int,
    vocab_size: int,
    documents: int,
    lengths: Lengths,
    gpu: str,
) -> StepTime:
    """Return the time of a step by the rates measured on a GPU; see `step_time`.

    Args:
        config: configuration of the run.
        world_size: number of processes.
        vocab_size: entries of the vocabulary.
        documents: capacity of a pack in documents.
        lengths: tokens of the documents.
        gpu: name of a GPU in `measured_rates`.
    """
    with no_collection(), compiler_not_imported():
        imagined = Imagined.from_config(config, world_size, vocab_size)
        pieces = pieces_of_documents(config, lengths)
        return step_time(config, imagined, documents, pieces, measured_rates()[gpu.upper()])


def pieces_of_documents(config: RunConfig, lengths: Lengths) -> Lengths:
    """Return the tokens of the pieces in which documents of these lengths are packed."""
    packing = config.packing
    return Pieces.cut(lengths, packing.max_document_length, packing.overlong_policy).length


def with_partition(config: RunConfig, vocab_size: int, lengths: Lengths) -> tuple[RunConfig, str]:
    """Return the configuration with the partition that these documents choose, and a sentence that
    says why; see `choose_partition`.
    """
    if not config.parallel.chooses_partition:
        return config, ""
    try:
        pieces = pieces_of_documents(config, lengths)
    except ValueError:
        return config, ""  # the packer refuses the documents
    return choose_partition(config, pieces, partial(attention_share, config, vocab_size, pieces))


def usual(ranks: Mapping[str, Estimate]) -> Estimate:
    """Return the estimate of a rank with balanced experts."""
    return next(iter(ranks.values()))


@dataclass(frozen=True, kw_only=True)
class Change:
    """Option that reduces the memory of a rank further, after the previous changes of the list."""

    flag: str
    total: int
    """Bytes of a rank with this change and the previous changes."""
    saves: int


def changes(
    config: RunConfig, world_size: int, vocab_size: int, documents: int, *, limit: int
) -> list[Change]:
    """Return options that reduce memory, one after the other, until a balanced rank fits.

    Each time, the option that saves most by a new estimate is chosen. Smaller packs, which change
    the training, are suggested only if no other option saves 1 %. The list is empty if everything
    fits or nothing helps.

    Args:
        config: configuration of the run.
        world_size: number of processes.
        vocab_size: entries of the vocabulary.
        documents: capacity of a pack in documents.
        limit: memory of a GPU in bytes.
    """
    known: KnownUnits = {}
    now = usual(estimates(config, world_size, vocab_size, documents, known)).total
    found: list[Change] = []
    while now > limit and len(found) < _ROUNDS:
        best: tuple[int, str, RunConfig] | None = None
        # Options that do not change results come first. Smaller packs are tried only if no other
        # option helps.
        alike = chain(_other_layouts(config, world_size), _recomputations(config))
        for choices in (alike, _smaller_packs(config)):
            for flag, other in choices:
                total = usual(estimates(other, world_size, vocab_size, documents, known)).total
                if total < 0.99 * now and (best is None or total < best[0]):
                    best = total, flag, other
            if best is not None:
                break
        if best is None:
            break
        found.append(Change(flag=best[1], total=best[0], saves=now - best[0]))
        now, _, config = best
    return found


def _other_layouts(config: RunConfig, world_size: int) -> Iterator[tuple[str, RunConfig]]:
    parallel, layout = config.parallel, config.layout(world_size)
    if not parallel.use_distributed_optimizer and layout.size("dp_cp") > 1:
        yield from _valid(
            config, world_size, flags.USE_DISTRIBUTED_OPTIMIZER, use_distributed_optimizer=True
        )
    tp, sequence = parallel.tensor_model_parallel_size, {"sequence_parallel": True}
    if tp > 1 and not parallel.sequence_parallel:
        yield from _valid(config, world_size, flags.SEQUENCE_PARALLEL, **sequence)
    expert_tp = (
        2 * tp
        if parallel.expert_tensor_parallel_size == tp > 1
        else parallel.expert_tensor_parallel_size
    )
    yield from _valid(
        config,
        world_size,
        f"{flags.TENSOR_MODEL_PARALLEL_SIZE} {2 * tp} {flags.SEQUENCE_PARALLEL}",
        tensor_model_parallel_size=2 * tp,
        expert_tensor_parallel_size=2 if tp == 1 else expert_tp,
        **sequence,
    )
    cp, ep = parallel.context_parallel_size, parallel.expert_model_parallel_size
    yield from _valid(
        config, world_size, f"{flags.CONTEXT_PARALLEL_SIZE} {2 * cp}", context_parallel_size=2 * cp
    )
    if config.model.num_experts is not None:
        yield from _valid(
            config,
            world_size,
            f"{flags.EXPERT_MODEL_PARALLEL_SIZE} {2 * ep}",
            expert_model_parallel_size=2 * ep,
        )


def _valid(
    config: RunConfig, world_size: int, flag: str, **values: Any
) -> Iterator[tuple[str, RunConfig]]:
    """Yield the configuration with other parallel sizes, if that layout is valid on GPUs."""
    try:
        other = replace(config, parallel=replace(config.parallel, **values))
        other.layout(world_size)
    except ConfigError:
        return
    if zigzag_kernel_problem(other) is not None:
        return
    if (
        other.packing.global_batch_size
        % (other.packing.micro_batch_size * other.data_parallel_size(world_size))
        == 0
    ):
        yield flag, other


def _recomputations(config: RunConfig) -> Iterator[tuple[str, RunConfig]]:
    """Yield configurations with recomputation of core attention and of whole layers.

    If whole layers are already recomputed, yield one with offload of their inputs instead.
    """
    memory = config.memory
    if memory.recomputes_layers and not memory.offloads:
        yield from _remembering(
            config, flags.OFFLOAD_LAYER_INPUTS, replace(memory, offload_layer_inputs=True)
        )
    if memory.recompute_granularity is not None:
        return
    for values in (
        {"recompute_granularity": "selective"},
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    ):
        flag = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in values.items())
        yield from _remembering(config, flag, replace(memory, **values))


def _remembering(
    config: RunConfig, flag: str, memory: MemoryConfig
) -> Iterator[tuple[str, RunConfig]]:
    """Yield the configuration with another ``memory`` section, if it is valid."""
    try:
        yield flag, replace(config, memory=memory)
    except ConfigError:
        return


def _smaller_packs(config: RunConfig) -> Iterator[tuple[str, RunConfig]]:
    packing = config.packing
    for flag, name in (
        (flags.MICRO_BATCH_SIZE, "micro_batch_size"),
        (flags.SEQ_LENGTH, "seq_length"),
    ):
        value = getattr(packing, name)
        if value % 2 == 0:
            try:
                longest = min(packing.max_document_length, packing.tokens_per_pack // 2)
                smaller = replace(packing, max_document_length=longest, **{name: value // 2})
                yield f"{flag} {value // 2}", replace(config, packing=smaller)
            except ConfigError:
                continue


@dataclass(frozen=True, kw_only=True)
class StepWork:
    """Work of one optimizer step over full packs, with statistics of the document lengths."""

    documents: int
    """Number of documents whose lengths are known."""
    mean: float
    p50: float
    p90: float
    p99: float
    longest: int
    documents_per_pack: float
    tokens: int
    """Tokens of a step."""
    flops: Flops
    """FLOPs of forward and backward of a step, over all ranks."""
    six_n_t: float
    """The estimate ``6 N T`` of these FLOPs, with 4 in place of 6 for frozen parameters."""
    multiplied_parameters: int
    """N of this estimate: active parameters that take part in products."""
    multiplied_frozen: int
    """Part of N that is frozen."""
    repeated: float
    """FLOPs with weights that ``6 N T`` counts once and a token uses several times."""
    rows_of_ranks: RowsOfRanks | None
    """Partitions of a pack; None if attention exchanges no keys and values."""


def step_work(config: RunConfig, vocab_size: int, lengths: Lengths) -> StepWork:
    """Return the work of a step whose packs are full.

    Raises:
        ValueError: a document is too long under ``--overlong-policy error``, or all documents are
            dropped.
    """
    packing = config.packing
    pieces = pieces_of_documents(config, lengths)
    if not pieces.size:
        raise ValueError(
            f"no document has at most {flags.MAX_DOCUMENT_LENGTH} ({packing.max_document_length}) tokens."
        )
    tokens = config.packs_per_step() * packing.tokens_per_pack
    counter = FlopCounter(config.model, vocab_size)
    flops = counter.training(pieces).scaled(tokens / float(pieces.sum()))
    p50, p90, p99 = (float(value) for value in np.quantile(pieces, (0.5, 0.9, 0.99)))
    return StepWork(
        documents=int(pieces.size),
        mean=float(pieces.mean()),
        p50=p50,
        p90=p90,
        p99=p99,
        longest=int(pieces.max()),
        documents_per_pack=packing.tokens_per_pack / float(pieces.mean()),
        tokens=tokens,
        flops=flops,
        six_n_t=counter.six_n_t(tokens),
        multiplied_parameters=counter.parameters.multiplied,
        multiplied_frozen=counter.parameters.multiplied_frozen,
        repeated=counter.repeated_work(tokens),
        rows_of_ranks=rows_of_ranks(config, pieces, flops.attention_share),
    )


def documents_in_pack(config: RunConfig, work: StepWork) -> int:
    """Return the number of documents that a pack has capacity for: the largest capacity of the
    graphs, or an estimate for the fullest pack.
    """
    capacities = config.cuda_graph.capacities if config.cuda_graph.enabled else None
    if capacities is not None:
        return capacities[-1]
    cap = config.packing.max_documents_per_pack
    # The balanced packer keeps the number of documents of every pack near the mean. The largest
    # number is about 1.5 times the mean.
    return min(ceil(1.5 * work.documents_per_pack), cap or config.packing.tokens_per_pack)
