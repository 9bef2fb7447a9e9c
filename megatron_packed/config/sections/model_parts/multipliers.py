"""Constant factors on the hidden state and on the logits."""

from __future__ import annotations

from megatron_packed.config.options import option
from megatron_packed.config.section import Section

MULTIPLIERS = "multipliers"


class MultiplierOptions(Section, group=MULTIPLIERS):
    """Constant factors of Granite 4.0-H."""

    embedding_multiplier: float | None = option(
        None, "Factor on the output of the embedding; 1 when not given.", above=0
    )
    residual_multiplier: float | None = option(
        None,
        "Factor on the output of each layer before it is added to the residual stream; 1 when not "
        "given.",
        above=0,
    )
    logits_scaling: float | None = option(
        None,
        "Number by which the logits are divided; 1 when not given.",
        above=0,
    )
