"""Megatron-LM's flags that are accepted and change nothing, with what this project does instead.

The trained model is the same with and without such a flag. A run prints one line for each given flag.
``accepted_flags.json`` has the flags in groups with the same line. Flags that are accepted because
their effect is always on are in ``flags.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megatron_packed.config.run import RunConfig
from megatron_packed.config.table_rows import table_rows


@dataclass(frozen=True)
class AcceptedFlag:
    """Flag of Megatron that is no option and is accepted.

    Args:
        reason: the fact that makes the flag unnecessary, or what is done instead.
        values: the accepted values; None for a switch, () for any values unless ``differs``
            returns a problem.
        differs: function of (values, run) that returns the problem of the values; empty if they are
            accepted.
    """

    reason: str
    values: tuple[str, ...] | None = None
    differs: Callable[[tuple[str, ...], RunConfig], str] | None = None


ANY: tuple[str, ...] = ()
"""Any values are accepted."""


ACCEPTED = {
    flag: AcceptedFlag(group["reason"], None if values is None else tuple(values))
    for group in table_rows("megatron/accepted_flags.json")
    for flag, values in group["flags"].items()
}
