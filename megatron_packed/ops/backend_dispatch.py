"""Choice of the backend of an op, with the reasons why other backends were not chosen.

Each op has one ``Op``: a name and its backends, in order of measured speed, fastest first. A backend
is a module that is imported on first use, so each optional package is imported in exactly one file.
The module has two functions:

* ``not_supported_reasons(inputs) -> list[str]``: sentences that say why the backend does not
  support ``inputs``; empty if it does. The function is cheap and runs on the host only. Plain
  PyTorch supports all inputs and has no such function.
* ``run(...)``: the implementation, with the signature of the op's public function.

``inputs`` is a frozen, hashable dataclass of the op. It holds shapes, dtypes, the device type and
options, but no tensor values. The choice for equal ``inputs`` is made once and cached. The cache is
bounded, because some ``inputs`` contain a size that differs from pack to pack.

[Note: ops of a planned rank]
A model on the meta device runs without values, for example to find what it asks of its ops. There
each op runs its backend ``on_meta``, by default plain PyTorch. Inside of
`planned`, a request on the meta device counts as a request on the planned device: its calls are
counted, and it decides whether operations are joined.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple, cast

import torch

_REMEMBERED = 1024


class NoBackendError(ValueError):
    """Error for inputs that the requested backend, or with ``auto`` every backend, does not support.

    The message lists all reasons.
    """


@dataclass(frozen=True)
class Backend:
    """One implementation of an op.

    Args:
        name: name by which users select the backend, e.g. ``flash_attn_4``.
        module: dotted path of the module, imported on first use. If one module has several
            backends, ``module:name`` names a class in it.
        automatic: True if ``auto`` may choose the backend. Backends that are slow by design are
            used only if they are requested by name.
        gpu_only: True if only GPUs, or Triton's interpreter, run the backend. A choice for another
            device then does not import the module; only a report of the reasons does.
        on_meta: backend that stands for this one on the meta device, if the op's does not. See
            [Note: ops of a planned rank].
    """

    name: str
    module: str
    automatic: bool = True
    on_meta: Backend | None = None
    gpu_only: bool = False

    def load(self) -> ModuleType:
        """Import and return the module, or the class in it, that has the backend's functions."""
        path, _, name = self.module.partition(":")
        module = import_module(path)
        return cast(ModuleType, getattr(module, name)) if name else module

    @cached_property
    def loaded(self) -> ModuleType:
        """Module of the backend, cached so that training steps read an attribute only."""
        return self.load()

    def reasons(self, inputs: Hashable) -> list[str]:
        """Return the reasons why this backend does not support ``inputs``; empty if it does.

        An import that fails is one of the reasons.
        """
        try:
            module = self.load()
        except Exception as error:  # A broken optional package may raise any exception at import.
            return [f"{self.module} does not import: {type(error).__name__}: {error}"]
        find_reasons = getattr(module, "not_supported_reasons", None)
        return [] if find_reasons is None else list(find_reasons(inputs))

    def supports(self, inputs: Hashable) -> bool:
        """Return whether there is no reason against ``inputs``."""
        if self.gpu_only and getattr(inputs, "device_type", "cuda") != "cuda" and not interprets():
            return False
        return not self.reasons(inputs)


def interprets() -> bool:
    """Return whether Triton's interpreter runs the kernels."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def is_on_meta(inputs: Hashable) -> bool:
    return getattr(inputs, "device_type", None) == "meta"


GPUBackend = partial(Backend, gpu_only=True)
_machine_is_complete = False


@contextmanager
def complete_machine() -> Iterator[None]:
    """Choose as on a machine with the GPU and the packages that every `JoiningBackend` needs.

    Use it to plan ranks of another machine, because nothing can run such a choice here.
    """
    global _machine_is_complete
    before, _machine_is_complete = _machine_is_complete, True
    try:
        yield
    finally:
        _machine_is_complete = before


@dataclass(frozen=True)
class JoiningBackend(Backend):
    """Backend of GPUs that joins operations. Its stand-in ``on_meta`` has the reasons that follow
    from the inputs alone, and not from the machine.
    """

    gpu_only: bool = True

    def supports(self, inputs: Hashable) -> bool:
        if not _machine_is_complete:
            return super().supports(inputs)
        assert self.on_meta is not None, self.name
        on_gpu = getattr(inputs, "device_type", "cuda") == "cuda"
        return on_gpu and self.on_meta.supports(inputs)


class Choices(dict[tuple[str, Hashable], Backend]):
    """Cache of chosen backends by ``(requested backend, inputs)``; a missing entry is computed.

    Training steps read the cache as a dictionary, so a cached choice costs one lookup and no call
    of a Python function.
    """

    def __init__(self, choose: Callable[[str, Hashable], Backend]) -> None:
        super().__init__()
        self._choose = choose

    def __missing__(self, key: tuple[str, Hashable]) -> Backend:
        if is_on_meta(key[1]):
            return self._choose(*key)  # Each plan has to see the request.
        if len(self) >= _REMEMBERED:
            self.clear()
        chosen = self[key] = self._choose(*key)
        return chosen


@dataclass(frozen=True, kw_only=True)
class OpWork:
    """Operations of one call of an op in the forward pass, apart from products with weights.

    It contains products, and no elementwise work.
    """

    per_token: int = 0
    per_visible_pair: int = 0
    """Operations for a token and each token that it sees in its document."""
    window: int | None = None
    """Number of tokens that a token sees; None for all earlier tokens and itself."""
    chunk: int = 1
    """Number of tokens in which a document is divided."""
    per_pair_in_chunk: int = 0
    per_chunk: int = 0


NO_WORK = OpWork()


class Op:
    """Operation with its backends, fastest first.

    ``chosen[backend, inputs].loaded`` is the module of the chosen backend; ``backend`` is a name or
    ``auto``. Like `select`, this expression raises `NoBackendError` if no backend fits.

    Args:
        name: name of the op.
        backends: fastest first; the last automatic one is plain PyTorch.
        on_meta: backend that returns tensors of the right shapes on the meta device; by default
            plain PyTorch.
        on_device: function of a requested backend, its inputs on the meta device and a device. It
            returns the request on this device; by default the inputs with its type.
        work: function of inputs that returns the work of a call.
        to_tune: function of inputs that returns those for which kernels are tuned, for packs of any
            size.
    """

    def __init__(
        self,
        name: str,
        backends: tuple[Backend, ...],
        *,
        on_meta: Backend | None = None,
        on_device: Callable[[str, Any, torch.device], tuple[str, Any]] | None = None,
        work: Callable[[Any], OpWork] = lambda inputs: NO_WORK,
        to_tune: Callable[[Any], Any] | None = None,
    ) -> None:
        self.name = name
        self.backends = backends
        self.on_meta = on_meta or [backend for backend in backends if backend.automatic][-1]
        self.on_device = on_device or with_device_type
        self.work = work
        self.to_tune = to_tune
        self.chosen = Choices(self._choose)

    def names(self) -> list[str]:
        return [backend.name for backend in self.backends]

    def select(self, inputs: Hashable, backend: str = "auto") -> Backend:
        """Return the backend to use for ``inputs``: ``backend``, or with ``auto`` the fastest.

        On a planned rank this is a request without a call.

        Raises:
            NoBackendError: ``backend`` is unknown or does not support ``inputs``, or with ``auto``
                no backend supports them.
        """
        if is_on_meta(inputs):
            return self._choose(backend, inputs, calls=0)
        return self.chosen[backend, inputs]

    def explain(self, inputs: Hashable) -> dict[str, list[str]]:
        """Return the reasons against each backend, by name; empty for backends that fit."""
        return {candidate.name: candidate.reasons(inputs) for candidate in self.backends}

    def _choose(self, backend: str, inputs: Hashable, calls: int = 1) -> Backend:
        if is_on_meta(inputs):
            return self.on_meta if _plan is None else _plan.choose(self, backend, inputs, calls)
        if backend != "auto" and backend not in self.names():
            raise NoBackendError(
                f"{self.name} has no backend {backend!r}; choose one of {['auto', *self.names()]}."
            )
        candidates = [
            b for b in self.backends if (b.automatic if backend == "auto" else b.name == backend)
        ]
        for candidate in candidates:
            if candidate.supports(inputs):
                return candidate
        refusals = [f"{each.name}: {'; '.join(each.reasons(inputs))}" for each in candidates]
        refusal = (
            "no backend supports" if backend == "auto" else f"backend {backend!r} does not support"
        )
        raise NoBackendError(f"{self.name}: {refusal} {inputs}: " + " | ".join(refusals))


def with_device_type(backend: str, inputs: Any, device: torch.device) -> tuple[str, Any]:
    """Return a request on a device of the same type as ``device``."""
    return backend, replace(inputs, device_type=device.type)


class Request(NamedTuple):
    """Request of a model to an op."""

    op: Op
    backend: str
    """Requested backend: a name, or ``auto``."""
    inputs: Hashable


CHUNKS_TO_TUNE = 64
"""Number of chunks that, with all heads of a model, fill a GPU like a pack in training."""


def tune(requests: Iterable[Request], device: torch.device) -> None:
    """Tune the kernels of ops that have sizes ``to_tune``.

    Triton tunes a kernel at its first call, and uses the result for packs of any size. So call this
    function before the first small pack. Backends without a function ``tune`` are left out.

    Raises:
        NoBackendError: a requested backend does not support the inputs.
    """
    sizes = {
        Request(op, backend, op.to_tune(inputs)): None
        for op, backend, inputs in requests
        if op.to_tune is not None
    }
    for op, backend, inputs in sizes:
        module = op.select(inputs, backend).loaded
        if hasattr(module, "tune"):
            module.tune(inputs, device)


class _PlannedRank:
    """Device of a planned rank, and the requests to ops so far."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.calls: Counter[Request] = Counter()
        self.op = ""
        """Name of the op that was requested last."""
        self._backends: dict[Request, Backend] = {}

    def choose(self, op: Op, backend: str, inputs: Hashable, calls: int) -> Backend:
        """Record a request and its calls, and return the backend that runs on the meta device."""
        self.op = op.name
        request = Request(op, *op.on_device(backend, inputs, self.device))
        self.calls[request] += calls
        if request not in self._backends:
            self._backends[request] = self._on_meta(request)
        return self._backends[request]

    def _on_meta(self, request: Request) -> Backend:
        op, backend, inputs = request
        # A backend that joins operations is the first of its op, and its choice has an effect on
        # other requests.
        first = op.backends[0]
        if first.on_meta and backend in ("auto", first.name) and first.supports(inputs):
            return first.on_meta
        named = (each.on_meta for each in op.backends[1:] if each.name == backend and each.on_meta)
        return next(named, op.on_meta)


_plan: _PlannedRank | None = None


@contextmanager
def planned(device: torch.device) -> Iterator[Counter[Request]]:
    """Let models on the meta device ask their ops as on ``device``.

    Yields:
        the requests so far, in the order of the first of equal ones -> number of calls.
    """
    global _plan
    assert _plan is None, "plans cannot be nested"
    _plan = _PlannedRank(device)
    try:
        yield _plan.calls
    finally:
        _plan = None


def planned_op() -> str:
    """Return the name of the op that a planned rank requested last; empty outside of `planned`."""
    return "" if _plan is None else _plan.op


def planned_type(device_type: str) -> str:
    """Return the type of the planned device for ``meta`` inside of `planned`, else the argument."""
    return _plan.device.type if _plan is not None and device_type == "meta" else device_type
