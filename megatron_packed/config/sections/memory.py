"""Options of activation memory: recomputation in the backward pass, and offload to the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from megatron_packed.config.conditions import Condition, option_given
from megatron_packed.config.errors import Problem, Problems
from megatron_packed.config.kinds.attention import CORE_ATTENTION
from megatron_packed.config.kinds.layer_kind import ACTIVATION, EVERYTHING, INPUT, KINDS, LAYER_NORM
from megatron_packed.config.options import Related, option
from megatron_packed.config.section import Section, Sound
from megatron_packed.config.sections.cuda_graph import LOCAL, CudaGraphConfig

if TYPE_CHECKING:
    from megatron_packed.config.run import RunConfig

FULL, SELECTIVE = "full", "selective"
UNIFORM, BLOCK = "uniform", "block"
GRANULARITY, METHOD = "--recompute-granularity", "--recompute-method"
NUM_LAYERS, MODULES = "--recompute-num-layers", "--recompute-modules"
MIXERS = {kind.mixer_module: symbol for symbol, kind in KINDS.items() if kind.mixer_module}
RECOMPUTED_IN = {name: symbol for symbol, kind in KINDS.items() for name in kind.recompute_modules}
"""Layers (symbols of the pattern) that contain each module of --recompute-modules. A norm is part
of all layers.
"""
RECOMPUTED_PARTS = {
    name: parts for kind in KINDS.values() for name, parts in kind.recomputed.items()
}
"""Names of --recompute-modules inside mixers -> the part, and the part that reads its output if the
output alone is recomputed.
"""
LAYER_INPUTS, FINE_GRAINED, OFFLOADED = (
    "--offload-layer-inputs",
    "--fine-grained-activation-offloading",
    "--offload-modules",
)
PARTS = {part.name: part for kind in KINDS.values() for part in kind.parts}
"""Modules whose saved tensors can be offloaded."""
OFFLOADED_IN = {
    name: "".join(symbol for symbol, kind in KINDS.items() if part in kind.parts)
    for name, part in PARTS.items()
}
"""Layers (symbols of the pattern) that contain each of these modules."""


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


def _words(names: Sequence[str]) -> str:
    """Return names as one text: ``a, b and c``."""
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _saving(saves: str) -> list[str]:
    return [name for name, part in PARTS.items() if part.saves == saves]


FULL_RECOMPUTATION = option_given("memory.recompute_granularity", FULL)
OFFLOADS = Condition("nothing is offloaded", lambda run, processes: run.memory.offloads)


class RecomputeOptions(Section):
    """Options of the recomputation in the backward pass."""

    recompute_granularity: str | None = option(
        None,
        "Recompute activations in the backward pass: of whole layers (full), or of the modules "
        "in --recompute-modules (selective). Nothing is recomputed when not given.",
        choices=(FULL, SELECTIVE),
        shorthands={"recompute-activations": SELECTIVE},
    )
    recompute_method: str | None = option(
        None,
        "Layers of full recomputation. uniform: all layers, in groups of --recompute-num-layers "
        "layers; each group saves only its input. block: each of the first "
        "--recompute-num-layers layers by itself.",
        choices=(UNIFORM, BLOCK),
        only_if=FULL_RECOMPUTATION,
        required_with=Related("recompute_granularity", value=FULL),
    )
    recompute_num_layers: int | None = option(
        None,
        "Number of layers in a group (uniform), or number of recomputed layers (block).",
        unit="layers",
        minimum=1,
        only_if=FULL_RECOMPUTATION,
        required_with=Related("recompute_granularity", value=FULL),
    )
    recompute_modules: tuple[str, ...] = option(
        (),
        "Modules of selective recomputation; core_attn when not given. The module core_attn is "
        f"the attention between the projections. The modules {_words([*MIXERS])} are everything "
        "after the norm of these layers. The module layernorm recomputes the outputs of norms, "
        "and moe_act those of the experts' activation function.",
        choices=(*RECOMPUTED_IN, LAYER_NORM),
        not_built={
            "mla_up_proj": "leave it out: latent attention is not supported",
            "shared_experts": "give moe, which also recomputes shared experts",
        },
        only_if=option_given("memory.recompute_granularity", SELECTIVE),
    )


class MemoryConfig(RecomputeOptions, title="memory", group="offload"):
    """Options of the activations between the forward and the backward pass: recompute or offload
    them.
    """

    offload_layer_inputs: bool = option(
        False,
        "Offload the inputs of recomputed layers to pinned host memory. An input is copied back "
        "while the following layer runs its backward pass.",
        needs=Related(
            "recompute_granularity",
            "only this saves the tensors to offload",
            cure=f"give {GRANULARITY} {FULL}, or leave it out; {FINE_GRAINED} works without recomputation",
            value=FULL,
        ),
    )
    fine_grained_activation_offloading: bool = option(
        False,
        "Offload the tensors that the modules in --offload-modules save for the backward pass "
        "to pinned host memory.",
    )
    offload_modules: tuple[str, ...] = option(
        (),
        "Modules whose saved tensors are offloaded. A norm or projection offloads its input: "
        f"{', '.join(_saving(INPUT))}. An activation function offloads its input too: "
        f"{', '.join(_saving(ACTIVATION))}. The modules {_words(_saving(EVERYTHING))} offload all "
        "tensors saved between the projections.",
        choices=tuple(OFFLOADED_IN),
        only_if=option_given("memory.fine_grained_activation_offloading"),
        required_with=Related("fine_grained_activation_offloading"),
    )
    min_offloaded_tensor_size: int = option(
        2**20,
        "Minimum size of an offloaded tensor; smaller tensors stay on the device.",
        unit="elements",
        minimum=1,
        only_if=OFFLOADS,
    )
    offload_buffers: int = option(
        2,
        "Maximum number of device buffers that receive offloaded tensors. The first step uses 1 "
        "buffer and more are added while memory allows. With 1 buffer no tensor is prefetched.",
        minimum=1,
        maximum=64,
        only_if=OFFLOADS,
    )
    offload_headroom_mib: int = option(
        512,
        "Device memory that must stay free when another buffer is added.",
        unit="MiB",
        minimum=0,
        only_if=OFFLOADS,
    )

    @property
    def recomputes_layers(self) -> bool:
        return self.recompute_granularity == FULL

    @property
    def layers_per_unit(self) -> int:
        """Number of layers that are recomputed together; 1 if layers are recomputed singly or not
        at all.
        """
        grouped = self.recomputes_layers and self.recompute_method == UNIFORM
        return (self.recompute_num_layers or 1) if grouped else 1

    @property
    def modules(self) -> tuple[str, ...]:
        """Modules that are recomputed, each once."""
        if self.recompute_granularity != SELECTIVE:
            return ()
        return tuple(dict.fromkeys(self.recompute_modules)) or (CORE_ATTENTION,)

    def recomputes_layer(self, number: int) -> bool:
        """Return whether the whole layer ``number``, counted from 0, is recomputed."""
        if not self.recomputes_layers:
            return False
        return self.recompute_method == UNIFORM or number < (self.recompute_num_layers or 0)

    @property
    def offloads(self) -> bool:
        """Return whether any tensor is offloaded to host memory."""
        return self.offload_layer_inputs or self.fine_grained_activation_offloading

    @property
    def offload_flag(self) -> str:
        """Flag that requests the offload."""
        return LAYER_INPUTS if self.offload_layer_inputs else FINE_GRAINED

    @property
    def changes_layers(self) -> bool:
        """True if any layer recomputes or offloads something."""
        return self.offloads or self.recompute_granularity is not None

    @property
    def offloaded_modules(self) -> tuple[str, ...]:
        """Modules whose saved tensors are offloaded, each once."""
        return (
            tuple(dict.fromkeys(self.offload_modules))
            if self.fine_grained_activation_offloading
            else ()
        )

    def offloads_input(self, number: int) -> bool:
        """Return whether the saved input of layer ``number``, or of the group that starts with it,
        is offloaded. Layers are counted from 0.
        """
        return (
            self.offload_layer_inputs
            and self.recomputes_layer(number)
            and number % self.layers_per_unit == 0
        )

    def offloads_module(self, module: str, number: int) -> bool:
        """Return whether the tensors that a module of layer ``number`` saves are offloaded. A
        recomputed layer saves none.
        """
        return module in self.offloaded_modules and not self.recomputes_layer(number)


def recompute_rules(run: RunConfig, sound: Sound) -> Problems:
    """Yield problems between recomputation and other sections."""
    memory = run.memory
    if not sound("memory.recompute_granularity") or memory.recompute_granularity is None:
        return
    if sound(
        "model.hybrid_layer_pattern", "memory.recompute_num_layers", "memory.recompute_modules"
    ):
        yield from _pattern_rules(memory, "".join(run.model.layer_types))
    if sound(
        "cuda_graph.cuda_graph_impl",
        "cuda_graph.cuda_graph_modules",
        "memory.recompute_method",
        "memory.recompute_num_layers",
        "memory.recompute_modules",
    ):
        yield from _graph_rules(memory, run.cuda_graph)


def _pattern_rules(memory: MemoryConfig, pattern: str) -> Problems:
    count = memory.recompute_num_layers if memory.recomputes_layers else None
    if count is not None and count > len(pattern):
        yield memory.problem(
            "recompute_num_layers",
            f"is more than the number of layers in the pattern {pattern}",
            f"give 1 to {len(pattern)}",
        )
    for module in memory.modules:
        symbol = RECOMPUTED_IN.get(module, "")
        if symbol not in pattern:
            named = module if memory.recompute_modules else ""
            yield Problem(
                MODULES,
                named,
                f"{module} is never recomputed: the pattern {pattern} has no {symbol} "
                f"({KINDS[symbol].name}) layer",
                f"leave {module} out"
                if named
                else f"give other modules with {MODULES} ({_others(pattern)})",
            )


def _others(pattern: str) -> str:
    """Return the modules that the layers of a pattern contain, as one text."""
    return ", ".join(
        module
        for module in (*RECOMPUTED_IN, LAYER_NORM)
        if RECOMPUTED_IN.get(module, "") in pattern
    )


def _graph_rules(memory: MemoryConfig, graphs: CudaGraphConfig) -> Problems:
    if not graphs.enabled or graphs.captures_steps:
        return
    if memory.layers_per_unit > 1:
        yield memory.problem(
            "recompute_num_layers",
            f"forms groups of layers, but --cuda-graph-impl {graphs.cuda_graph_impl} captures "
            "single layers",
            "give 1, or --cuda-graph-impl full_iteration",
        )
    if "moe_router" in graphs.modules and (memory.recomputes_layers or "moe" in memory.modules):
        yield Problem(
            "--cuda-graph-modules",
            "moe_router",
            "is part of a recomputed module, and a graph cannot run twice in one micro-batch",
            "give moe, which captures whole layers, or leave it out",
        )


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


def offload_rules(run: RunConfig, sound: Sound) -> Problems:
    """Yield problems between offload, the pattern and CUDA graphs."""
    memory, graphs = run.memory, run.cuda_graph
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
            yield from _module_rules(module, memory, "".join(run.model.layer_types))


def _module_rules(module: str, memory: MemoryConfig, pattern: str) -> Problems:
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
