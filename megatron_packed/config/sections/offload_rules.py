"""Rules between the options of activation offload and other sections."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from megatron_packed.config.errors import Problem
from megatron_packed.config.kinds.attention import CORE_ATTENTION
from megatron_packed.config.kinds.layer_kind import KINDS, LAYER_NORM
from megatron_packed.config.section import Sound
from megatron_packed.config.sections.cuda_graph import LOCAL, CudaGraphConfig
from megatron_packed.config.sections.memory import (
    LAYER_INPUTS,
    MODULES,
    OFFLOADED,
    OFFLOADED_IN,
    MemoryConfig,
)
from megatron_packed.config.sections.model import ModelConfig

INSIDE = {
    **{
        name: set(parts)
        for kind in KINDS.values()
        for name, parts in kind.recompute_modules.items()
    },
    LAYER_NORM: {name for kind in KINDS.values() for name in kind.inside_norm},
}
"""Modules of --offload-modules inside each module of --recompute-modules. If the recomputed module
contains an offload module, the offload module saves other tensors or none.
"""


BUFFERS = "MEGATRON_PACKED_OFFLOAD_BUFFERS"
"""Environment variable with a fixed number of device buffers; 0 offloads nothing."""


def forced_buffers(environ: Mapping[str, str], problems: list[Problem]) -> int | None:
    """Return the number of device buffers in `BUFFERS`; None if it is not set. A wrong value is
    added to ``problems``.
    """
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
    """Yield problems between offload, the pattern and CUDA graphs. See `Sound` for ``sound``."""
    if (
        not sound("memory.offload_layer_inputs", "memory.fine_grained_activation_offloading")
        or not memory.offloads
    ):
        return
    if sound("cuda_graph.cuda_graph_impl") and graphs.uses_transformer_engine:
        yield graphs.problem(
            "cuda_graph_impl",
            f"cannot be used with {memory.offload_flag}: TransformerEngine's graphs keep their saved tensors in "
            "their own memory",
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
            yield from _module_rules(module, memory, "".join(model.layer_types))


def _module_rules(module: str, memory: MemoryConfig, pattern: str) -> Iterator[Problem]:
    symbols = OFFLOADED_IN[module]
    has = [number for number, symbol in enumerate(pattern) if symbol in symbols]
    without = f"leave {module} out"
    if not has:
        kinds = " or ".join(f"{symbol} ({KINDS[symbol].name})" for symbol in symbols)
        yield Problem(
            OFFLOADED,
            module,
            f"saves no tensor: the pattern {pattern} has no {kinds} layer",
            without,
        )
    elif all(map(memory.recomputes_layer, has)):
        yield Problem(
            OFFLOADED,
            module,
            "saves no tensor: all layers that contain it are recomputed",
            f"{without}, or give {LAYER_INPUTS}, which offloads the inputs of recomputed layers",
        )
    elif within := [name for name in memory.modules if module in INSIDE[name]]:
        yield Problem(
            OFFLOADED,
            module,
            f"is recomputed by {MODULES} {within[0]}",
            f"{without}, or leave {within[0]} out of {MODULES}",
        )
    elif module == "attn_proj" and CORE_ATTENTION not in (
        *memory.offloaded_modules,
        *memory.modules,
    ):
        yield Problem(
            OFFLOADED,
            module,
            "saves a tensor that the attention kernel before it also saves, so offloading only "
            "this module frees no memory",
            f"add {CORE_ATTENTION}, or leave it out",
        )
