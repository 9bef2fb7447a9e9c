"""CUDA graphs of modules or whole steps, captured once and replayed over every pack that fits."""

from typing import TYPE_CHECKING

from megatron_packed.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from megatron_packed.cuda_graphs.audit import AuditMismatchError as AuditMismatchError
    from megatron_packed.cuda_graphs.fallback_reasons import GraphCounters as GraphCounters
    from megatron_packed.cuda_graphs.fallback_reasons import (
        GraphFallbackError as GraphFallbackError,
    )
    from megatron_packed.cuda_graphs.layer_graphs import LayerGraphs as LayerGraphs
    from megatron_packed.cuda_graphs.replaced_forward import KeywordLayer as KeywordLayer
    from megatron_packed.cuda_graphs.step_graphs import StepGraphs as StepGraphs
    from megatron_packed.cuda_graphs.whole_step_graphs import (
        FullIterationGraphs as FullIterationGraphs,
    )
else:
    __all__, __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "audit": ["AuditMismatchError"],
            "fallback_reasons": ["GraphCounters", "GraphFallbackError"],
            "replaced_forward": ["KeywordLayer"],
            "step_graphs": ["StepGraphs"],
            "whole_step_graphs": ["FullIterationGraphs"],
            "layer_graphs": ["LayerGraphs"],
        },
    )
