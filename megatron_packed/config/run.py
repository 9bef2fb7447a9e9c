"""The whole configuration of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from megatron_packed.config.errors import ConfigError, Problem
from megatron_packed.config.kernel_options import kernel_rules
from megatron_packed.config.layer_pattern import ATTENTION
from megatron_packed.config.parallel_layout import ParallelLayout
from megatron_packed.config.section import Section
from megatron_packed.config.sections.checkpoint import CheckpointConfig
from megatron_packed.config.sections.cuda_graph import (
    CudaGraphConfig,
    graph_rules,
    whole_step_rules,
)
from megatron_packed.config.sections.data import TRAINING_DATA, DataConfig, vocabulary_rules
from megatron_packed.config.sections.logging import LoggingConfig
from megatron_packed.config.sections.memory import MemoryConfig, recompute_rules
from megatron_packed.config.sections.model import ModelConfig
from megatron_packed.config.sections.offload_rules import offload_rules
from megatron_packed.config.sections.optim import SAMPLE_UNITS, OptimizerConfig
from megatron_packed.config.sections.packing import (
    PackingConfig,
    default_overlong_policy,
    nearest_multiples,
)
from megatron_packed.config.sections.parallel import ParallelConfig, parallel_rules
from megatron_packed.config.sections.profiling import ProfilingConfig, profiling_rules
from megatron_packed.config.sections.training import TrainingConfig
from megatron_packed.config.value_checks import INT32_MAX

TRANSFORMER_ENGINE_HEAD_LIMIT = 128
"""Widest attention head of TransformerEngine's packed kernels."""
ZIGZAG_BACKENDS = ("transformer_engine", "reference")
"""Attention kernels for rows that ranks hold in a zigzag."""

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


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """All sections. Rules between sections are checked here, rules about this machine in
    ``launch_checks.py``.

    Raises:
        ConfigError: with every problem found.
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
    """Origin of each value of a command line, by key (`flags.Parsed.sources`); None if a program
    made them. It is no part of what is stored.
    """

    def __post_init__(self) -> None:
        if self.packing.overlong_policy is None:
            policy = default_overlong_policy(self.data.sft)
            object.__setattr__(self, "packing", replace(self.packing, overlong_policy=policy))
        found = list(cross_rules(self, lambda *keys: True))
        if found:
            raise ConfigError(found)

    def is_given(self, key: str) -> bool:
        """Return whether the user chose the value of e.g. ``packing.seq_length``; a program chooses
        all of them.
        """
        origin = "flag" if self.origins is None else self.origins[key]
        return origin != "default" and not origin.startswith("derived: ")

    @property
    def max_positions(self) -> int:
        """Positions that rotary tables cover."""
        return self.model.max_position_embeddings or self.packing.max_document_length

    @property
    def decay_iters(self) -> float:
        """Iteration at which the learning rate has decayed; perhaps between two, where it was given
        in samples.
        """
        if (decay := self._schedule_length("lr_decay_iters")) is not None:
            return decay
        samples = self.training.train_samples
        return (
            self.training.train_iters
            if samples is None
            else samples / self.packing.global_batch_size
        )

    @property
    def warmup_iters(self) -> float:
        """Iterations of the warm-up, however it was given."""
        if self.optim.lr_warmup_fraction is None:
            return self._schedule_length("lr_warmup_iters") or 0
        return self.optim.lr_warmup_fraction * self.decay_iters

    @property
    def wsd_decay_iters(self) -> float | None:
        """Iterations of the final decay of WSD."""
        return self._schedule_length("lr_wsd_decay_iters")

    def _schedule_length(self, name: str) -> float | None:
        """A length of the schedule in iterations, from the option of this name or from its samples."""
        samples: int | None = getattr(self.optim, SAMPLE_UNITS[name])
        iters: int | None = getattr(self.optim, name)
        return samples / self.packing.global_batch_size if samples else iters

    @property
    def schedule_units(self) -> set[str]:
        """Of ``iters`` and ``samples``, those that lengths of the learning rate's schedule are
        given in.
        """
        used = [
            name
            for name in SAMPLE_UNITS
            if name != "lr_wsd_decay_iters" or self.optim.lr_decay_style == "WSD"
        ]
        names = (name for iters in used for name in (iters, SAMPLE_UNITS[iters]))
        units = {name.rpartition("_")[2] for name in names if getattr(self.optim, name)}
        if not self.optim.lr_decay_iters and not self.optim.lr_decay_samples:
            units.add("iters" if self.training.train_samples is None else "samples")
        return units

    def last_iteration(self, origin: int = 0) -> int:
        """At which the run ends: of ``train_samples``, where no further whole batch is left of
        them.

        Args:
            origin: packs trained on beyond ``packs_per_step`` in every iteration
                (`PackPlan.origin`).
        """
        samples = self.training.train_samples
        if samples is None:
            return self.training.train_iters
        return (samples // self.packing.micro_batch_size - origin) // self.packs_per_step()

    @property
    def validates(self) -> bool:
        """Whether there are validations."""
        return bool(self.training.validation_interval) and self.data.has_validation

    @property
    def tests(self) -> bool:
        """Whether there is a test at the end."""
        return bool(self.training.eval_iters) and self.data.has_test

    @property
    def drops_pieces_without_targets(self) -> bool:
        """True where pieces of documents without a target are left out of packs."""
        return self.data.sft and not self.packing.keep_pieces_without_targets

    @property
    def shorten_to(self) -> int | None:
        """Tokens to which conversations and prompts are shortened as they are tokenised; None keeps
        them whole.
        """
        return (
            self.packing.max_document_length
            if self.packing.overlong_policy == "truncate_prompt"
            else None
        )

    @property
    def document_alignment(self) -> int:
        """What slots of documents begin and end at multiples of, A; a zigzag needs one."""
        return self.packing.pad_packed_seq_alignment or self.parallel.document_alignment

    @property
    def shares_captures(self) -> bool:
        """Whether CUDA graphs hold collectives between ranks with different packs."""
        parallel, graphs = self.parallel, self.cuda_graph
        of_experts = parallel.expert_model_parallel_size > 1 and graphs.captures_experts
        return of_experts or (parallel.overlap_grad_reduce and graphs.captures_steps)

    def data_parallel_size(self, world_size: int) -> int:
        """Ranks that train on different packs."""
        return max(world_size // self.parallel.ranks_per_replica, 1)

    def layout(self, world_size: int) -> ParallelLayout:
        """Which ranks form which groups."""
        return ParallelLayout(world_size=world_size, **self.parallel.layout_sizes)

    def micro_batches_per_step(self, data_parallel_size: int) -> int:
        """Forward passes of each rank in one optimizer step."""
        return self.packing.global_batch_size // (
            self.packing.micro_batch_size * data_parallel_size
        )

    def packs_per_step(self) -> int:
        """Packs of one optimizer step over all ranks."""
        return self.packing.global_batch_size // self.packing.micro_batch_size


def unchecked_run(sections: Mapping[str, Section]) -> RunConfig:
    """A ``RunConfig`` of all sections whose rules the caller checks, together with others.

    An over-long policy that is not given is filled in, in place.
    """
    run = object.__new__(RunConfig)
    for name in SECTIONS:
        object.__setattr__(run, name, sections[name])
    if run.packing.overlong_policy is None:
        object.__setattr__(run.packing, "overlong_policy", default_overlong_policy(run.data.sft))
    return run


def cross_rules(run: RunConfig, sound: Callable[..., bool]) -> Iterator[Problem]:
    """Problems between sections. ``sound("model.hidden_size", ...)``: no problem was found with
    those fields.
    """
    model, packing, data, optim, training = (
        run.model,
        run.packing,
        run.data,
        run.optim,
        run.training,
    )
    if sound("model.max_position_embeddings", "packing.seq_length", "packing.max_document_length"):
        given, longest = model.max_position_embeddings, packing.max_document_length
        if given is not None and given < longest and model.position_embedding_type == "rope":
            yield Problem(
                "--max-position-embeddings",
                str(given),
                f"is less than the longest document of a pack (--max-document-length {longest})",
                f"raise it, leave it out, or give --max-document-length {given}",
            )
    if sound("packing.overlong_policy", "data.sft") and run.shorten_to is not None and not data.sft:
        yield Problem(
            "--overlong-policy",
            "truncate_prompt",
            "keeps answers, and without --sft documents are text",
            "add --sft, or give split, truncate, drop or error",
        )
    per_sample = (
        model.moe_router_load_balancing_type == "seq_aux_loss" and packing.micro_batch_size != 1
    )
    if sound("model.moe_router_load_balancing_type", "packing.micro_batch_size") and per_sample:
        yield Problem(
            "--moe-router-load-balancing-type",
            "seq_aux_loss",
            f"is for each sample, and the {packing.micro_batch_size} of a micro-batch are one pack",
            "give --micro-batch-size 1, or aux_loss, which is for each pack",
        )
    if sound(
        "model.moe_router_topk",
        "model.num_experts",
        "packing.seq_length",
        "packing.micro_batch_size",
    ):
        rows = packing.tokens_per_pack * model.moe_router_topk
        if (
            model.num_experts is not None
            and rows > INT32_MAX
            and packing.tokens_per_pack <= INT32_MAX
        ):
            yield Problem(
                "--moe-router-topk",
                str(model.moe_router_topk),
                f"makes {rows} rows of a pack of {packing.tokens_per_pack} tokens, and offsets are 32-bit",
                "make the pack smaller by --seq-length or --micro-batch-size",
            )
    evaluated = sound(*TRAINING_DATA, "data.valid_data_path", "data.test_data_path", "data.split")
    if (
        evaluated
        and sound("training.eval_interval", "training.eval_iters")
        and not data.named.fault
    ):
        if training.validation_interval is not None and not data.has_validation:
            yield Problem(
                "--eval-interval",
                str(training.eval_interval),
                "there is no validation data",
                "give --valid-data-path FILE [FILE ...] or --split, or leave it out",
            )
        nothing = training.validation_interval is None and not run.tests
        if sound("training.skip_train") and training.skip_train and nothing:
            yield Problem(
                "--skip-train",
                "",
                "leaves nothing to do without validation or test data",
                "give --valid-data-path FILE and --eval-interval 1, or leave it out",
            )
        if training.eval_iters and training.eval_interval is None and data.valid_data_path:
            yield Problem(
                "--valid-data-path",
                " ".join(data.valid_data_path),
                "is never used without --eval-interval",
                "give --eval-interval N, or leave it out",
            )
    for split, blend, verb in (
        ("valid", data.valid_blend, "validate"),
        ("test", data.test_blend, "test"),
    ):
        both = sorted(set(data.train_paths) & set(blend.paths)) if evaluated else []
        if both:
            yield Problem(
                data.flag_of(split),
                " ".join(both),
                f"is training data too, so it would {verb} nothing",
                "name files that are not trained on",
            )
    if (
        sound("logging.log_progress", "checkpoint.save")
        and run.logging.log_progress
        and run.checkpoint.save is None
    ):
        yield Problem("--log-progress", "", "needs --save", "give --save DIRECTORY")
    on_gpus = sound("parallel.distributed_backend") and run.parallel.distributed_backend == "nccl"
    if on_gpus and sound("training.device") and training.device == "cpu":
        yield Problem(
            "--distributed-backend",
            "nccl",
            "cannot run on --device cpu",
            "give gloo, or leave it out",
        )
    if (
        sound("training.attention_backend", "model.hybrid_layer_pattern")
        and ATTENTION in model.layer_types
    ):
        yield from _attention_rules(run, sound)
    if (
        sound("cuda_graph.cuda_graph_impl", "training.device")
        and run.cuda_graph.uses_transformer_engine
        and training.device == "cpu"
    ):
        yield Problem(
            "--cuda-graph-impl",
            run.cuda_graph.cuda_graph_impl,
            "TransformerEngine captures on GPUs only, and --device is cpu",
            "give local, which runs eagerly there, or leave it out",
        )
    yield from kernel_rules(run, sound)
    yield from vocabulary_rules(data, model.vocab_size, sound)
    yield from _schedule_rules(run, optim, sound)
    yield from graph_rules(run.cuda_graph, model, packing, sound)
    yield from whole_step_rules(run.cuda_graph, run.parallel, sound)
    yield from parallel_rules(run.parallel, model, packing, run.cuda_graph, sound)
    yield from profiling_rules(run.profiling, training, sound)
    yield from recompute_rules(run.memory, model, run.cuda_graph, sound)
    yield from offload_rules(run.memory, model, run.cuda_graph, sound)


def _attention_rules(run: RunConfig, sound: Callable[..., bool]) -> Iterator[Problem]:
    training, parallel, width = run.training, run.parallel, run.model.kv_channels
    known = (
        sound("training.transformer_impl", "model.kv_channels")
        and training.uses_transformer_engine_attention
    )
    if known and width is not None and (width % 8 or width > TRANSFORMER_ENGINE_HEAD_LIMIT):
        yield Problem(
            "--transformer-impl",
            training.transformer_impl,
            "TransformerEngine's packed attention takes "
            f"heads of a multiple of 8 up to {TRANSFORMER_ENGINE_HEAD_LIMIT} channels, not of {width}",
            "name another --attention-backend beside it, or give local",
        )
    zigzag = (
        sound("parallel.context_parallel_size", "parallel.cp_comm_type")
        and parallel.document_alignment > 1
    )
    if zigzag and training.attention_backend not in ("auto", *ZIGZAG_BACKENDS):
        yield Problem(
            "--attention-backend",
            training.attention_backend,
            f"exchanges no keys and values, as --cp-comm-type {parallel.cp_comm_type} does",
            f"give auto or {' or '.join(ZIGZAG_BACKENDS)}, or --cp-comm-type a2a",
        )


def _schedule_rules(
    run: RunConfig, optim: OptimizerConfig, sound: Callable[..., bool]
) -> Iterator[Problem]:
    keys = (f"optim.{name}" for names in SAMPLE_UNITS.items() for name in names)
    if not sound(
        *keys,
        "optim.lr_warmup_fraction",
        "optim.lr_decay_style",
        "training.train_iters",
        "training.train_samples",
        "packing.global_batch_size",
    ):
        return
    training, batch = run.training, run.packing.global_batch_size
    if (
        training.train_samples is not None
        and training.train_iters != training.train_samples // batch
    ):
        yield Problem(
            "--train-samples",
            str(training.train_samples),
            f"contradicts --train-iters ({training.train_iters}): --global-batch-size ({batch}) makes "
            f"{training.train_samples // batch} iterations of it",
            "give one of the two",
        )
        return
    end, warmup = run.decay_iters, run.warmup_iters
    name, value = _given_length(optim, "lr_warmup_iters")
    if optim.lr_warmup_fraction is not None:
        name, value = "--lr-warmup-fraction", str(optim.lr_warmup_fraction)
    source, decay = _given_length(optim, "lr_decay_iters")
    if not decay:
        source = "--train-iters" if training.train_samples is None else "--train-samples"
    if warmup >= end:
        yield Problem(
            name,
            value,
            f"warms up for {warmup:g} iterations, and the decay ends at {end:g} ({source})",
            f"warm up for at most {end - 1:g} iterations",
        )
    elif (
        optim.lr_decay_style == "WSD"
        and (annealing := run.wsd_decay_iters) is not None
        and warmup + annealing > end
    ):
        name, value = _given_length(optim, "lr_wsd_decay_iters")
        yield Problem(
            name,
            value,
            f"and a warm-up of {warmup:g} iterations do not fit into {end:g} ({source})",
            f"give at most {end - warmup:g} iterations",
        )


def _given_length(optim: OptimizerConfig, name: str) -> tuple[str, str]:
    """The flag that gave a length of the schedule, and its value; that of iterations, and nothing,
    if none did.
    """
    for option in (SAMPLE_UNITS[name], name):
        if getattr(optim, option):
            return optim.flag(option), str(getattr(optim, option))
    return optim.flag(name), ""


def batch_rule(run: RunConfig, world_size: int, sound: Callable[..., bool]) -> Iterator[Problem]:
    """The global batch divides into micro-batches for every data-parallel rank."""
    packing = run.packing
    if not sound("packing.global_batch_size", "packing.micro_batch_size"):
        return
    ranks = run.data_parallel_size(world_size)
    unit = packing.micro_batch_size * ranks
    splits_into_micro_batches = (
        packing.global_batch_size % packing.micro_batch_size == 0
    )  # else PackingConfig says so
    if splits_into_micro_batches and packing.global_batch_size % unit:
        yield Problem(
            "--global-batch-size",
            str(packing.global_batch_size),
            f"must be a multiple of {unit}: --micro-batch-size ({packing.micro_batch_size}) x data-parallel "
            f"ranks ({ranks})",
            nearest_multiples(packing.global_batch_size, unit),
        )
