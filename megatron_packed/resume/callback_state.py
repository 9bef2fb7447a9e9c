"""State of callbacks in checkpoints.

A tensor under the name of a parameter, with its shape on this rank, is stored like the parameter. Its
ranges of the unsplit tensor, ``callback/<callback>/<path>``, load into every parallel layout. Any
other tensor belongs to one rank, ``callback/<callback>/rank_<r>/<path>``, and so do values of the host
that differ between ranks. They load only in the layout that saved them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_packed.checkpoint.errors import CheckpointMismatchError
from megatron_packed.checkpoint.manifest import Manifest
from megatron_packed.checkpoint.rank_agreement import Ranks
from megatron_packed.checkpoint.run_metadata import CALLBACKS, CallbackRecord, Metadata
from megatron_packed.checkpoint.tensor_shard import TensorShard
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.models.hybrid_model import HybridModel
from megatron_packed.resume.held_state import Held, held_parameter

_PATH_KEY = re.compile(r"[A-Za-z0-9_.:@+=,-]+")
"""Pattern of a key of a tensor; a slash joins the keys of nested objects."""


class StatefulCallback(Protocol):
    """Callback, as far as checkpoints use it."""

    @property
    def name(self) -> str: ...

    def state_dict(self) -> Mapping[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class CallbackError(RuntimeError):
    """Error that a callback of the user has raised; its cause is the original error."""

    def __init__(self, callback: StatefulCallback, function: str, cause: Exception) -> None:
        text = str(cause) or "the error has no message"
        super().__init__(f"callback {callback.name}, {function}: {type(cause).__name__}: {text}")


@dataclass(kw_only=True, eq=False)
class CallbackStates:
    """State of the callbacks of a run, which it saves to and restores from checkpoints."""

    callbacks: Sequence[StatefulCallback]
    """The callbacks, the same on all ranks."""
    model: HybridModel
    """The model; its parameters' names are known."""
    groups: ParallelGroups
    """Process groups of the run."""
    layout: Mapping[str, int]
    """Sizes of the parallel layout, as stored in checkpoints."""
    loaded: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Callback -> state of a checkpoint whose tensors a load fills."""

    def save(self) -> tuple[list[Held], dict[str, Any]]:
        """Return the shards that this rank holds, and the metadata; a collective.

        Raises:
            CallbackError: `state_dict` has failed, or it holds a value that no checkpoint stores.
        """
        held: list[Held] = []
        records: dict[str, CallbackRecord] = {}
        for callback in self.callbacks:
            try:
                state = callback.state_dict()
                parts, record = self._parts(callback.name, state)
            except Exception as error:
                raise CallbackError(callback, "state_dict", error) from error
            held += parts
            if state:
                records[callback.name] = record
        if not self.callbacks:
            return held, {}
        of_ranks, states = Ranks.from_groups(self.groups).gather(records), {}
        for name in records:
            first, *others = [of_rank.get(name) for of_rank in of_ranks]
            # Most states are the same on all ranks. One copy keeps the manifest small.
            same = all(other == first for other in others)
            states[name] = [first] if same else [first, *others]
        return held, {CALLBACKS: states}

    def refusal(self, metadata: Metadata) -> str | None:
        """Return why a checkpoint's state of a callback cannot be loaded; None if it can."""
        if metadata.get("layout") == self.layout:
            return None
        stored = metadata.get(CALLBACKS, {})
        for callback in self.callbacks:
            records = stored.get(callback.name, [])
            alone = [path for record in records if record for path in record["tensors"]]
            if alone or len(records) > 1:
                what = (
                    f"tensors of single ranks ({alone[0]})"
                    if alone
                    else "other values on each rank"
                )
                return (
                    f"has {what} in the state of the callback {callback.name}, and was saved in another parallel "
                    "layout; resume in that layout, or leave the callback out. Tensors under the names of parameters "
                    "load into every layout"
                )
        return None

    def wanted(self, manifest: Manifest) -> list[TensorShard]:
        """Return the shards that this rank needs of a checkpoint, in new tensors.

        Raises:
            CheckpointMismatchError: the metadata names a tensor that the checkpoint does not have.
        """
        self.loaded = {}
        stored, shards = manifest.metadata.get(CALLBACKS, {}), []
        parameters = self.model.sharded_parameters()
        for callback in self.callbacks:
            records = stored.get(callback.name, [None])
            record = records[0 if len(records) == 1 else self.groups.rank]
            if record is None:
                continue
            self.loaded[callback.name] = state = deepcopy(record["values"])
            for path, place in (record["parameters"] | record["tensors"]).items():
                is_parameter = path in record["parameters"]
                name = self._tensor_name(callback.name, path, of_rank=not is_parameter)
                sharded = parameters.get(_last_key(path)) if is_parameter else None
                if name not in manifest.tensors or (is_parameter and sharded is None):
                    raise CheckpointMismatchError(
                        f"has no tensor for {path} in the state of the callback {callback.name}"
                    )
                whole = manifest.tensors[name]
                # Padding of a vocabulary is not stored, so it is zero.
                tensor = torch.zeros(
                    whole.shape if sharded is None else sharded.parameter.shape,
                    dtype=whole.dtype,
                    device=self.groups.device if place == "device" else "cpu",
                )
                _put(state, path, tensor)
                if sharded is None:
                    shards.append(TensorShard.whole(name, tensor))
                else:
                    parts = held_parameter(name, sharded, tensor.view(-1))
                    shards += [part.shard for part in parts]
        return shards

    def restore(self) -> None:
        """Give the callbacks their loaded states.

        Raises:
            CallbackError: `load_state_dict` has failed.
        """
        for callback in self.callbacks:
            state = self.loaded.pop(callback.name, None)
            if state is None:
                continue
            try:
                callback.load_state_dict(state)
            except Exception as error:
                raise CallbackError(callback, "load_state_dict", error) from error

    def warnings(self, metadata: Metadata) -> list[str]:
        """Return sentences about states that only the checkpoint or only this run has."""
        stored, names = metadata.get(CALLBACKS, {}), [callback.name for callback in self.callbacks]
        begins = [
            f"the checkpoint has no state of the callback {callback.name}, which begins without one"
            for callback in self.callbacks
            if callback.name not in stored and callback.state_dict()
        ]
        return begins + [
            f"the checkpoint has state of the callback {name}, which this run does not have; checkpoints of this run "
            "will not have it"
            for name in stored
            if name not in names
        ]

    def _parts(self, name: str, state: Mapping[str, Any]) -> tuple[list[Held], CallbackRecord]:
        """Return the parts of one callback's tensors, and its metadata on this rank."""
        tensors: dict[str, Tensor] = {}
        values = _without_tensors(state, tensors)
        record: CallbackRecord = {"values": values, "parameters": {}, "tensors": {}}
        parameters, held = self.model.sharded_parameters(), list[Held]()
        for path, tensor in tensors.items():
            # Every load of the checkpoint would refuse such a value.
            if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
                raise ValueError(f"{path} has a value that is not finite")
            contiguous = tensor.detach().contiguous()
            place = "device" if tensor.device.type == self.groups.device.type else "host"
            sharded = parameters.get(_last_key(path))
            if sharded is not None and tensor.shape == sharded.parameter.shape:
                record["parameters"][path] = place
                stored_name = self._tensor_name(name, path, of_rank=False)
                held += held_parameter(stored_name, sharded, contiguous.view(-1))
            else:
                record["tensors"][path] = place
                stored_name = self._tensor_name(name, path, of_rank=True)
                shard = TensorShard.whole(stored_name, contiguous)
                held.append(Held(shard, owned=True, replicated=False))
        return held, record

    def _tensor_name(self, callback: str, path: str, *, of_rank: bool) -> str:
        rank = f"rank_{self.groups.rank}/" if of_rank else ""
        return f"callback/{callback}/{rank}{path}"


def _last_key(path: str) -> str:
    return path.rpartition("/")[2]


def _without_tensors(
    state: Mapping[str, Any], tensors: dict[str, Tensor], parent: str = ""
) -> dict[str, Any]:
    """Return a copy of a state without its tensors, which are put into ``tensors`` by path.

    Raises:
        TypeError: a key is no text, or a value is neither JSON nor a tensor.
        ValueError: a tensor's key cannot be part of a tensor's name, or a number is not finite.
    """
    values: dict[str, Any] = {}
    for key, value in state.items():
        if not isinstance(key, str):
            raise TypeError(f"the key {key!r} of the state is no text")
        path = f"{parent}{key}"
        if isinstance(value, Tensor):
            if not _PATH_KEY.fullmatch(key):
                raise ValueError(
                    f"the key {key!r} of a tensor has other characters than letters, digits and _.:@+=,-"
                )
            tensors[path] = value
        elif isinstance(value, Mapping):
            values[key] = _without_tensors(value, tensors, f"{path}/")
        else:
            _check_json(path, value)
            values[key] = value
    return values


def _check_json(path: str, value: object) -> None:
    try:
        same = json.loads(json.dumps(value, allow_nan=False)) == value
    except TypeError:
        same = False
    if not same:
        raise TypeError(
            f"{path} is of type {type(value).__name__}; a state has values of JSON, tensors, and objects of them"
        )


def _put(state: dict[str, Any], path: str, tensor: Tensor) -> None:
    """Put a tensor into the state from which `_without_tensors` has taken it."""
    *parents, key = path.split("/")
    for parent in parents:
        state = state[parent]
    state[key] = tensor
