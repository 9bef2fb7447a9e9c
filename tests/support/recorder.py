"""Record of the operations that torch executes."""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

name_of = cache(str)


class Recorder(TorchDispatchMode):
    """Recorder of every operation with the shapes of its results."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Tell torch that nothing is compiled: its wrapper took half of the time of a record."""
        return False

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, list[tuple[int, ...]]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        outputs = result if isinstance(result, (tuple, list)) else [result]
        self.calls.append(
            (name_of(func), [tuple(value.shape) for value in outputs if isinstance(value, Tensor)])
        )
        return result

    def collectives(self) -> list[str]:
        return [name.split(".")[1] for name, _ in self.calls if name.startswith("c10d.")]

    @property
    def tolist(self) -> Any:
        """Replace ``Tensor.tolist``, which dispatch does not see on the CPU."""
        original = Tensor.tolist

        def noted(x: Tensor) -> Any:
            self.calls.append(("tolist", []))
            return original(x)

        return noted
