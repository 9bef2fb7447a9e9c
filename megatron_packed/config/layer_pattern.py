"""The hybrid layer pattern: one character per layer, in Megatron's spelling.

Each kind in ``config.kinds`` has a character: ``M*-E`` is a model of four layers. After each ``/`` are
the layers of one depth of multi-token prediction, the same for all depths: ``M*-E/*E/*E`` has two
depths of two layers.
"""

from __future__ import annotations

from megatron_packed.config.errors import Problem
from megatron_packed.config.kinds.layer_kind import KINDS

STAGE = "|"
"""Mark of pipeline stages between layers; command lines may have it with one stage."""
DEPTH = "/"
"""Mark before the layers of each depth of multi-token prediction."""
MOST_LAYERS = 10_000
"""Most layers of a model. A pattern of millions, from a damaged file, would take hours to build."""
REFUSED_SYMBOLS = {
    "D": ("sparse (DS) attention layers are not supported", "use * (full causal attention)"),
    "+": (
        "multi-latent attention layers are not supported",
        "use * with --num-query-groups for a smaller key-value state",
    ),
    STAGE: (
        "it marks a pipeline stage, but pipeline parallelism is not supported",
        "remove it: every rank holds all layers",
    ),
}


def pattern_problems(pattern: str, flag: str = "--hybrid-layer-pattern") -> list[Problem]:
    """Return a problem for each character that is not a layer, once, with its first position
    (counted from 1), or only that the pattern is too long.
    """
    if len(pattern) > MOST_LAYERS:
        value = f"{pattern[:20]!r} ..."
        rule = f"has {len(pattern):,} characters; a model has at most {MOST_LAYERS:,} layers"
        return [Problem(flag, value, rule, "check where the pattern comes from")]
    problems = _depth_problems(pattern, flag)
    for symbol in dict.fromkeys(pattern):
        if symbol in KINDS or symbol == DEPTH:
            continue
        positions = [i + 1 for i, other in enumerate(pattern) if other == symbol]
        where = f"position {positions[0]}" + (
            f" and {len(positions) - 1} more" if len(positions) > 1 else ""
        )
        if symbol in REFUSED_SYMBOLS:
            reason, cure = REFUSED_SYMBOLS[symbol]
            problems.append(Problem(flag, repr(pattern), f"{symbol!r} at {where}: {reason}", cure))
        else:
            symbols = KINDS.in_words()
            cure = "write it in upper case" if symbol.upper() in KINDS else f"use only {symbols}"
            problems.append(
                Problem(flag, repr(pattern), f"{symbol!r} at {where} is not a layer symbol", cure)
            )
    return problems


def _depth_problems(pattern: str, flag: str) -> list[Problem]:
    """Return the problems of the parts of a pattern."""
    main, *parts = pattern.split(DEPTH)
    cure = f"write the same layers after each {DEPTH}, for example M*-E/*E/*E"
    if not parts:
        return []
    if not main:
        depth = next(filter(None, parts), "*E")
        cure = f"write the layers of the model before it, for example M*-E{DEPTH}{depth}"
        return [Problem(flag, repr(pattern), f"has no layer before the first {DEPTH}", cure)]
    if not all(parts):
        shorter = DEPTH.join([main, *filter(None, parts)])
        cure = f"leave out this {DEPTH} ({shorter}), or {cure}"
        return [Problem(flag, repr(pattern), f"has no layer after a {DEPTH}", cure)]
    if len(set(parts)) > 1:
        rule = f"has other layers after one {DEPTH} than after another"
        return [Problem(flag, repr(pattern), rule, cure)]
    return []
