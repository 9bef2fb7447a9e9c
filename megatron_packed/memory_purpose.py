"""Purposes of device memory, and the purpose of the memory that is allocated now.

Code that allocates memory for a purpose of its own says so by `counted_as`. An estimate of memory
reads the purpose of each allocation; a run ignores it.
"""

from __future__ import annotations

from enum import Enum


class Purpose(Enum):
    """Purpose of memory; each member but `HOST` is a row of the table that ``plan`` prints."""

    ACTIVATIONS = "activations"
    """Tensors that forward saves for backward, and hidden states."""
    STATES = "SSM states"
    """States of one recurrent layer at a time, because backward recomputes them."""
    EXPERTS = "expert buffers"
    """Rows sorted by expert and the results of the experts, saved or not."""
    COMMUNICATION = "communication buffers"
    """Tensors that collectives inside one layer gather or receive."""
    GRADIENTS = "gradients of activations"
    """Gradients inside one layer, including the workspaces of the kernels."""
    LOSS = "logits and loss"
    HOST = "pinned on the host"
    """Memory of the host, which is not counted with the device's."""


class counted_as:
    """Context in which allocated memory has a purpose; contexts may be nested.

    Args:
        purpose: purpose of the memory, or None for that of the pass: activations or gradients.
    """

    def __init__(self, purpose: Purpose | None) -> None:
        self._purpose = purpose
        self._outer: list[Purpose | None] = []

    def __enter__(self) -> None:
        global _purpose
        self._outer.append(_purpose)
        _purpose = self._purpose

    def __exit__(self, *error: object) -> None:
        global _purpose
        _purpose = self._outer.pop()


class running:
    """Context in which the kernels of an op run.

    Args:
        name: name of the op.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        global _op
        _op = self._name

    def __exit__(self, *error: object) -> None:
        global _op
        _op = ""


def op_now() -> str:
    """Return the name of the op whose kernels run now; empty if there is none."""
    return _op


def purpose_now() -> Purpose | None:
    """Return the purpose of the memory that is allocated now; None if no context says it."""
    return _purpose


_purpose: Purpose | None = None
_op = ""
