"""Calls inside a module that have a name of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch import nn

Output = TypeVar("Output")


class NamedCall(nn.Module):
    """Call of a function as a submodule, so that `memory.apply` can wrap it by its name.

    It has no parameters. Those that the function uses belong to the module around it, and keep the
    names that checkpoints know.
    """

    def forward(self, function: Callable[..., Output], *args: object) -> Output:
        return function(*args)
