"""Rows of ``--explain``: every capability of a run, whether the run has it, why, and a cure."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from typing import NamedTuple

import torch

from megatron_packed.config.exchanged_heads import (
    exchanges_of_run,
    parts_of_layers,
    reorders_rows,
)
from megatron_packed.config.kinds.experts import EXPERT_ACTIVATION
from megatron_packed.config.optional_packages import is_installed
from megatron_packed.config.run import RunConfig
from megatron_packed.config.sections.cuda_graph import MODULE_LAYERS, CudaGraphConfig
from megatron_packed.config.sections.memory import MODULES, OFFLOADED_IN, RECOMPUTED_IN
from megatron_packed.config.sections.parallel import NOT_BUILT
from megatron_packed.cuda_graphs.transformer_engine import maker
from megatron_packed.distributed.sequence_parallel_products import NO_OVERLAP
from megatron_packed.distributed.symmetric_memory import dtype_reasons, not_supported_reasons
from megatron_packed.explain.kernel_reasons import choose, layer_reasons
from megatron_packed.explain.op_requests import op_requests, served_by, useless_recomputation
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
from megatron_packed.models.tensor_overlap import overlap_absence, overlap_of, overlap_words
from megatron_packed.ops.backend_dispatch import NoBackendError, Op
from megatron_packed.ops.varlen_attention import api as varlen_attention

CPU = torch.device("cpu")
ON, PARTIAL, OFF = "on", "partial", "off"
_IF_REACHABLE = "if the GPUs of the ranks can access each other's memory"
_NOT_COUNTED = "MFU does not count recomputed operations"
FLEX_OVERTAKES = {"transformer_engine": 128, "flash_attn_2": 32, "torch_varlen": 16}
"""Capacity in documents from which FlexAttention was measured to be faster than each kernel.

Measured by `capacity_cost.py`; it was faster for at least one of the measured sizes.
"""


class Capability(NamedTuple):
    """Feature of a run, whether the run has it, the reason, and a better setting."""

    name: str
    state: str
    """``on``, ``partial`` or ``off``."""
    reason: str
    advice: str = ""
    """Setting that would improve the state; empty if there is none."""


def on_or_off(name: str, active: bool, on: str, off: str, advice: str = "") -> Capability:
    """Return a capability with the reason of its state; ``advice`` is for a run without it."""
    return Capability(name, ON, on) if active else Capability(name, OFF, off, advice)


def capabilities(
    config: RunConfig, device: torch.device, world_size: int = 1
) -> Iterator[Capability]:
    """Yield all capabilities of the configuration on ``device`` with ``world_size`` processes."""
    yield from _machine(config, device)
    yield _layers(config, device)
    requests = op_requests(config, device)
    # Several layers may have equal rows.
    yield from dict.fromkeys(
        kernel(request.op, request.inputs, served_by(request, requests), device)
        for request in requests
    )
    yield from graph_capabilities(config, device)
    yield _recomputation(config, device)
    yield _offload(config, device)
    yield from parallel_capabilities(config, world_size, device)
    if config.model.mtp_depths:
        yield _depths(config)
    yield from _saved_and_logged(config)
    yield _export(config)


def _machine(config: RunConfig, device: torch.device) -> Iterator[Capability]:
    training = config.training
    if device.type == "cuda":
        yield Capability("device", ON, torch.cuda.get_device_name())
        peak = "the peak FLOP/s of this GPU is"
        knows_peak = peak_flops(device) is not None
        yield on_or_off("MFU", knows_peak, f"{peak} known", f"{peak} not known")
    elif training.device == "cpu" or not torch.cuda.is_available():
        why = "--device cpu" if training.device == "cpu" else "torch sees no GPU"
        yield Capability(
            "device",
            PARTIAL,
            f"{why}: every op runs its plain PyTorch reference",
            "use a machine with a GPU, with the extra 'gpu' installed",
        )
    advice = "--bf16" if device.type == "cuda" and not training.bf16 else ""
    yield Capability("precision", ON, config.precision, advice)
    if training.deterministic_mode:
        yield Capability("determinism", ON, "every run computes the same bits")
    elif device.type == "cuda":
        why = "some GPU kernels add numbers in an order that differs from run to run"
        yield Capability("determinism", PARTIAL, why, "--deterministic-mode")
    else:
        yield Capability("determinism", ON, "CPU kernels compute the same bits in every run")
    yield on_or_off(
        "isolation self-test",
        training.isolation_self_test,
        "checks before the first step that documents of a pack do not influence each other",
        "--no-isolation-self-test",
        "remove --no-isolation-self-test",
    )


def _layers(config: RunConfig, device: torch.device) -> Capability:
    """Return which library's linear layers and norms run."""
    name, impl = "layers", config.training.transformer_impl
    if impl == LOCAL_NAME:
        return Capability(name, ON, "local: linear layers and norms of megatron_packed")
    for reason in layer_reasons(config, device)[impl]:
        why, _, advice = reason.rpartition("; ")
        return Capability(name, OFF, f"{impl}: {why}", advice)
    return Capability(
        name,
        ON,
        f"{impl}: its parallel linear layers and norms; experts and router of megatron_packed",
    )


def kernel(op: Op, inputs: Hashable, backend: str, device: torch.device) -> Capability:
    """Return which backend of an op runs, and why no faster backend does."""
    name = f"kernel {op.name}"
    try:
        chosen = choose(op, inputs, backend)
    except NoBackendError as error:
        return Capability(name, OFF, str(error), "choose another backend, or auto")
    if device.type == "cpu" and chosen.name == "reference":
        return Capability(name, PARTIAL, "reference: plain PyTorch, the backend for CPUs")
    cost = chosen.cost if device.type == "cuda" else ""
    if backend != "auto":
        state, advice = (PARTIAL, "auto") if cost else (ON, "")
        return Capability(name, state, f"{chosen.name}, as requested{cost}{chosen.remark}", advice)
    faster = chosen.passed_over
    if not faster:
        return Capability(name, ON, f"{chosen.name}, the fastest backend{chosen.remark}")
    why = "; ".join(f"{other}: {reasons[0]}" for other, reasons in faster.items())
    missing = any("does not import" in reasons[0] for reasons in faster.values())
    advice = "install the extra 'gpu'" if missing else ""
    why = f"{chosen.name}{cost}; faster backends cannot be used: {why}"
    return Capability(name, PARTIAL, why, advice)


def _recomputation(config: RunConfig, device: torch.device) -> Capability:
    """Return which activations the backward pass recomputes."""
    name, memory, layers = "recomputation", config.memory, len(config.model.layer_types)
    if memory.recomputes_layers:
        size, count = memory.layers_per_unit, sum(map(memory.recomputes_layer, range(layers)))
        saved = "only the input of each is saved"
        if size > 1:
            saved = f"in groups of {size}: only the input of each group is saved"
        return Capability(name, ON, f"{count} of {layers} layers, {saved}; {_NOT_COUNTED}")
    if not memory.modules:
        saved = "every activation that the backward pass needs is saved"
        return Capability(name, OFF, saved, "--recompute-granularity reduces memory")
    symbols = config.model.hybrid_layer_pattern
    counts = {
        module: symbols.count(RECOMPUTED_IN[module]) if module in RECOMPUTED_IN else layers
        for module in memory.modules
    }
    text = f"{_of_layers(counts)}; {_NOT_COUNTED}"
    if useless := useless_recomputation(config, device):
        advice = f"leave {EXPERT_ACTIVATION} out of {MODULES}"
        return Capability(name, PARTIAL, f"{text}; {useless}", advice)
    return Capability(name, ON, text)


def _of_layers(counts: Mapping[str, int]) -> str:
    """Return parts of layers as text, each with its number of layers."""
    return ", ".join(f"{part} of {n} layer{'s' if n > 1 else ''}" for part, n in counts.items())


def _offload(config: RunConfig, device: torch.device) -> Capability:
    """Return which activations are offloaded to host memory."""
    symbols = config.model.layer_types
    name, memory, layers = "offload", config.memory, range(len(symbols))
    if not memory.offloads:
        of_parts = "--fine-grained-activation-offloading"
        cure = "--offload-layer-inputs" if memory.recomputes_layers else of_parts
        why = "saved activations stay on the device"
        return Capability(name, OFF, why, f"{cure} reduces device memory")
    moved = {"the inputs": sum(map(memory.offloads_input, layers))}
    for module in memory.offloaded_modules:
        of_layers = (n for n in layers if symbols[n] in OFFLOADED_IN[module])
        moved[module] = sum(memory.offloads_module(module, number) for number in of_layers)
    what = _of_layers({part: count for part, count in moved.items() if count})
    if device.type != "cuda":
        why = f"{what}: without a GPU the copies reduce no memory"
        return Capability(name, PARTIAL, why, "use a machine with a GPU")
    buffers = f"at most {memory.offload_buffers} device buffers"
    return Capability(name, ON, f"{what}, in pinned host memory; {buffers}")


def _depths(config: RunConfig) -> Capability:
    """Return the depths of multi-token prediction and the weight of their losses."""
    model, depths = config.model, config.model.mtp_depths
    how, mean = f"one depth of {model.mtp_layers}", "its loss"
    if depths > 1:
        weights = "the same" if model.mtp_use_repeated_layer else "their own"
        how, mean = (
            f"{depths} depths of {model.mtp_layers} with {weights} weights",
            "their mean loss",
        )
    return Capability(
        "multi-token prediction",
        ON,
        f"{how}; {mean} counts {model.mtp_loss_scaling_factor:g}; validation and answers use the "
        "main model alone",
    )


def _saved_and_logged(config: RunConfig) -> Iterator[Capability]:
    checkpoint, logging = config.checkpoint, config.logging
    name = "checkpoints"
    if checkpoint.save is None:
        advice = "--save DIRECTORY --save-interval N"
        yield Capability(name, OFF, "no checkpoint is saved", advice)
    elif checkpoint.save_interval is None:
        why = "saved only at the end of the run and when the run is stopped"
        yield Capability(name, PARTIAL, why, "--save-interval N")
    else:
        how = ", written in the background" if checkpoint.async_save else ""
        interval = f"every {checkpoint.save_interval} iterations"
        yield Capability(name, ON, f"{interval} in {checkpoint.save}{how}")
    log = logging.log_jsonl
    yield on_or_off("log", bool(log), log or "", "console only", "--log-jsonl FILE")
    if logging.tensorboard_dir and not is_installed("tensorboard"):
        why = "the package tensorboard is not installed"
        yield Capability("TensorBoard", OFF, why, "install the extra 'log'")


def _export(config: RunConfig) -> Capability:
    """Return the Hugging Face family that can hold the trained model, or what no family has."""
    name = "export to transformers"
    nearest, differences = next(iter(nearest_families(config.model).items()))
    if differences:
        why = f"the nearest family, {nearest}, cannot express {'; '.join(differences)}"
        return Capability(name, OFF, why)
    return Capability(name, ON, f"as a {nearest} model, by `megatron-packed convert --to-hf`")


def graph_capabilities(config: RunConfig, device: torch.device) -> Iterator[Capability]:
    """Yield whether CUDA graphs run on ``device``, which modules they hold, which stay eager."""
    graphs = config.cuda_graph
    if not graphs.enabled:
        yield _no_graphs(config, device)
        return
    eager = graphs.eager_reason(device.type)
    if not eager and graphs.uses_transformer_engine:
        try:
            maker()
        except ValueError as error:
            reason, _, advice = str(error).rpartition("; ")
            yield Capability("CUDA graphs", OFF, reason, advice)
            return
    yield _implementation(graphs, eager)
    if not graphs.captures_steps:
        yield from _captured_modules(config, bool(eager))
    yield _capacities(graphs)
    if not eager and graphs.capacities is not None and config.model.has_attention:
        yield from _attention_of_graphs(config, device, graphs.capacities[-1])
    interval = graphs.cuda_graph_audit_interval
    yield on_or_off(
        "  audit",
        bool(interval),
        f"every {interval} iterations",
        "replays are never compared with eager runs",
        "--cuda-graph-audit-interval 1000",
    )


def _no_graphs(config: RunConfig, device: torch.device) -> Capability:
    dropout = ", remove --hidden-dropout" if config.model.hidden_dropout else ""
    advice = f"--cuda-graph-impl local{dropout}" if device.type == "cuda" else ""
    return Capability("CUDA graphs", OFF, "--cuda-graph-impl none", advice)


def _implementation(graphs: CudaGraphConfig, eager: str) -> Capability:
    if eager:
        strict = " Because of --cuda-graph-strict the run ends." if graphs.cuda_graph_strict else ""
        return Capability("CUDA graphs", PARTIAL, eager + strict, "use a machine with a GPU")
    what = "forward and backward of each module"
    if graphs.captures_steps:
        what = "whole micro-batches, and the optimizer update"
    elif graphs.uses_transformer_engine:
        what += ", by TransformerEngine's make_graphed_callables"
    return Capability("CUDA graphs", ON, f"{graphs.cuda_graph_impl}: {what}")


def _capacities(graphs: CudaGraphConfig) -> Capability:
    name = "  capacities"
    if graphs.capacities is None:
        why = "auto: chosen from the first epoch's pack plan, so that each of its packs fits"
        return Capability(name, ON, why)
    text = f"{' '.join(map(str, graphs.capacities))} documents; a pack with more"
    if graphs.cuda_graph_strict:
        return Capability(name, ON, f"{text} ends the run")
    return Capability(name, ON, f"{text} runs eagerly", "auto covers every pack")


def _captured_modules(config: RunConfig, eager: bool) -> Iterator[Capability]:
    graphs, pattern = config.cuda_graph, config.model.hybrid_layer_pattern
    for module, symbol in MODULE_LAYERS.items():
        if symbol not in pattern or (module == "moe_router" and module not in graphs.modules):
            continue
        name, count = f"  {module}", pattern.count(symbol)
        if module == "moe" and "moe_router" in graphs.modules:
            advice = "give moe instead of moe_router in --cuda-graph-modules"
            why = f"{count} run eagerly, except for their routers"
            yield Capability(name, OFF, why, advice)
        elif graphs.modules and module not in graphs.modules:
            why = f"{count} run eagerly: not in --cuda-graph-modules"
            yield Capability(name, OFF, why, f"add {module} to --cuda-graph-modules")
        elif eager:
            yield Capability(name, PARTIAL, "eager")
        else:
            yield Capability(name, ON, f"{count} captured")
    if not eager:
        why = "embedding, loss, reductions over ranks and the optimizer update run eagerly"
        yield Capability("  the rest", OFF, why, "--cuda-graph-impl full_iteration")


def _attention_of_graphs(
    config: RunConfig, device: torch.device, capacity: int
) -> Iterator[Capability]:
    """Yield a line if the attention kernel is slower for a larger graph capacity."""
    op = varlen_attention.OP
    requests = (request for request in op_requests(config, device) if request.op is op)
    request = next(requests, None)
    if request is None:  # context-parallel attention has a single kernel for GPUs
        return
    try:
        chosen = choose(op, request.inputs, request.backend).name
    except NoBackendError:
        return
    if capacity >= FLEX_OVERTAKES.get(chosen, capacity + 1):
        why = f"{chosen} takes time for all {capacity} documents of the capacity, even for a pack with fewer"
        advice = "install flash-attn 4, or use --attention-backend flex"
        yield Capability("  attention", PARTIAL, why, advice)


def parallel_capabilities(
    config: RunConfig, world_size: int, device: torch.device = CPU
) -> Iterator[Capability]:
    """Yield how ``world_size`` processes divide matrices, tokens, batches and experts among them."""
    parallel = config.parallel
    yield from _tensor_parallel(config, device)
    name, cp = "context parallelism", parallel.context_parallel_size
    if cp == 1:
        yield Capability(name, OFF, "every rank holds all tokens of its packs")
    else:
        text = f"the tokens of each pack are split over {cp} ranks, by {parallel.cp_comm_type}"
        if config.document_alignment > 1:
            text += f"; documents start at multiples of {config.document_alignment} tokens"
        yield Capability(name, ON, text + _states_and_heads(config))
    yield from _replicas(config, world_size)
    gathers = config.gathers_during_next_step
    yield on_or_off(
        "overlap",
        parallel.overlap_grad_reduce,
        "gradient reduction begins during the last backward pass"
        + "; updated weights are gathered during the next step" * gathers,
        "gradients are reduced after the last backward pass",
        "--overlap-grad-reduce",
    )
    yield from _experts(config)
    yield from _shared_expert(config, device)
    yield from _equal_exchanges(config, device)
    for axis in NOT_BUILT.values():
        yield Capability(axis, OFF, "not supported yet")


def _states_and_heads(config: RunConfig) -> str:
    """Describe passed states, and the parts of exchanged heads if the run requests an overlap."""
    parallel = config.parallel
    passing = [kind for kind in config.model.kinds if kind.exchanges(parallel) == "states"]
    said = "".join(f"; {kind.layer}s pass states" for kind in passing)
    if reorders_rows(config):
        said += ", and all-to-alls reorder the rows of attention"
    parts = parts_of_layers(config)
    if parts and parallel.cp_comm_overlap_parts > 1:
        numbers = (f"{number} for each {kind.symbol} layer" for kind, number in parts.items())
        said += f"; parts in which heads travel: {', '.join(numbers)}"
    return said


def _tensor_parallel(config: RunConfig, device: torch.device) -> Iterator[Capability]:
    tp = config.parallel.tensor_model_parallel_size
    if tp == 1:
        yield Capability("tensor parallelism", OFF, "every rank holds whole weight matrices")
        return
    yield Capability("tensor parallelism", ON, f"each weight matrix is split over {tp} ranks")
    yield on_or_off(
        "sequence parallelism",
        config.parallel.sequence_parallel,
        f"between the layers each rank holds 1 / {tp} of the tokens",
        "between the layers each rank holds all tokens",
        "--sequence-parallel reduces memory",
    )
    yield _tensor_overlap(config, device)


def _tensor_overlap(config: RunConfig, device: torch.device) -> Capability:
    """Return which collectives of linear layers run under matrix products."""
    name, overlap = "tensor-parallel overlap", overlap_of(config)
    if overlap == NO_OVERLAP:
        if config.parallel.tp_comm_overlap:
            return Capability(name, OFF, overlap_absence(config))
        advice = "--tp-comm-overlap" if config.parallel.sequence_parallel else ""
        return Capability(name, OFF, "collectives and products run one after the other", advice)
    # The other ranks are not known here, so only this machine's reasons are.
    reasons = [*not_supported_reasons(device), *dtype_reasons(dtype_of(config))]
    reasons = reasons if overlap.fuses else []
    sentence = overlap_words(overlap, reasons[0] if reasons else "")
    if overlap.fuses and not reasons:
        sentence += f"; fused {_IF_REACHABLE}"
    return Capability(name, PARTIAL if reasons else ON, sentence)


def _replicas(config: RunConfig, world_size: int) -> Iterator[Capability]:
    layout, parallel = config.layout(world_size), config.parallel
    sharded, each = parallel.use_distributed_optimizer, parallel.ranks_per_replica
    replicas, copies = layout.dp_size, layout.size("dp_cp") > 1
    copies |= config.model.has_experts and layout.expert_dp_size > 1
    collective = "reduce-scatter" if sharded else "all-reduce"
    collective = f"; gradients are summed by {collective}" if copies else ""
    if config.model.balances_all_ranks and layout.size("dp_cp") > 1:
        collective += ", and loads of experts once in each micro-batch"
    of_each = f"of {each} process{'' if each == 1 else 'es'}{collective}"
    several, single = f"{replicas} replicas {of_each}", f"one replica {of_each}"
    yield on_or_off("data parallelism", replicas > 1, several, single)
    name = "distributed optimizer"
    if not copies:
        yield Capability(name, OFF, "no two ranks hold the same weights")
        return
    state = "of the fp32 master weights and moments"
    yield on_or_off(
        name,
        sharded,
        f"every rank holds its part {state}",
        f"every rank holds all {state}",
        "--use-distributed-optimizer",
    )


def _experts(config: RunConfig) -> Iterator[Capability]:
    parallel, model = config.parallel, config.model
    name, size = "expert parallelism", parallel.expert_model_parallel_size
    if not model.has_experts:
        return
    if size == 1:
        yield Capability(name, OFF, "every rank holds all experts")
        return
    how = (
        f"the experts are split over {size} ranks; tokens are dispatched by "
        f"{model.moe_token_dispatcher_type}"
    )
    if model.moe_latent_size is not None:
        how += f", in rows of {model.moe_latent_size} channels"
    factor = config.expert_rank_capacity_factor
    if factor is not None:
        how += f"; their rows are bounded (--moe-expert-rank-capacity-factor {factor})"
    if config.asks_for_expert_rows:
        advice = "--moe-expert-rank-capacity-factor auto, or --moe-token-dispatcher-type allgather"
        yield Capability(name, PARTIAL, f"{how}, with one host sync per E layer", advice)
    else:
        yield Capability(name, ON, how)


def _shared_expert(config: RunConfig, device: torch.device) -> Iterator[Capability]:
    """Yield whether the shared expert runs beside the dispatch, if the model has one."""
    model, name = config.model, "shared-expert overlap"
    if not model.has_experts or not model.moe_shared_expert_intermediate_size:
        return
    if not model.moe_shared_expert_overlap:
        yield Capability(name, OFF, "the shared expert runs after the other experts")
    elif device.type != "cuda":
        yield Capability(name, OFF, f"streams need a GPU, and the device is {device.type}")
    else:
        yield on_or_off(
            name,
            not config.parallel.splits_tokens_of_experts,
            "the shared expert runs beside dispatch, experts and combination",
            "tensor-parallel ranks dispatch different tokens, and the shared expert has "
            "collectives of its own",
        )


def _equal_exchanges(config: RunConfig, device: torch.device) -> Iterator[Capability]:
    """Yield how parts of equal sizes travel, if ranks exchange any."""
    if not any(exchanges_of_run(config)):
        return
    if not uses_symmetric_memory(config):
        graphs = config.cuda_graph.enabled and device.type == "cuda"
        advice = f"{OPTION} auto" if graphs else ""
        yield Capability(EXCHANGES, OFF, by_collective(config), advice)
        return
    # The other ranks are not known here, so only this machine's reasons are.
    if reasons := not_supported_reasons(device):
        yield Capability(EXCHANGES, PARTIAL, by_collective(config, reasons[0]))
        return
    yield Capability(EXCHANGES, ON, f"{by_copies(config)}, {_IF_REACHABLE}")
