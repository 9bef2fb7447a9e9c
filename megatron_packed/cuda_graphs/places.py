"""Where tensors are kept that graphs read or write, and whether one of them has left its address."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

Place = tuple[Mapping[str, Any], str]
"""A mapping and a name in it. Not the tensor: ``module.to()`` puts another one into a buffer's
place.
"""
MOVED = "weights have moved to other memory"


class Places:
    """The addresses of tensors now, to be compared with those of later.

    Args:
        places: a tensor or None lies in each.
    """

    def __init__(self, places: Iterable[Place] = ()) -> None:
        self._places = list(places)
        self._addresses = self._now()

    @property
    def moved(self) -> bool:
        """Whether something lies elsewhere than when this was made."""
        return self._addresses != self._now()

    def _now(self) -> list[int]:
        tensors = (place.get(name) for place, name in self._places)
        return [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
