"""Layer pattern of a GPT model, whose command line has a number of layers instead."""

from __future__ import annotations

from collections.abc import Sequence

NUM_LAYERS = "--num-layers"
_HYBRID = ("--is-hybrid-model", "--hybrid-attention-ratio", "--hybrid-mlp-ratio")
MOST_GPT_LAYERS = 1000


def gpt_pattern(layers: int, *, experts: bool) -> str:
    """Return the pattern of Megatron-LM's migration guide: attention and an MLP for each layer.

    Args:
        layers: number of layers of the GPT model.
        experts: True if the MLPs are mixtures of experts.
    Example:
        ``*-*-`` for two layers, ``*E*E`` with experts.
    """
    return ("*E" if experts else "*-") * layers


def gpt_layer_count(texts: Sequence[str]) -> int | None:
    """Return the number that the values of ``--num-layers`` give, or None if there is none."""
    if len(texts) != 1 or not texts[0].isascii() or not texts[0].isdecimal():
        return None
    return int(texts[0]) if len(texts[0]) < 5 and 1 <= int(texts[0]) <= MOST_GPT_LAYERS else None


def pattern_of_words(arguments: Sequence[str]) -> tuple[str, ...]:
    """Return the flag and pattern that replace ``--num-layers N`` of a line without a pattern.

    The result is empty if the line has no number of layers, or if ``--moe-layer-freq`` decides
    which layers have experts. It is also empty for a hybrid, whose layers are not those of GPT.
    """
    if NUM_LAYERS not in arguments or "--moe-layer-freq" in arguments or _is_hybrid(arguments):
        return ()
    at = arguments.index(NUM_LAYERS) + 1
    layers = gpt_layer_count(arguments[at : at + 1])
    if layers is None:
        return ()
    return ("--hybrid-layer-pattern", gpt_pattern(layers, experts="--num-experts" in arguments))


def _is_hybrid(arguments: Sequence[str]) -> bool:
    """Return whether a line without a pattern describes a hybrid: by a ratio or by ``--spec``."""
    spec = arguments[arguments.index("--spec") + 1 :][:2] if "--spec" in arguments else ()
    return bool({*_HYBRID} & {*arguments}) or any(
        "mamba" in word or "hybrid" in word for word in spec
    )
