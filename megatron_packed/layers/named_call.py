"""Function calls as named submodules, so that recompute and offload can wrap them by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch import nn

_Output = TypeVar("_Output")


class NamedCall(nn.Module):
    """Submodule that calls a function, so that `memory.apply` can wrap the call by its name.

    The submodule has no parameters. The parameters that the function uses belong to the enclosing
    module, so their names in checkpoints do not change.
    """

    def forward(self, function: Callable[..., _Output], *args: object) -> _Output:
        return function(*args)
