"""Options of low-rank adapters (LoRA), which train in place of the weights that they adapt."""

from __future__ import annotations

from megatron_packed.config.conditions import TRAINS, Condition
from megatron_packed.config.options import option
from megatron_packed.config.section import Section, section_fields

ALL_LINEAR = "all-linear"
"""Name in ``--lora-target-modules`` of all matrices of the layers but routers and gates of experts."""
ADAPTERS = Condition("--lora-rank is not given", lambda run, processes: run.model.has_adapters)


class LoraOptions(Section, group="LoRA adapters", only_if=(ADAPTERS, TRAINS)):
    """Rank, scale and targets of adapters."""

    lora_rank: int | None = option(
        None,
        "Train adapters of this rank (LoRA) in place of the model's weights, which are frozen.",
        unit="columns",
        minimum=1,
        training_only=True,
        resume="trained parameters",
        only_if=TRAINS,
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
    )
    lora_target_modules: tuple[str, ...] = option(
        (ALL_LINEAR,),
        "Matrices with an adapter: all-linear, a part of the model (attention, mamba, gdn, mlp, "
        "experts, shared-experts, latent), a name of Megatron (linear_qkv) or Hugging Face "
        "(q_proj), or a pattern of complete names (layers.0.*).",
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

    @property
    def has_adapters(self) -> bool:
        return self.lora_rank is not None

    @property
    def lora_scale(self) -> float:
        """Factor of the update of a matrix."""
        rank = self.lora_rank or 1
        scale: float = self.lora_alpha / (rank**0.5 if self.lora_rslora else rank)
        return scale


def keys_of_adapters() -> tuple[str, ...]:
    """Return the keys of the options that decide shapes and function of adapters."""
    fields = section_fields(LoraOptions)
    return tuple(f"model.{field.name}" for field in fields if field.option.resume)
