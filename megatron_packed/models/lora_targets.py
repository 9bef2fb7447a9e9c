"""Matrices that the words of ``--lora-target-modules`` name.

A word is `ALL_LINEAR`, a part of the model such as ``attention``, the end of a name such as ``qkv``,
``linear_qkv`` or ``self_attn.q_proj``, or a shell pattern of complete names. Names are those of this
project, of Megatron (with those of Megatron-Bridge's separate matrices) and of Hugging Face. Layers
have other numbers in Hugging Face, so the first of the three in which a word means something counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

from megatron_packed.config import flag_names as flags
from megatron_packed.config.errors import ConfigError, Problem
from megatron_packed.config.kinds.layer_kind import KINDS, Projection
from megatron_packed.config.parser.did_you_mean import did_you_mean, nearest
from megatron_packed.config.sections.model import ModelConfig
from megatron_packed.config.sections.model_parts.lora import ALL_LINEAR
from megatron_packed.layers.kinds.mixer_kind import hybrid_layer_name
from megatron_packed.layers.kinds.registry import MIXERS

PATTERN = frozenset("*?[")
"""Characters of which a shell pattern has at least one."""
TABLES = {"embedding": "embed_tokens", "output": "lm_head"}
"""Usual Hugging Face names of the tables, for messages."""
_NAMED = 4
"""Number of names that a refusal shows as examples."""


class Names(NamedTuple):
    """Names of one matrix, without ``.weight``."""

    ours: tuple[str, ...]
    megatron: tuple[str, ...]
    """Name of the weight in Megatron, and of the matrix in Megatron-Bridge."""
    huggingface: tuple[str, ...]
    part: str = ""

    def ends(self) -> set[str]:
        """Return the last component of each name."""
        return {name.rpartition(".")[2] for names in self[:3] for name in names}


Weights = dict[str, list[Names]]
"""Name of a weight -> names of the matrices among its rows."""


def projection_of(name: str, config: ModelConfig) -> Projection | None:
    """Return the record of a weight of a mixer; None for other weights.

    Args:
        name: name of the weight without ``.weight``, such as ``layers.0.mixer.qkv``.
    """
    place, _, path = name.partition(".mixer.")
    if not place.startswith("layers."):
        return None
    projections = KINDS[config.layer_types[int(place.removeprefix("layers."))]].projections
    return next((each for each in projections if each.path == path), None)


def names_of(name: str, huggingface: Sequence[tuple[str, ...]], config: ModelConfig) -> list[Names]:
    """Return the names of the matrices of a weight.

    Args:
        name: name of the weight without ``.weight``.
        huggingface: names of each matrix in Hugging Face; gate and up of routed experts are one.
    """
    record, megatron = projection_of(name, config), _megatron_name(name, config)
    canonical = () if record is None or not megatron else record.canonical
    place, part = megatron.rpartition(".")[0], "" if record is None else record.part
    names = []
    for number, theirs in enumerate(huggingface):
        own: tuple[str, ...] = ()
        if len(canonical) == len(huggingface):
            own = canonical[number : number + 1]
        elif len(theirs) > 1 and name.endswith(".experts.fc1"):
            own = canonical
        of_megatron = (*filter(None, [megatron]), *(f"{place}.{each}" for each in own))
        names.append(Names((name,), of_megatron, theirs, part))
    return names


def _megatron_name(name: str, config: ModelConfig) -> str:
    """Return the name of a weight in Megatron; empty if Megatron has no such layer."""
    if name.startswith("mtp."):
        return f"mtp.layers.{name.removeprefix('mtp.')}"
    if not name.startswith("layers."):
        return ""
    _, number, inside = name.split(".", 2)
    names = MIXERS[config.layer_types[int(number)]].megatron
    if names is None:
        return ""
    tensor = names.possible(f"{inside}.weight")[0]
    return f"{hybrid_layer_name(config, int(number))}.{tensor.partition('.weight')[0]}"


def adapted_matrices(
    config: ModelConfig, weights: Weights, others: Weights
) -> dict[str, list[bool]]:
    """Return for each weight which of its matrices have an adapter.

    Args:
        weights: weights that may have adapters.
        others: other matrices of the model, which a refusal names.
    Raises:
        ConfigError: a word names no matrix, or only matrices that can have no adapter.
    Example:
        ``("q_proj", "v_proj")`` gives ``[True, False, True]`` for each weight ``qkv``.
    """
    chosen = {name: [False] * len(matrices) for name, matrices in weights.items()}
    problems = []
    for word in config.lora_target_modules:
        places = _places(word, weights)
        for name, number in places:
            chosen[name][number] = True
        if not places:
            problems.append(_matches_nothing(word, weights, others))
    if problems:
        raise ConfigError(problems)
    return chosen


def _places(word: str, weights: Weights) -> list[tuple[str, int]]:
    """Return the weight and the number in it of each matrix that a word names."""
    tests: list[Callable[[Names], bool]] = [
        lambda matrix: word in (ALL_LINEAR, matrix.part),
        *(
            lambda matrix, place=place: any(_fits(word, name) for name in matrix[place])
            for place in range(3)
        ),
    ]
    for test in tests:
        places = [
            (name, number)
            for name, matrices in weights.items()
            for number, matrix in enumerate(matrices)
            if test(matrix)
        ]
        if places:
            return places
    return []


def _fits(word: str, name: str) -> bool:
    if PATTERN.isdisjoint(word):
        return name == word or name.endswith(f".{word}")
    return fnmatchcase(name, word)


def _matches_nothing(word: str, weights: Weights, others: Weights) -> Problem:
    if outside := sorted({name.removesuffix(".weight") for name, _ in _places(word, others)}):
        return Problem(
            flags.LORA_TARGET_MODULES,
            word,
            f"names {outside[0]}, which is trained whole or not at all",
            f"leave it out, or train it with {flags.LORA_MODULES_TO_SAVE} "
            f"'*{outside[0].rpartition('.')[2]}.weight'",
        )
    known = sorted(_known_words(weights.values()))
    examples = did_you_mean(nearest(word, known), f"choose from {', '.join(known)}")
    return Problem(
        flags.LORA_TARGET_MODULES, word, "names no matrix of the layers of this model", examples
    )


def _known_words(weights: Iterable[list[Names]]) -> Iterator[str]:
    """Yield the words that name something, without numbers of layers."""
    words = {ALL_LINEAR}
    for matrices in weights:
        for matrix in matrices:
            words |= matrix.ends() | {matrix.part} - {""}
    yield from words


def whole_parameters(names: Iterable[str], patterns: Sequence[str]) -> set[str]:
    """Return the parameters that ``--lora-modules-to-save`` trains whole.

    Args:
        names: names of all parameters but adapters. Tied tables have one name.
    Raises:
        ConfigError: a pattern matches no name.
    """
    every = list(names)
    matches = {
        pattern: {name for name in every if fnmatchcase(name, pattern)} for pattern in patterns
    }
    problems = []
    for pattern in [pattern for pattern, found in matches.items() if not found]:
        table = next((own for own, theirs in TABLES.items() if theirs in pattern), "")
        of_output = "output" in (table, pattern.partition(".")[0])
        tied = " (tied tables have the name embedding.weight)" if of_output else ""
        cure = did_you_mean(
            nearest(pattern, every), "give a shell pattern of complete names, such as 'output.*'"
        )
        if table:
            there = table if any(name.startswith(f"{table}.") for name in every) else "embedding"
            cure = f"give '{there}.*'"
        examples = ", ".join(every[:: max(len(every) // _NAMED, 1)][:_NAMED])
        rule = f"matches the name of no parameter{tied}, for example {examples}"
        problems.append(Problem(flags.LORA_MODULES_TO_SAVE, pattern, rule, cure))
    if problems:
        raise ConfigError(problems)
    return set().union(*matches.values())
