"""Options of CUDA graphs: the modules to capture, the capture sizes, and the handling of a
micro-batch that no graph fits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_packed.config.conditions import option_is_not
from megatron_packed.config.errors import Problem, Problems
from megatron_packed.config.kinds.layer_kind import KINDS
from megatron_packed.config.options import Related, option
from megatron_packed.config.section import Section, Sound, section_fields

if TYPE_CHECKING:
    from megatron_packed.config.run import RunConfig

MODULE_LAYERS = {name: symbol for symbol, kind in KINDS.items() for name in kind.graph_modules}
"""Layers (symbols of the pattern) that contain each module."""

AUTO = "auto"
LOCAL, TRANSFORMER_ENGINE, FULL_ITERATION = "local", "transformer_engine", "full_iteration"


CAPTURES = option_is_not("cuda_graph.cuda_graph_impl", "none")


class CudaGraphConfig(Section, title="cuda_graph"):
    """Options of CUDA graphs. A graph has static shapes: each pack replays the graph with the
    smallest capacity, in documents, that holds the pack.
    """

    cuda_graph_impl: str = option(
        "none",
        "CUDA graph capture: of each layer's forward and backward pass (local, or "
        "transformer_engine on GPUs only), or of whole micro-batches and the optimizer update "
        "(full_iteration). On a CPU, local and full_iteration run eagerly.",
        choices=("none", LOCAL, TRANSFORMER_ENGINE, FULL_ITERATION),
        shorthands={"enable-cuda-graph": LOCAL, "external-cuda-graph": TRANSFORMER_ENGINE},
    )
    cuda_graph_modules: tuple[str, ...] = option(
        (),
        "Modules to capture; full captures whole layers of every kind. moe_router is the part "
        "of an expert layer before the experts; moe_preprocess is another name for it.",
        aliases=("cuda-graph-scope",),
        empty_word="full",
        choices=tuple(MODULE_LAYERS),
        value_aliases={"moe_preprocess": "moe_router"},
        not_built={"full_iteration": "give --cuda-graph-impl full_iteration"},
        only_if=CAPTURES,
        excludes=Related(
            "cuda_graph_impl",
            "modules select layers, and this captures whole steps",
            value=FULL_ITERATION,
        ),
    )
    cuda_graph_max_packed_seqs: tuple[int, ...] = option(
        (),
        "Capacities of the captured graphs, in documents per pack; a pack replays the smallest "
        "graph that holds it, also in validation and test. With auto, they are the smallest set "
        "that covers every pack of the first epoch, of validation and of the test at the least "
        "expected cost. The flag without a value means 50.",
        unit="documents",
        aliases=("thd-max-packed-sequences",),
        empty_word=AUTO,
        bare=(50,),
        minimum=1,
        only_if=CAPTURES,
    )
    cuda_graph_strict: bool = option(
        False,
        "Fail if a micro-batch or module would run eagerly. By default eager runs are counted "
        "and reported.",
        only_if=CAPTURES,
    )
    cuda_graph_audit_interval: int | None = option(
        None,
        "Interval, in iterations, at which the replay of one micro-batch is compared with an "
        "eager run; no comparison when not given.",
        unit="iterations",
        minimum=1,
        only_if=CAPTURES,
    )
    cuda_graph_warmup_steps: int = option(
        3,
        "Number of eager runs of each capture size before its capture. Kernels are tuned during "
        "these runs. With 0, each size is run once, and kernels are tuned there.",
        unit="runs",
        minimum=0,
        only_if=CAPTURES,
    )

    @property
    def enabled(self) -> bool:
        return self.cuda_graph_impl != "none"

    @property
    def modules(self) -> tuple[str, ...]:
        """Modules to capture, each once, in the order of `MODULE_LAYERS`; empty for whole layers of
        every kind.
        """
        return tuple(module for module in MODULE_LAYERS if module in self.cuda_graph_modules)

    @property
    def captures_experts(self) -> bool:
        """Return whether whole expert layers are captured."""
        return self.enabled and (not self.modules or "moe" in self.modules)

    @property
    def capacities(self) -> tuple[int, ...] | None:
        """Given capacities in ascending order, each once; None if the pack plan chooses them."""
        return tuple(sorted(set(self.cuda_graph_max_packed_seqs))) or None

    @property
    def uses_transformer_engine(self) -> bool:
        """Return whether TransformerEngine captures the layers."""
        return self.cuda_graph_impl == TRANSFORMER_ENGINE

    @property
    def captures_steps(self) -> bool:
        """Return whether whole micro-batches and the update are captured, instead of single layers."""
        return self.cuda_graph_impl == FULL_ITERATION

    def eager_reason(self, device_type: str) -> str:
        """Return a sentence that explains why requested graphs are not captured on this kind of
        device; empty if they are captured or not requested.
        """
        if not self.enabled or device_type == "cuda":
            return ""
        return (
            f"--cuda-graph-impl {self.cuda_graph_impl}: CUDA graphs need a GPU, and this run is "
            f"on {device_type}. Every micro-batch runs eagerly, padded for as many documents as "
            "its graph would hold; the results are the same."
        )

    def rules(self, sound: Sound) -> Problems:
        yield from super().rules(sound)
        if sound("cuda_graph_impl") and not self.enabled:
            for field in section_fields(type(self))[1:]:
                value = getattr(self, field.name)
                if sound(field.name) and value != field.default:
                    yield self.problem(
                        field.name,
                        "has no effect with --cuda-graph-impl none",
                        "give --cuda-graph-impl local, or leave it out",
                    )
        if sound("cuda_graph_modules") and {"moe", "moe_router"} <= set(self.cuda_graph_modules):
            yield self.problem(
                "cuda_graph_modules",
                "moe_router is part of moe, and moe captures the whole expert layer",
                "give moe or moe_router",
            )


def graph_rules(run: RunConfig, sound: Sound) -> Problems:
    """Yield problems between CUDA graphs and other sections."""
    graphs, model, packing = run.cuda_graph, run.model, run.packing
    if not sound("cuda_graph.cuda_graph_impl") or not graphs.enabled:
        return
    # `ModelConfig` refuses dropout of attention weights, with or without graphs.
    if sound("model.hidden_dropout") and model.hidden_dropout > 0:
        yield graphs.problem(
            "cuda_graph_impl",
            f"cannot be used with --hidden-dropout {model.hidden_dropout}: dropout inside "
            "captured modules is not supported",
            "leave one of them out",
        )
    if sound("cuda_graph.cuda_graph_modules", "model.hybrid_layer_pattern"):
        for module in graphs.modules:
            symbol = MODULE_LAYERS[module]
            if symbol not in model.hybrid_layer_pattern:
                yield Problem(
                    "--cuda-graph-modules",
                    module,
                    f"is never captured: the pattern {model.hybrid_layer_pattern} has no "
                    f"{symbol} ({KINDS[symbol].name}) layer",
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
                f"is more documents than any pack can hold: a pack has {tokens} slots, and a "
                f"document takes at least {least}",
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
            yield packing.problem(
                "max_documents_per_pack",
                f"is more than the largest capacity ({capacities[-1]}), and --cuda-graph-strict "
                "forbids packs that fit no graph",
                f"give at most {capacities[-1]}, or a larger --cuda-graph-max-packed-seqs",
            )
