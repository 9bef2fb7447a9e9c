"""The hybrid layer pattern: one character per layer, in Megatron's spelling.

``M`` Mamba-2, ``G`` gated delta net, ``*`` attention, ``-`` MLP, ``E`` mixture of experts. ``M*-E`` is
a model of four layers.
"""

from __future__ import annotations

from megatron_packed.config.errors import Problem

MAMBA = "M"
ATTENTION = "*"
MLP = "-"
MOE = "E"
GATED_DELTA_NET = "G"
STAGE = "|"
"""Mark of pipeline stages between layers; command lines may have it with one stage."""
LAYER_NAMES = {
    MAMBA: "Mamba-2",
    GATED_DELTA_NET: "gated delta net",
    ATTENTION: "attention",
    MLP: "MLP",
    MOE: "mixture of experts",
}

REFUSED = {
    "D": ("sparse (DS) attention layers are not supported", "use * (full causal attention)"),
    "+": (
        "multi-latent attention layers are not supported",
        "use * with --num-query-groups for a smaller key-value state",
    ),
    STAGE: (
        "it marks a pipeline stage, but pipeline parallelism is not supported",
        "remove it: every rank holds all layers",
    ),
    "/": (
        "it starts a multi-token-prediction depth, which is not supported",
        "keep only the part before the first /",
    ),
}


def pattern_problems(pattern: str, flag: str = "--hybrid-layer-pattern") -> list[Problem]:
    """Return a problem for each character that is not a layer, once, with its first position
    (counted from 1).
    """
    found = []
    for symbol in dict.fromkeys(pattern):
        if symbol in LAYER_NAMES:
            continue
        positions = [i + 1 for i, other in enumerate(pattern) if other == symbol]
        where = f"position {positions[0]}" + (
            f" and {len(positions) - 1} more" if len(positions) > 1 else ""
        )
        if symbol in REFUSED:
            reason, cure = REFUSED[symbol]
            found.append(Problem(flag, repr(pattern), f"{symbol!r} at {where}: {reason}", cure))
        else:
            known = ", ".join(f"{name} {meaning}" for name, meaning in LAYER_NAMES.items())
            cure = (
                "write it in upper case" if symbol.upper() in LAYER_NAMES else f"use only {known}"
            )
            found.append(
                Problem(flag, repr(pattern), f"{symbol!r} at {where} is not a layer symbol", cure)
            )
    return found
