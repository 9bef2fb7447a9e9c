"""Sentences about the data of a run: how it packs, and what became of every token and target."""

from __future__ import annotations

import numpy as np

from megatron_packed.config.run import RunConfig
from megatron_packed.data.packing.evaluation_plan import EvaluationPlan
from megatron_packed.data.packing.pack_plan import PackPlan
from megatron_packed.data.packing.packing_report import PackingReport
from megatron_packed.packed.capture_sizes import CaptureSizes
from megatron_packed.training.plan_packs import Plans

FEW_TARGETS = 1000
"""A mean loss over fewer targets is said to be noisy."""


def spread_sentences(plan: PackPlan) -> list[str]:
    """Return how even the work of data-parallel ranks is; nothing for a single one."""
    if plan.dp_size == 1:
        return []
    p50, p99 = np.quantile(plan.dp_imbalance(), (0.5, 0.99))
    return [
        f"Packs are spread over {plan.dp_size} data-parallel ranks by estimated FLOPs: the busiest has {p50:.3f} times "
        f"the mean (P50 of the first epoch's steps), {p99:.3f} times (P99)."
    ]


def epoch_sentence(config: RunConfig, report: PackingReport) -> str:
    """Return the steps of an epoch, by which --train-iters is chosen."""
    packs = config.packs_per_step()
    return f"An epoch takes {report.packs / packs:,.1f} steps of {packs} {'pack' if packs == 1 else 'packs'}."


def blend_sentences(config: RunConfig, plan: PackPlan) -> list[str]:
    """Return what an epoch holds of each path; nothing without weights."""
    return [] if plan.blend is None else plan.blend.sentences(config.data.train_paths)


def packing_sentences(config: RunConfig, plans: Plans) -> list[str]:
    """Return how the data packs and what became of every token and target, for people."""
    return [
        *blend_sentences(config, plans.train),
        *plans.packing.sentences(),
        epoch_sentence(config, plans.packing),
        *(
            line
            for name, plan in plans.evaluations.items()
            for line in evaluation_sentences(name, plan)
        ),
    ]


def evaluation_sentences(name: str, plan: PackPlan | EvaluationPlan) -> list[str]:
    """Return what became of the tokens and targets of validation or test data, and whether they are
    few.
    """
    lines = [f"{name} data: {line}" for line in plan.pieces.sentences()]
    # A mean over few targets moves more than what is trained between two validations.
    if isinstance(plan, EvaluationPlan) and plan.num_targets < FEW_TARGETS:
        assert plan.pieces.targets is not None
        cure = "give it more documents"
        kept = plan.pieces.targets.targets_kept
        if plan.num_targets < kept:  # the rest may be too few as well
            more = "" if kept >= FEW_TARGETS else f", and {cure}"
            cure = f"raise --eval-iters, which ends it before its last document{more}"
        lines.append(
            f"{name} data: {plan.num_targets:,} targets are fewer than {FEW_TARGETS:,}, so the {name} loss is noisy; "
            f"{cure}."
        )
    return lines


def beyond_sentences(
    capture_sizes: CaptureSizes | None, plan: EvaluationPlan, name: str
) -> list[str]:
    if capture_sizes is None:
        return []
    documents = plan.documents_per_pack
    beyond = int((documents > capture_sizes.largest).sum())
    if not beyond:
        return []
    return [
        f"CUDA graphs: {beyond} of {documents.size} packs of the {name} data hold more than the "
        f"{capture_sizes.largest} documents of the largest capacity, and run eagerly."
    ]
