"""Callbacks: code that a run calls at fixed places of its loop, on every rank.

The run's own periodic work is made of callbacks (``run_callbacks.py``). A run from Python may add
others: ``train(..., callbacks=[MyCallback()])``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from difflib import get_close_matches
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from megatron_packed.reporting.metric_names import SECTIONS

if TYPE_CHECKING:
    from megatron_packed.training.trainer import Trainer


class Callback:
    """Base class of callbacks; a subclass overrides the hooks that it needs.

    All ranks call the same hooks in the same order, so a hook may run collectives. Reading a value
    of the device (``float(tensor)``, ``tensor.cpu()``) waits for all queued work, and the device
    becomes idle. A hook that reads only metrics costs the device no time.
    """

    @property
    def name(self) -> str:
        """Name in messages and checkpoints; it must be unique within a run."""
        return type(self).__name__

    def on_train_start(self, trainer: Trainer) -> None:
        """Run after the start values are loaded, before the first step."""

    def on_step_end(self, trainer: Trainer, step: int) -> None:
        """Run after a step is queued on the device, which may still compute it.

        Kernels that the hook launches see the weights after the step. The update of a step may be
        left out: ``trainer.update_applied`` is 1 or 0 on the device. If a step is repeated with room
        for all experts' rows, the hook is called again for it. ``trainer.progress`` has then already
        counted the step after it.

        Args:
            step: number of the step, from 1.
        """

    def on_metrics(self, trainer: Trainer, metrics: StepMetrics) -> None:
        """Run when the metrics of a step are on the host, one step late, before they are logged.

        Args:
            metrics: record of the step. The hook may add entries, whose values are host numbers.
        """

    def on_validation_end(self, trainer: Trainer, metrics: Mapping[str, Any]) -> None:
        """Run after a validation, with its record (``valid_loss`` and more)."""

    def on_save(self, trainer: Trainer, checkpoint: Path) -> None:
        """Run after a checkpoint is published. With ``--async-save``, ranks may learn of it at
        different steps.
        """

    def on_train_end(self, trainer: Trainer) -> None:
        """Run at the end of the run, after its last checkpoint; not after an error."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return the state that each checkpoint stores: host values and tensors, with text keys.

        Values are those of JSON, tensors, and objects of them. A tensor under the name of a
        parameter, with its shape, is stored like the parameter and loads into every parallel layout.
        It must be equal on all ranks that hold the parameter. Other tensors belong to one rank.
        """
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of a checkpoint, before `on_train_start`; the callback owns the tensors."""

    def __init_subclass__(cls) -> None:
        for attribute in vars(cls):
            if attribute.startswith("on_") and attribute not in HOOKS:
                guesses = get_close_matches(attribute, HOOKS, n=1, cutoff=0.0)
                raise TypeError(
                    f"{cls.__name__}.{attribute} is no hook of a callback; did you mean {guesses[0]}? The hooks are "
                    f"{', '.join(HOOKS)}."
                )


HOOKS = tuple(attribute for attribute in vars(Callback) if attribute.startswith("on_"))
"""Names of the hooks."""


_RESERVED = ("iteration", "samples", "end", "run", "starts", "checkpoint", *SECTIONS)
_RESERVED_STARTS = ("valid_", "test_", "mtp_", "expert_", "graph_", "offload_", "checkpoint_")


class StepMetrics(MutableMapping[str, Any]):
    """Record of a step, to which callbacks add metrics; its own entries do not change.

    Args:
        record: the record of the step.
    """

    def __init__(self, record: Mapping[str, Any]) -> None:
        self._record = record
        self.added: dict[str, float] = {}
        """Metrics that callbacks have added."""

    def __getitem__(self, name: str) -> Any:
        return self.added[name] if name in self.added else self._record[name]

    def __iter__(self) -> Iterator[str]:
        yield from self._record
        yield from self.added

    def __len__(self) -> int:
        return len(self._record) + len(self.added)

    def __setitem__(self, name: str, number: Any) -> None:
        if not isinstance(name, str) or not name:
            raise TypeError(f"the name of a metric is {name!r}; it must be a text.")
        if name in self._record or name in _RESERVED or name.startswith(_RESERVED_STARTS):
            raise ValueError(f"{name} is a field of the log; give the metric another name.")
        if isinstance(number, Tensor) or not isinstance(number, Real):
            raise TypeError(
                f"metric {name} is of type {type(number).__name__}; a metric is a number of the host. float(tensor) "
                "reads one, and waits for the device."
            )
        self.added[name] = int(number) if isinstance(number, Integral) else float(number)

    def __delitem__(self, name: str) -> None:
        raise TypeError(f"{name} cannot be removed from the metrics of a step.")


def overriding(callbacks: Sequence[Callback], hook: str) -> list[Callback]:
    """Return the callbacks whose class defines ``hook``, in their order."""
    default = vars(Callback)[hook]
    return [callback for callback in callbacks if getattr(type(callback), hook) is not default]


def check_callbacks(callbacks: Sequence[Callback]) -> None:
    """Check the callbacks of a user.

    Raises:
        TypeError: one is no `Callback`, or a class in place of an object.
        ValueError: two have the same name.
    """
    names = set()
    for callback in callbacks:
        if isinstance(callback, type) and issubclass(callback, Callback):
            raise TypeError(f"callbacks has the class {callback.__name__}; pass an object of it.")
        if not isinstance(callback, Callback):
            raise TypeError(
                f"callbacks has {callback!r}; pass objects of subclasses of megatron_packed.Callback."
            )
        if callback.name in names:
            raise ValueError(
                f"two callbacks have the name {callback.name}, under which a checkpoint stores their state; give "
                "one of them another name."
            )
        names.add(callback.name)
