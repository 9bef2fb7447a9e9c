"""Sentences about a run's data: packing results, and counts of kept and dropped tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from megatron_packed.config.run import RunConfig
from megatron_packed.data.packing.pack_plan import PackPlan
from megatron_packed.data.packing.packing_report import PackingReport
from megatron_packed.inputs.plan_packs import Plans, epochs_sentences
from megatron_packed.packed.capture_sizes import CaptureSizes

if TYPE_CHECKING:
    from megatron_packed.data.packing.evaluation_plan import EvaluationPlan

FEW_TARGETS = 1000
"""Number of targets below which a warning calls the mean loss noisy."""


def spread_sentences(plan: PackPlan) -> list[str]:
    """Return how evenly data-parallel ranks share the work; empty for a single rank."""
    if plan.dp_size == 1:
        return []
    p50, p99 = np.quantile(plan.dp_imbalance(), (0.5, 0.99))
    return [
        f"Packs are distributed over {plan.dp_size} data-parallel ranks by estimated FLOPs. In the first epoch's "
        f"steps, the busiest rank has {p50:.3f} times the mean work (P50), {p99:.3f} times (P99)."
    ]


def epoch_sentence(config: RunConfig, report: PackingReport) -> str:
    """Return the number of steps of an epoch, which helps to choose --train-iters."""
    packs = config.packs_per_step()
    return f"An epoch takes {report.packs / packs:,.1f} steps of {packs} {'pack' if packs == 1 else 'packs'}."


def blend_sentences(config: RunConfig, plan: PackPlan) -> list[str]:
    """Return the share of each data path in an epoch; empty without blend weights."""
    return [] if plan.blend is None else plan.blend.sentences(config.data.train_paths)


def packing_sentences(config: RunConfig, plans: Plans) -> list[str]:
    """Return all sentences about packing, tokens and targets of the run's data."""
    return [
        *blend_sentences(config, plans.train),
        *plans.packing.sentences(),
        epoch_sentence(config, plans.packing),
        *epochs_sentences(config, plans.train),
        *(
            line
            for name, plan in plans.evaluations.items()
            for line in evaluation_sentences(name, plan)
        ),
    ]


def evaluation_sentences(name: str, plan: EvaluationPlan) -> list[str]:
    """Return counts of kept and dropped tokens and targets of validation or test data.

    A warning follows if there are fewer than `FEW_TARGETS` targets.
    """
    lines = [f"{name} data: {line}" for line in plan.pieces.sentences()]
    # The loss over few targets varies more than training changes it between two validations.
    if plan.num_targets < FEW_TARGETS:
        assert plan.pieces.targets is not None
        cure = "add documents to it"
        kept_targets = plan.pieces.targets.targets_kept
        if plan.num_targets < kept_targets:  # even all targets of the data may be too few
            cure_clause = "" if kept_targets >= FEW_TARGETS else f", and {cure}"
            cure = f"raise --eval-iters, which stops before the last document{cure_clause}"
        lines.append(
            f"{name} data: {plan.num_targets:,} targets are fewer than {FEW_TARGETS:,}, so the {name} loss is noisy; "
            f"{cure}."
        )
    return lines


def beyond_sentences(
    capture_sizes: CaptureSizes | None, plan: EvaluationPlan, name: str
) -> list[str]:
    """Return how many packs of validation or test data fit no graph; empty if all packs fit."""
    if capture_sizes is None:
        return []
    documents = plan.documents_per_pack
    beyond = int((documents > capture_sizes.largest).sum())
    if not beyond:
        return []
    return [
        f"CUDA graphs: {beyond} of {documents.size} packs of the {name} data hold more than "
        f"{capture_sizes.largest} documents, the largest capacity, and run eagerly."
    ]
