"""Child process with limits that reads the pickles of a Megatron checkpoint and answers in JSON.

`restricted_pickle` already runs nothing from a file. The process bounds the time and the memory of
a file that is made to exhaust them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from megatron_packed.data.tokenizers.limited_process import (
    Budget,
    LimitedProcess,
    LimitReached,
    Limits,
    serve_requests,
)
from megatron_packed.models.convert.megatron.arguments import Refusal, model_problem
from megatron_packed.models.convert.megatron.restricted_pickle import (
    MEMBER,
    STORAGE_DTYPES,
    Made,
    RefusedPickle,
    load,
    unknown,
)

METADATA, TENSOR, OBJECTS = b"m", b"t", b"o"
"""Kinds of pickles: ``.metadata``, one tensor, and options and other plain values."""
_ARGUMENTS = b"a"
"""Request for `arguments.model_problem`, as JSON."""
_MOST_VALUES = 1_000_000
"""Limit of the values of options. References to one value count each time."""
_LIMITS = Limits(cpu_seconds=60.0, cpu_seconds_per_mib=60.0)
_CHECKPOINT = "torch.distributed.checkpoint.metadata."
_WHOLE_SHAPE = "nd_reformulated_orig_global_shape"
"""Key of the shape of a tensor that older versions store as blocks."""
TENSOR_CALL = "torch._utils._rebuild_tensor_v2"
"""Function that torch names in the pickle of a tensor."""
_TENSOR_ARGUMENTS = 4
"""Arguments of a tensor that count: storage, offset, shape and strides."""


class PickleProcess:
    """Reader of pickles in a child process."""

    def __init__(self, limits: Limits = _LIMITS) -> None:
        # Each refused pickle ends the conversion, so a budget over several pickles is not needed.
        budget = Budget("the checkpoint", "pickles", "", max_in_a_row=2**31, seconds=math.inf)
        self._process = LimitedProcess(__name__, {}, limits, budget, quiet=True)

    def read(self, kind: bytes, pickle: bytes) -> object:
        """Return what `serve` makes of a pickle.

        Raises:
            RefusedPickle: the pickle is damaged, hostile or exceeds a limit.
        """
        try:
            return json.loads(self._process.ask(kind + pickle))
        except LimitReached as limit:
            raise RefusedPickle(str(limit)) from None

    def model_problem(self, args: Mapping[str, Any], rows: int) -> Refusal | None:
        """Return `arguments.model_problem`, computed within the limits of the process.

        Raises:
            RefusedPickle: it exceeds a limit.
        """
        pair = self.read(_ARGUMENTS, json.dumps([args, rows]).encode())
        if pair is None:
            return None
        assert isinstance(pair, list), "JSON has the pair as a list"
        sentence, cure = pair
        return sentence, cure

    def close(self) -> None:
        self._process.close()


def serve() -> None:
    """Answer requests; the main function of the child."""
    serve_requests(lambda setup: (b"", _answer))


def _answer(request: bytes) -> bytes:
    kind, pickle = request[:1], request[1:]
    try:
        if kind == _ARGUMENTS:
            return json.dumps(model_problem(*json.loads(pickle))).encode()
        value = load(pickle)
        answer: object
        if kind == METADATA:
            answer = _metadata(value)
        elif kind == TENSOR:
            answer = _tensor(value)
        else:
            answer = _jsonable(value)
        return json.dumps(answer).encode()
    except RefusedPickle as error:
        raise LimitReached(str(error)) from None
    except Exception as error:  # a value of another type than expected, at any place
        raise LimitReached(f"is damaged ({type(error).__name__})") from None


def _metadata(value: object) -> dict[str, Any]:
    """Return the tensors and the objects of ``.metadata``, with the place of each part."""
    state = _made(value, _CHECKPOINT + "Metadata").state
    tensors: dict[str, Any] = {}
    objects: dict[str, Any] = {}
    for name, description in state["state_dict_metadata"].items():
        if description.name == _CHECKPOINT + "BytesStorageMetadata":
            objects[name] = None
        else:
            tensors[name] = _described(description)
    for key, where in state["storage_data"].items():
        index = _made(key, _CHECKPOINT + "MetadataIndex").state
        if index["fqn"] in objects:
            objects[index["fqn"]] = _place(where)
        else:
            tensors[index["fqn"]]["places"].append([list(index["offset"]), *_place(where)])
    for name, description in (state.get("mcore_data") or {}).items():
        if name in tensors and _WHOLE_SHAPE in description:
            tensors[name]["whole_shape"] = list(description[_WHOLE_SHAPE])
    return {"tensors": tensors, "objects": objects}


def _described(tensor: object) -> dict[str, Any]:
    state = _made(tensor, _CHECKPOINT + "TensorStorageMetadata").state
    dtype = _made(state["properties"], _CHECKPOINT + "TensorProperties").state[0]
    chunks = [_made(chunk, _CHECKPOINT + "ChunkStorageMetadata").state for chunk in state["chunks"]]
    return {
        "dtype": dtype.name.removeprefix("torch."),
        "shape": list(state["size"]),
        "chunks": [[list(chunk["offsets"]), list(chunk["sizes"])] for chunk in chunks],
        "places": [],
        "whole_shape": None,
    }


def _place(where: object) -> list[Any]:
    state = _made(where, "torch.distributed.checkpoint.filesystem._StorageInfo").state
    if state.get("transform_descriptors"):
        raise RefusedPickle("stores its tensors transformed, which is not supported")
    return [state["relative_path"], state["offset"], state["length"]]


def _tensor(value: object) -> dict[str, Any]:
    """Return dtype, storage, offset, shape and strides of a pickled tensor."""
    if not isinstance(value, Made) or value.name != TENSOR_CALL:
        raise RefusedPickle("is damaged (a tensor is missing)")
    storage, offset, shape, strides = value.arguments[:_TENSOR_ARGUMENTS]
    kind, storage_class, key, _, count = storage
    dtype = STORAGE_DTYPES[storage_class.name.removeprefix("torch.").removesuffix("Storage")]
    if kind != "storage":
        raise RefusedPickle("is damaged (a storage is missing)")
    return {
        "dtype": dtype,
        "key": key,
        "count": count,
        "offset": offset,
        "shape": list(shape),
        "strides": list(strides),
    }


def _made(value: object, name: str) -> Made:
    if not isinstance(value, Made) or value.name != name:
        raise RefusedPickle(f"is damaged ({name.rpartition('.')[2]} is missing)")
    return value


def _jsonable(value: object) -> object:
    """Return options as JSON. Enumerations and functions become their names."""
    left = iter(range(_MOST_VALUES))

    def convert(value: object) -> object:
        if next(left, None) is None:
            raise RefusedPickle(f"has more than {_MOST_VALUES:,} values")
        if isinstance(value, Made):
            if value.name == "argparse.Namespace":
                return convert(value.state)
            if value.name == TENSOR_CALL:
                return {TENSOR_CALL: _tensor(value)}
            return {"name": value.name, "arguments": [convert(inner) for inner in value.arguments]}
        if isinstance(value, type) and issubclass(value, Made):
            if value.name == MEMBER:  # only members of enumerations contain it
                raise RefusedPickle(unknown(MEMBER))
            return value.name
        if isinstance(value, Mapping):
            return {str(key): convert(inner) for key, inner in value.items()}
        if isinstance(value, (list, tuple, set)):
            return [convert(inner) for inner in value]
        return None if isinstance(value, bytes) else value

    return convert(value)
