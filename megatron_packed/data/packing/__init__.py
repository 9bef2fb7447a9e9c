"""Packing of documents, and the plan of packs for each step, rank and micro-batch."""

from typing import TYPE_CHECKING

from megatron_packed.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from megatron_packed.data.packing.evaluation_plan import EvaluationPlan as EvaluationPlan
    from megatron_packed.data.packing.pack_plan import PackPlan as PackPlan
    from megatron_packed.data.packing.packer import Packer as Packer
    from megatron_packed.data.packing.packing_report import PackingReport as PackingReport
    from megatron_packed.data.packing.pieces import Pieces as Pieces
    from megatron_packed.data.packing.step_cost import StepCosts as StepCosts
    from megatron_packed.data.packing.step_plan import StepPlan as StepPlan
else:
    __all__, __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "evaluation_plan": ["EvaluationPlan"],
            "pack_plan": ["PackPlan"],
            "packer": ["Packer"],
            "packing_report": ["PackingReport"],
            "pieces": ["Pieces"],
            "step_cost": ["StepCosts"],
            "step_plan": ["StepPlan"],
        },
    )
