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
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_packed.checkpoint.errors import CheckpointMismatchError
from megatron_packed.checkpoint.manifest import Manifest
from megatron_packed.checkpoint.rank_agreement import Ranks
from megatron_packed.checkpoint.run_metadata import CALLBACKS, CallbackRecord, Metadata
from megatron_packed.checkpoint.tensor_shard import TensorShard
from megatron_packed.models.hybrid_model import HybridModel
from megatron_packed.resume.held_state import Held, shards_of_parameter

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


class CallbackStates:
    """State of the callbacks of a run, which it saves to and restores from checkpoints.

    Args:
        callbacks: the callbacks, the same on all ranks.
        model: the model; its parameters' names are known.
        device: device of the run.
        layout: sizes of the parallel layout, as stored in checkpoints.
        ranks: all ranks of the run.
    """

    def __init__(
        self,
        callbacks: Sequence[StatefulCallback],
        model: HybridModel,
        device: torch.device,
        layout: Mapping[str, int],
        ranks: Ranks,
    ) -> None:
        self._callbacks = callbacks
        self._model = model
        self._device = device
        self._layout = layout
        self._ranks = ranks
        self._loaded: dict[str, dict[str, Any]] = {}
        """Callback -> state of a checkpoint whose tensors a load fills."""

    def save(self) -> tuple[list[Held], dict[str, Any]]:
        """Return the shards that this rank holds, and the metadata; a collective.

        Raises:
            CallbackError: `state_dict` has failed, or it holds a value that no checkpoint stores.
        """
        held: list[Held] = []
        records: dict[str, CallbackRecord] = {}
        for callback in self._callbacks:
            try:
                state = callback.state_dict()
                tensors: dict[str, Tensor] = {}
                values = _without_tensors(state, tensors)
                shards, record = self._shards(callback.name, values, tensors)
            except Exception as error:
                raise CallbackError(callback, "state_dict", error) from error
            held += shards
            if state:
                records[callback.name] = record
        if not self._callbacks:
            return held, {}
        of_ranks = self._ranks.gather(records)
        states = {name: [of_rank.get(name) for of_rank in of_ranks] for name in records}
        # Most states are the same on all ranks. One copy keeps the manifest small.
        return held, {
            CALLBACKS: {
                name: [of_rank[0]] if all(state == of_rank[0] for state in of_rank) else of_rank
                for name, of_rank in states.items()
            }
        }

    def refusal(self, metadata: Metadata) -> str | None:
        """Return why a checkpoint's state of a callback cannot be loaded; None if it can."""
        if metadata.get("layout") == self._layout:
            return None
        stored = metadata.get(CALLBACKS, {})
        for callback in self._callbacks:
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
        self._loaded = {}
        stored, shards = manifest.metadata.get(CALLBACKS, {}), []
        parameters = self._model.sharded_parameters()
        for callback in self._callbacks:
            records = stored.get(callback.name)
            record = None
            if records:
                record = records[0 if len(records) == 1 else self._ranks.rank]
            if record is None:
                continue
            tensors: dict[str, Tensor] = {}
            for path, place in (record["parameters"] | record["tensors"]).items():
                on_device = self._device if place == "device" else torch.device("cpu")
                is_parameter = path in record["parameters"]
                name = self._tensor_name(callback.name, path, of_rank=not is_parameter)
                sharded = parameters.get(_last_key(path)) if is_parameter else None
                if name not in manifest.tensors or (is_parameter and sharded is None):
                    raise CheckpointMismatchError(
                        f"has no tensor for {path} in the state of the callback {callback.name}"
                    )
                dtype, shape = manifest.tensors[name].dtype, manifest.tensors[name].shape
                if sharded is None:
                    tensors[path] = torch.empty(shape, dtype=dtype, device=on_device)
                    shards.append(TensorShard.whole(name, tensors[path]))
                    continue
                # Padding of a vocabulary is not stored, so it is zero.
                tensor = torch.zeros(sharded.parameter.shape, dtype=dtype, device=on_device)
                tensors[path] = tensor
                shards += [
                    shard for shard, _ in shards_of_parameter(name, sharded, tensor.view(-1))
                ]
            self._loaded[callback.name] = {"values": record["values"], "tensors": tensors}
        return shards

    def restore(self) -> None:
        """Give the callbacks their loaded states.

        Raises:
            CallbackError: `load_state_dict` has failed.
        """
        for callback in self._callbacks:
            loaded = self._loaded.pop(callback.name, None)
            if loaded is None:
                continue
            try:
                callback.load_state_dict(_with_tensors(loaded["values"], loaded["tensors"]))
            except Exception as error:
                raise CallbackError(callback, "load_state_dict", error) from error

    def warnings(self, metadata: Metadata) -> list[str]:
        """Return sentences about states that only the checkpoint or only this run has."""
        stored, names = metadata.get(CALLBACKS, {}), [callback.name for callback in self._callbacks]
        begins = [
            f"the checkpoint has no state of the callback {callback.name}, which begins without one"
            for callback in self._callbacks
            if callback.name not in stored and callback.state_dict()
        ]
        return begins + [
            f"the checkpoint has state of the callback {name}, which this run does not have; checkpoints of this run "
            "will not have it"
            for name in stored
            if name not in names
        ]

    def _shards(
        self, name: str, values: dict[str, Any], tensors: Mapping[str, Tensor]
    ) -> tuple[list[Held], CallbackRecord]:
        """Return the shards of one callback's tensors, and its metadata on this rank."""
        parameters = self._model.sharded_parameters()
        held = []
        record: CallbackRecord = {"values": values, "parameters": {}, "tensors": {}}
        for path, tensor in tensors.items():
            sharded = parameters.get(_last_key(path))
            like_parameter = sharded is not None and tensor.shape == sharded.parameter.shape
            stored_name = self._tensor_name(name, path, of_rank=not like_parameter)
            # Every load of the checkpoint would refuse such a value.
            if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
                raise ValueError(f"{path} has a value that is not finite")
            contiguous = tensor.detach().contiguous()
            place = "device" if tensor.device.type == self._device.type else "host"
            if sharded is not None and like_parameter:
                record["parameters"][path] = place
                held += [
                    Held(shard, owned, replicated=True, expert=sharded.is_expert)
                    for shard, owned in shards_of_parameter(
                        stored_name, sharded, contiguous.view(-1)
                    )
                ]
            else:
                record["tensors"][path] = place
                shard = TensorShard.whole(stored_name, contiguous)
                held.append(Held(shard, owned=True, replicated=False))
        return held, record

    def _tensor_name(self, callback: str, path: str, *, of_rank: bool) -> str:
        rank = f"rank_{self._ranks.rank}/" if of_rank else ""
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


def _with_tensors(values: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the state whose parts `_without_tensors` has separated."""
    state = json.loads(json.dumps(values))
    for path, tensor in tensors.items():
        *parents, key = path.split("/")
        place = state
        for parent in parents:
            place = place[parent]
        place[key] = tensor
    return dict(state)
