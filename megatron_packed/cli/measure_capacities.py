"""Measurement of training step times at several capacities, for `data.packing.step_cost`.

Model, optimizer and graphs are those of the run's flags; tokens are random. As in training, a series
of steps is queued, and the host waits only at its end. Steps with one and with several micro-batches
separate the time of a micro-batch from the rest of the step. Capacities are measured in alternation,
so that a drift of the clock frequency affects all capacities equally.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from statistics import median

import numpy as np
import torch

from megatron_packed.config.run import RunConfig
from megatron_packed.config.sections.cuda_graph import LOCAL
from megatron_packed.cuda_graphs.capture_and_pool import GraphBackend
from megatron_packed.data.packing.step_cost import StepCosts, Timed
from megatron_packed.distributed.determinism import configure_determinism
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.distributed.rng import seed_all
from megatron_packed.explain.op_requests import op_requests
from megatron_packed.models.isolation import check_isolation
from megatron_packed.models.run_model import device_of, dtype_of
from megatron_packed.packed.capture_sizes import CaptureSizes
from megatron_packed.packed.micro_batch import Document, MicroBatch
from megatron_packed.training.build_graphs import (
    build_graphs,
    capture_graphs,
    cut_to_longest,
    refuse_eager,
    released,
)
from megatron_packed.training.build_job import Job, build_job
from megatron_packed.training.train_step import TrainStep

MICRO_BATCHES = 4
"""Number of micro-batches in the longer of the two kinds of steps."""
ROUNDS = 3
ROW_SECONDS = 0.4
"""Approximate duration of a series of steps on a GPU, in seconds."""


def measure(
    config: RunConfig,
    vocab_size: int,
    capacities: Iterable[int],
    say: Callable[[str], None] = lambda line: None,
    backend: GraphBackend | None = None,
) -> StepCosts:
    """Measure step times of a run's model on this machine, with graphs and eagerly.

    Graphs are those of the run, or ``local`` if the run uses none. On a CPU, packs that are padded to
    the capacities run eagerly. The measurement needs as much memory as a run, and waits for the
    device.

    Args:
        config: configuration of the run.
        vocab_size: entries of the vocabulary.
        capacities: capacities in documents, each at most the number of token slots of a pack.
        say: prints a line about the progress.
        backend: captures and replays; by default torch's CUDA graphs, which need a GPU.
    Raises:
        ValueError: the layout needs several processes, or packs were not replayed.
        GraphFallbackError: ``--cuda-graph-strict`` without a GPU.
    """
    if config.parallel.ranks_per_replica > 1:
        raise ValueError(
            "the measurement runs in one process; give the sizes of one rank's share as the sizes of the model."
        )
    device = device_of(config)
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    groups = ParallelGroups.single(device)
    capture_sizes = CaptureSizes.from_capacities(
        sorted(set(capacities)), config.packing.tokens_per_pack
    )
    config = _with_graphs(config, capture_sizes)
    if backend is None:
        refuse_eager(config.cuda_graph, device)
    if config.training.deterministic_mode:
        configure_determinism()
    seed_all(config.training.seed)
    job = build_job(config, groups, vocab_size)
    if config.training.isolation_self_test and device.type == "cuda":
        # Kernels are tuned for the first shapes that they get. In a run, these are the shapes of
        # the self-test, so the measurement runs it, too.
        check_isolation(
            config.model,
            device,
            job.model.dtype,
            job.model.backends,
            requests=op_requests(config, device),
        )
    timer = _Timer(job.step)
    job.step.graphs = build_graphs(config, job, capture_sizes, groups, say, backend)
    timed, update = _time_graphs(config, job, groups, vocab_size, capture_sizes, timer, say)
    job.step.graphs = None
    exact = _packs(config, vocab_size, capture_sizes.capacities[0], None, device)
    timed += timer.times([(None, pack) for pack in exact], say)[0]
    job.close()  # after the graphs, which contain addresses of its memory
    return StepCosts(
        tokens=config.packing.tokens_per_pack,
        update_ms=update,
        packs=tuple(timed),
        device=torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        model=signature(config),
        versions={"torch": torch.__version__},
    )


def _with_graphs(config: RunConfig, capture_sizes: CaptureSizes) -> RunConfig:
    """Return the configuration with graphs of these sizes, ``local`` if it uses no graphs."""
    options = config.cuda_graph
    impl = options.cuda_graph_impl if options.enabled else LOCAL
    chosen = replace(
        options, cuda_graph_impl=impl, cuda_graph_max_packed_seqs=capture_sizes.capacities
    )
    return replace(config, cuda_graph=chosen)


def _time_graphs(
    config: RunConfig,
    job: Job,
    groups: ParallelGroups,
    vocab_size: int,
    capture_sizes: CaptureSizes,
    timer: _Timer,
    say: Callable[[str], None],
) -> tuple[list[Timed], float]:
    """Capture the job's graphs, time packs of every capacity, and release the graphs."""
    graphs = job.step.graphs
    packs = [
        (capacity, pack)
        for capacity in capture_sizes.capacities
        for pack in _packs(config, vocab_size, capacity, capacity, groups.device)
    ]
    with released(graphs):
        if graphs is not None:
            capacities = ", ".join(map(str, capture_sizes.capacities))
            say(f"capturing {len(capture_sizes.capacities)} capacities: {capacities}")
            capture_graphs(graphs, job.step, config.packs_per_step(), groups, first=True)
        found = timer.times(packs, say)
        if graphs is not None and graphs.counters.fallbacks:
            raise ValueError(
                f"packs ran eagerly instead of being replayed: {dict(graphs.counters.fallbacks)}"
            )
    return found


def _packs(
    config: RunConfig, vocab_size: int, filled: int, capacity: int | None, device: torch.device
) -> list[MicroBatch]:
    """Return packs with up to ``filled`` documents, padded to ``capacity``; None does not pad."""
    alignment = config.document_alignment
    longest = max(min(config.max_positions, config.packing.max_document_length) // alignment, 1)
    units = config.packing.tokens_per_pack // alignment
    return [
        _pack(lengths, config, vocab_size, capacity, device)
        for lengths in shapes(units, filled, longest)
    ]


EARLIER = {
    "main_grads_dtype": "fp32",
    "ddp_param_name_patterns_for_fp32_local_accumulation": [],
    "use_precision_aware_optimizer": False,
    "exp_avg_dtype": "fp32",
    "exp_avg_sq_dtype": "fp32",
}
"""Values of the options that tables did not store before they existed."""


def signature(config: RunConfig) -> dict[str, object]:
    """Return the options that step times depend on, as JSON stores them."""
    parallel, optim = config.parallel, config.optim
    kept = {
        **asdict(config.model),
        "dtype": str(dtype_of(config)),
        "backends": dict(config.training.backends),
        "deterministic": config.training.deterministic_mode,
        **asdict(config.memory),
        "cuda_graph_impl": config.cuda_graph.cuda_graph_impl
        if config.cuda_graph.enabled
        else LOCAL,
        "cuda_graph_modules": list(config.cuda_graph.modules),
        # Kernels add to main gradients, and the update reads them and the optimizer's state.
        "main_grads_dtype": "bf16" if parallel.sums_gradients_in_bf16 else "fp32",
        "ddp_param_name_patterns_for_fp32_local_accumulation": (
            parallel.ddp_param_name_patterns_for_fp32_local_accumulation
        ),
        "use_precision_aware_optimizer": optim.use_precision_aware_optimizer,
        "exp_avg_dtype": optim.exp_avg_dtype,
        "exp_avg_sq_dtype": optim.exp_avg_sq_dtype,
    }
    return {
        name: list(value) if isinstance(value, tuple) else value for name, value in kept.items()
    }


def shapes(tokens: int, capacity: int, longest: int) -> list[list[int]]:
    """Return document lengths of several packs that fit a capacity.

    The packs have one document, few and many documents of long-tailed lengths, and many documents
    of equal length. No length exceeds ``longest``. All slots are filled if the lengths allow it.

    Example:
        8 slots, capacity 4, longest 8: ``[8]``, two long-tailed lengths, four long-tailed lengths,
        ``[2, 2, 2, 2]``.
    """
    most = min(capacity, tokens)
    few = max(round(most**0.5), 1)
    equal = [tokens // most + (number < tokens % most) for number in range(most)]
    found = [[tokens], _long_tailed(tokens, few), _long_tailed(tokens, most), equal]
    allowed = (tuple(cut_to_longest(np.array(lengths), longest).tolist()) for lengths in found)
    return [list(lengths) for lengths in dict.fromkeys(allowed)]


def _long_tailed(tokens: int, documents: int) -> list[int]:
    """Return lognormal lengths (sigma 1.2), each at least 1; the same arguments give the same lengths."""
    weights = np.exp(1.2 * np.random.default_rng(0).standard_normal(documents))
    lengths = 1 + np.floor(weights / weights.sum() * (tokens - documents)).astype(int)
    lengths[int(lengths.argmax())] += tokens - int(lengths.sum())
    return [int(length) for length in lengths]


def _pack(
    lengths: Sequence[int],
    config: RunConfig,
    vocab_size: int,
    capacity: int | None,
    device: torch.device,
) -> MicroBatch:
    """Build a pack of random tokens; ``lengths`` are in units of the documents' alignment."""
    draw = np.random.default_rng(len(lengths))
    tokens, alignment = config.packing.tokens_per_pack, config.document_alignment
    lengths = [alignment * length for length in lengths]
    documents = [Document(draw.integers(0, vocab_size, length)) for length in lengths]
    scales = (1 / max(sum(length - 1 for length in lengths), 1), 1.0)
    bound = None if capacity is None else tokens
    made = MicroBatch.build(documents, tokens, capacity, scales, bound, alignment)
    return made.pin_memory() if device.type == "cuda" else made


class _Timer:
    """Timer of the training steps of one job."""

    def __init__(self, step: TrainStep) -> None:
        self.step = step
        self.on_gpu = step.device.type == "cuda"

    def times(
        self, packs: Sequence[tuple[int | None, MicroBatch]], say: Callable[[str], None]
    ) -> tuple[list[Timed], float]:
        """Measure each pack's micro-batch time, and the time of a step without its micro-batches.

        Returns:
            For each pack, the time of a micro-batch; and the time of a step outside its
            micro-batches, in ms.
        """
        # The first runs of a shape compile and tune kernels, so they are not timed.
        for _, pack in packs:
            self._row([pack], 2)
        seconds = self._row([packs[0][1]] * MICRO_BATCHES, 1)
        steps = max(2, min(20, int(ROW_SECONDS / seconds))) if self.on_gpu else 1
        short: list[float] = []
        long: list[list[float]] = [[] for _ in packs]
        for number in range(ROUNDS):
            say(f"round {number + 1} of {ROUNDS}: {len(packs)} packs")
            # Alternate the direction, so that a drift of the clock frequency favours no capacity.
            order = range(len(packs)) if number % 2 == 0 else reversed(range(len(packs)))
            for at in order:
                long[at].append(self._row([packs[at][1]] * MICRO_BATCHES, steps))
            short.append(self._row([packs[0][1]], steps))
        first = median(long[0])
        update = max(median(short) - (first - median(short)) / (MICRO_BATCHES - 1), 0.0)
        timed = [
            Timed(
                capacity=capacity,
                documents=pack.packed.num_seqs,
                squares=float(
                    sum(
                        int(n) ** 2
                        for n in np.diff(pack.packed.cu_seqlens_cpu.numpy().astype(np.int64))
                    )
                ),
                ms=max(1e3 * (median(rounds) - update) / MICRO_BATCHES, 1e-6),
            )
            for (capacity, pack), rounds in zip(packs, long, strict=True)
        ]
        return timed, 1e3 * update

    def _row(self, micro_batches: Sequence[MicroBatch], steps: int) -> float:
        """Return seconds per step of a series, which follows one step that is not timed."""
        self.step(micro_batches, 0.0)
        self._drain()
        begun = time.perf_counter()
        for _ in range(steps):
            self.step(micro_batches, 0.0)
        self._drain()
        return (time.perf_counter() - begun) / steps

    def _drain(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize(self.step.device)
