"""Lines of ``--explain`` about CUDA graphs: modules, capacities, attention and audit."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from megatron_packed.config.run import RunConfig
from megatron_packed.config.sections.cuda_graph import MODULE_LAYERS, CudaGraphConfig
from megatron_packed.cuda_graphs.transformer_engine import maker
from megatron_packed.explain.capability import OFF, ON, PARTIAL, Capability
from megatron_packed.explain.kernel_reasons import choose
from megatron_packed.explain.op_requests import op_requests
from megatron_packed.ops.backend_dispatch import NoBackendError
from megatron_packed.ops.varlen_attention import backends as varlen_attention

FLEX_OVERTAKES = {"transformer_engine": 128, "flash_attn_2": 32, "torch_varlen": 16}
"""Capacity in documents from which FlexAttention was measured to be faster than each kernel.

Measured by `capacity_cost.py`; it was faster for at least one of the measured sizes.
"""


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
    if interval:
        yield Capability("  audit", ON, f"every {interval} iterations")
    else:
        yield Capability(
            "  audit",
            OFF,
            "replays are never compared with eager runs",
            "--cuda-graph-audit-interval 1000",
        )


def _no_graphs(config: RunConfig, device: torch.device) -> Capability:
    advice = ["--cuda-graph-impl local"]
    if config.model.hidden_dropout:
        advice.append("remove --hidden-dropout")
    return Capability(
        "CUDA graphs",
        OFF,
        "--cuda-graph-impl none",
        ", ".join(advice) if device.type == "cuda" else "",
    )


def _implementation(graphs: CudaGraphConfig, eager: str) -> Capability:
    if eager:
        strict = " Because of --cuda-graph-strict the run ends." if graphs.cuda_graph_strict else ""
        return Capability("CUDA graphs", PARTIAL, eager + strict, "use a machine with a GPU")
    what = (
        "whole micro-batches, and the optimizer update"
        if graphs.captures_steps
        else "forward and backward of each module"
    )
    how = (
        ", by TransformerEngine's make_graphed_callables" if graphs.uses_transformer_engine else ""
    )
    return Capability("CUDA graphs", ON, f"{graphs.cuda_graph_impl}: {what}{how}")


def _capacities(graphs: CudaGraphConfig) -> Capability:
    if graphs.capacities is None:
        return Capability(
            "  capacities",
            ON,
            "auto: chosen from the first epoch's pack plan, so that each of its packs fits",
        )
    numbers = " ".join(map(str, graphs.capacities))
    what = "ends the run" if graphs.cuda_graph_strict else "runs eagerly"
    return Capability(
        "  capacities",
        ON,
        f"{numbers} documents; a pack with more {what}",
        "" if graphs.cuda_graph_strict else "auto covers every pack",
    )


def _captured_modules(config: RunConfig, eager: bool) -> Iterator[Capability]:
    graphs, pattern = config.cuda_graph, config.model.hybrid_layer_pattern
    for module, symbol in MODULE_LAYERS.items():
        if symbol not in pattern or (module == "moe_router" and module not in graphs.modules):
            continue
        count = pattern.count(symbol)
        if module == "moe" and "moe_router" in graphs.modules:
            reason = f"{count} run eagerly, except for their routers"
            yield Capability(
                "  moe",
                OFF,
                reason,
                "give moe instead of moe_router in --cuda-graph-modules",
            )
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
                f"add {module} to --cuda-graph-modules",
            )
    if not eager:
        yield Capability(
            "  the rest",
            OFF,
            "embedding, loss, reductions over ranks and the optimizer update run eagerly",
            "--cuda-graph-impl full_iteration",
        )


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
        yield Capability(
            "  attention",
            PARTIAL,
            f"{chosen} takes time for all {capacity} documents of the capacity, even for a pack "
            "with fewer",
            "install flash-attn 4, or use --attention-backend flex",
        )
