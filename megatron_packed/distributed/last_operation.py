"""Last-operation record of a process: the running collective and the function that called it.

The record is read from a thread's stack when a report needs it, so it adds no cost to a step.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from types import FrameType

import torch.distributed as dist

from megatron_packed.torch_private import nccl_trace_json

_WAITS_FOR_THE_DEVICE = ("training/late_metrics.py", "distributed/hang_detection.py")
"""Files whose functions poll the device; a thread in such a function waits for the device."""
_PACKAGE = Path(__file__).parents[1]
_OUR_COLLECTIVES = str(Path(__file__).parent / "collectives.py")
_ROWS = tuple(str(Path(__file__).parent / f"symmetric_{name}.py") for name in ("rows", "memory"))
"""Files of exchanges of rows, and of their steps."""
_ROWS_NAMES = ("all_gather_matmul", "matmul_reduce_scatter", "start_gather", "start_scatter")
"""Functions of these files that exchange rows."""
_EXCHANGES = str(Path(__file__).parent / "symmetric_exchange.py")
_COLLECTIVES = str(Path(dist.__file__).parent / "distributed_c10d.py")


def last_operation_of_thread(ident: int | None) -> str:
    """Describe the operation that the thread ``ident`` is in.

    If that thread waits for a GPU, the text also names the NCCL collective that the GPU is in.
    """
    frame = sys._current_frames().get(ident) if ident is not None else None
    place = _describe(reversed(list(_outwards(frame))))
    # A thread blocked in the driver holds the driver's lock: a device query here would block too.
    waits = frame is not None and frame.f_code.co_filename.endswith(_WAITS_FOR_THE_DEVICE)
    on_device = _collective_of_device() if waits else None
    return place if on_device is None else f"{place}, while its GPU was in {on_device}"


def last_operation_of_error(error: BaseException) -> str:
    place = _describe(frame for frame, _ in traceback.walk_tb(error.__traceback__))
    on_device = _collective_of_device()
    return place if on_device is None else f"{place}, while its GPU was in {on_device}"


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _describe(inwards: Iterable[FrameType]) -> str:
    """Return ``"all_reduce over tp (ranks 0, 1), called by layers/attention.py: forward"``.

    Without a collective on the stack, only the calling function is returned.

    Args:
        inwards: frames of a stack, outermost first.
    """
    collective, function = None, None
    for frame in inwards:
        path, name = frame.f_code.co_filename, frame.f_code.co_name
        # Inner frames come last and overwrite outer ones: the innermost collective is waiting.
        if path == _COLLECTIVES and not name.startswith("_"):
            collective = _collective(name, frame.f_locals.get("group"))
        elif (
            path == _OUR_COLLECTIVES
            and name == "wait_for"
            and (started := frame.f_locals.get("started")) is not None
        ):
            collective = _collective(started.name, started.group)
        elif path in _ROWS:
            if name in _ROWS_NAMES:  # other functions of the files keep the name of the exchange
                collective = _collective(name, getattr(frame.f_locals.get("self"), "group", None))
        elif path == _EXCHANGES and name == "start":
            collective = _collective("exchange", frame.f_locals.get("group"))
        elif _PACKAGE in Path(path).parents:
            inside = Path(path).relative_to(_PACKAGE)
            collective = None
            # torch's frame already names the collective, so the useful caller is outside this
            # folder.
            if inside.parts[0] != "distributed":
                function = f"{inside}: {name}"
    caller = function or "code outside megatron_packed"
    return caller if collective is None else f"{collective}, called by {caller}"


def _collective(name: str, group: dist.ProcessGroup | None) -> str:
    ranks: list[int] = []
    with suppress(Exception):  # the group may be in the middle of its destruction
        ranks = dist.get_process_group_ranks(group)
    axis = (
        getattr(group, "group_desc", "")
        if group is not None and group is not dist.group.WORLD
        else "all ranks"
    )
    shown = ", ".join(map(str, ranks[:16])) + (", ..." if len(ranks) > 16 else "")
    return f"{name} over {axis or 'a group'}" + (f" (ranks {shown})" if ranks else "")


def _collective_of_device() -> str | None:
    """Return the first NCCL collective in torch's flight recorder that has not completed."""
    # this API of torch is private and may change; the report can omit the collective
    with suppress(Exception):
        trace = nccl_trace_json()
        if trace is None:
            return None
        entries = json.loads(trace)["entries"]
        waiting = [entry for entry in entries if entry["state"] != "completed"]
        if waiting:
            first = min(
                waiting, key=lambda entry: (entry["state"] != "started", entry["record_id"])
            )
            return f"{first['profiling_name']} over {first['process_group'][-1]}"
    return None
