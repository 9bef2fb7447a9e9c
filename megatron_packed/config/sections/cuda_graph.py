"""CUDA graphs: what is captured, for which static sizes, and what happens to a micro-batch that
fits none.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_packed.config.errors import Problem
from megatron_packed.config.layer_pattern import ATTENTION, LAYER_NAMES, MAMBA, MLP, MOE
from megatron_packed.config.options import option
from megatron_packed.config.section import Section, Sound, section_fields
from megatron_packed.config.sections.model import ModelConfig
from megatron_packed.config.sections.packing import PackingConfig

if TYPE_CHECKING:
    from megatron_packed.config.sections.parallel import ParallelConfig

MODULE_LAYERS = {"attn": ATTENTION, "mamba": MAMBA, "mlp": MLP, "moe": MOE, "moe_router": MOE}
"""The layers (symbols of the pattern) that each module is a part of."""

AUTO = "auto"
LOCAL, TRANSFORMER_ENGINE, FULL_ITERATION = "local", "transformer_engine", "full_iteration"


@dataclass(frozen=True, kw_only=True)
class CudaGraphConfig(Section, title="cuda_graph"):
    """CUDA graphs. A graph has static shapes, so a pack gets the smallest capacity, in documents,
    that holds it.
    """

    cuda_graph_impl: str = option(
        "none",
        "CUDA graphs: none; local, which captures forward and backward layer by layer; transformer_engine, by "
        "which TransformerEngine's make_graphed_callables does so, on GPUs; full_iteration, which captures whole "
        "micro-batches and the update. On a CPU local and full_iteration run eagerly.",
        choices=("none", LOCAL, TRANSFORMER_ENGINE, FULL_ITERATION),
        shorthands={"enable-cuda-graph": LOCAL, "external-cuda-graph": TRANSFORMER_ENGINE},
    )
    cuda_graph_modules: tuple[str, ...] = option(
        (),
        "What is captured; full: whole layers of every kind. moe_router is the part of an expert layer in front of "
        "the experts, and moe_preprocess belongs to it.",
        aliases=("cuda-graph-scope",),
        empty_word="full",
        choices=tuple(MODULE_LAYERS),
        value_aliases={"moe_preprocess": "moe_router"},
        not_built={"full_iteration": "give --cuda-graph-impl full_iteration"},
    )
    cuda_graph_max_packed_seqs: tuple[int, ...] = option(
        (),
        "Capacities that graphs are captured for; a pack replays the smallest that holds it. auto: the fewest that "
        "cover every pack of the first epoch and of validation at least expected cost. 50 when given alone.",
        unit="documents",
        aliases=("thd-max-packed-sequences",),
        empty_word=AUTO,
        bare=(50,),
        minimum=1,
    )
    cuda_graph_strict: bool = option(
        False,
        "A micro-batch or module that would run eagerly is an error; otherwise it is counted.",
    )
    cuda_graph_audit_interval: int | None = option(
        None,
        "Compare replay with an eager run of one micro-batch every so many iterations; never when not given.",
        unit="iterations",
        minimum=1,
    )
    cuda_graph_warmup_steps: int = option(
        3,
        "Eager runs of each size before it is captured, in which kernels are tuned.",
        unit="runs",
        minimum=1,
    )

    @property
    def enabled(self) -> bool:
        """Return whether graphs were asked for."""
        return self.cuda_graph_impl != "none"

    @property
    def modules(self) -> tuple[str, ...]:
        """The modules to capture, each once, in the order of `MODULE_LAYERS`; empty for whole
        layers of every kind.
        """
        return tuple(module for module in MODULE_LAYERS if module in self.cuda_graph_modules)

    @property
    def captures_experts(self) -> bool:
        """Return whether whole expert layers are captured."""
        return self.enabled and (not self.modules or "moe" in self.modules)

    @property
    def capacities(self) -> tuple[int, ...] | None:
        """The capacities that were given, smallest first, each once; None when the pack plan
        decides.
        """
        return tuple(sorted(set(self.cuda_graph_max_packed_seqs))) or None

    @property
    def uses_transformer_engine(self) -> bool:
        """Return whether TransformerEngine captures the layers."""
        return self.cuda_graph_impl == TRANSFORMER_ENGINE

    @property
    def captures_steps(self) -> bool:
        """Return whether whole parts of a step are captured, the update included, and not layers."""
        return self.cuda_graph_impl == FULL_ITERATION

    def eager_reason(self, device_type: str) -> str:
        """One sentence why nothing is captured on this kind of device although it was asked for;
        empty otherwise.
        """
        if not self.enabled or device_type == "cuda":
            return ""
        return (
            f"--cuda-graph-impl {self.cuda_graph_impl}: CUDA graphs need a GPU, and this run is on {device_type}; "
            "every micro-batch runs eagerly, with room for as many documents as its graph would have, and the same "
            "result."
        )

    def rules(self, sound: Sound) -> Iterator[Problem]:
        if sound("cuda_graph_impl") and not self.enabled:
            for described in section_fields(type(self))[1:]:
                value = getattr(self, described.name)
                if sound(described.name) and value != described.default:
                    yield Problem(
                        described.flag,
                        _shown(value),
                        "is never used with --cuda-graph-impl none",
                        "give --cuda-graph-impl local, or leave it out",
                    )
        if sound("cuda_graph_modules") and {"moe", "moe_router"} <= set(self.cuda_graph_modules):
            yield Problem(
                "--cuda-graph-modules",
                _shown(self.cuda_graph_modules),
                "moe_router is a part of moe, which is captured whole",
                "give one of the two",
            )
        if (
            sound("cuda_graph_impl", "cuda_graph_modules")
            and self.captures_steps
            and self.cuda_graph_modules
        ):
            yield Problem(
                "--cuda-graph-modules",
                _shown(self.cuda_graph_modules),
                "is a choice of layers, and --cuda-graph-impl full_iteration captures all there is",
                "leave it out, or give --cuda-graph-impl local",
            )


def graph_rules(
    graphs: CudaGraphConfig, model: ModelConfig, packing: PackingConfig, sound: Sound
) -> Iterator[Problem]:
    """Problems between graphs and other sections. ``sound("model.hidden_dropout", ...)`` as for all
    sections.
    """
    if not sound("cuda_graph.cuda_graph_impl") or not graphs.enabled:
        return
    # Dropout of attention weights is refused with graphs and without.
    if sound("model.hidden_dropout") and model.hidden_dropout > 0:
        yield Problem(
            "--cuda-graph-impl",
            graphs.cuda_graph_impl,
            f"cannot be used with --hidden-dropout ({model.hidden_dropout}): dropout inside captured modules "
            "is not built",
            "leave one of them out",
        )
    if sound("cuda_graph.cuda_graph_modules", "model.hybrid_layer_pattern"):
        for module in graphs.modules:
            symbol = MODULE_LAYERS[module]
            if symbol not in model.hybrid_layer_pattern:
                yield Problem(
                    "--cuda-graph-modules",
                    module,
                    f"is never captured: the pattern {model.hybrid_layer_pattern} has no {symbol} "
                    f"({LAYER_NAMES[symbol]}) layer",
                    f"leave {module} out",
                )
    if sound(
        "cuda_graph.cuda_graph_max_packed_seqs",
        "packing.seq_length",
        "packing.micro_batch_size",
        "packing.pad_packed_seq_alignment",
    ):
        tokens, capacities = packing.tokens_per_pack, graphs.capacities
        least = packing.pad_packed_seq_alignment or 1
        if capacities is not None and capacities[-1] > tokens // least:
            yield Problem(
                "--cuda-graph-max-packed-seqs",
                str(capacities[-1]),
                f"is room that no pack can fill: a pack has {tokens} slots, and a document takes {least} "
                "or more",
                f"give at most {tokens // least}",
            )
    if sound("cuda_graph.cuda_graph_max_packed_seqs", "packing.max_documents_per_pack"):
        limit, capacities = packing.max_documents_per_pack, graphs.capacities
        if (
            graphs.cuda_graph_strict
            and limit is not None
            and capacities is not None
            and limit > capacities[-1]
        ):
            yield Problem(
                "--max-documents-per-pack",
                str(limit),
                f"is more than the largest capacity ({capacities[-1]}), and --cuda-graph-strict allows no "
                "pack beyond it",
                f"give at most {capacities[-1]}, or a larger --cuda-graph-max-packed-seqs",
            )


def whole_step_rules(
    graphs: CudaGraphConfig, parallel: ParallelConfig, sound: Sound
) -> Iterator[Problem]:
    """Problems between graphs of whole steps and the layout. ``sound`` as for all sections."""
    if not sound("cuda_graph.cuda_graph_impl") or not graphs.captures_steps:
        return
    impl = "--cuda-graph-impl full_iteration"
    if sound("parallel.overlap_param_gather") and parallel.overlap_param_gather:
        yield Problem(
            "--overlap-param-gather",
            "",
            f"lets weights come back in the next step, and {impl} gathers them "
            "in the graph that ends this one",
            "leave it out, or give --cuda-graph-impl local",
        )


def _shown(value: object) -> str:
    """A value as it was typed; nothing for a switch."""
    if isinstance(value, bool):
        return ""
    return " ".join(str(item) for item in value) if isinstance(value, tuple) else str(value)
