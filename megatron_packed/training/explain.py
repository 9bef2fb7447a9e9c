"""``--explain``: what a configuration gets on this machine, capability by capability, with reasons
and what to try.

Asks the ops themselves (``Op.explain`` with the sizes of the run), so it says what training would
choose. Reads no data and builds no model.
"""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Hashable, Iterator
from importlib.util import find_spec
from typing import NamedTuple

import torch

from megatron_packed.config.launch_checks import environment_number
from megatron_packed.config.layer_pattern import ATTENTION, MOE
from megatron_packed.config.run import RunConfig
from megatron_packed.config.sections.cuda_graph import MODULE_LAYERS
from megatron_packed.config.sections.memory import OFFLOADED_IN, RECOMPUTED_IN
from megatron_packed.config.sections.parallel import NOT_BUILT
from megatron_packed.cuda_graphs.transformer_engine import maker
from megatron_packed.layers.implementation import LOCAL_NAME, transformer_engine_refusal
from megatron_packed.ops.backend_dispatch import NoBackendError, Op
from megatron_packed.ops.varlen_attention import api as varlen_attention
from megatron_packed.training.build_job import device_of, dtype_of
from megatron_packed.training.exit_codes import ExitCode
from megatron_packed.training.kernels import Kernel, asked_of, op_inputs
from megatron_packed.training.metrics import peak_flops

ON, PARTIAL, OFF = "on", "partial", "off"
FLEX_OVERTAKES = {"transformer_engine": 128, "flash_attn_2": 32, "torch_varlen": 16}
"""Room in documents from which FlexAttention was faster than these in some measured size
(`capacity_cost.py`).
"""


class Capability(NamedTuple):
    """One line of the answer."""

    name: str
    state: str
    """``on``, ``partial`` or ``off``."""
    reason: str
    advice: str = ""
    """The next best setting, where there is one."""


def explain(config: RunConfig) -> str:
    """All capabilities as a table for a terminal.

    Raises:
        SystemExit: the device that the configuration names is not here; says so.
    """
    try:
        device = device_of(config)
    except ValueError as error:
        print(error, file=sys.stderr)
        raise SystemExit(ExitCode.USAGE) from None
    rows = list(capabilities(config, device, environment_number(os.environ, "WORLD_SIZE", 1, [])))
    width = max(len(row.name) for row in rows)
    lines = []
    for row in rows:
        text = row.reason + (f" -> {row.advice}" if row.advice else "")
        wrapped = textwrap.wrap(text, 118 - width - 11, break_long_words=False) or [""]
        lines.append(f"{row.name.ljust(width)}  {row.state.ljust(7)}  {wrapped[0]}")
        lines += [" " * (width + 11) + line for line in wrapped[1:]]
    return "\n".join(lines) + "\n"


def capabilities(
    config: RunConfig, device: torch.device, world_size: int = 1
) -> Iterator[Capability]:
    """What the configuration gets on ``device``, with so many processes."""
    yield from _machine(config, device)
    yield _layers(config, device)
    for op, inputs in op_inputs(config, device):
        yield kernel(op, inputs, asked_of(config, op, device), device)
    yield from _graphs(config, device)
    yield _recomputation(config)
    yield _offload(config, device)
    yield from _parallelism(config, world_size)
    yield from _keeping(config)


def _machine(config: RunConfig, device: torch.device) -> Iterator[Capability]:
    training = config.training
    if device.type == "cuda":
        yield Capability("device", ON, torch.cuda.get_device_name())
        known = peak_flops(device) is not None
        yield Capability(
            "MFU",
            ON if known else OFF,
            "the GPU's peak is known" if known else "unknown GPU: no peak",
        )
    elif training.device == "cpu" or not torch.cuda.is_available():
        why = "--device cpu" if training.device == "cpu" else "torch sees no GPU"
        yield Capability(
            "device",
            PARTIAL,
            f"{why}: every kernel is its plain PyTorch reference",
            "a machine with a GPU and the extra 'gpu'",
        )
    precision = "bf16 with fp32 masters" if training.bf16 else "fp32"
    yield Capability(
        "precision", ON, precision, "--bf16" if device.type == "cuda" and not training.bf16 else ""
    )
    if training.deterministic_mode:
        yield Capability("determinism", ON, "the same bits in every run")
    else:
        yield Capability(
            "determinism",
            PARTIAL if device.type == "cuda" else ON,
            "some GPU kernels add in a changing order"
            if device.type == "cuda"
            else "CPU kernels repeat",
            "--deterministic-mode" if device.type == "cuda" else "",
        )
    if training.isolation_self_test:
        yield Capability(
            "isolation self-test", ON, "checks at the start that documents cannot see each other"
        )
    else:
        yield Capability("isolation self-test", OFF, "--no-isolation-self-test", "leave it out")


def _layers(config: RunConfig, device: torch.device) -> Capability:
    """Whose linear layers and norms."""
    name, impl = "layers", config.training.transformer_impl
    if impl == LOCAL_NAME:
        return Capability(name, ON, "local: linear layers and norms are this package's own")
    reason = transformer_engine_refusal(device, dtype_of(config))
    if reason is not None:
        why, _, advice = reason.rpartition("; ")
        return Capability(name, OFF, f"{impl}: {why}", advice)
    return Capability(
        name,
        ON,
        f"{impl}: its parallel linear layers and norms; experts and router are this package's",
    )


def kernel(op: Op, inputs: Hashable, asked: str, device: torch.device) -> Capability:
    """Return which backend of an op runs, and why no faster one."""
    name = f"kernel {op.name}"
    try:
        chosen = op.select(inputs, asked).name
    except NoBackendError as error:
        return Capability(name, OFF, str(error), "another backend, or auto")
    if device.type == "cpu" and chosen == "reference":
        return Capability(name, PARTIAL, "reference: plain PyTorch, as on every CPU")
    cost = Kernel(op, inputs, chosen, "").cost if device.type == "cuda" else ""
    if asked != "auto":
        return Capability(
            name, PARTIAL if cost else ON, f"{chosen}, as asked{cost}", "auto" if cost else ""
        )
    automatic = [backend for backend in op.backends if backend.automatic]
    reasons = op.explain(inputs)
    faster = [backend.name for backend in automatic[: [b.name for b in automatic].index(chosen)]]
    if not faster:
        return Capability(name, ON, f"{chosen}, the fastest there is")
    why = "; ".join(f"{other}: {reasons[other][0]}" for other in faster)
    missing = any("does not import" in reasons[other][0] for other in faster)
    advice = "install the extra 'gpu'" if missing else ""
    return Capability(name, PARTIAL, f"{chosen}{cost}, because not {why}", advice)


def _graphs(config: RunConfig, device: torch.device) -> Iterator[Capability]:
    graphs, pattern = config.cuda_graph, config.model.hybrid_layer_pattern
    if not graphs.enabled:
        advice = ["--cuda-graph-impl local"]
        if _cannot_capture_experts(config):
            advice.append("--moe-token-dispatcher-type allgather")
        if config.model.hidden_dropout:
            advice.append("no --hidden-dropout")
        yield Capability(
            "CUDA graphs",
            OFF,
            "--cuda-graph-impl none",
            ", ".join(advice) if device.type == "cuda" else "",
        )
        return
    eager = graphs.eager_reason(device.type)
    if eager and graphs.cuda_graph_strict:
        eager += " --cuda-graph-strict ends the run for it."
    if not eager and graphs.uses_transformer_engine:
        try:
            maker()
        except ValueError as error:
            reason, _, advice = str(error).rpartition("; ")
            yield Capability("CUDA graphs", OFF, reason, advice)
            return
    what = (
        "whole micro-batches, and the update"
        if graphs.captures_steps
        else "forward and backward of each module"
    )
    how = ", by its make_graphed_callables" if graphs.uses_transformer_engine else ""
    yield Capability(
        "CUDA graphs",
        PARTIAL if eager else ON,
        eager or f"{graphs.cuda_graph_impl}: {what}{how}",
        "a machine with a GPU" if eager else "",
    )
    if not graphs.captures_steps:
        yield from _captured_modules(config, bool(eager))
    if graphs.capacities is None:
        yield Capability(
            "  capacities",
            ON,
            "auto: chosen from the first epoch's plan, so that each of its packs fits",
        )
    else:
        numbers = " ".join(map(str, graphs.capacities))
        what = "ends the run" if graphs.cuda_graph_strict else "runs eagerly"
        yield Capability(
            "  capacities",
            ON,
            f"{numbers} documents; what has more {what}",
            "" if graphs.cuda_graph_strict else "auto covers every pack",
        )
        if not eager and ATTENTION in pattern:
            yield from _attention_of_graphs(config, device, graphs.capacities[-1])
    interval = graphs.cuda_graph_audit_interval
    yield Capability(
        "  audit",
        ON if interval else OFF,
        f"every {interval} iterations" if interval else "replay is never compared with eager",
        "" if interval else "--cuda-graph-audit-interval 1000",
    )


def _cannot_capture_experts(config: RunConfig) -> bool:
    """Whether whole expert layers would be refused."""
    shared = (
        MOE in config.model.hybrid_layer_pattern and config.parallel.expert_model_parallel_size > 1
    )
    return shared and config.model.dispatch_asks_the_device


def _captured_modules(config: RunConfig, eager: bool) -> Iterator[Capability]:
    graphs, pattern = config.cuda_graph, config.model.hybrid_layer_pattern
    first = (
        "--moe-token-dispatcher-type allgather, then " if _cannot_capture_experts(config) else ""
    )
    for module, symbol in MODULE_LAYERS.items():
        if symbol not in pattern or (module == "moe_router" and module not in graphs.modules):
            continue
        count = pattern.count(symbol)
        if module == "moe" and "moe_router" in graphs.modules:
            reason = f"{count} run eagerly behind their routers"
            yield Capability("  moe", OFF, reason, f"{first}moe in the place of moe_router")
        elif not graphs.modules or module in graphs.modules:
            yield Capability(
                f"  {module}",
                PARTIAL if eager else ON,
                f"{count} captured" if not eager else "eager",
            )
        else:
            yield Capability(
                f"  {module}",
                OFF,
                f"{count} run eagerly: not in --cuda-graph-modules",
                f"{first if module == 'moe' else ''}add {module}",
            )
    if not eager:
        whole = not first and not config.parallel.overlap_param_gather
        yield Capability(
            "  the rest",
            OFF,
            "embedding, loss, sums over ranks and the update run eagerly",
            "--cuda-graph-impl full_iteration" if whole else "",
        )


def _attention_of_graphs(
    config: RunConfig, device: torch.device, capacity: int
) -> Iterator[Capability]:
    """Whether the time of the attention kernel grows with the room that a graph has."""
    inputs = {op.name: asked for op, asked in op_inputs(config, device)}.get(
        varlen_attention.OP.name
    )
    if inputs is None:  # a zigzag has one kernel for GPUs
        return
    try:
        chosen = varlen_attention.OP.select(
            inputs, asked_of(config, varlen_attention.OP, device)
        ).name
    except NoBackendError:
        return
    if capacity >= FLEX_OVERTAKES.get(chosen, capacity + 1):
        yield Capability(
            "  attention",
            PARTIAL,
            f"{chosen} takes time for every document that there is room for, {capacity} of them",
            "flash-attn 4, or --attention-backend flex",
        )


def _recomputation(config: RunConfig) -> Capability:
    """What the backward pass computes again."""
    name, memory, layers = "recomputation", config.memory, config.model.num_layers
    if memory.recomputes_layers:
        size, count = memory.layers_per_group, sum(map(memory.recomputes_layer, range(layers)))
        kept = (
            "the input of each" if size == 1 else f"in groups of {size} that keep their input alone"
        )
        return Capability(
            name, ON, f"{count} of {layers} layers, {kept}; MFU counts the model's operations alone"
        )
    if not memory.modules:
        return Capability(
            name,
            OFF,
            "every activation that the backward pass needs is kept",
            "--recompute-granularity saves memory",
        )
    found = []
    for module in memory.modules:
        count = (
            config.model.hybrid_layer_pattern.count(RECOMPUTED_IN[module])
            if module in RECOMPUTED_IN
            else layers
        )
        found.append(f"{module} of {count} layer{'s' if count > 1 else ''}")
    return Capability(name, ON, f"{', '.join(found)}; MFU counts the model's operations alone")


def _offload(config: RunConfig, device: torch.device) -> Capability:
    """What waits in the host's memory."""
    name, memory, layers = "offload", config.memory, range(config.model.num_layers)
    if not memory.offloads:
        cure = (
            "--offload-layer-inputs"
            if memory.recomputes_layers
            else "--fine-grained-activation-offloading"
        )
        return Capability(name, OFF, "what is kept is kept on the device", f"{cure} saves memory")
    moved = {"the inputs": sum(map(memory.offloads_input, layers))}
    for module in memory.offloaded_modules:
        of_layers = (
            n for n in layers if config.model.hybrid_layer_pattern[n] in OFFLOADED_IN[module]
        )
        moved[module] = sum(memory.offloads_module(module, number) for number in of_layers)
    what = ", ".join(f"{part} of {n} layer{'s' if n > 1 else ''}" for part, n in moved.items() if n)
    if device.type != "cuda":
        return Capability(
            name,
            PARTIAL,
            f"{what}: on this device they are copied, and no memory is saved",
            "a GPU",
        )
    return Capability(
        name, ON, f"{what}, in pinned memory; device buffers: at most {memory.offload_buffers}"
    )


def _parallelism(config: RunConfig, world_size: int) -> Iterator[Capability]:
    parallel = config.parallel
    tp = parallel.tensor_model_parallel_size
    if tp == 1:
        yield Capability("tensor parallelism", OFF, "every rank has whole matrices")
    else:
        yield Capability("tensor parallelism", ON, f"{tp} ranks share each matrix")
        if parallel.sequence_parallel:
            yield Capability(
                "sequence parallelism",
                ON,
                f"between the layers each rank has 1 / {tp} of the tokens",
            )
        else:
            yield Capability(
                "sequence parallelism",
                OFF,
                "between the layers each rank has all tokens",
                "--sequence-parallel saves memory",
            )
    cp, comm = parallel.context_parallel_size, parallel.cp_comm_type
    if cp == 1:
        yield Capability("context parallelism", OFF, "every rank has all tokens of its packs")
    else:
        padded = (
            f"; documents lie at multiples of {config.document_alignment}"
            if config.document_alignment > 1
            else ""
        )
        yield Capability(
            "context parallelism",
            ON,
            f"{cp} ranks share the tokens of each pack, by {comm}{padded}",
        )
    yield from _replicas(config, world_size)
    if parallel.overlap_grad_reduce:
        gather = (
            "; weights come back while the next step runs" if parallel.overlap_param_gather else ""
        )
        yield Capability("overlap", ON, f"sums begin in the last backward pass{gather}")
    else:
        yield Capability(
            "overlap",
            OFF,
            "gradients are summed behind the last backward pass",
            "--overlap-grad-reduce",
        )
    yield from _experts(config)
    for axis in NOT_BUILT.values():
        yield Capability(axis, OFF, "not built yet")


def _replicas(config: RunConfig, world_size: int) -> Iterator[Capability]:
    layout, parallel = config.layout(world_size), config.parallel
    sharded, each = parallel.use_distributed_optimizer, parallel.ranks_per_replica
    replicas, copies = layout.dp_size, layout.size("dp_cp") > 1
    copies |= MOE in config.model.hybrid_layer_pattern and layout.expert_dp_size > 1
    collective = f"; gradients by {'reduce-scatter' if sharded else 'all-reduce'}" if copies else ""
    processes = "process" if each == 1 else "processes"
    if replicas == 1:
        yield Capability("data parallelism", OFF, f"one replica, of {each} {processes}{collective}")
    else:
        yield Capability(
            "data parallelism", ON, f"{replicas} replicas of {each} {processes}{collective}"
        )
    if not copies:
        yield Capability("distributed optimizer", OFF, "no two ranks have the same weights")
    else:
        yield Capability(
            "distributed optimizer",
            ON if sharded else OFF,
            f"{'its part' if sharded else 'all'} of the fp32 masters and moments on every rank",
            "" if sharded else "--use-distributed-optimizer",
        )


def _experts(config: RunConfig) -> Iterator[Capability]:
    parallel, model = config.parallel, config.model
    size = parallel.expert_model_parallel_size
    if MOE not in model.hybrid_layer_pattern:
        return
    if size == 1:
        yield Capability("expert parallelism", OFF, "every rank has all experts")
        return
    how = f"{size} ranks share the experts, dispatched by {model.moe_token_dispatcher_type}"
    if model.dispatch_asks_the_device:
        yield Capability(
            "expert parallelism",
            PARTIAL,
            f"{how}: one host sync per E layer",
            "--moe-token-dispatcher-type allgather",
        )
    else:
        yield Capability("expert parallelism", ON, how)


def _keeping(config: RunConfig) -> Iterator[Capability]:
    checkpoint, logging = config.checkpoint, config.logging
    if checkpoint.save is None:
        yield Capability(
            "checkpoints", OFF, "nothing is saved", "--save DIRECTORY --save-interval N"
        )
    elif checkpoint.save_interval is None:
        yield Capability(
            "checkpoints",
            PARTIAL,
            "at the end and when the run is stopped only",
            "--save-interval N",
        )
    else:
        how = ", beside training" if checkpoint.async_save else ""
        yield Capability(
            "checkpoints",
            ON,
            f"every {checkpoint.save_interval} iterations in {checkpoint.save}{how}",
        )
    yield Capability(
        "log",
        ON if logging.log_jsonl else OFF,
        logging.log_jsonl or "the console alone",
        "" if logging.log_jsonl else "--log-jsonl FILE",
    )
    if logging.tensorboard_dir and find_spec("tensorboard") is None:
        yield Capability(
            "TensorBoard", OFF, "the package tensorboard is not there", "install the extra 'log'"
        )
