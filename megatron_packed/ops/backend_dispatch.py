"""Choice of the implementation of an op, with the reasons against the others.

Every op owns one ``Op``: a name and its backends, fastest first as measured. A backend is a module
that is imported only when it is asked for (so an optional package is imported in exactly one file),
with

* ``not_supported_reasons(inputs) -> list[str]``: empty when it can serve ``inputs``, else
  sentences. Cheap, host only.
* ``run(...)``: the implementation, with the signature of the op's public function.

``inputs`` is a frozen, hashable dataclass of the op: shapes, dtypes, device type and options, never
tensor values. The choice for equal ``inputs`` is made once and remembered, for a bounded number of
them: a size that a kernel cannot reach may be part of ``inputs`` and differ from pack to pack.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from types import ModuleType
from typing import cast

_REMEMBERED = 1024


class NoBackendError(ValueError):
    """No backend, or not the one that was asked for, can serve these inputs; the message holds
    every reason.
    """


@dataclass(frozen=True)
class Backend:
    """One implementation of an op.

    Args:
        name: what the user writes to force it, e.g. ``flash_attn_4``.
        module: dotted path, imported on first use; ``module:name`` where one module holds several.
        automatic: whether 'auto' may choose it. A path that is slow or loose on purpose must be
            asked for.
    """

    name: str
    module: str
    automatic: bool = True

    def load(self) -> ModuleType:
        """Return the module, or the class in it, that holds the two functions."""
        path, _, name = self.module.partition(":")
        module = import_module(path)
        return cast(ModuleType, getattr(module, name)) if name else module

    @cached_property
    def loaded(self) -> ModuleType:
        """The module of a backend that serves; steps read it without a call."""
        return self.load()

    def reasons(self, inputs: Hashable) -> list[str]:
        """Return the reasons why this backend cannot serve ``inputs``; empty when it can.

        A package that does not import is a reason.
        """
        try:
            module = self.load()
        except Exception as error:  # a broken optional package may raise anything at import
            return [f"{self.module} does not import: {type(error).__name__}: {error}"]
        return list(module.not_supported_reasons(inputs))


class Choices(dict[tuple[str, Hashable], Backend]):
    """``(requested backend, inputs)`` -> the backend that serves them, chosen when first read.

    Steps read it as a dictionary: a choice that was made costs one look-up, no call of Python code.
    """

    def __init__(self, choose: Callable[[str, Hashable], Backend]) -> None:
        super().__init__()
        self._choose = choose

    def __missing__(self, key: tuple[str, Hashable]) -> Backend:
        if len(self) >= _REMEMBERED:
            self.clear()
        chosen = self[key] = self._choose(*key)
        return chosen


class Op:
    """An operation and its backends, fastest first.

    ``chosen[backend, inputs].loaded`` is the module that serves ``inputs``; ``backend`` is a name or
    ``auto``. It raises `NoBackendError` as `select` does.
    """

    def __init__(self, name: str, backends: tuple[Backend, ...]) -> None:
        self.name = name
        self.backends = backends
        self.chosen = Choices(self._choose)

    def names(self) -> list[str]:
        return [backend.name for backend in self.backends]

    def select(self, inputs: Hashable, backend: str = "auto") -> Backend:
        """Return the backend that serves ``inputs``.

        Raises:
            NoBackendError: ``backend`` is unknown or cannot serve, or 'auto' finds none.
        """
        return self.chosen[backend, inputs]

    def explain(self, inputs: Hashable) -> dict[str, list[str]]:
        """Return the reasons against each backend for ``inputs``, by name; empty if it can serve."""
        return {candidate.name: candidate.reasons(inputs) for candidate in self.backends}

    def _choose(self, backend: str, inputs: Hashable) -> Backend:
        if backend != "auto" and backend not in self.names():
            raise NoBackendError(
                f"{self.name} has no backend {backend!r}; choose one of {['auto', *self.names()]}."
            )
        candidates = [
            b for b in self.backends if (b.automatic if backend == "auto" else b.name == backend)
        ]
        refusals = []
        for candidate in candidates:
            reasons = candidate.reasons(inputs)
            if not reasons:
                return candidate
            refusals.append(f"{candidate.name}: {'; '.join(reasons)}")
        asked = "no backend" if backend == "auto" else f"backend {backend!r} cannot"
        raise NoBackendError(f"{self.name}: {asked} serve {inputs}: " + " | ".join(refusals))
