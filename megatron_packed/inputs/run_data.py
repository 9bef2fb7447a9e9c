"""Data of a run: tokenizer, tokenised documents, pack plans, loaders, and counts of dropped tokens."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeAlias, TypeVar

from megatron_packed.checkpoint.run_metadata import DataHashes
from megatron_packed.config.run import RunConfig
from megatron_packed.config.sections.data_parts.tokenizer import TRAINED_BPE
from megatron_packed.config.sections.parallel import ParallelConfig
from megatron_packed.data.documents import Documents
from megatron_packed.data.errors import DataError
from megatron_packed.data.loader import Loader
from megatron_packed.data.packing.pack_plan import PackPlan
from megatron_packed.data.packing.packing_report import PackingReport
from megatron_packed.data.tokenizers.base import Tokenizer, meaning_hash, vocabulary
from megatron_packed.distributed.collectives import all_gather_json
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.inputs.data_messages import (
    beyond_sentences,
    evaluation_sentences,
    packing_sentences,
    spread_sentences,
)
from megatron_packed.inputs.open_documents import (
    TEST,
    VALIDATION,
    RunDocuments,
    build_tokenizer,
    open_run_documents,
)
from megatron_packed.inputs.plan_packs import Plans, StoredPacks, pack_cost, plan_data
from megatron_packed.inputs.stored_files import StoredFiles, files_to_attach, with_stored_template
from megatron_packed.packed.capture_sizes import CaptureSizes

if TYPE_CHECKING:
    from megatron_packed.data.packing.evaluation_plan import EvaluationPlan
    from megatron_packed.inputs.sample_and_metric_prompts import Questions

AnyPlan: TypeAlias = "PackPlan | EvaluationPlan"
"""Plan of training data, or of validation or test data."""
_Plan = TypeVar("_Plan", bound="AnyPlan")
_Plan_co = TypeVar("_Plan_co", bound="AnyPlan", covariant=True)


@dataclass(frozen=True, kw_only=True)
class Stream(Generic[_Plan_co]):
    """Documents, the plan that orders and packs them, and the loader of their packs."""

    dataset: Documents
    plan: _Plan_co
    loader: Loader


@dataclass(frozen=True, kw_only=True)
class RunData:
    """Data that a run trains, validates and tests on."""

    parallel: ParallelConfig
    """Options of the parallel axes, with the partition that the lengths of documents decide."""
    tokenizer: Tokenizer
    vocab_size: int
    train: Stream[PackPlan]
    evaluated: Mapping[str, Stream[EvaluationPlan]]
    """Validation and test data, with the keys of `RunDocuments.evaluated`."""
    tokenizer_hash: str
    """`meaning_hash` of the tokenizer."""
    packing: PackingReport
    """Statistics of the packs in the first epoch of the training data."""
    capture_sizes: CaptureSizes | None
    """Sizes for which CUDA graphs are captured, the same on all ranks; None without graphs."""
    samples: Questions | None = None
    """Prompts of ``--sample-prompts``."""
    metric: Questions | None = None
    """Prompts of ``--valid-metric``."""
    attached: Mapping[str, str] = field(default_factory=dict)
    """Texts that the checkpoints contain, by file name (`files_to_attach`)."""
    changed_files: str = ""
    """Clause about files that have changed since the checkpoint (`StoredFiles.changed_files`)."""

    @property
    def valid(self) -> Stream[EvaluationPlan] | None:
        """Validation data; None without any, and with several validation sets."""
        return self.evaluated.get(VALIDATION)

    @property
    def test(self) -> Stream[EvaluationPlan] | None:
        return self.evaluated.get(TEST)

    @property
    def validations(self) -> dict[str, Stream[EvaluationPlan]]:
        """``validation``, or ``validation (NAME)`` for each validation set."""
        return {name: stream for name, stream in self.evaluated.items() if name != TEST}

    @property
    def hashes(self) -> DataHashes:
        """Hashes that checkpoints store.

        That of a validation does not depend on the batch size, unless the batch size decides which
        documents are read.
        """
        read = [
            [stream.dataset.content_hash, stream.plan.num_targets]
            for stream in self.validations.values()
        ]
        validation = hashlib.sha256(json.dumps(read).encode()).hexdigest()[:32] if read else ""
        return DataHashes(self.train.dataset.content_hash, self.tokenizer_hash, validation)

    @property
    def _streams(self) -> dict[str, Stream[AnyPlan]]:
        return {"training": self.train, **self.evaluated}

    @property
    def accounts(self) -> dict[str, dict[str, int]]:
        """Counts of kept and dropped tokens and targets, for each of training, validation, test."""
        return {name: stream.plan.pieces.as_dict() for name, stream in self._streams.items()}

    def sentences(self) -> list[str]:
        """Return sentences about packing and about kept and dropped tokens and targets."""
        of_plans = [
            evaluation_sentences(name, stream.plan) for name, stream in self.evaluated.items()
        ]
        return [*self.packing.sentences(), *(line for lines in of_plans for line in lines)]

    def close(self) -> None:
        for stream in self._streams.values():
            stream.loader.close()
        self.tokenizer.close()


def build_data(
    config: RunConfig,
    groups: ParallelGroups,
    say: Callable[[str], None],
    resumed: StoredPacks | None = None,
    *,
    detail: Callable[[str], None] | None = None,
    stored: StoredFiles | None = None,
    show: bool | None = None,
) -> RunData:
    """Tokenise data that the cache lacks, plan its packs, and print counts of tokens and targets.

    Args:
        config: configuration of the run.
        groups: process groups of this rank.
        say: prints a line of text.
        resumed: the checkpoint from which the run continues.
        detail: prints a line about packs if every token is kept; None for ``say``.
        stored: files of the checkpoint with which the run starts.
        show: show progress and warnings on standard error; None shows them on rank 0.
    Raises:
        DataError: the data cannot be used.
        CheckpointMismatchError: see `plan_training`.
    """
    config = with_stored_template(config, stored)
    options = config.data
    show = groups.rank == 0 if show is None else show
    if options.hub_paths:
        from megatron_packed.inputs.hub_commits import agree_on_commits

        agree_on_commits(options.hub_paths, groups)
    trained = None if stored is None else stored.trained_tokenizer(options)
    tokenizer = build_tokenizer(options, config.model.vocab_size, say, trained=trained, show=show)
    if stored is not None and trained is not None:
        say(f"tokenizer: the {TRAINED_BPE} of {stored.checkpoint}")
    # Texts, not paths: a save hours later must not read files that were changed in the meantime.
    attached = files_to_attach(options, tokenizer)
    vocab_size = _vocabulary(config, tokenizer)
    # Before the data, because tokenising it may take hours.
    samples = metric = None
    if config.logging.sample_prompts is not None:
        from megatron_packed.inputs.sample_and_metric_prompts import sample_questions

        samples = sample_questions(config, tokenizer, groups)
    documents = open_run_documents(config, tokenizer, show=show)
    if config.training.valid_metric is not None:
        from megatron_packed.inputs.sample_and_metric_prompts import metric_questions

        metric = metric_questions(config, tokenizer, documents.valid)
    tokenizer_hash = _closed(tokenizer)
    _say_documents(config, documents, say)
    if config.parallel.chooses_partition:
        from megatron_packed.models.estimate.run_estimate import with_partition

        config, reason = with_partition(config, vocab_size, documents.train.lengths)
        if reason:
            say(reason)
    cost = pack_cost(config, vocab_size)  # packs are distributed over ranks by their cost
    plans = plan_data(config, documents, groups.dp.size, cost, resumed=resumed, show_progress=show)
    _say_packs(config, plans, say, detail)
    streams = {
        name: _stream(config, groups, documents.evaluated[name], plan, plans.capture_sizes)
        for name, plan in plans.evaluations.items()
    }
    train = _stream(config, groups, documents.train, plans.train, plans.capture_sizes)
    # In the first step, ranks with different data would run different collectives and hang.
    check_alike({"training": train, **streams}, groups)
    return RunData(
        parallel=config.parallel,
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        tokenizer_hash=tokenizer_hash,
        train=train,
        evaluated=streams,
        packing=plans.packing,
        capture_sizes=plans.capture_sizes,
        samples=samples,
        metric=metric,
        attached=attached,
        changed_files="" if stored is None else stored.changed_files(options, attached),
    )


def _closed(tokenizer: Tokenizer) -> str:
    """Free the tokenizer's processes, which hold copies of the vocabulary; return its hash."""
    try:
        return meaning_hash(tokenizer)
    finally:
        tokenizer.close()


def _vocabulary(config: RunConfig, tokenizer: Tokenizer) -> int:
    """Return the size of the vocabulary before padding.

    Raises:
        DataError: its padded size is not that of --padded-vocab-size.
    """
    vocab_size = vocabulary(tokenizer, config.model.vocab_size)
    if problem := config.padding_problem(vocab_size):
        rule, cure = problem
        raise DataError(f"--padded-vocab-size {config.data.padded_vocab_size} {rule}; {cure}.")
    return vocab_size


def _say_documents(config: RunConfig, documents: RunDocuments, say: Callable[[str], None]) -> None:
    """Print sentences about the files, and a line if validation data is given but not used."""
    for line in documents.sentences:
        say(line)
    if config.data.named.valid and not config.validates and config.training.eval_iters:
        say(
            f"{config.data.flag_of('valid')} is not used: without --eval-interval no validation runs."
        )


def _say_packs(
    config: RunConfig,
    plans: Plans,
    say: Callable[[str], None],
    detail: Callable[[str], None] | None,
) -> None:
    """Print sentences about packs, as details if no token is cut or dropped.

    Raises:
        GraphFallbackError: see `_refuse_fallbacks`.
    """
    beyond = [
        line
        for name, evaluation in plans.evaluations.items()
        for line in beyond_sentences(plans.capture_sizes, evaluation, name)
    ]
    pieces = [plans.train.pieces, *(plan.pieces for plan in plans.evaluations.values())]
    keeps_all = all(part.keeps_everything for part in pieces)
    show = detail if detail is not None and keeps_all else say
    for line in [*packing_sentences(config, plans), *beyond, *spread_sentences(plans.train)]:
        show(line)
    _refuse_fallbacks(config, plans, beyond)


def _refuse_fallbacks(config: RunConfig, plans: Plans, beyond: list[str]) -> None:
    """Refuse packs that fit no graph, if ``--cuda-graph-strict`` is given.

    Raises:
        GraphFallbackError: there are such packs; the message has their number.
    """
    capture_sizes, packing = plans.capture_sizes, plans.packing
    if (
        config.cuda_graph.cuda_graph_strict
        and capture_sizes is not None
        and (packing.packs_beyond or beyond)
    ):
        from megatron_packed.cuda_graphs.fallback_reasons import GraphFallbackError

        raise GraphFallbackError(
            "packs would run eagerly, which --cuda-graph-strict forbids. "
            f"{packing.packs_beyond:,} of {packing.packs:,} packs of the first epoch hold more than "
            f"{capture_sizes.largest} documents, the largest capacity"
            f"{', and so do some packs of the validation or test data' if beyond else ''}. Raise "
            "--cuda-graph-max-packed-seqs, or limit the packer by --max-documents-per-pack."
        )


def check_alike(streams: Mapping[str, Stream[AnyPlan]], groups: ParallelGroups) -> None:
    """Check that all ranks read the same tokens in the same order. A collective.

    Raises:
        DataError: on all ranks; files of the data differ between ranks.
    """
    mine = {
        name: [stream.plan.hash, stream.dataset.content_hash] for name, stream in streams.items()
    }
    of_ranks = all_gather_json(mine, groups)
    for name in sorted({name for hashes in of_ranks for name in hashes}):
        others = [
            str(rank)
            for rank, hashes in enumerate(of_ranks)
            if hashes.get(name) != of_ranks[0].get(name)
        ]
        if others:
            raise DataError(
                f"the {name} data of rank {', '.join(others)} differs from that of rank 0; the data options and the "
                "files that they name must be the same on all machines."
            )


def _stream(
    config: RunConfig,
    groups: ParallelGroups,
    dataset: Documents,
    plan: _Plan,
    capture_sizes: CaptureSizes | None,
) -> Stream[_Plan]:
    loader = Loader(
        dataset,
        plan,
        dp_rank=groups.dp.rank,
        total_tokens=config.packing.tokens_per_pack,
        capture_sizes=capture_sizes,
        same_on_all_ranks=config.shares_captures,
        prefetch=config.data.num_workers,
        device=groups.device,
    )
    return Stream(dataset=dataset, plan=plan, loader=loader)


def most_documents(data: RunData) -> int:
    """Return the largest number of documents for which kernels are chosen."""
    captured = 0 if data.capture_sizes is None else data.capture_sizes.largest
    return max(captured, data.packing.documents_max)
