"""Options of multi-token prediction: the parts of the pattern after a ``/``."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_packed.config.conditions import Condition, layers
from megatron_packed.config.errors import Problem
from megatron_packed.config.layer_pattern import DEPTH
from megatron_packed.config.options import derived_option, option
from megatron_packed.config.section import Section, Sound

MULTI_TOKEN = "multi-token prediction"  # noqa: S105
MOST_DEPTHS = 14
"""Largest number of depths; a micro-batch has a factor for the loss of each depth."""


DEPTHS = layers(DEPTH, f"{DEPTH} part")
SEVERAL_DEPTHS = Condition(
    f"the pattern has one {DEPTH} part", lambda run, processes: run.model.mtp_depths > 1
)


class MultiTokenOptions(Section, group=MULTI_TOKEN):
    """Depths of multi-token prediction. Depth k predicts the token k + 1 tokens ahead."""

    mtp_num_layers: int = derived_option(
        "Number of depths of multi-token prediction.",
        derived="number of / parts of --hybrid-layer-pattern, which it must equal",
        derive=lambda model: model.mtp_depths,
        derived_from=("hybrid_layer_pattern",),
        unit="depths",
        minimum=0,
        only_if=DEPTHS,
    )
    mtp_use_repeated_layer: bool = option(
        False,
        "Use the same weights at every depth of multi-token prediction.",
        only_if=(DEPTHS, SEVERAL_DEPTHS),
    )
    mtp_loss_scaling_factor: float = option(
        0.1,
        "Weight of the mean loss of all depths of multi-token prediction, which is added to the "
        "loss of the next token.",
        minimum=0,
        training_only=True,
        only_if=DEPTHS,
    )

    def multi_token_rules(self, sound: Sound, depths: int) -> Iterator[Problem]:
        """Yield problems of the number of depths.

        Args:
            depths: number of parts of the pattern after a ``/``.
        """
        if not sound("hybrid_layer_pattern", "mtp_num_layers"):
            return
        given = self.mtp_num_layers
        if given != depths:
            yield self.problem(
                "mtp_num_layers",
                f"is not the number of parts after a {DEPTH} in --hybrid-layer-pattern ({depths})",
                f"give {depths}, or write the layers of each depth after a {DEPTH}, "
                "for example M*ME/*E/*E",
            )
        if depths > MOST_DEPTHS:
            yield Problem(
                "--hybrid-layer-pattern",
                "",
                f"has {depths} parts after a {DEPTH}; at most {MOST_DEPTHS} depths are supported",
                "leave parts out",
            )
