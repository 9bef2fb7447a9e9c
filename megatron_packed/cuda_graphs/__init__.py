"""CUDA graphs of modules or whole steps, captured once and replayed over every pack that fits."""

from typing import TYPE_CHECKING

from megatron_packed.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from megatron_packed.cuda_graphs.audit import AuditMismatchError as AuditMismatchError
    from megatron_packed.cuda_graphs.full_iteration import (
        FullIterationGraphs as FullIterationGraphs,
    )
    from megatron_packed.cuda_graphs.graphed_module import KeywordLayer as KeywordLayer
    from megatron_packed.cuda_graphs.layer_graphs import LayerGraphs as LayerGraphs
    from megatron_packed.cuda_graphs.step_graphs import GraphCounters as GraphCounters
    from megatron_packed.cuda_graphs.step_graphs import GraphFallbackError as GraphFallbackError
    from megatron_packed.cuda_graphs.step_graphs import StepGraphs as StepGraphs
else:
    __all__, __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "audit": ["AuditMismatchError"],
            "graphed_module": ["KeywordLayer"],
            "step_graphs": ["GraphCounters", "GraphFallbackError", "StepGraphs"],
            "full_iteration": ["FullIterationGraphs"],
            "layer_graphs": ["LayerGraphs"],
        },
    )
