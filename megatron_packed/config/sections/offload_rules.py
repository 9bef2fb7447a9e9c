"""Rules between the offload of activations and other sections."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from megatron_packed.config.errors import Problem
from megatron_packed.config.layer_pattern import LAYER_NAMES
from megatron_packed.config.section import Sound
from megatron_packed.config.sections.cuda_graph import LOCAL, CudaGraphConfig
from megatron_packed.config.sections.memory import (
    CORE_ATTENTION,
    EXPERT_ACTIVATION,
    FINE_GRAINED,
    LAYER_INPUTS,
    LAYER_NORM,
    MODULES,
    OFFLOADED,
    OFFLOADED_IN,
    MemoryConfig,
)
from megatron_packed.config.sections.model import ModelConfig

INSIDE = {
    CORE_ATTENTION: {CORE_ATTENTION},
    "mamba": {"mamba_in_proj", "mamba_scan", "mamba_out_proj"},
    "mlp": {"mlp_fc1", "mlp_act", "mlp_fc2"},
    "moe": {"expert_fc1", EXPERT_ACTIVATION, "expert_fc2"},
    LAYER_NORM: {"attn_norm", "mamba_norm", "mlp_norm", "qkv_linear", "mamba_in_proj", "mlp_fc1"},
    EXPERT_ACTIVATION: {EXPERT_ACTIVATION, "expert_fc2"},
}
"""Of --recompute-modules: the parts that save something else, or nothing, where it is recomputed."""


BUFFERS = "MEGATRON_PACKED_OFFLOAD_BUFFERS"
"""Environment variable: exactly so many device buffers; 0 offloads nothing."""


def forced_buffers(environ: Mapping[str, str], problems: list[Problem]) -> int | None:
    """What `BUFFERS` says; None where it says nothing."""
    text = environ.get(BUFFERS, "").strip()
    if not text or (text.isdecimal() and int(text) <= 64):
        return int(text) if text else None
    problems.append(
        Problem(
            BUFFERS,
            repr(text),
            "the environment variable must be a number of device buffers, 0 to 64",
            "unset it, or set 0 to offload nothing",
            node_dependent=True,
        )
    )
    return None


def offload_rules(
    memory: MemoryConfig, model: ModelConfig, graphs: CudaGraphConfig, sound: Sound
) -> Iterator[Problem]:
    """Problems between offload, the pattern and graphs. ``sound("model.hybrid_layer_pattern",
    ...)`` as elsewhere.
    """
    if (
        not sound("memory.offload_layer_inputs", "memory.fine_grained_activation_offloading")
        or not memory.offloads
    ):
        return
    flag = LAYER_INPUTS if memory.offload_layer_inputs else FINE_GRAINED
    if sound("cuda_graph.cuda_graph_impl") and graphs.uses_transformer_engine:
        yield Problem(
            "--cuda-graph-impl",
            graphs.cuda_graph_impl,
            f"cannot be used with {flag}: TransformerEngine's "
            "graphs hold what they save in memory of their own",
            f"give --cuda-graph-impl {LOCAL} or full_iteration",
        )
    if sound(
        "model.hybrid_layer_pattern",
        "memory.offload_modules",
        "memory.recompute_granularity",
        "memory.recompute_method",
        "memory.recompute_num_layers",
        "memory.recompute_modules",
    ):
        for module in memory.offloaded_modules:
            yield from _module_rules(module, memory, model.hybrid_layer_pattern)


def _module_rules(module: str, memory: MemoryConfig, pattern: str) -> Iterator[Problem]:
    symbols = OFFLOADED_IN[module]
    has = [number for number, symbol in enumerate(pattern) if symbol in symbols]
    without = f"leave {module} out"
    if not has:
        kinds = " or ".join(f"{symbol} ({LAYER_NAMES[symbol]})" for symbol in symbols)
        yield Problem(
            OFFLOADED, module, f"saves nothing: the pattern {pattern} has no {kinds} layer", without
        )
    elif all(map(memory.recomputes_layer, has)):
        yield Problem(
            OFFLOADED,
            module,
            "saves nothing: all layers that have it are recomputed whole",
            f"{without}, or give {LAYER_INPUTS}, which moves what recomputation keeps",
        )
    elif within := [name for name in memory.modules if module in INSIDE[name]]:
        yield Problem(
            OFFLOADED,
            module,
            f"is computed again by {MODULES} {within[0]}",
            f"{without}, or leave {within[0]} out of {MODULES}",
        )
    elif module == "attn_proj" and CORE_ATTENTION not in (
        *memory.offloaded_modules,
        *memory.modules,
    ):
        yield Problem(
            OFFLOADED,
            module,
            "saves what the kernel in front of it returns and keeps too, so that it alone "
            "frees nothing",
            f"name {CORE_ATTENTION} beside it, or leave it out",
        )
