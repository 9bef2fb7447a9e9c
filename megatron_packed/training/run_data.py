"""A run's data: tokenizer, tokenised documents, pack plans and loaders, with a report of what
became of every token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_packed.config.run import RunConfig
from megatron_packed.config.sections.cuda_graph import AUTO
from megatron_packed.config.serialise import to_dict
from megatron_packed.cuda_graphs.step_graphs import GraphFallbackError
from megatron_packed.data.documents import Documents, JoinedDocuments
from megatron_packed.data.errors import DataError
from megatron_packed.data.loader import Loader
from megatron_packed.data.packing.evaluation_plan import EvaluationPlan
from megatron_packed.data.packing.pack_plan import PackPlan
from megatron_packed.data.packing.packer import Packer
from megatron_packed.data.packing.packing_report import PackingReport
from megatron_packed.data.packing.pieces import Pieces, TargetCounts
from megatron_packed.data.packing.rank_balance import BY_TOKENS, PackCost
from megatron_packed.data.packing.step_plan import StepPlan
from megatron_packed.data.packing.token_accounting import cut_documents
from megatron_packed.data.source_blend import SourceBlend
from megatron_packed.data.tokenizers.base import Tokenizer, vocabulary
from megatron_packed.distributed.collectives import all_gather_json
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.models.flops import FlopCounter
from megatron_packed.packed.capture_sizes import CaptureSizes, choose_capacities
from megatron_packed.training.open_documents import RunDocuments, build_tokenizer, open_documents
from megatron_packed.training.resume import Resumed, check_capacities, room_of

FEW_TARGETS = 1000
"""A mean loss over fewer targets is said to be noisy."""


@dataclass(frozen=True, kw_only=True)
class Stream:
    """Documents in the order of a plan."""

    dataset: Documents
    plan: PackPlan | EvaluationPlan
    loader: Loader

    def lengths(self, step: StepPlan) -> NDArray[np.int64]:
        """Tokens of every document piece of a step, over all ranks."""
        numbers = [numbers for rank in step.packs for numbers in rank]
        return self.plan.pieces.length[np.concatenate(numbers)]


@dataclass(frozen=True, kw_only=True)
class RunData:
    """Data that a run trains, validates and tests on."""

    tokenizer: Tokenizer
    vocab_size: int
    train: Stream
    valid: Stream | None
    test: Stream | None
    packing: PackingReport
    """Packs of the first epoch of the training data, in numbers."""
    capture_sizes: CaptureSizes | None
    """Sizes that CUDA graphs are captured for, the same on all ranks; None without graphs."""

    @property
    def accounts(self) -> dict[str, dict[str, int]]:
        """Accounts of tokens and targets, for training, validation and test data."""
        streams = {"training": self.train, "validation": self.valid, "test": self.test}
        return {
            name: stream.plan.pieces.as_dict()
            for name, stream in streams.items()
            if stream is not None
        }

    def sentences(self) -> list[str]:
        """Return how the data packs and what became of every token and target, for people."""
        evaluated = {"validation": self.valid, "test": self.test}
        of_plans = [
            evaluation_sentences(name, one.plan)
            for name, one in evaluated.items()
            if one is not None
        ]
        return [*self.packing.sentences(), *(line for lines in of_plans for line in lines)]

    def close(self) -> None:
        for stream in (self.train, self.valid, self.test):
            if stream is not None:
                stream.loader.close()


def build_data(
    config: RunConfig,
    groups: ParallelGroups,
    say: Callable[[str], None],
    resumed: Resumed | None = None,
) -> RunData:
    """Tokenise what the cache does not hold, pack it, and say where tokens and targets went.

    Args:
        resumed: what the run goes on from.
    Raises:
        DataError: the data cannot be used.
        CheckpointMismatchError: see `plan_training`.
    """
    options, show = config.data, groups.rank == 0
    tokenizer = build_tokenizer(options, config.model.vocab_size, say)
    vocab_size = vocabulary(tokenizer, config.model.vocab_size)
    documents = open_documents(
        options,
        tokenizer,
        validates=config.validates,
        tests=config.tests,
        shorten_to=config.shorten_to,
        show=show,
    )
    tokenizer.close()  # its processes hold a vocabulary each, on every rank
    for line in documents.sentences:
        say(line)
    if config.data.named.valid and not config.validates and config.training.eval_iters:
        say(
            f"{config.data.flag_of('valid')}: nothing is validated, since there is no --eval-interval."
        )
    cost = pack_cost(config, vocab_size)
    plans = plan_data(config, documents, groups.dp_size, cost, resumed=resumed, show_progress=show)
    plan, capture_sizes, packing, evaluations = plans
    beyond = [
        line
        for name, evaluation in evaluations.items()
        for line in _beyond(capture_sizes, evaluation, name)
    ]
    for line in [*packing_sentences(config, plans), *beyond, *spread_sentences(plan)]:
        say(line)
    if (
        config.cuda_graph.cuda_graph_strict
        and capture_sizes is not None
        and (packing.packs_beyond or beyond)
    ):
        raise GraphFallbackError(
            f"packs would run eagerly, which --cuda-graph-strict forbids: {packing.packs_beyond:,} of "
            f"{packing.packs:,} packs of the first epoch hold more than the {capture_sizes.largest} documents "
            f"of the largest capacity{', and some of validation or test do' if beyond else ''}; raise "
            "--cuda-graph-max-packed-seqs or cap the packer by --max-documents-per-pack."
        )
    evaluated = documents.evaluated
    streams = {
        n: _stream(config, groups, evaluated[n], evaluations[n], capture_sizes) for n in evaluations
    }
    train = _stream(config, groups, documents.train, plan, capture_sizes)
    check_alike({"training": train, **streams}, groups)
    return RunData(
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        train=train,
        valid=streams.get("validation"),
        test=streams.get("test"),
        packing=packing,
        capture_sizes=capture_sizes,
    )


def check_alike(streams: Mapping[str, Stream], groups: ParallelGroups) -> None:
    """Check that all ranks read the same tokens in the same order. A collective.

    Raises:
        DataError: on all ranks; a file that an option names is another one on some of them.
    """
    mine = {
        name: [stream.plan.hash, stream.dataset.content_hash] for name, stream in streams.items()
    }
    of_ranks = all_gather_json(mine, groups)
    for name in sorted({name for one in of_ranks for name in one}):
        others = [
            str(rank) for rank, one in enumerate(of_ranks) if one.get(name) != of_ranks[0].get(name)
        ]
        if others:
            raise DataError(
                f"the {name} data of rank {', '.join(others)} is not that of rank 0; what the data options name, and "
                "the files that name data, must be the same on all machines."
            )


def pack_cost(config: RunConfig, vocab_size: int) -> PackCost:
    """Return the cost of a pack for this model, in floating-point operations of the forward pass."""
    per_token, per_squared_length = FlopCounter(config.model, vocab_size).linear_and_quadratic()
    return PackCost(per_token=per_token, per_squared_length=per_squared_length)


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


class Plans(NamedTuple):
    """The packs of all data of a run."""

    train: PackPlan
    capture_sizes: CaptureSizes | None
    packing: PackingReport
    evaluations: dict[str, EvaluationPlan]
    """``validation`` and ``test``, as far as a run has them."""


def plan_data(
    config: RunConfig,
    documents: RunDocuments,
    dp_size: int = 1,
    cost: PackCost = BY_TOKENS,
    *,
    resumed: Resumed | None = None,
    show_progress: bool = False,
) -> Plans:
    """Pack training, validation and test data.

    Raises:
        DataError: the documents cannot be packed as the options ask, or no target is left.
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
    resumed: Resumed | None = None,
    show_progress: bool = False,
) -> tuple[PackPlan, CaptureSizes | None, PackingReport]:
    """Return the endless plan over the training data, the sizes of CUDA graphs for it, and a report
    of its first epoch.

    The balanced packer keeps to the room that there is. With given capacities that is the largest;
    without, the first epoch is packed freely, its packs and those of ``evaluations`` decide the
    capacities, and later epochs keep to the first one's largest count. So the plan depends on the
    training data and the options, not on validation and test data.

    A resumed run keeps the packs of its checkpoint, whatever graphs it has: those that are to come
    decide its capacities where none are given.

    Raises:
        DataError: the documents cannot be packed as the options ask.
        CheckpointMismatchError: the given capacities are less than packs of the checkpoint hold.
    """
    pieces, targets = _pieces(config, dataset, "training")
    room = room_of(to_dict(config)) if resumed is None else resumed.room
    packer = _packer(config, room)
    plan = PackPlan(
        pieces,
        targets,
        packer=packer,
        packs_per_step=config.packs_per_step(),
        dp_size=dp_size,
        seed=config.training.seed,
        cost=cost,
        blend=_blend(config, dataset, pieces),
        show_progress=show_progress,
    )
    first = plan.epoch(0)
    if room == AUTO:
        plan = plan.keeping_to(int(first.documents_per_pack.max()))
    capture_sizes = None
    if config.cuda_graph.enabled:
        capacities = config.cuda_graph.capacities
        documents = first.documents_per_pack
        if resumed is not None and resumed.is_of(plan) and packer.method == "balanced":
            documents = np.concatenate(
                [documents, *resumed.packs_to_come(config, plan, int(documents.max()))]
            )
            check_capacities(config, int(documents.max()))
        if capacities is None:
            evaluated = (evaluation.documents_per_pack for evaluation in evaluations)
            capacities = choose_capacities(np.concatenate([documents, *evaluated]))
        capture_sizes = CaptureSizes.of(capacities, config.packing.tokens_per_pack)
    report = PackingReport.of(
        pieces, first, packer, capture_sizes=capture_sizes, blended=plan.blend is not None
    )
    return plan, capture_sizes, report


def plan_evaluation(
    config: RunConfig,
    dataset: Documents,
    dp_size: int = 1,
    cost: PackCost = BY_TOKENS,
    name: str = "validation",
) -> EvaluationPlan:
    """Return the finite plan over the data that ``name`` says: validation or test.

    Raises:
        DataError: the documents cannot be packed as the options ask, or no target is left.
    """
    pieces, targets = _pieces(config, dataset, name)
    plan = EvaluationPlan(
        pieces,
        targets,
        packer=_packer(config, room_of(to_dict(config))),
        packs_per_step=config.packs_per_step(),
        dp_size=dp_size,
        seed=config.training.seed,
        cost=cost,
        blend=_blend(config, dataset, pieces),
        max_steps=config.training.eval_iters,
    )
    if plan.num_steps and not plan.num_targets:
        raise DataError(
            f"the {name} data has no target in the first {plan.num_steps} steps of it; raise --eval-iters."
        )
    return plan


def _beyond(capture_sizes: CaptureSizes | None, plan: EvaluationPlan, name: str) -> list[str]:
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


def _packer(config: RunConfig, room: int | str | None) -> Packer:
    packer = Packer.from_config(config.packing, config.document_alignment)
    return packer.keeping_to(room) if isinstance(room, int) else packer


def _pieces(config: RunConfig, dataset: Documents, name: str) -> tuple[Pieces, NDArray[np.int64]]:
    """Return the pieces that packs are made of, and the targets of each."""
    policy, longest = config.packing.overlong_policy, config.packing.max_document_length
    wanted = config.drops_pieces_without_targets
    try:
        pieces, targets = cut_documents(dataset, longest, policy, only_with_targets=wanted)
    except ValueError as error:  # over-long documents under the policy that refuses them
        raise DataError(str(error)) from None
    counts = pieces.counts
    if counts.documents_dropped == counts.documents_in:
        raise DataError(
            f"every one of the {counts.documents_in} documents of the {name} data is longer than "
            f"--max-document-length ({longest}) and was dropped (--overlong-policy {policy}); raise it, or choose "
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
    """Return what the epochs hold where the data paths have weights."""
    if not isinstance(dataset, JoinedDocuments) or dataset.weights is None:
        return None
    try:
        return SourceBlend(
            pieces.length,
            dataset.range_of(pieces.document),
            dataset.weights,
            config.training.seed,
        )
    except ValueError as error:  # every document of a source was dropped
        raise DataError(str(error)) from None


def _stream(
    config: RunConfig,
    groups: ParallelGroups,
    dataset: Documents,
    plan: PackPlan | EvaluationPlan,
    capture_sizes: CaptureSizes | None,
) -> Stream:
    loader = Loader(
        dataset,
        plan,
        dp_rank=groups.dp_rank,
        total_tokens=config.packing.tokens_per_pack,
        capture_sizes=capture_sizes,
        alike=config.shares_captures,
        prefetch=config.data.num_workers,
        device=groups.device,
    )
    return Stream(dataset=dataset, plan=plan, loader=loader)
