"""Options of parallelism: the sizes of the parallel axes and the collectives."""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd, lcm
from typing import TYPE_CHECKING, NamedTuple

from megatron_packed.config.conditions import (
    CONTEXT_PARALLEL,
    EXPERT_LAYERS,
    REPLICAS,
    Condition,
)
from megatron_packed.config.errors import Problem, Problems
from megatron_packed.config.exchanged_heads import parts_of_layers
from megatron_packed.config.kinds.layer_kind import LayerKind
from megatron_packed.config.options import Related, derived_option, option
from megatron_packed.config.parallel_layout import layout_problems
from megatron_packed.config.section import Sound, section_fields
from megatron_packed.config.sections.collectives import (
    TENSOR_PARALLEL,
    AllToAllOptions,
    TensorOverlapOptions,
)
from megatron_packed.config.sections.gradients import GradientOptions
from megatron_packed.config.sections.kind_options import KindCommunication
from megatron_packed.config.sections.model import ModelConfig
from megatron_packed.config.sections.model_parts.divisors import divisors, every_divisor, in_words
from megatron_packed.config.sections.packing import PackingConfig

if TYPE_CHECKING:
    from megatron_packed.config.run import RunConfig

NOT_BUILT = {
    "pipeline_model_parallel_size": "pipeline parallelism",
}
"""Axes that are not supported: their size must be 1."""
AXIS_SIZES = (
    "tensor_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
)
"""Axes whose size may be any number that fits the model and the number of processes."""
REPLICA_SIZES = ("tensor_model_parallel_size", "context_parallel_size", *NOT_BUILT)
"""Axes whose ranks share the work on one pack."""

BY_LENGTHS = "auto"
"""Value of ``--cp-partition-mode`` with which the lengths of documents decide."""
HEADS_IN_PARTS = Condition(
    "no layer exchanges heads in more than one part",
    lambda run, processes: max(parts_of_layers(run).values(), default=1) != 1,
)
KEYS_BETWEEN_RANKS = Condition(
    "attention exchanges heads, not keys and values (--cp-comm-type)",
    lambda run, processes: run.parallel.cp_comm_type != "a2a",
)
GATHERS_DURING_STEPS = Condition(
    "graphs of whole steps gather the weights at the end of each step",
    lambda run, processes: not run.cuda_graph.captures_steps,
)
SEVERAL_PROCESSES = Condition("the run has one process", lambda run, processes: processes != 1)


class ParallelConfig(  # dataclass fields follow the bases from right to left
    GradientOptions, KindCommunication, TensorOverlapOptions, AllToAllOptions, title="parallel"
):
    """Options of the parallel axes. The data-parallel size is the number of processes divided by
    the other sizes.
    """

    tensor_model_parallel_size: int = option(
        1,
        "Number of tensor-parallel ranks; they share each weight matrix.",
        unit="ranks",
        minimum=1,
    )
    sequence_parallel: bool = option(
        False,
        "Split the tokens between layers over the tensor-parallel ranks too (sequence "
        "parallelism). Saves activation memory.",
        only_if=TENSOR_PARALLEL,
    )
    context_parallel_size: int = option(
        1,
        "Number of context-parallel ranks; they share the tokens of each pack.",
        unit="ranks",
        minimum=1,
    )
    cp_comm_type: str = option(
        "a2a",
        "Communication of context-parallel attention. a2a exchanges heads for tokens. "
        "all_gather and p2p (a ring) exchange keys and values, see --cp-partition-mode.",
        choices=("a2a", "all_gather", "p2p"),
        value_aliases={"allgather": "all_gather"},
        not_built={"a2a+p2p": "give a2a, all_gather or p2p"},
        megatron=("p2p", "no document needs padding, and every attention kernel can be used"),
        only_if=CONTEXT_PARALLEL,
    )
    cp_partition_mode: str = option(
        BY_LENGTHS,
        "Tokens of a context-parallel rank in attention that exchanges keys and values. With zigzag "
        "the ranks have equal work, and each document is padded, see --pad-packed-seq-alignment. "
        "With contiguous no document is padded; heads of 256 and attention windows work too. auto "
        "chooses by the lengths of the documents, and says why.",
        choices=(BY_LENGTHS, "zigzag", "contiguous"),
        only_if=(CONTEXT_PARALLEL, KEYS_BETWEEN_RANKS),
    )
    cp_comm_overlap_parts: int = option(
        1,
        "Largest number of parts in which context-parallel ranks exchange heads; a part travels "
        "while another one is computed. 1 does not overlap.",
        unit="parts",
        minimum=1,
        only_if=(CONTEXT_PARALLEL, HEADS_IN_PARTS),
    )
    expert_model_parallel_size: int = option(
        1, "Number of expert-parallel ranks; they share the experts.", unit="ranks", minimum=1
    )
    expert_tensor_parallel_size: int = derived_option(
        "Number of ranks that share each weight matrix of an expert.",
        derived="--tensor-model-parallel-size",
        derive=lambda parallel: parallel.tensor_model_parallel_size,
        derived_from=("tensor_model_parallel_size",),
        unit="ranks",
        minimum=1,
        only_if=(EXPERT_LAYERS, TENSOR_PARALLEL),
    )
    pipeline_model_parallel_size: int = option(
        1, "Number of pipeline-parallel ranks; only 1 is supported.", unit="ranks", minimum=1
    )
    use_distributed_optimizer: bool = option(
        False,
        "Shard the fp32 masters and moments over the data-parallel ranks; each rank updates its "
        "shard (ZeRO-1).",
        only_if=REPLICAS,
    )
    overlap_grad_reduce: bool = option(
        False,
        "Reduce gradients over data-parallel ranks while the last backward pass of a step is "
        "still running.",
        only_if=REPLICAS,
    )
    overlap_param_gather: bool = option(
        False,
        "Gather the updated parameters from the ranks that own them while the next step "
        "is already running.",
        only_if=(REPLICAS, GATHERS_DURING_STEPS),
        needs=(Related("use_distributed_optimizer"), Related("overlap_grad_reduce")),
    )
    ddp_bucket_size: int = option(
        40_000_000,
        "Approximate bucket size of data-parallel collectives, in parameters.",
        unit="parameters",
        minimum=1,
        megatron=(
            "40,000,000, or 1,000,000 x data-parallel ranks",
            "sums do not depend on the number of ranks",
        ),
    )
    distributed_backend: str | None = option(
        None,
        "Communication library for collectives; nccl on GPUs and gloo on CPUs when not given.",
        choices=("nccl", "gloo"),
        only_if=SEVERAL_PROCESSES,
    )
    distributed_timeout_minutes: int = option(
        10,
        "Time, in minutes, after which a collective that is still running, or a GPU that makes "
        "no progress, ends the run.",
        unit="minutes",
        minimum=1,
        maximum=100000,
        only_if=SEVERAL_PROCESSES,
    )

    @property
    def ranks_per_replica(self) -> int:
        """Number of ranks that work on one pack."""
        return (
            self.tensor_model_parallel_size
            * self.context_parallel_size
            * self.pipeline_model_parallel_size
        )

    @property
    def document_alignment(self) -> int:
        """Number that divides the length of every document in its pack: the number of chunks that a
        zigzag cuts a document into, or 1.
        """
        return 2 * self.context_parallel_size if self.uses_zigzag else 1

    @property
    def exchanges_keys(self) -> bool:
        """Return whether attention exchanges keys and values between ranks."""
        return self.context_parallel_size > 1 and self.cp_comm_type != "a2a"

    @property
    def chooses_partition(self) -> bool:
        """Return whether the partition of attention is still to be chosen. It counts as contiguous."""
        return self.exchanges_keys and self.cp_partition_mode == BY_LENGTHS

    @property
    def uses_zigzag(self) -> bool:
        """Return whether the rows of a rank in attention are a zigzag."""
        return self.exchanges_keys and self.cp_partition_mode == "zigzag"

    @property
    def has_keys_in_order(self) -> bool:
        """Return whether attention exchanges keys and values of contiguous rows."""
        return self.exchanges_keys and not self.uses_zigzag

    @property
    def attention_exchange(self) -> str:
        """Words for the exchange of context-parallel attention."""
        rows = " of contiguous rows" * self.has_keys_in_order
        return self.cp_comm_type + rows + " or of a zigzag" * self.chooses_partition

    @property
    def ranks_per_row(self) -> int:
        """Number of ranks that share the rows of a pack between layers."""
        return self.context_parallel_size * (
            self.tensor_model_parallel_size if self.sequence_parallel else 1
        )

    @property
    def splits_tokens_of_experts(self) -> bool:
        """Return whether tensor-parallel ranks send different tokens to the experts."""
        return self.expert_tensor_parallel_size < self.tensor_model_parallel_size

    @property
    def layout_sizes(self) -> dict[str, int]:
        """Arguments of a ``ParallelLayout`` with these sizes, without the number of processes."""
        return {
            "tp_size": self.tensor_model_parallel_size,
            "cp_size": self.context_parallel_size,
            "ep_size": self.expert_model_parallel_size,
            "expert_tp_size": self.expert_tensor_parallel_size,
        }

    def rules(self, sound: Sound) -> Problems:
        for name, axis in NOT_BUILT.items():
            size = getattr(self, name)
            if sound(name) and size != 1:
                yield self.problem(name, f"{axis} is not supported yet", "give 1")
        yield from super().rules(sound)


def fewest_processes(parallel: ParallelConfig) -> int:
    """Return the smallest number of processes for which these sizes form a layout; 1 if a size is
    invalid.
    """
    sizes = {name: getattr(parallel, name) for name in AXIS_SIZES}
    if sizes["expert_tensor_parallel_size"] is None:
        sizes["expert_tensor_parallel_size"] = sizes["tensor_model_parallel_size"]
    if not all(isinstance(size, int) and size >= 1 for size in sizes.values()):
        return 1
    tp, cp, ep, expert_tp = sizes.values()
    return lcm(tp * cp, expert_tp * ep)


def processes_rules(parallel: ParallelConfig, world_size: int, sound: Sound) -> Problems:
    """Yield problems if the sizes do not form a layout of ``world_size`` processes."""
    keys = (f"parallel.{name}" for name in (*AXIS_SIZES, *NOT_BUILT))
    if sound(*keys) and all(getattr(parallel, name) == 1 for name in NOT_BUILT):
        yield from layout_problems(world_size, **parallel.layout_sizes)


class _Shared(NamedTuple):
    """Countable parts of a model, for example heads, that tensor-parallel or context-parallel ranks
    share.
    """

    flag: str
    number: int
    may_be_fewer: bool = False
    """True if several ranks may hold copies of one item."""

    kind: LayerKind | None = None
    """Kind of the layers in which context-parallel ranks may exchange the items; None if they do
    not.
    """

    of_rank: str = ""
    """Words for the owner of the items if that is not the whole model."""

    def fits(self, ranks: int) -> bool:
        return self.number % ranks == 0 or (self.may_be_fewer and ranks % self.number == 0)

    def of_one(self, ranks: int) -> _Shared:
        """Return the items of a single tensor-parallel rank out of ``ranks``."""
        whose = "" if ranks == 1 else " of a tensor-parallel rank"
        return self._replace(number=max(self.number // ranks, 1), of_rank=whose)

    def exchanged_by(self, parallel: ParallelConfig) -> bool:
        """Return whether context-parallel ranks exchange these items for tokens (all-to-all)."""
        return self.kind is not None and self.kind.exchanges(parallel) == "heads"


def parallel_rules(run: RunConfig, sound: Sound) -> Problems:
    """Yield problems between the layout and other sections."""
    parallel, model = run.parallel, run.model
    yield from _dense_rules(run, sound)
    size = parallel.expert_model_parallel_size
    if (
        sound("parallel.expert_model_parallel_size", "model.hybrid_layer_pattern")
        and not model.has_experts
        and size > 1
    ):
        yield parallel.problem(
            "expert_model_parallel_size", "the pattern has no expert layer (E)", "leave it out"
        )


def _dense_rules(run: RunConfig, sound: Sound) -> Problems:
    parallel, model = run.parallel, run.model
    if not sound("parallel.tensor_model_parallel_size", "parallel.context_parallel_size"):
        return
    tp, cp = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    tp_flag, cp_flag = "--tensor-model-parallel-size", "--context-parallel-size"
    shared = list(_shared_items(parallel, model, sound))
    yield from _shared_out(tp_flag, tp, shared)
    of_kinds = (f"parallel.{field.name}" for field in section_fields(KindCommunication))
    comm = sound("parallel.cp_comm_type", *of_kinds)
    if cp > 1 and sound("model.hybrid_layer_pattern"):
        for kind in model.kinds:
            if kind.mixes_tokens and not kind.exchanges(parallel):
                rule = f"{kind.layer}s ({kind.symbol}) exchange no tokens between ranks"
                yield Problem(cp_flag, str(cp), rule, "give 1")
    if cp > 1 and all(items.fits(tp) for items in shared) and comm:
        exchanged = [items.of_one(tp) for items in shared if items.exchanged_by(parallel)]
        yield from _shared_out(cp_flag, cp, exchanged, _instead_of_heads(cp, exchanged))
    if sound("packing.seq_length", "packing.micro_batch_size"):
        yield from _row_rules(parallel, run.packing, sound)


def _instead_of_heads(cp: int, exchanged: list[_Shared]) -> str:
    """Return the flags with which ``cp`` ranks fit because they exchange no heads, as a cure."""
    kinds = dict.fromkeys(items.kind for items in exchanged if not items.fits(cp))
    options = [kind.without_heads for kind in kinds if kind is not None]
    flags = [f"--{x[0].replace('_', '-')} {x[1]}" for x in options if x is not None]
    if not flags or len(flags) < len(options):
        return ""
    verb = "share" if len(flags) > 1 else "shares"
    return f", or give {' and '.join(flags)}, which {verb} no heads"


def _shared_out(flag: str, size: int, shared: list[_Shared], instead: str = "") -> Problems:
    """Yield a problem for each item that ``size`` ranks cannot share evenly. ``instead`` is the end
    of the cure.
    """
    most = gcd(*(items.number for items in shared if not items.may_be_fewer))
    for items in shared:
        if not items.fits(size):
            fitting = [
                number
                for number in every_divisor(most)
                if all(other.fits(number) for other in shared)
            ]
            rule = (
                "neither divides nor is a multiple of" if items.may_be_fewer else "does not divide"
            )
            yield Problem(
                flag,
                str(size),
                f"{rule} {items.flag} ({items.number}{items.of_rank})",
                (f"choose from {in_words(fitting)}" if fitting else "give 1") + instead,
            )


def _row_rules(parallel: ParallelConfig, packing: PackingConfig, sound: Sound) -> Problems:
    """Yield problems if the slots of a pack do not divide evenly among its ranks, or documents into
    the chunks of a zigzag.
    """
    tokens, tp, cp = (
        packing.tokens_per_pack,
        parallel.tensor_model_parallel_size,
        parallel.context_parallel_size,
    )
    tp_flag, cp_flag, comm = (
        "--tensor-model-parallel-size",
        "--context-parallel-size",
        parallel.cp_comm_type,
    )
    if tokens % cp:
        yield parallel.problem(
            "context_parallel_size",
            f"does not divide the {tokens} token slots of a pack",
            f"choose from {divisors(tokens)}",
        )
    elif tokens % parallel.ranks_per_row:
        yield Problem(
            "--sequence-parallel",
            "",
            f"requires the {tokens} token slots of a pack to divide evenly among {tp_flag} "
            f"({tp}) x {cp_flag} ({cp}) ranks",
            "choose sizes whose product divides the slots, or leave it out"
            if cp > 1
            else f"choose a size from {divisors(tokens)}, or leave it out",
        )
    chunks, alignment = parallel.document_alignment, packing.pad_packed_seq_alignment
    sound_modes = sound("parallel.cp_comm_type", "parallel.cp_partition_mode")
    if tokens % cp or not sound_modes or not sound("packing.pad_packed_seq_alignment"):
        return
    if tokens % chunks:
        yield parallel.problem(
            "cp_comm_type",
            f"cuts packs and documents into 2 x {cp_flag} ({cp}) chunks, but {chunks} does not "
            f"divide the {tokens} token slots of a pack",
            f"give a2a, --cp-partition-mode contiguous, or a --seq-length that is a multiple of {chunks}",
        )
    elif alignment is not None and (alignment % chunks or tokens % alignment):
        fitting = in_words([size for size in every_divisor(tokens) if size % chunks == 0])
        rule = f"must be a multiple of 2 x {cp_flag} ({chunks}) with --cp-comm-type {comm}"
        yield packing.problem(
            "pad_packed_seq_alignment",
            rule if alignment % chunks else f"does not divide the {tokens} token slots of a pack",
            f"choose from {fitting}",
        )


def _shared_items(parallel: ParallelConfig, model: ModelConfig, sound: Sound) -> Iterator[_Shared]:
    """Yield what ranks divide among themselves in the layers of the pattern, for example heads.

    Sizes that already have a problem are left out.
    """
    for kind in model.kinds if sound("model.hybrid_layer_pattern") else ():
        counts = []
        for shared in kind.shared:
            count, is_sound = getattr(model, shared.option), sound(f"model.{shared.option}")
            if not is_sound or not count or (shared.may_be_fewer and count in counts):
                continue
            if shared.of_experts and parallel.splits_tokens_of_experts:
                continue  # checked against --expert-tensor-parallel-size, by the rules of its kind
            counts += [] if shared.may_be_fewer else [count]
            of_kind = kind if shared.exchanged else None
            yield _Shared(model.flag(shared.option), count, shared.may_be_fewer, of_kind)
