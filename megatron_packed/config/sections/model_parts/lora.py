"""Options of low-rank adapters (LoRA), which train in place of the weights that they adapt."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_packed.config.conditions import EXPERT_LAYERS, TRAINS, Condition
from megatron_packed.config.errors import Problem, Problems
from megatron_packed.config.kinds.experts import EXPERT_ACTIVATION
from megatron_packed.config.kinds.layer_kind import KINDS, LAYER_NORM
from megatron_packed.config.options import option
from megatron_packed.config.section import Section, Sound, section_fields

if TYPE_CHECKING:
    from megatron_packed.config.run import RunConfig
    from megatron_packed.config.sections.model import ModelConfig

ALL_LINEAR = "all-linear"
"""Name in ``--lora-target-modules`` of all matrices of the layers but routers and gates of experts."""
ADAPTERS = Condition("--lora-rank is not given", lambda run, processes: run.model.has_adapters)
APART = "projections with adapters run their collectives apart from their products"
"""Reason why ``--tp-comm-overlap`` has no effect."""
LOW_LEARNING_RATE = 5e-5
"""Learning rate below which a run with adapters prints advice."""
INITS = ("kaiming", "xavier", "gaussian")
"""Values of ``--lora-init``."""


class LoraOptions(Section, group="LoRA adapters", only_if=ADAPTERS):
    """Rank, scale and targets of adapters."""

    lora_rank: int | None = option(
        None,
        "Train adapters of this rank (LoRA) in place of the model's weights, which are frozen.",
        unit="columns",
        minimum=1,
        training_only=True,
        resume="trained parameters",
    )
    lora_alpha: float = option(
        32.0,
        "The update of a matrix is alpha / rank times B A.",
        above=0,
        training_only=True,
        resume="trained parameters",
    )
    lora_rslora: bool = option(
        False,
        "Scale updates by alpha / sqrt(rank) in place of alpha / rank (rank-stabilised LoRA).",
        training_only=True,
        resume="trained parameters",
    )
    lora_dropout: float = option(
        0.0,
        "Probability of dropout of an adapter's input; routed experts have none.",
        minimum=0,
        below=1,
        training_only=True,
        only_if=TRAINS,
    )
    lora_init: str = option(
        "kaiming",
        "Initial values of A: uniform in +-1/sqrt(inputs) (kaiming, the default of PEFT), normal "
        "with variance 2 / (inputs + rank) (xavier, that of Megatron-Bridge), or normal with "
        "standard deviation 1 / rank (gaussian). B is zero.",
        choices=INITS,
        training_only=True,
        only_if=TRAINS,
    )
    lora_target_modules: tuple[str, ...] = option(
        (ALL_LINEAR,),
        "Matrices with an adapter: all-linear, or a part of the model (attention, mamba, gdn, mlp, "
        "experts, shared-experts, latent). Also a name of Megatron (linear_qkv) or Hugging Face "
        "(q_proj), or a pattern of complete names (layers.0.*). A name that matches nothing is an "
        "error.",
        training_only=True,
        resume="trained parameters",
    )
    lora_modules_to_save: tuple[str, ...] = option(
        (),
        "Weights that are trained whole beside the adapters, by patterns of their names, for "
        "example 'embedding.*' 'output.*'.",
        training_only=True,
        resume="trained parameters",
    )

    lora_keep_balancing: bool = option(
        False,
        "Go on with the update of expert biases and with auxiliary losses, which are off with "
        "adapters: their routers are frozen.",
        training_only=True,
        only_if=(EXPERT_LAYERS, TRAINS),
    )

    @property
    def has_adapters(self) -> bool:
        return self.lora_rank is not None

    @property
    def lora_scale(self) -> float:
        """Factor of the update of a matrix."""
        rank = self.lora_rank or 1
        scale: float = self.lora_alpha / (rank**0.5 if self.lora_rslora else rank)
        return scale

    @property
    def adapts_all_projections(self) -> bool:
        return self.has_adapters and ALL_LINEAR in self.lora_target_modules

    @property
    def balances_experts(self) -> bool:
        """Return whether expert biases are updated and auxiliary losses are part of the loss."""
        return not self.has_adapters or self.lora_keep_balancing

    def adapter_rules(self, model: ModelConfig, sound: Sound) -> Problems:
        """Yield problems of parts of the model in ``--lora-target-modules`` that it does not have."""
        if not self.has_adapters or not sound("lora_target_modules", "hybrid_layer_pattern"):
            return
        words = dict.fromkeys(self.lora_target_modules)
        for kind in KINDS.values():
            for part in dict.fromkeys(projection.part for projection in kind.projections):
                if part in words and kind not in model.kinds:
                    yield Problem(
                        self.flag("lora_target_modules"),
                        part,
                        f"the pattern has no {kind.layer} ({kind.symbol})",
                        "leave the word out",
                    )


def adapter_run_rules(run: RunConfig, sound: Sound) -> Problems:
    """Yield problems of adapters with the layout and the implementation of the layers."""
    model, parallel = run.model, run.parallel
    if not model.has_adapters:
        return
    if sound("training.transformer_impl") and run.training.transformer_impl != "local":
        yield run.training.problem(
            "transformer_impl",
            f"has no layers with adapters ({model.flag('lora_rank')})",
            "give local, which computes the same",
        )
    if model.lora_dropout == 0 or not sound("model.lora_dropout"):
        return
    memory = run.memory
    if (
        sound(
            "cuda_graph.cuda_graph_impl",
            "memory.recompute_granularity",
            "memory.recompute_modules",
        )
        and run.cuda_graph.enabled
        and (memory.recomputes_layers or {*memory.modules} - {LAYER_NORM, EXPERT_ACTIVATION})
    ):
        yield model.problem(
            "lora_dropout",
            "needs the same mask when a layer is recomputed (--recompute-granularity), and CUDA graphs "
            "(--cuda-graph-impl) cannot draw the same numbers again",
            "give 0, or leave recomputation or graphs out",
        )
    if (
        sound(
            "parallel.sequence_parallel",
            "parallel.expert_tensor_parallel_size",
            "model.moe_latent_size",
        )
        and model.moe_latent_size is not None
        and parallel.splits_tokens_of_experts
        and not parallel.sequence_parallel
    ):
        yield model.problem(
            "lora_dropout",
            "would drop the same channels of the different tokens that tensor-parallel ranks send "
            "to experts (--moe-latent-size)",
            "give 0, --sequence-parallel, or another --expert-tensor-parallel-size",
        )


def keys_of_adapters() -> tuple[str, ...]:
    """Return the keys of the options that decide shapes and function of adapters."""
    fields = section_fields(LoraOptions)
    return tuple(f"model.{field.name}" for field in fields if field.option.resume)
