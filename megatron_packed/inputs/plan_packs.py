"""Pack plans of training, validation and test data, capture sizes for their packs, and epochs in steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from megatron_packed.checkpoint.errors import CheckpointMismatchError
from megatron_packed.checkpoint.run_metadata import RunProgress
from megatron_packed.config.errors import ConfigError, Problem
from megatron_packed.config.run import RunConfig
from megatron_packed.config.sections.cuda_graph import AUTO
from megatron_packed.data.documents import Documents, JoinedDocuments
from megatron_packed.data.errors import DataError
from megatron_packed.data.packing.pack_plan import PackPlan
from megatron_packed.data.packing.packer import Packer
from megatron_packed.data.packing.packing_report import PackingReport
from megatron_packed.data.packing.pieces import (
    Pieces,
    TargetCounts,
    cut_documents,
    targets_of_depths,
)
from megatron_packed.data.packing.step_plan import BY_TOKENS, PackCost
from megatron_packed.inputs.open_documents import TEST, RunDocuments
from megatron_packed.models.flops import FlopCounter
from megatron_packed.packed.capture_sizes import CaptureSizes, choose_capacities

if TYPE_CHECKING:
    from megatron_packed.data.packing.evaluation_plan import EvaluationPlan
    from megatron_packed.data.source_blend import SourceBlend

_LOOKED_AT = 4_000_000
"""Largest number of documents that are packed to find the largest remaining pack.

Packing this number takes about ten seconds.
"""


class StoredPacks(Protocol):
    """Packs of the checkpoint from which a run continues; `Resumed` of a run."""

    @property
    def room(self) -> int | str | None:
        """Limit on documents per pack (`Packer.room`); `AUTO`: the largest number in epoch 0."""

    @property
    def progress(self) -> RunProgress: ...

    @property
    def has_new_packs(self) -> bool:
        """True if this run does not continue the packs of the checkpoint."""

    def is_of(self, plan: PackPlan) -> bool:
        """Return True if the checkpoint's position refers to this plan."""


class Plans(NamedTuple):
    """Pack plans of all data of a run."""

    train: PackPlan
    capture_sizes: CaptureSizes | None
    packing: PackingReport
    evaluations: dict[str, EvaluationPlan]
    """``validation`` and ``test`` -> plan, for the data that the run has."""


def with_epochs(
    config: RunConfig, plan: PackPlan, progress: RunProgress | None = None
) -> RunConfig:
    """Return the configuration with the steps and samples of ``--train-epochs``.

    Without ``--train-epochs``, ``config`` is returned. The number of steps is rounded up, so the
    last step may take packs of the next epoch. The length is stored in samples, too: a run that
    resumes with another batch size then ends at the same place of the data.

    Args:
        config: configuration of the run.
        plan: plan of the training data.
        progress: progress with which the run continues; None at step 0. Epochs are those of the
            plan, so steps and samples of earlier phases are added.
    Raises:
        ConfigError: the configuration names another number of steps, or an option does not fit the
            number of steps.
    """
    epochs = config.training.train_epochs
    if epochs is None:
        return config
    steps = -(-plan.packs_of(epochs) // plan.packs_per_step)
    batch = config.packing.global_batch_size
    earlier_samples = 0 if progress is None else progress.plan_samples
    samples = earlier_samples + steps * batch
    if progress is not None and earlier_samples:
        steps += (earlier_samples - progress.samples_ahead(config.packing)) // batch
    # The rules between options expect the steps of a run in which all batches had this size.
    nominal = samples // batch
    if config.training.train_iters not in (None, steps, nominal):
        rule = f"gives {steps} steps with this data, but --train-iters is {config.training.train_iters}"
        cure = "leave one of the two flags out"
        raise ConfigError([Problem("--train-epochs", f"{epochs:g}", rule, cure)])
    training = replace(config.training, train_iters=nominal, train_samples=samples)
    return replace(config, training=training)


def epochs_sentences(config: RunConfig, plan: PackPlan) -> list[str]:
    """Return one line with the number of steps of ``--train-epochs``; empty without the flag."""
    epochs = config.training.train_epochs
    if epochs is None:
        return []
    packs = plan.packs_of(epochs)
    steps = -(-packs // plan.packs_per_step)
    further_packs = steps * plan.packs_per_step - packs
    ends = (
        f" The last step also takes {further_packs} of the next {_packs(further_packs)}."
        if further_packs
        else ""
    )
    blend = (
        " An epoch of the blend has as many tokens as its data sets together."
        if plan.blend is not None
        else ""
    )
    return [
        f"--train-epochs {epochs:g} is {steps:,} steps: {packs:,} {_packs(packs)}.{ends}{blend}"
    ]


def _packs(number: int) -> str:
    return "pack" if number == 1 else "packs"


def pack_cost(config: RunConfig, vocab_size: int) -> PackCost:
    """Return the cost of a pack for this model, in FLOPs of the forward pass."""
    counter = FlopCounter(config.model, vocab_size)
    longest = config.packing.max_document_length
    per_token, per_squared_length = counter.linear_and_quadratic(longest)
    return PackCost(per_token=per_token, per_squared_length=per_squared_length)


def plan_data(
    config: RunConfig,
    documents: RunDocuments,
    dp_size: int = 1,
    cost: PackCost = BY_TOKENS,
    *,
    resumed: StoredPacks | None = None,
    show_progress: bool = False,
) -> Plans:
    """Plan the packs of training, validation and test data.

    Args:
        config: configuration of the run.
        documents: the opened data.
        dp_size: number of data-parallel ranks.
        cost: cost of a pack, by which packs are distributed over ranks.
        resumed: packs of the checkpoint from which the run continues.
        show_progress: print a progress bar.
    Raises:
        DataError: the options do not allow to pack the documents, or no target is left.
    """
    evaluations = {
        name: plan_evaluation(config, dataset, dp_size, cost, name)
        for name, dataset in documents.evaluated.items()
    }
    training = plan_training(
        config,
        documents.train,
        dp_size,
        list(evaluations.values()),
        cost,
        resumed=resumed,
        show_progress=show_progress,
    )
    return Plans(*training, evaluations)


def plan_training(
    config: RunConfig,
    dataset: Documents,
    dp_size: int = 1,
    evaluations: Sequence[EvaluationPlan] = (),
    cost: PackCost = BY_TOKENS,
    *,
    resumed: StoredPacks | None = None,
    show_progress: bool = False,
) -> tuple[PackPlan, CaptureSizes | None, PackingReport]:
    """Return the endless plan of the training data, its capture sizes, and a report of epoch 0.

    With graphs, the balanced packer limits the documents of a pack. If capacities are given, the
    limit is the largest capacity. Otherwise epoch 0 is packed without a limit, and the limit of
    later epochs is the largest number of documents in a pack of epoch 0. Capacities are then chosen
    from the packs of epoch 0 and of ``evaluations``. So the plan depends on the training data and
    the options, but not on validation and test data.

    A resumed run keeps the packs of its checkpoint, whether or not it uses graphs. If no capacities
    are given, they are chosen from the packs to come. A new phase keeps its packs only if its data
    and options make the same.

    For the arguments see `plan_data`; ``evaluations`` are the plans of validation and test data.

    Raises:
        DataError: the options do not allow to pack the documents.
        CheckpointMismatchError: packs of the checkpoint exceed the given capacities.
    """
    pieces, targets = _pieces(config, dataset, "training")
    plan_with = partial(
        PackPlan,
        pieces,
        targets,
        packs_per_step=config.packs_per_step(),
        dp_size=dp_size,
        seed=config.training.seed,
        cost=cost,
        blend=_blend(config, dataset, pieces),
        ramp=config.packing.batch_ramp,
        depth_targets=targets_of_depths(dataset, pieces, targets, config.model.mtp_depths),
        show_progress=show_progress,
    )
    room = config.room if resumed is None else resumed.room
    plan = plan_with(packer=(packer := _packer(config, room)))
    if resumed is not None and resumed.has_new_packs and not resumed.is_of(plan):
        room = config.room
        plan = plan_with(packer=(packer := _packer(config, room)))
    # Without given capacities, the fullest pack of epoch 0 sets the limit of later epochs.
    first = plan.epoch(0)
    if room == AUTO:
        plan = plan.keeping_to(int(first.documents_per_pack.max()))
    if resumed is not None and resumed.is_of(plan) and packer.method == "balanced":
        config = with_epochs(config, plan, resumed.progress)
    else:
        resumed = None
    capture_sizes = _capture_sizes(config, plan, first.documents_per_pack, evaluations, resumed)
    report = PackingReport.from_packs(
        pieces, first, packer, capture_sizes=capture_sizes, blended=plan.blend is not None
    )
    return plan, capture_sizes, report


def _capture_sizes(
    config: RunConfig,
    plan: PackPlan,
    documents: NDArray[np.int64],
    evaluations: Sequence[EvaluationPlan],
    resumed: StoredPacks | None,
) -> CaptureSizes | None:
    """Return the capture sizes of CUDA graphs; None without graphs.

    Args:
        documents: number of documents in each pack of epoch 0.
        resumed: the checkpoint whose remaining packs must fit; None for a run with a new plan.
    """
    if not config.cuda_graph.enabled:
        return None
    capacities = config.cuda_graph.capacities
    if resumed is not None:
        documents = np.concatenate(
            [documents, *_packs_to_come(config, plan, int(documents.max()), resumed.progress)]
        )
        check_capacities(config, int(documents.max()))
    # Packs of validation and test data are replayed, too. They may change the chosen capacities, but
    # not the packs of training.
    if capacities is None:
        evaluated = (evaluation.documents_per_pack for evaluation in evaluations)
        capacities = choose_capacities(np.concatenate([documents, *evaluated]))
    return CaptureSizes.from_capacities(capacities, config.packing.tokens_per_pack)


def _packs_to_come(
    config: RunConfig, plan: PackPlan, in_first: int, done: RunProgress
) -> Iterator[NDArray[np.int64]]:
    """Yield documents per pack of each remaining epoch, if packs may exceed the capacities.

    At most about `_LOOKED_AT` documents are packed. Later packs that exceed the capacities run
    eagerly and are counted.

    Args:
        config: configuration of the run.
        plan: plan of the training data.
        in_first: most documents of a pack of epoch 0.
        done: progress of the checkpoint from which the run continues.
    """
    # A resumed run must not change its packs, and a remaining epoch may have a pack with more
    # documents than epoch 0.
    largest = (config.cuda_graph.capacities or (in_first,))[-1]
    limits = filter(None, (plan.room, config.packing.max_documents_per_pack))
    steps = config.last_iteration(done.samples_ahead(config.packing)) - done.iteration
    # If the packs have a limit within the largest capacity, all of them fit, and no epoch needs
    # to be packed.
    if min(limits, default=largest + 1) <= largest or steps <= 0:
        return
    looked_at, first = 0, done.consumed_packs - done.plan_packs
    for packs in plan.epochs_of(first, first + steps * plan.packs_per_step):
        yield packs.documents_per_pack
        looked_at += packs.order.size
        if looked_at > _LOOKED_AT:
            return


def plan_evaluation(
    config: RunConfig,
    dataset: Documents,
    dp_size: int = 1,
    cost: PackCost = BY_TOKENS,
    name: str = "validation",
) -> EvaluationPlan:
    """Return the finite plan of validation or test data; ``name`` is used in messages.

    Raises:
        DataError: the options do not allow to pack the documents, or no target is left.
    """
    from megatron_packed.data.packing.evaluation_plan import EvaluationPlan

    pieces, targets = _pieces(config, dataset, name)
    all_data = config.training.full_validation and name != TEST
    plan = EvaluationPlan(
        pieces,
        targets,
        packer=_packer(config, config.room),
        packs_per_step=config.packs_per_step(),
        dp_size=dp_size,
        seed=config.training.seed,
        cost=cost,
        blend=None if all_data else _blend(config, dataset, pieces),
        max_steps=None if all_data else config.training.eval_iters,
    )
    if plan.num_steps and not plan.num_targets:
        raise DataError(
            f"the first {plan.num_steps} steps of the {name} data hold no target; raise --eval-iters."
        )
    return plan


def _packer(config: RunConfig, room: int | str | None) -> Packer:
    packer = Packer.from_config(config.packing, config.document_alignment)
    return packer.keeping_to(room) if isinstance(room, int) else packer


def _pieces(config: RunConfig, dataset: Documents, name: str) -> tuple[Pieces, NDArray[np.int64]]:
    """Return the pieces of documents that packs consist of, and the targets of each piece."""
    policy, longest = config.packing.overlong_policy, config.packing.max_document_length
    # A piece without a target costs time, and the model learns nothing from it.
    wanted = config.drops_pieces_without_targets
    pieces, targets = cut_documents(dataset, longest, policy, only_with_targets=wanted)
    counts = pieces.counts
    if counts.documents_dropped == counts.documents_in:
        raise DataError(
            f"all {counts.documents_in} documents of the {name} data are longer than --max-document-length "
            f"({longest}) and were dropped (--overlong-policy {policy}); raise --max-document-length, or choose "
            "another policy."
        )
    assert pieces.targets is not None
    if not pieces.targets.targets_kept:
        raise DataError(
            f"the {name} data has no target left: "
            f"{pieces.targets.sentence().rstrip('.')} (--max-document-length {longest}, --overlong-policy {policy}); "
            f"{_cure(config, pieces.targets)}."
        )
    return pieces, targets


def _cure(config: RunConfig, counts: TargetCounts) -> str:
    if not counts.targets_in:
        return "give documents with answers"
    if config.data.sft and config.packing.overlong_policy != "truncate_prompt":
        return "raise --seq-length, or give --overlong-policy truncate_prompt, which keeps the last answer"
    return "raise --max-document-length"


def _blend(config: RunConfig, dataset: Documents, pieces: Pieces) -> SourceBlend | None:
    """Return the blend of sources in an epoch; None if the data paths have no weights."""
    if not isinstance(dataset, JoinedDocuments) or dataset.weights is None:
        return None
    from megatron_packed.data.source_blend import SourceBlend

    return SourceBlend(
        pieces.length, dataset.range_of(pieces.document), dataset.weights, config.training.seed
    )


def check_capacities(config: RunConfig, most: int) -> None:
    """Check that the given capacities hold the checkpoint's packs, which a resumed run keeps.

    Args:
        config: configuration of the run.
        most: most documents in a pack.
    Raises:
        CheckpointMismatchError: a pack has more documents than the largest capacity.
    """
    capacities = config.cuda_graph.capacities
    if capacities is not None and most > capacities[-1]:
        numbers = " ".join(map(str, (*capacities, most)))
        raise CheckpointMismatchError(
            f"give --cuda-graph-max-packed-seqs {numbers} (or auto) to resume with graphs: a resumed run keeps its "
            f"packs, which hold up to {most} documents, and the largest capacity is {capacities[-1]}",
            path=config.checkpoint.load,
        )
