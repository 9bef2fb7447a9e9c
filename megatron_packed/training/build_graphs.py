"""CUDA graphs of a training job: choice of modules, packs for the capture, audits and release."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from megatron_packed.config.run import RunConfig
from megatron_packed.config.sections.cuda_graph import (
    FULL_ITERATION,
    MODULE_LAYERS,
    CudaGraphConfig,
)
from megatron_packed.cuda_graphs.capture_and_pool import GraphBackend
from megatron_packed.cuda_graphs.fallback_reasons import GraphFallbackError
from megatron_packed.cuda_graphs.layer_graphs import LayerGraphs
from megatron_packed.cuda_graphs.step_graphs import StepGraphs
from megatron_packed.cuda_graphs.transformer_engine import Maker, maker
from megatron_packed.cuda_graphs.whole_step_graphs import FullIterationGraphs
from megatron_packed.distributed.collectives import all_gather_json, in_turns
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.layers.hybrid_layer import HybridMoELayer
from megatron_packed.layers.linear import main_grad_of
from megatron_packed.models.hybrid_model import HybridModel
from megatron_packed.packed.capture_sizes import CaptureSize, CaptureSizes
from megatron_packed.packed.micro_batch import Document, MicroBatch
from megatron_packed.training.build_job import Job
from megatron_packed.training.train_step import LAST_MICRO_BATCH, MICRO_BATCH, VALIDATION, TrainStep

ROUTER = "moe_router"
"""Name of the only module that is a part of a layer, not a whole layer."""


def refuse_eager(options: CudaGraphConfig, device: torch.device) -> None:
    """Refuse to start under ``--cuda-graph-strict`` on a device that cannot capture graphs.

    Raises:
        GraphFallbackError: ``--cuda-graph-strict`` was given, and the device cannot capture.
    """
    reason = options.eager_reason(device.type)
    if reason and options.cuda_graph_strict:
        raise GraphFallbackError(
            f"{reason} --cuda-graph-strict forbids eager runs; leave it out on a CPU."
        )


def build_graphs(
    config: RunConfig,
    job: Job,
    capture_sizes: CaptureSizes | None,
    groups: ParallelGroups,
    say: Callable[[str], None],
    backend: GraphBackend | None = None,
    made_by: Maker | None = None,
) -> StepGraphs | None:
    """Build the object that will capture and replay the job's graphs; nothing is captured yet.

    Args:
        config: configuration of the run.
        job: model, optimizer and training step.
        capture_sizes: sizes of the job's micro-batches; None without graphs.
        groups: process groups of this rank.
        say: prints a line: why requested graphs are not captured, and the progress of captures.
        backend: captures and replays; by default torch's CUDA graphs, which need a GPU.
        made_by: captures layers for ``--cuda-graph-impl transformer_engine``; by default
            TransformerEngine.
    Returns:
        The graphs; None if everything runs eagerly.
    Raises:
        ValueError: TransformerEngine is to capture, but is not installed or not usable.
    """
    options = config.cuda_graph
    if not options.enabled:
        return None
    if backend is None and groups.device.type != "cuda":
        say(options.eager_reason(groups.device.type))
        return None
    assert capture_sizes is not None, "the data of a run with graphs has capture sizes"
    common = {
        "total_tokens": config.packing.tokens_per_pack,
        "capture_sizes": capture_sizes,
        "device": groups.device,
        "tables": job.model.pack_tables.derive,
        "check": job.model.pack_tables.check,
        "copies": job.model.offload,
        "backend": backend,
        "warmup_steps": options.cuda_graph_warmup_steps,
        "strict": options.cuda_graph_strict,
        "agree": partial(failed_anywhere, groups=groups),
        "say": say,
    }
    if options.cuda_graph_impl == FULL_ITERATION:
        return _of_whole_steps(config, job.step, common)
    return LayerGraphs(
        modules_to_capture(options, job.model),
        job.step.forward_backward,
        own_rows=job.model.own_rows,
        made_by=(made_by or maker()) if options.uses_transformer_engine else None,
        passes_wait=groups.ranks_of_pass > 1 or waits_for_replicas(job.model),
        **common,
    )


def _of_whole_steps(
    config: RunConfig, step: TrainStep, common: Mapping[str, Any]
) -> FullIterationGraphs:
    unused = set()
    if step.overlapped is None:
        unused.add(LAST_MICRO_BATCH)
    if not config.validates and not config.tests:
        unused.add(VALIDATION)
    return FullIterationGraphs(
        {name: part for name, part in step.parts.items() if name not in unused},
        step.finish,
        rehearsing=step.rehearsing,
        places=step.places,
        audited={name: partial(_added_to, step, name) for name in (MICRO_BATCH, LAST_MICRO_BATCH)},
        reset=step.reset_sums,
        dtype=step.model.dtype,
        **common,
    )


def modules_to_capture(options: CudaGraphConfig, model: HybridModel) -> dict[str, nn.Module]:
    """Return name -> module of the modules to capture, in the order of the model.

    A module is a whole layer, or the router of an E layer if ``moe_router`` is requested.

    Example:
        ``M*E`` with ``attn moe_router``: ``{"layers.1": ..., "layers.2.mixer.router": ...}``.
    """
    requested_names = options.modules or tuple(name for name in MODULE_LAYERS if name != ROUTER)
    symbols = {MODULE_LAYERS[name] for name in requested_names if name != ROUTER}
    modules: dict[str, nn.Module] = {}
    for number, (symbol, layer) in enumerate(
        zip(model.config.layer_types, model.layers, strict=True)
    ):
        if symbol in symbols:
            modules[f"layers.{number}"] = layer
        elif ROUTER in requested_names and symbol == MODULE_LAYERS[ROUTER]:
            assert isinstance(layer, HybridMoELayer)
            modules[f"layers.{number}.mixer.router"] = layer.mixer.router
    return modules


def waits_for_replicas(model: HybridModel) -> bool:
    """Return whether a training pass waits for ranks that train on other packs."""
    return model.global_balance is not None and model.global_balance.group is not None


def tune_graphs(
    graphs: StepGraphs, step: TrainStep, packs_per_step: int, groups: ParallelGroups
) -> None:
    """Compile and tune kernels before the first `capture_graphs`; with several GPUs, rank 0 first.

    The other ranks reuse the results of rank 0 from the kernel caches on disk. If all ranks wait for
    each other in a pass, all tune at once. Tuning may take long and replays nothing. Gradients hold
    garbage afterwards.
    """
    tune = partial(graphs.tune, _dummies(graphs, step, packs_per_step))
    takes_turns = groups.device.type == "cuda" and groups.world_size > 1
    if takes_turns and not waits_for_replicas(step.model):
        in_turns(groups, tune)
    elif not graphs.tunes_in_capture:
        tune()


def capture_graphs(
    graphs: StepGraphs,
    step: TrainStep,
    packs_per_step: int,
    groups: ParallelGroups,
    *,
    first: bool = False,
) -> None:
    """Capture all graphs, for the first time or again after weights have moved to other addresses.

    All ranks call it together, between two steps. If any rank fails to capture a module, all ranks
    run it eagerly. Gradients are zero afterwards; nothing else of the job changes.

    Args:
        graphs: captures and replays.
        step: the training step.
        packs_per_step: number of packs in a step.
        groups: process groups of this rank.
        first: this is the first capture, so `tune_graphs` runs before it.
    Raises:
        GraphFallbackError: a module cannot be captured, and ``--cuda-graph-strict`` was given.
    """
    if first:
        tune_graphs(graphs, step, packs_per_step, groups)
    graphs.capture(_dummies(graphs, step, packs_per_step))
    step.buffers.zero_grad()


def _dummies(
    graphs: StepGraphs, step: TrainStep, packs_per_step: int
) -> Callable[[CaptureSize], MicroBatch]:
    return partial(
        dummy_pack,
        total_tokens=graphs.slot.total_tokens,
        vocab_size=step.model.vocab_size,
        packs_per_step=packs_per_step,
        alignment=step.model.cp.attention_partition.alignment,
        longest=step.model.max_positions,
    )


def audit_graphs(
    graphs: StepGraphs, step: TrainStep, micro_batch: MicroBatch, *, deterministic: bool, seed: int
) -> str | None:
    """Compare replays with eager passes on one micro-batch; all ranks call it between two steps.

    Returns:
        The finding in words; None if any rank would run its micro-batch eagerly.
    Raises:
        AuditMismatchError: replay and eager results differ.
    """
    replays = graphs.why_eager(micro_batch) is None
    # Graphs may hold collectives, so either all ranks replay or none does.
    if not all(all_gather_json(replays, step.groups)):
        return None
    comparison = graphs.audit(micro_batch, deterministic=deterministic, seed=seed)
    assert comparison is not None
    return f"{comparison.finding} (largest difference {comparison.largest_difference:.1e})"


def audit_first_replay(
    graphs: StepGraphs,
    step: TrainStep,
    micro_batches: Iterable[MicroBatch],
    *,
    deterministic: bool,
    seed: int,
) -> str:
    """Compare the first micro-batch that a graph would replay, and return the finding in words.

    Raises:
        AuditMismatchError: replay and eager results differ.
    """
    begun = time.perf_counter()
    for micro_batch in micro_batches:
        sentence = audit_graphs(graphs, step, micro_batch, deterministic=deterministic, seed=seed)
        if sentence is not None:
            return f"{sentence}, in {time.perf_counter() - begun:.1f} s"
    return "no micro-batch of the next step would be replayed"


def _added_to(step: TrainStep, part: str) -> dict[str, Tensor]:
    """Return the tensors that a part of a step adds to, by name, for the audit to compare.

    The last micro-batch with overlap also reduces gradients. If the optimizer is sharded, a rank's
    result is defined only for the gradients that it owns, so only those are returned.
    """
    buffers = step.buffers
    main_grads = {name: main_grad_of(parameter) for name, parameter in buffers.parameters.items()}
    gradients = {name: grad for name, grad in main_grads.items() if grad is not None}
    if part == LAST_MICRO_BATCH and not buffers.owns_all:
        owned = [buffers.owned_span(bucket) for bucket in buffers.layout.buckets]
        gradients = {
            f"bucket {number}": buffers.gradients(start, end)
            for number, (start, end) in enumerate(owned)
        }
    return {f"gradients of {name}": gradient for name, gradient in gradients.items()} | {
        "losses and counts": buffers.tail
    }


def failed_anywhere(mine: dict[str, str], groups: ParallelGroups) -> dict[str, str]:
    """Exchange failed captures between ranks and return module (or `ALL`) -> reason; a collective.

    Example:
        rank 1 gives ``{"layers.2": "OutOfMemoryError: ..."}``; rank 0 gets ``{"layers.2": "rank 1
        cannot capture it (OutOfMemoryError: ...), so all ranks run it eagerly"}``.
    """
    together = dict(mine)
    for rank, failed in enumerate(all_gather_json(mine, groups)):
        for module, reason in failed.items():
            together.setdefault(
                module, f"rank {rank} cannot capture it ({reason}), so all ranks run it eagerly"
            )
    return together


def dummy_pack(
    size: CaptureSize,
    *,
    total_tokens: int,
    vocab_size: int,
    packs_per_step: int,
    alignment: int = 1,
    longest: int | None = None,
) -> MicroBatch:
    """Build a micro-batch that fills ``size`` and resembles a training micro-batch, for captures.

    It holds as many documents as the capacity allows, of very unequal lengths. The documents fill
    all token slots unless they would exceed ``longest``. Every token is a target. The same arguments
    always give the same micro-batch, and no global random state is used.

    Args:
        size: capture size.
        total_tokens: token slots of a pack.
        vocab_size: token ids are below it.
        packs_per_step: number of packs in a step, for the scale of the loss.
        alignment: lengths of documents are multiples of it, in tokens.
        longest: most tokens of a document; None for no limit besides that of ``size``.
    """
    random = np.random.default_rng(size.capacity)
    units = total_tokens // alignment
    limit = size.max_seqlen if longest is None else min(size.max_seqlen, longest)
    lengths = alignment * _lengths(
        min(size.capacity, units), units, max(limit // alignment, 1), random
    )
    documents = [Document(random.integers(0, vocab_size, length)) for length in lengths]
    targets = int((lengths - 1).sum()) * packs_per_step
    scales = (1 / max(targets, 1), 1 / packs_per_step)
    return MicroBatch.build(
        documents, total_tokens, size.capacity, scales, size.max_seqlen, alignment
    )


def _lengths(
    count: int, total: int, longest: int, random: np.random.Generator
) -> NDArray[np.int64]:
    """Return ``count`` random lengths from 1 to ``longest``, with the sum ``total`` if possible."""
    cuts = np.sort(random.choice(total - 1, count - 1, replace=False)) + 1
    return cut_to_longest(np.diff(np.concatenate([[0], cuts, [total]])), longest)


def cut_to_longest(lengths: NDArray[np.int64], longest: int) -> NDArray[np.int64]:
    """Cut lengths to ``longest``, and add the cut tokens to shorter lengths as far as possible.

    Example:
        lengths [9, 1, 2] and 5: [5, 5, 2].
    """
    beyond = int(np.maximum(lengths - longest, 0).sum())
    lengths = np.minimum(lengths, longest)
    room = longest - lengths
    added: NDArray[np.int64] = np.clip(beyond - (np.cumsum(room) - room), 0, room)
    return lengths + added


def sentences_of_all_ranks(
    graphs: StepGraphs, model: HybridModel, groups: ParallelGroups
) -> list[str]:
    """Return this rank's graph counters in words, and their sums over all ranks; a collective."""
    counters = graphs.counters
    lines = counters.sentences()
    lines += [f"  {sentence}" for sentence in model.expert_room.sentences()]
    if groups.world_size > 1:
        ranks = all_gather_json(
            [counters.replays, counters.fallbacks.total(), counters.captures], groups
        )
        replays, fallbacks, captures = (sum(numbers) for numbers in zip(*ranks))
        lines.append(
            f"  the lines above are of rank {groups.rank}; all {groups.world_size} ranks together: "
            f"{replays:,} micro-batches replayed, {fallbacks:,} run eagerly, {captures:,} graphs"
        )
    return lines


@contextmanager
def released(graphs: StepGraphs | None) -> Iterator[None]:
    """Free all graphs when the block ends, also by an exception.

    The graphs must be freed before the process group is destroyed; otherwise the exit may hang.
    """
    try:
        yield
    except BaseException:
        if graphs is not None:
            # After a device error, freeing fails as well. Only the first error is reported.
            with suppress(Exception):
                graphs.close()
        raise
    if graphs is not None:
        graphs.close()
