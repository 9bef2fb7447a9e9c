"""Mixtures of experts: their options, and the rules between them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron_packed.config.conditions import EXPERT_LAYERS, Condition, option_given, option_is_not
from megatron_packed.config.errors import Problems
from megatron_packed.config.kinds.layer_kind import (
    ACTIVATION,
    LayerKind,
    LayerPart,
    Projection,
    Shared,
    gated_mlp,
)
from megatron_packed.config.options import Related, derived_option, option
from megatron_packed.config.section import Sound
from megatron_packed.config.sections.model_parts.divisors import divisors
from megatron_packed.config.sections.model_parts.stack import StackOptions

if TYPE_CHECKING:
    from megatron_packed.config.run import RunConfig
    from megatron_packed.config.sections.packing import PackingConfig
    from megatron_packed.config.sections.parallel import ParallelConfig

EXPERTS = "mixture of experts"
EXPERT_ACTIVATION = "moe_act"
MEASURE = "auto"
"""Value of ``--moe-expert-rank-capacity-factor`` that derives the bounds from observed routing."""


LIMITED_GROUPS = Condition(
    "tokens may use all groups of experts",
    lambda run, processes: run.model.limiting_expert_groups is not None,
)
EXPERTS_ON_RANKS = Condition(
    "every rank has all experts",
    lambda run, processes: run.parallel.expert_model_parallel_size != 1,
)
SHARED_EXPERT = option_given("model.moe_shared_expert_intermediate_size")
BALANCES = Condition(
    "adapters train without it; see --lora-keep-balancing",
    lambda run, processes: run.model.balances_experts,
)
SAME_TOKENS = Condition(
    "tensor-parallel ranks dispatch different tokens",
    lambda run, processes: not run.parallel.splits_tokens_of_experts,
)


class ExpertOptions(StackOptions, group=EXPERTS):
    """Experts, router and dispatcher of ``E`` layers."""

    num_experts: int | None = option(
        None,
        "Number of experts of an E layer.",
        unit="experts",
        minimum=1,
        maximum=65536,
    )
    moe_router_topk: int = option(
        2,
        "Number of experts for each token.",
        unit="experts",
        minimum=1,
        only_if=EXPERT_LAYERS,
        phase=True,
        at_most="num_experts",
    )
    moe_ffn_hidden_size: int = derived_option(
        "Inner width of one expert.",
        derived="that of an MLP layer",
        derive=lambda model: model.ffn_hidden_size or model.usual_mlp_width,
        derived_from=("ffn_hidden_size", "hidden_size", "swiglu"),
        unit="channels",
        minimum=1,
        only_if=EXPERT_LAYERS,
    )
    moe_latent_size: int | None = option(
        None,
        "Width of the rows that are sent to routed experts. One projection before the dispatch and "
        "one after the combination connect it to --hidden-size. The router and the shared expert "
        "keep --hidden-size. No projections when not given.",
        unit="channels",
        minimum=1,
    )
    moe_shared_expert_intermediate_size: int | None = option(
        None,
        "Inner width of the shared expert that processes every token; no shared expert when not "
        "given.",
        unit="channels",
        minimum=1,
    )
    moe_shared_expert_gate: bool = option(
        False,
        "Multiply the output of the shared expert by the sigmoid of a gate, one number for each "
        "token.",
        only_if=SHARED_EXPERT,
    )
    moe_router_score_function: str = option(
        "softmax",
        "Function that turns router logits into scores.",
        choices=("softmax", "sigmoid"),
        not_built={"sqrtsoftplus": "give sigmoid"},
        only_if=EXPERT_LAYERS,
        phase=True,
    )
    moe_router_pre_softmax: bool = option(
        False,
        "Apply the softmax over all experts before the top k are chosen, instead of over "
        "the chosen ones.",
        only_if=(EXPERT_LAYERS, option_is_not("model.moe_router_score_function", "sigmoid")),
        phase=True,
    )
    moe_router_topk_scaling_factor: float | None = option(
        None,
        "Factor applied to the scores of the chosen experts; 1 when not given.",
        above=0,
        only_if=EXPERT_LAYERS,
        phase=True,
    )
    moe_router_num_groups: int | None = option(
        None,
        "Number of groups of consecutive experts. A token uses the experts of "
        "--moe-router-group-topk groups; of all groups when not given.",
        unit="groups",
        minimum=1,
        only_if=(EXPERT_LAYERS, LIMITED_GROUPS),
        phase=True,
    )
    moe_router_group_topk: int | None = option(
        None,
        "Number of groups for each token: those with the highest sums of their best scores. The "
        "sum has --moe-router-topk / --moe-router-group-topk scores, rounded down.",
        unit="groups",
        minimum=1,
        only_if=(EXPERT_LAYERS, LIMITED_GROUPS),
        phase=True,
        needs=Related("moe_router_num_groups"),
        at_most="moe_router_num_groups",
    )
    moe_router_enable_expert_bias: bool = option(
        False,
        "Balance the load of experts with a bias per expert. The bias is added to the scores "
        "only to choose experts.",
        only_if=EXPERT_LAYERS,
        needs=Related("moe_router_score_function", value="sigmoid"),
    )
    moe_router_bias_update_rate: float = option(
        1e-3,
        "Change of the expert bias per iteration (see --moe-router-enable-expert-bias).",
        minimum=0,
        training_only=True,
        only_if=(EXPERT_LAYERS, option_given("model.moe_router_enable_expert_bias"), BALANCES),
    )
    moe_router_load_balancing_type: str = option(
        "aux_loss",
        "Auxiliary loss that balances the load of experts. aux_loss is computed per pack over "
        "its real tokens. seq_aux_loss is the mean over the samples of a pack. Each --seq-length "
        "consecutive slots are a sample. global_aux_loss uses the loads over all ranks and "
        "over the micro-batches of the step so far.",
        choices=("aux_loss", "seq_aux_loss", "global_aux_loss", "none"),
        training_only=True,
        not_built={
            "sinkhorn": "give aux_loss, or none with --moe-router-enable-expert-bias",
            "quantile_balancing": "give aux_loss, or none with --moe-router-enable-expert-bias",
        },
        only_if=(EXPERT_LAYERS, option_is_not("model.moe_aux_loss_coeff", 0), BALANCES),
    )
    moe_aux_loss_per_document: bool = option(
        False,
        "With seq_aux_loss, each document of a pack is one sample. Then this loss does not couple "
        "the documents of a pack.",
        training_only=True,
        only_if=(EXPERT_LAYERS, option_is_not("model.moe_aux_loss_coeff", 0), BALANCES),
        needs=Related("moe_router_load_balancing_type", value="seq_aux_loss"),
    )
    moe_router_force_load_balancing: bool = option(
        False,
        "Route tokens at random, in evaluations too, so that experts get even loads in a benchmark. "
        "The random logits depend on --seed and on the place of a token. The model does not learn to "
        "route.",
        training_only=True,
        only_if=EXPERT_LAYERS,
    )
    moe_aux_loss_coeff: float = option(
        0.0,
        "Weight of the auxiliary load-balancing loss.",
        minimum=0,
        training_only=True,
        only_if=(
            EXPERT_LAYERS,
            option_is_not("model.moe_router_load_balancing_type", "none"),
            BALANCES,
        ),
        zero_is_off=True,
    )
    moe_z_loss_coeff: float | None = option(
        None,
        "Weight of the z-loss, which keeps router logits small; no z-loss when not given.",
        minimum=0,
        training_only=True,
        only_if=(EXPERT_LAYERS, BALANCES),
        zero_is_off=True,
    )
    moe_expert_capacity_factor: float | None = option(
        None,
        "Limit of the tokens per expert, as a multiple of an even share of a rank's pack; no "
        "limit when not given.",
        above=0,
        training_only=True,
        only_if=EXPERT_LAYERS,
    )
    moe_token_drop_policy: str = option(
        "probs",
        "Tokens that an expert keeps when it reaches its capacity: those with the highest "
        "scores (probs) or the first (position).",
        choices=("probs", "position"),
        training_only=True,
        only_if=(EXPERT_LAYERS, option_given("model.moe_expert_capacity_factor")),
    )
    moe_pad_expert_input_to_capacity: bool = option(
        False,
        "Pad the rows that the alltoall dispatcher sends to the expert capacity, so that the "
        "row counts need not be read from the device.",
        training_only=True,
        only_if=(
            EXPERT_LAYERS,
            EXPERTS_ON_RANKS,
            option_is_not("model.moe_token_dispatcher_type", "allgather"),
        ),
        needs=Related("moe_expert_capacity_factor", "it sets the capacity to pad to"),
    )
    moe_token_dispatcher_type: str = option(
        "allgather",
        "Method that moves tokens to experts on other ranks. allgather sends all tokens to all "
        "ranks; alltoall sends each token to the ranks of its experts.",
        choices=("allgather", "alltoall"),
        training_only=True,
        value_aliases={"flex": "alltoall"},
        value_notes={
            "flex": "the tokens go to the same experts without a dispatcher library, so only the speed differs"
        },
        only_if=(EXPERT_LAYERS, EXPERTS_ON_RANKS),
    )
    moe_dispatch: str = option(
        "tokens",
        "Rows that alltoall sends: one for each expert of a token (rows), or one for each rank of "
        "its experts (tokens). With tokens a rank sums the results of its experts, and rounds the "
        "sum before it travels back.",
        choices=("rows", "tokens"),
        training_only=True,
        earlier=lambda stored: "rows",
        only_if=(
            EXPERT_LAYERS,
            EXPERTS_ON_RANKS,
            option_is_not("model.moe_token_dispatcher_type", "allgather"),
        ),
    )
    moe_comm_overlap_parts: int = option(
        1,
        "Number of parts of a rank's token slots that alltoall sends one after the other; a part "
        "travels while the experts compute another one. 1 does not overlap.",
        unit="parts",
        minimum=1,
        training_only=True,
        only_if=(
            EXPERT_LAYERS,
            EXPERTS_ON_RANKS,
            option_is_not("model.moe_token_dispatcher_type", "allgather"),
        ),
    )
    moe_shared_expert_overlap: bool = option(
        False,
        "Run the shared expert on a CUDA stream of its own, beside the dispatch of tokens to the "
        "other experts. It has no effect if tensor-parallel ranks dispatch different tokens.",
        training_only=True,
        only_if=(SHARED_EXPERT, SAME_TOKENS),
    )
    moe_expert_rank_capacity_factor: float | str | None = option(
        None,
        "Bound of the rows that a rank's experts, and a part sent by alltoall, can take, as a "
        "multiple of an even share. A step that needs more rows is not applied and repeated. auto "
        "observes the routing and raises the bound when needed; it is the default if CUDA graphs "
        "capture experts. Otherwise there is no bound.",
        word=MEASURE,
        above=0,
        training_only=True,
        only_if=(EXPERT_LAYERS, EXPERTS_ON_RANKS),
        excludes=Related(
            "moe_pad_expert_input_to_capacity", "it already gives the buffers a fixed size"
        ),
    )

    if TYPE_CHECKING:

        @property
        def balances_experts(self) -> bool:
            """`LoraOptions.balances_experts`; both are bases of `ModelConfig`."""

    @property
    def routed_width(self) -> int:
        """Return the width of the rows that routed experts process: latent or hidden size."""
        return self.hidden_size if self.moe_latent_size is None else self.moe_latent_size

    @property
    def sends_tokens(self) -> bool:
        """Return whether a token travels once to each rank of its experts."""
        return self.moe_token_dispatcher_type == "alltoall" and self.moe_dispatch == "tokens"  # noqa: S105

    @property
    def limiting_expert_groups(self) -> tuple[int, int] | None:
        """Return the number of groups of experts and of a token's groups; None if all are open."""
        groups, chosen = self.moe_router_num_groups, self.moe_router_group_topk
        return None if groups is None or chosen is None or chosen == groups else (groups, chosen)

    @property
    def balances_all_ranks(self) -> bool:
        """Return whether the load-balance loss uses the loads of all data-parallel ranks."""
        return (
            self.moe_router_load_balancing_type == "global_aux_loss"
            and self.moe_aux_loss_coeff != 0
            and self.balances_experts
            and self.num_experts is not None
        )

    @property
    def balances_documents(self) -> bool:
        """Return whether the load-balance loss is a mean over the documents of a pack."""
        coeff = self.moe_aux_loss_coeff if self.balances_experts else 0.0
        return self.moe_aux_loss_per_document and coeff != 0

    @property
    def dispatch_asks_the_device(self) -> bool:
        """Return whether the token dispatcher reads row counts from the device. Such a read (a host
        sync) cannot be part of a CUDA graph.
        """
        return (
            self.moe_token_dispatcher_type == "alltoall"  # noqa: S105
            and not self.moe_pad_expert_input_to_capacity
            and self.moe_expert_rank_capacity_factor is None
        )

    def expert_rules(self, sound: Sound) -> Problems:
        if self.add_bias_linear and sound("hybrid_layer_pattern"):
            yield self.problem(
                "hybrid_layer_pattern",
                "has E layers, but experts with biases are not supported",
                "add --disable-bias-linear",
            )
        counts_sound = self.num_experts is not None and sound("num_experts", "moe_router_topk")
        softmax = self.moe_router_score_function == "softmax" and not self.moe_router_pre_softmax
        if counts_sound and softmax and self.moe_router_topk == 1:
            yield self.problem(
                "moe_router_topk",
                "the softmax over a single chosen expert is always 1, so the router would "
                "not learn",
                "add --moe-router-pre-softmax, or choose at least two experts",
            )
        yield from self._group_rules(sound)

    def _group_rules(self, sound: Sound) -> Problems:
        groups, chosen = self.moe_router_num_groups, self.moe_router_group_topk
        if chosen is None or groups is None:
            return  # as in Megatron, all groups are open
        experts, topk = self.num_experts, self.moe_router_topk
        if not sound("moe_router_num_groups", "moe_router_group_topk"):
            return
        if chosen > groups or experts is None or not sound("num_experts", "moe_router_topk"):
            return
        if experts % groups:
            yield self.problem(
                "moe_router_num_groups",
                f"does not divide --num-experts ({experts})",
                f"choose from {divisors(experts)}",
            )
            return
        most = experts // groups * chosen
        if chosen < groups and topk <= experts and not chosen <= topk <= most:
            yield self.problem(
                "moe_router_group_topk",
                f"gives a token groups with {most} experts, but --moe-router-topk is {topk}",
                "choose a number that is at most --moe-router-topk, and whose groups have as many "
                "experts",
            )


def _parallel_rules(run: RunConfig, sound: Sound) -> Problems:
    """Yield problems of experts with the layout, the packs and the memory options."""
    model, parallel = run.model, run.parallel
    size, experts = parallel.expert_model_parallel_size, model.num_experts
    width, ranks = model.moe_ffn_hidden_size, parallel.expert_tensor_parallel_size
    counts = sound("parallel.expert_model_parallel_size", "model.num_experts")
    if counts and experts is not None and experts % size:
        yield parallel.problem(
            "expert_model_parallel_size",
            f"does not divide --num-experts ({experts})",
            f"choose from {divisors(experts)}",
        )
    if (
        sound("model.moe_ffn_hidden_size", "parallel.expert_tensor_parallel_size")
        and parallel.splits_tokens_of_experts
        and width % ranks
    ):
        yield parallel.problem(
            "expert_tensor_parallel_size",
            f"does not divide --moe-ffn-hidden-size ({width})",
            "give 1, or another --moe-ffn-hidden-size",
        )
    yield from _shared_token_rules(run.parallel, run.packing, sound)
    yield from _shared_expert_rules(run, sound)


def _shared_token_rules(parallel: ParallelConfig, packing: PackingConfig, sound: Sound) -> Problems:
    """Yield a problem if tensor-parallel ranks that dispatch different tokens cannot share the slots
    of a pack evenly.
    """
    if not sound(
        "parallel.tensor_model_parallel_size",
        "parallel.expert_tensor_parallel_size",
        "parallel.context_parallel_size",
        "packing.seq_length",
        "packing.micro_batch_size",
    ):
        return
    tp, tokens = parallel.tensor_model_parallel_size, packing.tokens_per_pack
    cp = parallel.context_parallel_size
    uneven = tokens % (tp * cp)
    if parallel.splits_tokens_of_experts and uneven and not parallel.sequence_parallel:
        yield parallel.problem(
            "expert_tensor_parallel_size",
            f"requires the {tokens} token slots of a pack to divide evenly among "
            f"--tensor-model-parallel-size ({tp}) x --context-parallel-size ({cp}) ranks",
            f"choose a --tensor-model-parallel-size from {divisors(max(tokens // cp, 1))}, or leave "
            "it out",
        )


def _shared_expert_rules(run: RunConfig, sound: Sound) -> Problems:
    """Yield a problem if one stream would restore a saved tensor that another stream reads."""
    memory, model = run.memory, run.model
    overlaps = sound(
        "memory.offload_layer_inputs",
        "memory.fine_grained_activation_offloading",
        "model.moe_shared_expert_intermediate_size",
        "parallel.tensor_model_parallel_size",
        "parallel.expert_tensor_parallel_size",
    )
    overlaps = overlaps and model.moe_shared_expert_overlap
    shared = model.moe_shared_expert_intermediate_size is not None
    if not overlaps or not shared or run.parallel.splits_tokens_of_experts:
        return
    if memory.offloads:
        yield model.problem(
            "moe_shared_expert_overlap",
            f"cannot be used with {memory.offload_flag}, which copies on streams of its own",
            "leave one of them out",
        )


LIMITING_GROUPS = ("moe_router_num_groups", "moe_router_group_topk")
"""Options that limit the experts of a token to some groups."""


def _left_out(model: ExpertOptions) -> dict[str, Any]:
    return {} if model.limiting_expert_groups else dict.fromkeys(LIMITING_GROUPS)


KIND = LayerKind(
    symbol="E",
    name=EXPERTS,
    place=5,
    noun="expert",
    options={"model": ExpertOptions},
    rules=ExpertOptions.expert_rules,
    cross_rules=_parallel_rules,
    left_out=_left_out,
    required=("num_experts",),
    refused_elsewhere=("num_experts", "moe_shared_expert_intermediate_size", "moe_latent_size"),
    mixes_tokens=False,
    may_have_bias=True,
    has_experts=True,
    shared=(
        Shared("moe_ffn_hidden_size", of_experts=True),
        Shared("moe_shared_expert_intermediate_size"),
    ),
    graph_modules=("moe", "moe_router"),
    mixer_module="moe",
    recomputed={EXPERT_ACTIVATION: (EXPERT_ACTIVATION, "expert_fc2")},
    inside_norm=("mlp_norm",),
    parts=(
        LayerPart("mlp_norm", "norm"),
        LayerPart("expert_fc1", "mixer.experts.expert_fc1"),
        LayerPart(EXPERT_ACTIVATION, "mixer.experts.moe_act", ACTIVATION),
        LayerPart("expert_fc2", "mixer.experts.expert_fc2"),
    ),
    projections=(
        *gated_mlp("experts.", "experts"),
        *gated_mlp("shared_expert.", "shared-experts"),
        Projection("fc1_latent_proj", "latent"),
        Projection("fc2_latent_proj", "latent"),
    ),
    example="--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 256",
)
