"""First console lines of a run: model, processes, packs, kernels, and warnings.

`warned_capabilities` are rows of ``--explain``, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch

from megatron_packed.config.kinds.experts import EXPERT_ACTIVATION
from megatron_packed.config.kinds.layer_kind import KINDS
from megatron_packed.config.run import RunConfig
from megatron_packed.config.sections.memory import MODULES, RECOMPUTED_IN
from megatron_packed.config.sections.model_parts.lora import LOW_LEARNING_RATE
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.explain.capability import OFF, ON, PARTIAL, Capability, row
from megatron_packed.explain.kernel_reasons import (
    check_kernels,
    kernel_block,
    kernel_names,
    slow_kernel_warnings,
)
from megatron_packed.explain.op_requests import useless_recomputation
from megatron_packed.models.equal_exchanges import exchange_line
from megatron_packed.models.hybrid_model import HybridModel
from megatron_packed.models.run_model import trained_elements
from megatron_packed.models.tensor_overlap import overlap_line

MANY_MICRO_BATCHES = 128
"""Micro-batches of a rank from which sums in bf16 differ by 1 %; see docs/measurements/gradient_sums.md."""


def describe(
    config: RunConfig,
    groups: ParallelGroups,
    model: HybridModel,
    plan_hash: str,
    *,
    say: Callable[[str], object],
    detail: Callable[[str], object],
) -> None:
    """Print the model's size and precision, the processes and their layout, and the packs.

    Args:
        config: configuration of the run.
        groups: process groups of this rank.
        model: model of this rank.
        plan_hash: hash of the pack plan of the training data.
        say: prints a line of text.
        detail: prints a line that a brief start leaves out.
    """
    parameters = sum(
        sharded.stored_shape.numel() for sharded in model.sharded_parameters().values()
    )
    frozen = parameters - trained_elements(model)
    suffix = f" ({frozen:,} of them frozen)" if frozen else ""
    say(
        f"model {config.model.hybrid_layer_pattern}: {parameters:,} parameters{suffix}, "
        f"{config.precision}"
    )
    if config.model.has_adapters:
        from megatron_packed.models.trained_share import adapter_line

        say(adapter_line(model))
    detail(
        f"{groups.world_size} process(es) on {groups.device.type}{_shared(config, groups)}; packs of "
        f"{config.packing.tokens_per_pack:,} tokens, {config.packs_per_step()} packs a step{_ramp(config)}; "
        f"plan {plan_hash[:12]}"
    )
    if groups.world_size > 1:
        for line in filter(None, (overlap_line(model), exchange_line(model, config))):
            say(line)
    buffer = model.expert_buffer(config.packing.tokens_per_pack)
    if buffer is not None and groups.ep.size > 1:
        mib = buffer.rows * buffer.bytes_per_row / 2**20
        # Observed bounds are printed when the routing was observed, after this line.
        holds = (
            "follows the routing"
            if model.expert_room.measured
            else f"holds {buffer.rows:,} rows ({mib:,.1f} MiB in each E layer)"
        )
        detail(f"the expert buffer of a rank {holds}; the worst case is {buffer.worst_rows:,} rows")


def _ramp(config: RunConfig) -> str:
    ramp = config.packing.batch_ramp
    if ramp is None or not ramp.sentence():
        return ""
    return f" (grows from {ramp.start // ramp.micro} over the first {ramp.samples:,} samples)"


def _shared(config: RunConfig, groups: ParallelGroups) -> str:
    """Return how the processes share the work; empty with data parallelism only."""
    axes = []
    if groups.tp_cp.size > 1:
        by_rows = config.parallel.sequence_parallel and groups.tp.size > 1
        tensor = f"{groups.tp.size} tensor-parallel{', sequence too,' if by_rows else ''}"
        context = f" x {groups.cp.size} context-parallel by {config.parallel.attention_exchange}"
        axes.append(
            f"{tensor}{context if groups.cp.size > 1 else ''} x {groups.dp.size} data-parallel"
        )
    if groups.ep.size > 1 or groups.expert_tp.size != groups.tp.size:
        of_experts = f"{groups.expert_tp.size} tensor-parallel x {groups.ep.size} expert-parallel"
        axes.append(f"experts {of_experts} x {groups.expert_dp.size} data-parallel")
    return f" ({'; '.join(axes)})" if axes else ""


def name_kernels(
    config: RunConfig,
    groups: ParallelGroups,
    documents: int,
    *,
    detail: Callable[[str], object],
    warn: Callable[[str], object],
) -> dict[str, str]:
    """Print the kernels that the packs will run, print warnings, and return the kernels' names.

    Args:
        config: configuration of the run.
        groups: process groups of this rank.
        documents: largest number of documents in a pack (`most_documents`).
        detail: prints a line that a brief start leaves out.
        warn: prints a warning.
    Raises:
        ConfigError: an op has no kernel for these packs that the options allow.
    """
    kernels = check_kernels(config, groups.device, documents)
    names = kernel_names(config, kernels)
    detail(kernel_block(names))
    for sentence in slow_kernel_warnings(kernels, groups.device):
        warn(sentence)
    for capability in warned_capabilities(config, groups.device, groups.world_size):
        if capability.state == PARTIAL:
            warn(f"{capability.name}: {capability.text}")
    return names


def warned_capabilities(
    config: RunConfig, device: torch.device, world_size: int
) -> Iterator[Capability]:
    """Yield the capabilities of which a run warns at its start if they are partial."""
    model, added = (
        config.model,
        config.micro_batches_per_step(config.data_parallel_size(world_size)),
    )
    yield _recomputation(config, device)
    low = config.training.bf16 and config.parallel.sums_gradients_in_bf16
    if low and added >= MANY_MICRO_BATCHES:
        yield Capability(
            "sums of gradients",
            PARTIAL,
            f"each rank adds the gradients of {added:,} micro-batches in bf16; from {MANY_MICRO_BATCHES} on, "
            "rounding changes the sum by more than 1 %",
            "use more ranks or larger packs, or leave --grad-reduce-in-bf16 and --main-grads-dtype out",
        )
    if model.moe_router_force_load_balancing and model.has_experts:
        random = "tokens are routed at random, for benchmarks: the model does not learn to route"
        yield Capability("routing", PARTIAL, random, "leave --moe-router-force-load-balancing out")
    if model.has_adapters and config.optim.lr < LOW_LEARNING_RATE:
        yield Capability(
            "learning rate",
            PARTIAL,
            "adapters usually need about 10 times the learning rate of full fine-tuning, and --lr "
            f"{config.optim.lr:g} is low for them",
            "1e-4 to 2e-4 is a common start",
        )
    chosen = config.is_given("model.position_embedding_type")
    ordered = any(kind.carries_order for kind in model.kinds)
    if model.has_attention and not ordered and not chosen:
        ordering = " or ".join(kind.symbol for kind in KINDS.values() if kind.carries_order)
        yield Capability(
            "positions",
            PARTIAL,
            "attention has none, because the default of --position-embedding-type is none and no "
            f"{ordering} layer carries the order of tokens",
            "give --position-embedding-type rope, or none to confirm",
        )


def _recomputation(config: RunConfig, device: torch.device) -> Capability:
    """Return which activations the backward pass recomputes."""
    memory, layers = config.memory, len(config.model.layer_types)
    whole = sum(map(memory.recomputes_layer, range(layers)))
    saved = "only the input of each is saved"
    if memory.recomputes_layers and memory.layers_per_unit > 1:
        saved = f"in groups of {memory.layers_per_unit}: only the input of each group is saved"
    symbols = config.model.hybrid_layer_pattern
    parts = of_layers(
        (module, symbols.count(RECOMPUTED_IN[module]) if module in RECOMPUTED_IN else layers)
        for module in memory.modules
    )
    useless = useless_recomputation(config, device)
    not_counted = "MFU does not count recomputed operations"
    everything = "every activation that the backward pass needs is saved"
    cure = f"leave {EXPERT_ACTIVATION} out of {MODULES}"
    return row(
        "recomputation",
        (memory.recomputes_layers, ON, f"{whole} of {layers} layers, {saved}; {not_counted}"),
        (not memory.modules, OFF, everything, "--recompute-granularity reduces memory"),
        (useless, PARTIAL, f"{parts}; {not_counted}; {useless}", cure),
        (True, ON, f"{parts}; {not_counted}"),
    )


def of_layers(parts: Iterable[tuple[str, int]]) -> str:
    """Return parts of layers as text, each with its number of layers."""
    return ", ".join(f"{part} of {n} layer{'s' if n > 1 else ''}" for part, n in parts)
