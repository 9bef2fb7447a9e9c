"""Configuration of a run: all sections together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import chain
from pathlib import PurePath
from typing import Any

from megatron_packed.config.cross_rules import cross_rules
from megatron_packed.config.errors import ConfigError
from megatron_packed.config.kinds.attention import partitions_that_fit
from megatron_packed.config.kinds.experts import MEASURE
from megatron_packed.config.options import Decided, Field, Stored
from megatron_packed.config.parallel_layout import ParallelLayout
from megatron_packed.config.section import Section, section_fields, unchecked
from megatron_packed.config.sections.checkpoint import CheckpointConfig
from megatron_packed.config.sections.cuda_graph import AUTO, CudaGraphConfig
from megatron_packed.config.sections.data import DataConfig
from megatron_packed.config.sections.logging import LoggingConfig
from megatron_packed.config.sections.memory import MemoryConfig
from megatron_packed.config.sections.model import ModelConfig
from megatron_packed.config.sections.optim import ENDS_WITH_RUN, SAMPLE_UNITS, OptimizerConfig
from megatron_packed.config.sections.packing import (
    PackingConfig,
    default_overlong_policy,
)
from megatron_packed.config.sections.parallel import ParallelConfig
from megatron_packed.config.sections.profiling import ProfilingConfig
from megatron_packed.config.sections.training import TrainingConfig
from megatron_packed.lazy_exports import lazy_function

SECTIONS: dict[str, type[Section]] = {
    "model": ModelConfig,
    "parallel": ParallelConfig,
    "packing": PackingConfig,
    "data": DataConfig,
    "optim": OptimizerConfig,
    "training": TrainingConfig,
    "cuda_graph": CudaGraphConfig,
    "memory": MemoryConfig,
    "checkpoint": CheckpointConfig,
    "logging": LoggingConfig,
    "profiling": ProfilingConfig,
}

STORED = "checkpoint"
"""Origin of a value that comes from a checkpoint (`RunConfig.origins`)."""
_parse = lazy_function("megatron_packed.config.parser.parse", "parse")
"""Parser of command lines; it creates objects of this module."""


@cache
def every_field() -> tuple[Field, ...]:
    """Return all options in the order of the sections."""
    return tuple(chain.from_iterable(map(section_fields, SECTIONS.values())))


def stored_values(stored: Stored) -> Iterator[tuple[Field, Any]]:
    """Yield the options that the configuration in a checkpoint contains, with their values."""
    for each in every_field():
        section = stored.get(each.section, {})
        if each.name in section:
            yield each, section[each.name]


def keys_deciding(*subjects: Decided) -> tuple[str, ...]:
    """Return the keys of the options that decide one of the subjects in a resumed run."""
    return tuple(each.key for each in every_field() if each.option.resume in subjects)


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Configuration of a run: all sections.

    Rules between sections are in ``cross_rules.py``, checks of this machine in
    ``launch_checks.py`` and ``path_checks.py``.

    Raises:
        ConfigError: lists every problem.
    """

    model: ModelConfig
    packing: PackingConfig
    data: DataConfig
    optim: OptimizerConfig
    training: TrainingConfig
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    cuda_graph: CudaGraphConfig = field(default_factory=CudaGraphConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    profiling: ProfilingConfig = field(default_factory=ProfilingConfig)
    origins: Mapping[str, str] | None = field(default=None, compare=False, repr=False)
    """Origin of each value of a command line, by key (`parser.parse.Parsed.sources`); None if a
    program created the configuration. Checkpoints do not store it.
    """

    def __post_init__(self) -> None:
        if self.packing.overlong_policy is None:
            policy = default_overlong_policy(self.data.sft)
            object.__setattr__(self, "packing", replace(self.packing, overlong_policy=policy))
        problems = list(cross_rules(self, lambda *keys: True))
        if problems:
            raise ConfigError(problems)
        settle_partition(self)

    @classmethod
    def from_args(
        cls, argv: Sequence[str] = (), world_size: int | None = None, **options: Any
    ) -> RunConfig:
        """Return the configuration that the words of a command line and keywords describe.

        Args:
            argv: flags of ``pretrain_hybrid.py`` with their values, without the program's name;
                ``@file`` and ``--config FILE`` are read.
            world_size: number of processes; None for ``WORLD_SIZE`` of the environment, else 1.
            options: values by the name of their flag, with underscores, such as ``lr=1e-3``,
                ``sft=True`` or ``data_path=["a.jsonl", "b.jsonl"]``. They override the words. None
                leaves an option as it is.
        Raises:
            TypeError: ``argv`` is one text and not a sequence of words.
            ConfigError: with every problem found.
        Example:
            ``RunConfig.from_args(["@run.args"], train_iters=20)``
        """
        if isinstance(argv, str):
            raise TypeError(
                "argv is one text; pass a list of words, for example shlex.split(text)."
            )
        config: RunConfig = _parse(argv, world_size, options)
        return config

    def is_given(self, key: str) -> bool:
        """Return whether the user gave the value of a key such as ``packing.seq_length``. In a
        configuration created by a program, all values count as given.
        """
        origin = "flag" if self.origins is None else self.origins[key]
        return origin != "default" and not origin.startswith("derived: ")

    def value_of(self, field: Field) -> Any:
        """Return the value of an option."""
        return getattr(getattr(self, field.section), field.name)

    @property
    def max_positions(self) -> int:
        """Number of positions that the rotary tables cover."""
        return self.model.max_position_embeddings or self.packing.max_document_length

    @property
    def decay_iters(self) -> float:
        """Iteration at which the decay of the learning rate ends. It may be fractional if it was
        given in samples.
        """
        return self._schedule_length("lr_decay_iters") or self._length_of_run()

    @property
    def weight_decay_incr_iters(self) -> float:
        """Iteration at which the weight decay ends to rise; see `decay_iters`."""
        return self._schedule_length("weight_decay_incr_iters") or self._length_of_run()

    def _length_of_run(self) -> float:
        samples = self.training.train_samples
        return self.last_iteration() if samples is None else self.full_batches(samples)

    @property
    def warmup_iters(self) -> float:
        """Number of iterations of the warm-up, for all ways of giving it."""
        if self.optim.lr_warmup_fraction is None:
            return self._schedule_length("lr_warmup_iters") or 0
        return self.optim.lr_warmup_fraction * self.decay_iters

    @property
    def wsd_decay_iters(self) -> float | None:
        """Number of iterations of the final decay of the WSD schedule."""
        return self._schedule_length("lr_wsd_decay_iters")

    def _schedule_length(self, name: str) -> float | None:
        """Return a length of the schedule in iterations, from the option with this name, or from
        the option that gives the same length in samples.
        """
        samples: int | None = getattr(self.optim, SAMPLE_UNITS[name])
        iters: int | None = getattr(self.optim, name)
        return self.full_batches(samples) if samples else iters

    def full_batches(self, samples: int) -> float:
        """Return a number of samples in batches of ``--global-batch-size``."""
        return samples / self.packing.global_batch_size

    @property
    def schedule_units(self) -> set[str]:
        """Units in which lengths of the schedules of learning rate and weight decay are given:
        ``iters``, ``samples`` or both.
        """
        optim = self.optim
        unused = {
            "lr_wsd_decay_iters": optim.lr_decay_style != "WSD",
            "weight_decay_incr_iters": not optim.weight_decay_changes,
        }
        of_run = "iters" if self.training.train_samples is None else "samples"
        units = set()
        for iters, samples in SAMPLE_UNITS.items():
            if unused.get(iters):
                continue
            if getattr(optim, samples):
                units.add("samples")
            elif getattr(optim, iters):
                units.add("iters")
            elif iters in ENDS_WITH_RUN:
                units.add(of_run)
        return units

    def last_iteration(self, ahead: int | None = None) -> int:
        """Return the iteration at which the run ends. With ``train_samples``, a last incomplete
        batch is left out. With ``train_epochs``, the data must be packed (`with_epochs`).

        Args:
            ahead: samples that were trained on in addition to ``global_batch_size`` per iteration
                (`RunProgress.samples_ahead`); None for a run that begins at iteration 0.
        """
        samples = self.training.train_samples
        if samples is None:
            assert self.training.train_iters is not None, "--train-epochs: pack the data first"
            return self.training.train_iters
        if ahead is None:
            ramp = self.packing.batch_ramp
            ahead = 0 if ramp is None else ramp.ahead()
        return (samples - ahead) // self.packing.global_batch_size

    @property
    def validation_interval(self) -> int | None:
        """Iterations between validations, or None for a run without validations."""
        return self.training.validation_interval if self.data.has_validation else None

    @property
    def validates(self) -> bool:
        return bool(self.validation_interval)

    @property
    def made_from(self) -> tuple[int, int, bool] | None:
        """Seed, longest document, and --sft of made documents; None without ``--mock-data``."""
        if not self.data.mock_data:
            return None
        return self.training.seed, self.packing.max_document_length, self.data.sft

    @property
    def validation_sets(self) -> tuple[str, ...]:
        """Names of the validation sets with ``--multiple-validation-sets``, one for each path of
        the validation data; empty without the flag.
        """
        training, paths = self.training, self.data.validation_paths
        if not training.multiple_validation_sets:
            return ()
        names = [PurePath(path).stem for path in paths]
        numbered = tuple(f"{name}_{number}" for number, name in enumerate(names))
        set_names = tuple(
            other if names.count(name) > 1 else name for name, other in zip(names, numbered)
        )
        # A file may have the name that a number gives another file.
        distinct = set_names if len(set(set_names)) == len(set_names) else numbered
        return training.validation_set_names or distinct

    @property
    def tests(self) -> bool:
        """Return whether the run has a test at its end."""
        return bool(self.training.eval_iters) and self.data.has_test

    @property
    def drops_pieces_without_targets(self) -> bool:
        """True if pieces of documents without a target are left out of packs."""
        return self.data.sft and not self.packing.keep_pieces_without_targets

    @property
    def shorten_to(self) -> int | None:
        """Maximum number of tokens of tokenised conversations and prompts; None if they are not
        shortened.
        """
        return (
            self.packing.max_document_length
            if self.packing.overlong_policy == "truncate_prompt"
            else None
        )

    @property
    def room(self) -> int | str | None:
        """Limit on documents per pack of a new run; `AUTO` is the largest number in epoch 0, and
        None is no limit.
        """
        graphs = self.cuda_graph
        if not graphs.enabled or self.packing.packing_method != "balanced":
            return None
        return max(graphs.cuda_graph_max_packed_seqs, default=AUTO)

    @property
    def document_alignment(self) -> int:
        """Alignment A: documents begin and end at multiples of A slots in their pack. Zigzag
        context parallelism needs an alignment.
        """
        return self.packing.pad_packed_seq_alignment or self.parallel.document_alignment

    @property
    def shares_captures(self) -> bool:
        """Return whether CUDA graphs contain collectives between ranks that train on different
        packs.
        """
        parallel, graphs = self.parallel, self.cuda_graph
        of_experts = parallel.expert_model_parallel_size > 1 and graphs.captures_experts
        of_steps = parallel.overlap_grad_reduce or self.model.balances_all_ranks
        return of_experts or (of_steps and graphs.captures_steps)

    @property
    def expert_rank_capacity_factor(self) -> float | str | None:
        """Bound of expert buffers: ``--moe-expert-rank-capacity-factor``, or ``auto`` if CUDA
        graphs capture experts that ranks share; None without a bound.
        """
        factor = self.model.moe_expert_rank_capacity_factor
        shared = self.parallel.expert_model_parallel_size > 1 and self.cuda_graph.captures_experts
        padded = self.model.moe_pad_expert_input_to_capacity
        return MEASURE if factor is None and shared and not padded else factor

    @property
    def asks_for_expert_rows(self) -> bool:
        """Return whether each E layer waits for the device, to read numbers of rows."""
        unbounded = self.expert_rank_capacity_factor is None
        return unbounded and self.model.dispatch_asks_the_device

    @property
    def expert_parts(self) -> int:
        """Number of parts in which rows travel to the experts of other ranks; 1 without an overlap."""
        travels = self.model.moe_token_dispatcher_type == "alltoall"  # noqa: S105
        shared = self.parallel.expert_model_parallel_size > 1
        return self.model.moe_comm_overlap_parts if shared and travels else 1

    def padding_problem(self, vocab_size: int) -> tuple[str, str] | tuple[()]:
        """Return how ``--padded-vocab-size`` differs from this vocabulary after padding, and the
        cure; empty if it is equal or not given.
        """
        tp_size = self.parallel.tensor_model_parallel_size
        padded = self.model.padded_vocab_size(vocab_size, tp_size)
        wanted = self.data.padded_vocab_size
        if wanted is None or wanted == padded:
            return ()
        multiple = self.model.make_vocab_size_divisible_by * tp_size
        cure = "give a tokenizer with fewer tokens"
        if wanted >= vocab_size and wanted % tp_size == 0:
            cure = (
                f"give --make-vocab-size-divisible-by {wanted // tp_size}, which pads to this size"
            )
        return (
            f"is not {padded}, to which {vocab_size} tokens are padded as a multiple of {multiple}",
            cure,
        )

    @property
    def gathers_during_next_step(self) -> bool:
        """Return whether updated weights are gathered while the next step runs. Graphs of whole
        steps gather them at their end.
        """
        return self.parallel.overlap_param_gather and not self.cuda_graph.captures_steps

    @property
    def precision(self) -> str:
        """Data types of weights and optimizer state, in words."""
        bf16 = self.training.bf16
        return f"{self.training.precision}{self.optim.state_words(bf16)}"

    def data_parallel_size(self, world_size: int) -> int:
        """Return the number of ranks that train on different packs."""
        return max(world_size // self.parallel.ranks_per_replica, 1)

    def layout(self, world_size: int) -> ParallelLayout:
        return ParallelLayout(world_size=world_size, **self.parallel.layout_sizes)

    def micro_batches_per_step(self, data_parallel_size: int) -> int:
        """Return the number of micro-batches of each rank in one optimizer step."""
        return self.packing.global_batch_size // (
            self.packing.micro_batch_size * data_parallel_size
        )

    def packs_per_step(self) -> int:
        """Return the number of packs of one optimizer step over all ranks."""
        return self.packing.global_batch_size // self.packing.micro_batch_size


def settle_partition(run: RunConfig) -> None:
    """Set the partition of attention in place if only one fits; otherwise the lengths of the documents
    decide (`models.estimate.rows_of_ranks`).
    """
    if run.parallel.chooses_partition and len(fitting := partitions_that_fit(run)) == 1:
        parallel = replace(run.parallel, cp_partition_mode=fitting[0])
        object.__setattr__(run, "parallel", parallel)


def unchecked_run(sections: Mapping[str, Section]) -> RunConfig:
    """Return a ``RunConfig`` of sections whose rules are not checked; the caller checks them.

    A missing over-long policy is set in place.
    """
    run = object.__new__(RunConfig)
    for name in SECTIONS:
        object.__setattr__(run, name, sections[name])
    if run.packing.overlong_policy is None:
        object.__setattr__(run.packing, "overlong_policy", default_overlong_policy(run.data.sft))
    return run


def unchecked_stored(stored: Stored) -> RunConfig:
    """Return the configuration in a checkpoint, unchecked; options that it lacks have defaults."""
    return unchecked_run(
        {name: unchecked(kind, stored.get(name, {})) for name, kind in SECTIONS.items()}
    )
