"""Conditions under which an option has an effect; an option declares its own with ``only_if``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron_packed.config.kinds.layer_kind import KINDS, LayerKind

if TYPE_CHECKING:
    from megatron_packed.config.run import RunConfig


@dataclass(frozen=True)
class Condition:
    """Property of a run that an option needs to have an effect.

    Args:
        text: text that a run without the property prints: ``--sft is not given``; or a function
            that returns it.
        holds: function of (run, processes) that returns True for a run with the property.
    """

    text: str | Callable[[], str]
    holds: Callable[[RunConfig, int], bool]

    @property
    def reason(self) -> str:
        """Text that a run without the property prints."""
        return self.text if isinstance(self.text, str) else self.text()


def option_given(key: str, value: str = "") -> Condition:
    """Return the condition that an option such as ``data.sft`` is given, with ``value`` if it is not
    empty.
    """

    def holds(run: RunConfig, processes: int) -> bool:
        option_value = _value(run, key)
        return option_value == value if value else option_value not in (None, False)

    return Condition(" ".join(filter(None, (flag_of_key(key), value, "is not given"))), holds)


def option_is(key: str, value: str) -> Condition:
    """Return the condition that an option has a value."""
    return Condition(
        f"{flag_of_key(key)} is not {value}", lambda run, processes: bool(_value(run, key) == value)
    )


def option_is_not(key: str, value: str | int) -> Condition:
    """Return the condition that an option has another value."""
    return Condition(
        f"{flag_of_key(key)} is {value}", lambda run, processes: bool(_value(run, key) != value)
    )


def layers(symbols: str, kind: str = "") -> Condition:
    """Return the condition that the pattern has a layer with one of the symbols.

    Args:
        kind: words for these layers; the symbols when empty.
    """
    return Condition(
        f"the pattern has no {kind or ' or '.join(symbols) + ' layer'}",
        lambda run, processes: not set(symbols).isdisjoint(run.model.hybrid_layer_pattern),
    )


def layers_where(test: Callable[[LayerKind], bool], kind: str = "") -> Condition:
    """Return the condition that the pattern has a layer whose kind passes a test.

    Args:
        kind: words for these layers; the symbols of the kinds when empty.
    """

    def reason() -> str:
        symbols = " or ".join(symbol for symbol, record in KINDS.items() if test(record))
        return f"the pattern has no {kind or f'{symbols} layer'}"

    return Condition(reason, lambda run, processes: any(map(test, run.model.kinds)))


def flag_of_key(key: str) -> str:
    """Return the flag of an option whose flag is its name."""
    return "--" + key.partition(".")[2].replace("_", "-")


def _value(run: RunConfig, key: str) -> Any:
    section, _, name = key.partition(".")
    return getattr(getattr(run, section), name)


EXPERT_LAYERS = layers_where(lambda kind: kind.has_experts)
CONTEXT_PARALLEL = option_is_not("parallel.context_parallel_size", 1)
TRAINS = Condition("--skip-train runs no training step", lambda run, _: not run.training.skip_train)


def has_replicas(run: RunConfig, processes: int) -> bool:
    """Return whether two ranks have the same weights."""
    layout = run.layout(processes)
    return layout.size("dp_cp") != 1 or (run.model.has_experts and layout.expert_dp_size > 1)


REPLICAS = Condition("no two ranks have the same weights", has_replicas)
