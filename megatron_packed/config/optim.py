"""The optimizer and its learning rate."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_packed.config.errors import Problem
from megatron_packed.config.options import Section, Sound, option

RATE, ADAM = "learning rate", "Adam"


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(Section, title="optim"):
    """AdamW over fp32 masters, and the schedule of its learning rate. Rules that need --train-iters stand in run.py."""

    lr: float = option(help="Highest learning rate.", group=RATE, minimum=0)
    min_lr: float = option(0.0, "Learning rate at the end of the decay, and the lowest one.", group=RATE, minimum=0)
    lr_decay_style: str = option(
        "linear", "Course of the decay.", group=RATE, choices=("constant", "linear", "cosine", "WSD"),
        not_built={"inverse-square-root": "give cosine, or WSD with --lr-wsd-decay-style minus_sqrt"},
    )
    lr_decay_iters: int | None = option(
        None, "Iteration at which the decay ends; --train-iters when not given.", unit="iterations", group=RATE,
        minimum=1,
    )
    lr_warmup_iters: int = option(0, "Linear warm-up.", unit="iterations", group=RATE, minimum=0)
    lr_warmup_fraction: float | None = option(
        None, "Linear warm-up as a share of the decay iterations.", group=RATE, minimum=0, maximum=1
    )
    lr_warmup_init: float = option(0.0, "Learning rate at the start of the warm-up.", group=RATE, minimum=0)
    lr_wsd_decay_iters: int | None = option(
        None, "WSD: iterations of the final decay.", unit="iterations", group=RATE, minimum=1
    )
    lr_wsd_decay_style: str = option(
        "exponential", "WSD: course of the final decay.", group=RATE,
        choices=("exponential", "linear", "cosine", "minus_sqrt"),
    )

    optimizer_backend: str = option(
        "auto", "Implementation of the fused step.", group=ADAM, choices=("auto", "torch", "transformer_engine", "apex")
    )
    weight_decay: float = option(
        0.01, "Decay of matrices; norms, biases, A_log, D and dt_bias have none.", group=ADAM, minimum=0
    )
    clip_grad: float = option(1.0, "Largest global norm of the gradient; 0 does not clip.", group=ADAM, minimum=0)
    adam_beta1: float = option(0.9, "Memory of the first moment.", group=ADAM, minimum=0, below=1)
    adam_beta2: float = option(0.999, "Memory of the second moment.", group=ADAM, minimum=0, below=1)
    adam_eps: float = option(1e-8, "Added to the root of the second moment.", group=ADAM, above=0)

    def rules(self, sound: Sound) -> Iterator[Problem]:
        for name in ("min_lr", "lr_warmup_init"):
            if sound("lr", name) and getattr(self, name) > self.lr:
                yield Problem(self.flag(name), str(getattr(self, name)), f"must be at most --lr ({self.lr})",
                              "lower it, or raise --lr")
        fraction_given = self.lr_warmup_fraction is not None
        if fraction_given and sound("lr_warmup_iters", "lr_warmup_fraction") and self.lr_warmup_iters:
            yield Problem("--lr-warmup-fraction", str(self.lr_warmup_fraction),
                          f"contradicts --lr-warmup-iters ({self.lr_warmup_iters})", "give one of the two")
        if sound("lr_decay_style", "lr_wsd_decay_iters"):
            if self.lr_decay_style == "WSD" and self.lr_wsd_decay_iters is None:
                yield Problem("--lr-wsd-decay-iters", "", "is required with --lr-decay-style WSD",
                              "give the number of iterations of the final decay")
            if self.lr_decay_style != "WSD" and self.lr_wsd_decay_iters is not None:
                yield Problem("--lr-wsd-decay-iters", str(self.lr_wsd_decay_iters),
                              f"has no meaning with --lr-decay-style {self.lr_decay_style}",
                              "give --lr-decay-style WSD, or leave it out")
