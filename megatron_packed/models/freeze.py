"""Parameters that a run does not train, chosen by patterns of their names.

A frozen parameter (``requires_grad`` False) has no gradient, master weight or moment, takes part in
no reduction, and is stored in checkpoints as a weight. Freeze before `FlatBuffers` and the optimizer
are built, because both hold trainable parameters only.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn

from megatron_packed.config import flag_names as flags
from megatron_packed.config.errors import ConfigError, Problem

_NAMED = 4
"""Number of parameters that a refusal names as examples."""


def freeze_parameters(module: nn.Module, patterns: Sequence[str]) -> None:
    """Set ``requires_grad`` to False for parameters whose name matches a pattern.

    A parameter that several modules share (tied weights) is frozen in all of them.

    Args:
        module: model; the names are those of ``named_parameters``.
        patterns: shell patterns (``*``, ``?``, ``[...]``), which must match the complete name.
    Raises:
        ConfigError: a pattern matches no parameter, or no parameter is left to train.
    Example:
        ``["embedding.*", "layers.[01].*"]`` freezes the embedding and the first two layers.
    """
    parameters = dict(module.named_parameters(remove_duplicate=False))
    unmatched = []
    for pattern in patterns:
        matches = [name for name in parameters if fnmatchcase(name, pattern)]
        for name in matches:
            parameters[name].requires_grad_(False)
        if not matches:
            unmatched.append(pattern)
    if unmatched:
        raise ConfigError(_matches_nothing(pattern, list(parameters)) for pattern in unmatched)
    if patterns and not any(parameter.requires_grad for parameter in parameters.values()):
        rule = "matches every parameter, so nothing is left to train"
        raise ConfigError(
            [Problem(flags.FREEZE_PARAMS, " ".join(patterns), rule, "leave out a pattern")]
        )


def _matches_nothing(pattern: str, names: Sequence[str]) -> Problem:
    examples = ", ".join(names[:: max(len(names) // _NAMED, 1)][:_NAMED])
    return Problem(
        flags.FREEZE_PARAMS,
        pattern,
        f"matches the name of no parameter; the model has {len(names)}, for example {examples}",
        "give a shell pattern of complete names, such as 'layers.0.*'",
    )
