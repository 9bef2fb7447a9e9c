"""Memory: what of the activations the backward pass computes again, or fetches from the host,
instead of finding it kept on the device.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_packed.config.errors import Problem
from megatron_packed.config.layer_pattern import ATTENTION, LAYER_NAMES, MAMBA, MLP, MOE
from megatron_packed.config.options import option
from megatron_packed.config.section import Section, Sound
from megatron_packed.config.sections.cuda_graph import LOCAL, CudaGraphConfig
from megatron_packed.config.sections.model import ModelConfig

FULL, SELECTIVE = "full", "selective"
UNIFORM, BLOCK = "uniform", "block"
GRANULARITY, METHOD = "--recompute-granularity", "--recompute-method"
NUM_LAYERS, MODULES = "--recompute-num-layers", "--recompute-modules"
CORE_ATTENTION, LAYER_NORM, EXPERT_ACTIVATION = "core_attn", "layernorm", "moe_act"
MIXERS = {"mamba": MAMBA, "mlp": MLP, "moe": MOE}
RECOMPUTED_IN = {CORE_ATTENTION: ATTENTION, **MIXERS, EXPERT_ACTIVATION: MOE}
"""Module -> the layers (symbols of the pattern) that it is a part of; a norm is a part of all."""
LAYER_INPUTS, FINE_GRAINED, OFFLOADED = (
    "--offload-layer-inputs",
    "--fine-grained-activation-offloading",
    "--offload-modules",
)
OFFLOADED_IN = {
    "attn_norm": ATTENTION,
    "qkv_linear": ATTENTION,
    CORE_ATTENTION: ATTENTION,
    "attn_proj": ATTENTION,
    "mamba_norm": MAMBA,
    "mamba_in_proj": MAMBA,
    "mamba_scan": MAMBA,
    "mamba_out_proj": MAMBA,
    "mlp_norm": MLP + MOE,
    "mlp_fc1": MLP,
    "mlp_act": MLP,
    "mlp_fc2": MLP,
    "expert_fc1": MOE,
    EXPERT_ACTIVATION: MOE,
    "expert_fc2": MOE,
}
"""Module whose saved tensors can be offloaded -> the layers (symbols of the pattern) that it is a
part of.
"""


@dataclass(frozen=True, kw_only=True)
class MemoryConfig(Section, title="memory"):
    """What is kept between the forward and the backward pass."""

    recompute_granularity: str | None = option(
        None,
        "The backward pass computes activations again: full, of whole layers, or selective, of the parts of "
        "--recompute-modules.",
        choices=(FULL, SELECTIVE),
        shorthands={"recompute-activations": SELECTIVE},
    )
    recompute_method: str | None = option(
        None,
        "Of whole layers: uniform, of all layers in groups of --recompute-num-layers, each of which keeps its "
        "input alone; block, of the first --recompute-num-layers layers one by one.",
        choices=(UNIFORM, BLOCK),
    )
    recompute_num_layers: int | None = option(
        None,
        "Size of a group (uniform), or number of layers that are recomputed (block).",
        unit="layers",
        minimum=1,
    )
    recompute_modules: tuple[str, ...] = option(
        (),
        "Parts that are recomputed; core_attn when none is named. core_attn: what lies between the projections of "
        "attention. mamba, mlp, moe: what follows the norm in these layers. layernorm: the outputs of the norms. "
        "moe_act: the outputs of the experts' activation.",
        choices=(*RECOMPUTED_IN, LAYER_NORM),
        not_built={
            "mla_up_proj": "leave it out: there is no latent attention",
            "shared_experts": "give moe, which recomputes the whole of it",
        },
    )

    offload_layer_inputs: bool = option(
        False,
        "The inputs that whole layers are recomputed from wait in the host's pinned memory, and are copied back "
        "during the backward pass of the next layer.",
        group="offload",
    )
    fine_grained_activation_offloading: bool = option(
        False,
        "So does what the parts of --offload-modules save for their backward pass.",
        group="offload",
    )
    offload_modules: tuple[str, ...] = option(
        (),
        "The parts. A norm or projection (attn_norm, qkv_linear, attn_proj, mamba_norm, mamba_in_proj, "
        "mamba_out_proj, mlp_norm, mlp_fc1, mlp_fc2, expert_fc1, expert_fc2): its input. mlp_act, moe_act: the input "
        "of the activation of an MLP, or of experts. core_attn, mamba_scan: what is saved between the projections.",
        choices=tuple(OFFLOADED_IN),
        group="offload",
    )
    min_offloaded_tensor_size: int = option(
        2**20, "Smaller tensors stay on the device.", unit="elements", minimum=1, group="offload"
    )
    offload_buffers: int = option(
        2,
        "Device buffers to copy back into: 1 in the first step, as many as this where memory allows. With 1 nothing "
        "is copied ahead of its use.",
        minimum=1,
        maximum=64,
        group="offload",
    )
    offload_headroom_mib: int = option(
        512,
        "Device memory that has to stay free beside another buffer.",
        unit="MiB",
        minimum=0,
        group="offload",
    )

    @property
    def recomputes_layers(self) -> bool:
        """Return whether whole layers are recomputed."""
        return self.recompute_granularity == FULL

    @property
    def layers_per_unit(self) -> int:
        """Layers that are recomputed together; 1 where none are, or each by itself."""
        grouped = self.recomputes_layers and self.recompute_method == UNIFORM
        return (self.recompute_num_layers or 1) if grouped else 1

    @property
    def modules(self) -> tuple[str, ...]:
        """The parts that are recomputed, each once."""
        if self.recompute_granularity != SELECTIVE:
            return ()
        return tuple(dict.fromkeys(self.recompute_modules)) or (CORE_ATTENTION,)

    def recomputes_layer(self, number: int) -> bool:
        """Return whether layer ``number``, from 0, is recomputed whole."""
        if not self.recomputes_layers:
            return False
        return self.recompute_method == UNIFORM or number < (self.recompute_num_layers or 0)

    @property
    def offloads(self) -> bool:
        """Return whether anything is to wait in the host's memory."""
        return self.offload_layer_inputs or self.fine_grained_activation_offloading

    @property
    def offloaded_modules(self) -> tuple[str, ...]:
        """The parts whose saved tensors are offloaded, each once."""
        return (
            tuple(dict.fromkeys(self.offload_modules))
            if self.fine_grained_activation_offloading
            else ()
        )

    def offloads_input(self, number: int) -> bool:
        """Return whether the saved input of layer ``number``, from 0, or of the group that it begins, is
        offloaded.
        """
        return (
            self.offload_layer_inputs
            and self.recomputes_layer(number)
            and number % self.layers_per_unit == 0
        )

    def offloads_module(self, module: str, number: int) -> bool:
        """Return whether what a part of layer ``number`` saves is offloaded; what is recomputed saves
        nothing.
        """
        return module in self.offloaded_modules and not self.recomputes_layer(number)

    def rules(self, sound: Sound) -> Iterator[Problem]:
        yield from self._recompute_rules(sound)
        yield from self._offload_rules(sound)

    def _recompute_rules(self, sound: Sound) -> Iterator[Problem]:
        if not sound("recompute_granularity") or not self.recomputes_layers:
            return
        of_layers = {
            METHOD: ("recompute_method", f"{UNIFORM}|{BLOCK}"),
            NUM_LAYERS: ("recompute_num_layers", "N"),
        }
        for flag, (name, example) in of_layers.items():
            if sound(name) and getattr(self, name) is None:
                yield Problem(
                    flag, "", f"is required with {GRANULARITY} {FULL}", f"give {flag} {example}"
                )

    def _offload_rules(self, sound: Sound) -> Iterator[Problem]:
        no_layers = (
            sound("offload_layer_inputs", "recompute_granularity") and not self.recomputes_layers
        )
        if no_layers and self.offload_layer_inputs:
            yield Problem(
                LAYER_INPUTS,
                "",
                f"moves what {GRANULARITY} {FULL} keeps",
                f"give {GRANULARITY} {FULL}, or leave it out; {FINE_GRAINED} is without recomputation",
            )
        if not sound("fine_grained_activation_offloading", "offload_modules"):
            return
        if self.fine_grained_activation_offloading and not self.offload_modules:
            yield Problem(
                OFFLOADED,
                "",
                f"is required with {FINE_GRAINED}",
                f"give {OFFLOADED} NAME [NAME ...]",
            )


def recompute_rules(
    memory: MemoryConfig, model: ModelConfig, graphs: CudaGraphConfig, sound: Sound
) -> Iterator[Problem]:
    """Problems between recomputation and other sections. ``sound("model.hidden_dropout", ...)`` as
    for all sections.
    """
    if not sound("memory.recompute_granularity") or memory.recompute_granularity is None:
        return
    if sound(
        "model.hybrid_layer_pattern", "memory.recompute_num_layers", "memory.recompute_modules"
    ):
        yield from _pattern_rules(memory, model.hybrid_layer_pattern)
    if sound(
        "cuda_graph.cuda_graph_impl",
        "cuda_graph.cuda_graph_modules",
        "memory.recompute_method",
        "memory.recompute_num_layers",
        "memory.recompute_modules",
    ):
        yield from _graph_rules(memory, graphs)


def _pattern_rules(memory: MemoryConfig, pattern: str) -> Iterator[Problem]:
    count = memory.recompute_num_layers if memory.recomputes_layers else None
    if count is not None and count > len(pattern):
        yield Problem(
            NUM_LAYERS,
            str(count),
            f"is more than the pattern {pattern} has layers",
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
                f"({LAYER_NAMES[symbol]}) layer",
                f"leave {module} out"
                if named
                else f"name others by {MODULES} ({_others(pattern)})",
            )


def _others(pattern: str) -> str:
    """The modules that layers of the pattern have."""
    return ", ".join(
        module
        for module in (*RECOMPUTED_IN, LAYER_NORM)
        if RECOMPUTED_IN.get(module, "") in pattern
    )


def _graph_rules(memory: MemoryConfig, graphs: CudaGraphConfig) -> Iterator[Problem]:
    if graphs.uses_transformer_engine:
        yield Problem(
            "--cuda-graph-impl",
            graphs.cuda_graph_impl,
            f"cannot be used with {GRANULARITY} {memory.recompute_granularity}: recomputation inside graphs "
            "that TransformerEngine captures is not built",
            f"give --cuda-graph-impl {LOCAL}",
        )
    if graphs.cuda_graph_impl != LOCAL:
        return
    if memory.layers_per_unit > 1:
        yield Problem(
            NUM_LAYERS,
            str(memory.recompute_num_layers),
            f"makes groups of layers, and --cuda-graph-impl {LOCAL} captures layer by layer",
            "give 1, or --cuda-graph-impl full_iteration",
        )
    if "moe_router" in graphs.modules and (memory.recomputes_layers or "moe" in memory.modules):
        yield Problem(
            "--cuda-graph-modules",
            "moe_router",
            "is a part of what is recomputed, and a graph runs once in a micro-batch",
            "give moe, which captures whole layers, or leave it out",
        )
