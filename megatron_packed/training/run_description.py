"""First console lines of a run: model, processes, packs, and kernels."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_packed.config.kinds import KINDS
from megatron_packed.config.run import RunConfig
from megatron_packed.config.sections.memory import MODULES
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.training.build_job import Job, elements_of
from megatron_packed.training.console import Console
from megatron_packed.training.equal_exchanges import exchange_line
from megatron_packed.training.kernels import (
    check_kernels,
    kernel_block,
    kernel_names,
    slow_kernel_warnings,
)
from megatron_packed.training.op_requests import useless_recomputation
from megatron_packed.training.run_data import RunData
from megatron_packed.training.tensor_overlap import overlap_line


def describe(
    config: RunConfig, groups: ParallelGroups, job: Job, data: RunData, console: Console
) -> None:
    """Print the model's size and precision, the processes and their layout, and the packs."""
    precision = "bf16 with fp32 masters" if config.training.bf16 else "fp32"
    parameters = sum(
        sharded.stored_shape.numel() for sharded in job.model.sharded_parameters().values()
    )
    frozen = parameters - elements_of(job.model)
    said = f" ({frozen:,} of them frozen)" if frozen else ""
    console.say(
        f"model {config.model.hybrid_layer_pattern}: {parameters:,} parameters{said}, {precision}"
    )
    console.detail(
        f"{groups.world_size} process(es) on {groups.device.type}{_shared(config, groups)}; packs of "
        f"{config.packing.tokens_per_pack:,} tokens, {config.packs_per_step()} packs a step{_ramp(config)}; "
        f"plan {data.train.plan.hash[:12]}"
    )
    for line in filter(None, (overlap_line(job.model), exchange_line(job.model, config))):
        console.say(line)
    buffer = job.model.expert_buffer(config.packing.tokens_per_pack)
    if buffer is not None and groups.ep.size > 1:
        mib = buffer.rows * buffer.bytes_per_row / 2**20
        # Observed bounds are printed when the routing was observed, after this line.
        holds = (
            "follows the routing"
            if job.model.expert_room.measured
            else f"holds {buffer.rows:,} rows ({mib:,.1f} MiB in each E layer)"
        )
        console.detail(
            f"the expert buffer of a rank {holds}; the worst case is {buffer.worst_rows:,} rows"
        )


def _ramp(config: RunConfig) -> str:
    ramp = config.packing.batch_ramp
    if ramp is None or not ramp.sentence():
        return ""
    return f" (grows from {ramp.start // ramp.micro} over the first {ramp.samples:,} samples)"


def _shared(config: RunConfig, groups: ParallelGroups) -> str:
    """Return how the processes share the work; empty with data parallelism only."""
    words = []
    if groups.tp_cp.size > 1:
        by_rows = config.parallel.sequence_parallel and groups.tp.size > 1
        tensor = f"{groups.tp.size} tensor-parallel{', sequence too,' if by_rows else ''}"
        context = f" x {groups.cp.size} context-parallel by {config.parallel.cp_comm_type}"
        words.append(
            f"{tensor}{context if groups.cp.size > 1 else ''} x {groups.dp.size} data-parallel"
        )
    if groups.ep.size > 1 or groups.expert_tp.size != groups.tp.size:
        of_experts = f"{groups.expert_tp.size} tensor-parallel x {groups.ep.size} expert-parallel"
        words.append(f"experts {of_experts} x {groups.expert_dp.size} data-parallel")
    return f" ({'; '.join(words)})" if words else ""


def name_kernels(
    config: RunConfig, groups: ParallelGroups, data: RunData, console: Console
) -> dict[str, str]:
    """Print the kernels that the packs will run, warn of slow kernels, and return their names.

    Raises:
        ConfigError: an op has no kernel for these packs that the options allow.
    """
    kernels = check_kernels(config, groups.device, most_documents(data))
    names = kernel_names(config, kernels)
    console.detail(kernel_block(names))
    for sentence in slow_kernel_warnings(kernels, groups.device):
        console.warn(sentence)
    for sentence in _model_warnings(config):
        console.warn(sentence)
    if useless := useless_recomputation(config, groups.device):
        console.warn(f"{MODULES} {useless}; leave it out")
    return names


def most_documents(data: RunData) -> int:
    """Return the largest number of documents for which kernels are chosen."""
    captured = 0 if data.capture_sizes is None else data.capture_sizes.largest
    return max(captured, data.packing.documents_max)


def _model_warnings(config: RunConfig) -> Iterator[str]:
    """Yield warnings of a model that learns less than its user may expect."""
    model = config.model
    if model.moe_router_force_load_balancing and model.has_experts:
        yield (
            "--moe-router-force-load-balancing routes tokens at random, for benchmarks: the model "
            "does not learn to route"
        )
    chosen = config.is_given("model.position_embedding_type")
    ordered = any(kind.carries_order for kind in model.kinds)
    if model.has_attention and not ordered and not chosen:
        ordering = " or ".join(kind.symbol for kind in KINDS.values() if kind.carries_order)
        yield (
            "attention has no positions, because the default of --position-embedding-type is none "
            f"and no {ordering} layer carries the order of tokens; give --position-embedding-type rope, "
            "or none to confirm"
        )
