"""Rows of ``--explain``: every capability of a run, whether the run has it, why, and a cure."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from math import ceil

import torch

from megatron_packed.config.exchanged_heads import (
    exchanges_of_run,
    parts_of_layers,
    reorders_rows,
)
from megatron_packed.config.run import RunConfig
from megatron_packed.config.sections.cuda_graph import MODULE_LAYERS
from megatron_packed.config.sections.memory import OFFLOADED_IN
from megatron_packed.config.sections.model_parts.lora import APART
from megatron_packed.config.sections.parallel import NOT_BUILT
from megatron_packed.cuda_graphs.transformer_engine import maker
from megatron_packed.distributed.sequence_parallel_products import NO_OVERLAP
from megatron_packed.distributed.symmetric_memory import not_supported_reasons
from megatron_packed.distributed.symmetric_rows import dtype_reasons
from megatron_packed.explain.capability import OFF, ON, PARTIAL, Capability, row
from megatron_packed.explain.kernel_reasons import kernel_row, layer_reasons, requested_kernels
from megatron_packed.explain.op_requests import op_requests
from megatron_packed.explain.run_description import of_layers, warned_capabilities
from megatron_packed.layers.transformer_impl import LOCAL_NAME
from megatron_packed.models.convert.trained_config import nearest_families
from megatron_packed.models.equal_exchanges import (
    EXCHANGES,
    OPTION,
    by_collective,
    by_copies,
    uses_symmetric_memory,
)
from megatron_packed.models.flops import peak_flops
from megatron_packed.models.run_model import dtype_of
from megatron_packed.models.tensor_overlap import (
    OVERLAP_FASTER,
    OVERLAP_SLOWER,
    overlap_absence,
    overlap_of,
    overlap_words,
)
from megatron_packed.ops.backend_dispatch import NoBackendError
from megatron_packed.ops.varlen_attention import api as varlen_attention

CPU = torch.device("cpu")
_IF_REACHABLE = "if the GPUs of the ranks can access each other's memory"
_OWN_EXPERTS = "experts and router of megatron_packed"
FLEX_OVERTAKES = {"transformer_engine": 128, "flash_attn_2": 32, "torch_varlen": 16}
"""Capacity in documents from which FlexAttention was measured to be faster than each kernel.

Measured by `capacity_cost.py`; it was faster for at least one of the measured sizes.
"""


def capabilities(
    config: RunConfig, device: torch.device, world_size: int = 1, steps: int | None = None
) -> Iterator[Capability]:
    """Yield all capabilities of the configuration on ``device`` with ``world_size`` processes.

    ``steps`` is the number of steps of the run, if it is known.
    """
    yield from _machine(config, device)
    # Several layers may have equal rows.
    yield from dict.fromkeys(
        kernel_row(kernel, device) for kernel in requested_kernels(config, device)
    )
    yield from graph_capabilities(config, device)
    yield from warned_capabilities(config, device, world_size)
    yield _offload(config, device)
    yield from parallel_capabilities(config, world_size, device)
    yield from _model_and_outputs(config, steps)


def _machine(config: RunConfig, device: torch.device) -> Iterator[Capability]:
    """Yield device, numbers and layers."""
    training, on_gpu = config.training, device.type == "cuda"
    if on_gpu:
        yield Capability("device", ON, torch.cuda.get_device_name())
        yield row(
            "MFU",
            (peak_flops(device), ON, "the peak FLOP/s of this GPU is known"),
            (True, OFF, "the peak FLOP/s of this GPU is not known"),
        )
    else:
        why = "--device cpu" if training.device == "cpu" else "torch sees no GPU"
        why += ": every op runs its plain PyTorch reference"
        cure = "use a machine with a GPU, with the extra 'gpu' installed"
        yield Capability("device", PARTIAL, why, cure)
    yield Capability("precision", ON, config.precision, "--bf16" * (on_gpu and not training.bf16))
    varies = "some GPU kernels add numbers in an order that differs from run to run"
    yield row(
        "determinism",
        (training.deterministic_mode, ON, "every run computes the same bits"),
        (on_gpu, PARTIAL, varies, "--deterministic-mode"),
        (True, ON, "CPU kernels compute the same bits in every run"),
    )
    checks = "checks before the first step that documents of a pack do not influence each other"
    yield row(
        "isolation self-test",
        (training.isolation_self_test, ON, checks),
        (True, OFF, "--no-isolation-self-test", "remove --no-isolation-self-test"),
    )
    impl = training.transformer_impl
    refusal = "".join(layer_reasons(config, device)[impl])
    why, _, cure = refusal.rpartition("; ")
    yield row(
        "layers",
        (impl == LOCAL_NAME, ON, "local: linear layers and norms of megatron_packed"),
        (refusal, OFF, f"{impl}: {why}", cure),
        (True, ON, f"{impl}: its parallel linear layers and norms; {_OWN_EXPERTS}"),
    )


def _offload(config: RunConfig, device: torch.device) -> Capability:
    """Return which activations are offloaded to host memory."""
    symbols = config.model.layer_types
    memory, layers = config.memory, range(len(symbols))
    moved = {"the inputs": sum(map(memory.offloads_input, layers))}
    for module in memory.offloaded_modules:
        numbers = (n for n in layers if symbols[n] in OFFLOADED_IN[module])
        moved[module] = sum(memory.offloads_module(module, number) for number in numbers)
    what = of_layers((part, count) for part, count in moved.items() if count)
    option = "--fine-grained-activation-offloading"
    cure = "--offload-layer-inputs" if memory.recomputes_layers else option
    eager = f"{what}: without a GPU the copies reduce no memory"
    buffers = f"at most {memory.offload_buffers} device buffers"
    stay = "saved activations stay on the device"
    return row(
        "offload",
        (not memory.offloads, OFF, stay, f"{cure} reduces device memory"),
        (device.type != "cuda", PARTIAL, eager, "use a machine with a GPU"),
        (True, ON, f"{what}, in pinned host memory; {buffers}"),
    )


def _model_and_outputs(config: RunConfig, steps: int | None) -> Iterator[Capability]:
    """Yield depths of multi-token prediction, adapters, validation, outputs, and the export."""

    def every(interval: int) -> str:
        total = "" if steps is None else f" ({ceil(steps / interval):,} in all)"
        return f"every {interval:,} steps{total}"

    model, checkpoint, log = config.model, config.checkpoint, config.logging.log_jsonl
    if depths := model.mtp_depths:
        weights = "the same" if model.mtp_use_repeated_layer else "their own"
        how, loss = f"one depth of {model.mtp_layers}", "its loss"
        if depths > 1:
            how = f"{depths} depths of {model.mtp_layers} with {weights} weights"
            loss = "their mean loss"
        alone = "validation and answers use the main model alone"
        counts = f"{how}; {loss} counts {model.mtp_loss_scaling_factor:g}; {alone}"
        yield Capability("multi-token prediction", ON, counts)
    if model.has_adapters:
        yield Capability("adapters", ON, _adapters(config))
    interval, without = config.validation_interval, "the run has no validation"
    yield row(
        "validation",
        (interval, ON, every(interval or 1)),
        (True, OFF, without, "--eval-interval N" * config.data.has_validation),
    )
    saved = f"{every(checkpoint.save_interval or 1)}, in {checkpoint.save}"
    at_end = f"only at the end of the run and when the run is stopped, in {checkpoint.save}"
    background = ", written in the background" * checkpoint.async_save
    no_save = "no checkpoint is saved"
    yield row(
        "checkpoints",
        (checkpoint.save is None, OFF, no_save, "--save DIRECTORY --save-interval N"),
        (checkpoint.save_interval is None, PARTIAL, at_end, "--save-interval N"),
        (True, ON, saved + background),
    )
    yield row("log", (log, ON, f"{log}"), (True, OFF, "console only", "--log-jsonl FILE"))
    nearest, differences = next(iter(nearest_families(model).items()))
    lacks = f"the nearest family, {nearest}, cannot express {'; '.join(differences)}"
    yield row(
        "export to transformers",
        (differences, OFF, lacks),
        (True, ON, f"as a {nearest} model, by `megatron-packed convert --to-hf`"),
    )


def _adapters(config: RunConfig) -> str:
    """Return what adapters train, and what their products are not joined with."""
    model = config.model
    whole = f", and {' '.join(model.lora_modules_to_save)} whole" * bool(model.lora_modules_to_save)
    balancing = "goes on" if model.balances_experts else "is off (--lora-keep-balancing)"
    return (
        f"rank {model.lora_rank} on {' '.join(model.lora_target_modules)}{whole}; all other weights are "
        "frozen. Products with adapters are not joined with an activation or a residual"
        + f"; balancing of experts {balancing}"
        * model.has_experts
    )


def graph_capabilities(config: RunConfig, device: torch.device) -> Iterator[Capability]:
    """Yield whether CUDA graphs run on ``device``, which modules they hold, which stay eager."""
    graphs, refusal = config.cuda_graph, ""
    eager = graphs.eager_reason(device.type)
    if graphs.uses_transformer_engine and not eager:
        try:
            maker()
        except ValueError as error:
            refusal = str(error)
    what = "forward and backward of each module"
    if graphs.captures_steps:
        what = "whole micro-batches, and the optimizer update"
    elif graphs.uses_transformer_engine:
        what += ", by TransformerEngine's make_graphed_callables"
    why, _, cure = refusal.rpartition("; ")
    strict = " Because of --cuda-graph-strict the run ends." * graphs.cuda_graph_strict
    dropout = ", remove --hidden-dropout" if config.model.hidden_dropout else ""
    local = f"--cuda-graph-impl local{dropout}" if device.type == "cuda" else ""
    yield row(
        "CUDA graphs",
        (not graphs.enabled, OFF, "--cuda-graph-impl none", local),
        (refusal, OFF, why, cure),
        (eager, PARTIAL, eager + strict, "use a machine with a GPU"),
        (True, ON, f"{graphs.cuda_graph_impl}: {what}"),
    )
    if not graphs.enabled or refusal:
        return
    if not graphs.captures_steps:
        yield from _captured_modules(config, eager)
    capacities = f"{' '.join(map(str, graphs.capacities or ()))} documents; a pack with more"
    fits = "auto: chosen from the first epoch's pack plan, so that each of its packs fits"
    yield row(
        "  capacities",
        (graphs.capacities is None, ON, fits),
        (graphs.cuda_graph_strict, ON, f"{capacities} ends the run"),
        (True, ON, f"{capacities} runs eagerly", "auto covers every pack"),
    )
    if not eager and graphs.capacities is not None:
        yield from _attention_of_graphs(config, device, graphs.capacities[-1])
    interval, never = graphs.cuda_graph_audit_interval, "replays are never compared with eager runs"
    yield row(
        "  audit",
        (interval, ON, f"every {interval} iterations"),
        (True, OFF, never, "--cuda-graph-audit-interval 1000"),
    )


def _captured_modules(config: RunConfig, eager: str) -> Iterator[Capability]:
    modules, pattern = config.cuda_graph.modules, config.model.hybrid_layer_pattern
    option = "--cuda-graph-modules"
    for module, symbol in MODULE_LAYERS.items():
        count = pattern.count(symbol)
        if not count or (module == "moe_router" and module not in modules):
            continue
        routers_alone = module == "moe" and "moe_router" in modules
        routers = f"{count} run eagerly, except for their routers"
        left_out = f"{count} run eagerly: not in {option}"
        yield row(
            f"  {module}",
            (routers_alone, OFF, routers, f"give moe instead of moe_router in {option}"),
            (modules and module not in modules, OFF, left_out, f"add {module} to {option}"),
            (eager, PARTIAL, "eager"),
            (True, ON, f"{count} captured"),
        )
    if not eager:
        why = "embedding, loss, reductions over ranks and the optimizer update run eagerly"
        yield Capability("  the rest", OFF, why, "--cuda-graph-impl full_iteration")


def _attention_of_graphs(
    config: RunConfig, device: torch.device, capacity: int
) -> Iterator[Capability]:
    """Yield a line if the attention kernel is slower for a larger graph capacity."""
    chosen = ""
    for op, backend, inputs in op_requests(config, device):
        if op is varlen_attention.OP and not chosen:
            with suppress(NoBackendError):
                chosen = op.select(inputs, backend).name
    if capacity >= FLEX_OVERTAKES.get(chosen, capacity + 1):
        why = f"{chosen} takes time for all {capacity} documents of the capacity, even for a pack with fewer"
        cure = "install flash-attn 4"
        if not config.parallel.exchanges_keys:
            cure += ", or use --attention-backend flex"
        yield Capability("  attention", PARTIAL, why, cure)


def parallel_capabilities(
    config: RunConfig, world_size: int, device: torch.device = CPU
) -> Iterator[Capability]:
    """Yield how ``world_size`` processes divide matrices, tokens, batches and experts among them."""
    parallel, cp = config.parallel, config.parallel.context_parallel_size
    yield from _tensor_parallel(config, device)
    split = f"the tokens of each pack are split over {cp} ranks, by {parallel.attention_exchange}"
    if config.document_alignment > 1:
        split += f"; documents start at multiples of {config.document_alignment} tokens"
    yield row(
        "context parallelism",
        (cp == 1, OFF, "every rank holds all tokens of its packs"),
        (True, ON, split + _states_and_heads(config)),
    )
    yield from _replicas(config, world_size)
    begins = "gradient reduction begins during the last backward pass"
    gathered = "; updated weights are gathered during the next step"
    after = "gradients are reduced after the last backward pass"
    yield row(
        "overlap",
        (parallel.overlap_grad_reduce, ON, begins + gathered * config.gathers_during_next_step),
        (True, OFF, after, "--overlap-grad-reduce"),
    )
    if config.model.has_experts:
        yield from _experts(config, device)
    yield from _equal_exchanges(config, device)
    for axis in NOT_BUILT.values():
        yield Capability(axis, OFF, "not supported yet")


def _states_and_heads(config: RunConfig) -> str:
    """Describe passed states, and the parts of exchanged heads if the run requests an overlap."""
    parallel = config.parallel
    passing = [kind for kind in config.model.kinds if kind.exchanges(parallel) == "states"]
    said = "".join(f"; {kind.layer}s pass states" for kind in passing)
    said += ", and all-to-alls reorder the rows of attention" * reorders_rows(config)
    parts = parts_of_layers(config)
    if parts and parallel.cp_comm_overlap_parts > 1:
        numbers = (f"{number} for each {kind.symbol} layer" for kind, number in parts.items())
        said += f"; parts in which heads travel: {', '.join(numbers)}"
    return said


def _tensor_parallel(config: RunConfig, device: torch.device) -> Iterator[Capability]:
    """Yield the division of matrices and of rows, and the collectives that run under products."""
    parallel, tp = config.parallel, config.parallel.tensor_model_parallel_size
    yield row(
        "tensor parallelism",
        (tp == 1, OFF, "every rank holds whole weight matrices"),
        (True, ON, f"each weight matrix is split over {tp} ranks"),
    )
    if tp == 1:
        return
    parts = f"between the layers each rank holds 1 / {tp} of the tokens"
    everything = "between the layers each rank holds all tokens"
    yield row(
        "sequence parallelism",
        (parallel.sequence_parallel, ON, parts),
        (True, OFF, everything, "--sequence-parallel reduces memory"),
    )
    overlap, absence = overlap_of(config), overlap_absence(config)
    # The other ranks are not known here, so only this machine's reasons are.
    reasons = [*not_supported_reasons(device), *dtype_reasons(dtype_of(config))]
    reason = reasons[0] if reasons and overlap.fuses else ""
    words = overlap_words(overlap, reason) + f"; {APART}" * config.model.has_adapters
    by_default = parallel.tp_comm_overlap is None
    words += f"; {OVERLAP_FASTER}" * by_default
    apart = "collectives and products run one after the other"
    eager = by_default and parallel.sequence_parallel and not config.cuda_graph.enabled
    yield row(
        "tensor-parallel overlap",
        (parallel.tp_comm_overlap and absence, OFF, absence),
        (overlap == NO_OVERLAP and eager, OFF, f"{apart}; {OVERLAP_SLOWER}"),
        (overlap == NO_OVERLAP, OFF, apart, "--tp-comm-overlap" * parallel.sequence_parallel),
        (reason and by_default, OFF, f"{apart}, because {reason}"),
        (reason, PARTIAL, words),
        (True, ON, words + f"; fused {_IF_REACHABLE}" * overlap.fuses),
    )


def _replicas(config: RunConfig, world_size: int) -> Iterator[Capability]:
    layout, parallel = config.layout(world_size), config.parallel
    sharded, each = parallel.use_distributed_optimizer, parallel.ranks_per_replica
    across = layout.size("dp_cp") > 1
    copies = across or (config.model.has_experts and layout.expert_dp_size > 1)
    how = f"of {each} process{'' if each == 1 else 'es'}"
    if copies:
        how += f"; gradients are summed by {'reduce-scatter' if sharded else 'all-reduce'}"
    if across and config.model.balances_all_ranks:
        how += ", and loads of experts once in each micro-batch"
    yield row(
        "data parallelism",
        (layout.dp_size > 1, ON, f"{layout.dp_size} replicas {how}"),
        (True, OFF, f"one replica {how}"),
    )
    yield from _gradients(config, copies)
    state = "of the fp32 master weights and moments"
    everything = f"every rank holds all {state}"
    yield row(
        "distributed optimizer",
        (not copies, OFF, "no two ranks hold the same weights"),
        (sharded, ON, f"every rank holds its part {state}"),
        (True, OFF, everything, "--use-distributed-optimizer"),
    )


def _gradients(config: RunConfig, copies: bool) -> Iterator[Capability]:
    """Yield how gradients in bf16 are summed, if there are any.

    Args:
        copies: several ranks hold the same weights.
    """
    parallel = config.parallel
    if not (config.training.bf16 and parallel.sums_gradients_in_bf16):
        return
    said = "matrices accumulate their gradients in bf16"
    if copies and parallel.ddp_reduce_scatter_with_fp32_accumulation:
        said += "; ranks exchange them (all-to-all), add them in fp32 and round the sum once"
    elif copies:
        said += "; the collective rounds after each addition"
    patterns = parallel.ddp_param_name_patterns_for_fp32_local_accumulation
    said += f"; fp32 for {', '.join(patterns)}" * bool(patterns)
    yield Capability("bf16 gradients", ON, said)


def _experts(config: RunConfig, device: torch.device) -> Iterator[Capability]:
    """Yield the division of experts, and whether the shared expert runs beside the dispatch."""
    parallel, model = config.parallel, config.model
    size, factor = parallel.expert_model_parallel_size, config.expert_rank_capacity_factor
    how = (
        f"the experts are split over {size} ranks; tokens are dispatched by "
        f"{model.moe_token_dispatcher_type}"
    )
    if model.sends_tokens:
        how += ", once to each rank"
    if model.moe_latent_size is not None:
        how += f", in rows of {model.moe_latent_size} channels"
    if factor is not None:
        how += f"; their rows are bounded (--moe-expert-rank-capacity-factor {factor})"
    if config.expert_parts > 1:
        how += (
            f"; they travel in {config.expert_parts} parts, while the experts compute other parts"
        )
    waits = f"{how}, with one host sync per E layer"
    cure = "--moe-expert-rank-capacity-factor auto, or --moe-token-dispatcher-type allgather"
    yield row(
        "expert parallelism",
        (size == 1, OFF, "every rank holds all experts"),
        (config.asks_for_expert_rows, PARTIAL, waits, cure),
        (True, ON, how),
    )
    if not model.moe_shared_expert_intermediate_size:
        return
    differ = "tensor-parallel ranks dispatch different tokens, and the shared expert has collectives of its own"
    no_gpu = f"streams need a GPU, and the device is {device.type}"
    after = "the shared expert runs after the other experts"
    if config.expert_parts > 1 and not parallel.splits_tokens_of_experts:
        after += ", while their last results travel"
    yield row(
        "shared-expert overlap",
        (not model.moe_shared_expert_overlap, OFF, after),
        (device.type != "cuda", OFF, no_gpu),
        (parallel.splits_tokens_of_experts, OFF, differ),
        (True, ON, "the shared expert runs beside dispatch, experts and combination"),
    )


def _equal_exchanges(config: RunConfig, device: torch.device) -> Iterator[Capability]:
    """Yield how parts of equal sizes travel, if ranks exchange any."""
    if not any(exchanges_of_run(config)):
        return
    graphs = config.cuda_graph.enabled and device.type == "cuda"
    # The other ranks are not known here, so only this machine's reasons are.
    reason = next(iter(not_supported_reasons(device)), "")
    yield row(
        EXCHANGES,
        (not uses_symmetric_memory(config), OFF, by_collective(config), f"{OPTION} auto" * graphs),
        (reason, PARTIAL, by_collective(config, reason)),
        (True, ON, f"{by_copies(config)}, {_IF_REACHABLE}"),
    )
