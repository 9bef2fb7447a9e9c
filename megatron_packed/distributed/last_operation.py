"""Last-operation record of a process: the collective that it is in and the function that called it.

It is read from the stack of the thread when a report needs it, and costs a step nothing.
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
"""Files whose functions ask again and again for what the device has done."""
_PACKAGE = Path(__file__).parents[1]
_OUR_COLLECTIVES = str(Path(__file__).parent / "collectives.py")
_COLLECTIVES = str(Path(dist.__file__).parent / "distributed_c10d.py")


def last_operation_of_thread(ident: int | None) -> str:
    """Describe the operation that the thread ``ident`` is in; on a GPU, also the collective that the
    device is in.
    """
    frame = sys._current_frames().get(ident) if ident is not None else None
    place = _describe(reversed(list(_outwards(frame))))
    # A thread that waits inside the driver holds its lock: a query of the device would block too.
    waits = frame is not None and frame.f_code.co_filename.endswith(_WAITS_FOR_THE_DEVICE)
    on_device = _collective_of_device() if waits else None
    return place if on_device is None else f"{place}, its GPU in {on_device}"


def last_operation_of_error(error: BaseException) -> str:
    """Describe the operation that raised ``error``."""
    place = _describe(frame for frame, _ in traceback.walk_tb(error.__traceback__))
    on_device = _collective_of_device()
    return place if on_device is None else f"{place}, its GPU in {on_device}"


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _describe(inwards: Iterable[FrameType]) -> str:
    """Return ``"all_reduce over tp (ranks 0, 1), called by layers/attention.py: forward"``, or the
    caller alone.

    Args:
        inwards: the frames of a stack, the outermost first.
    """
    collective, function = None, None
    for frame in inwards:
        path, name = frame.f_code.co_filename, frame.f_code.co_name
        # Inner frames come last and win: the innermost collective is the one that waits.
        if path == _COLLECTIVES and not name.startswith("_"):
            collective = _collective(name, frame.f_locals.get("group"))
        elif (
            path == _OUR_COLLECTIVES
            and name == "wait_for"
            and (started := frame.f_locals.get("started")) is not None
        ):
            collective = _collective(started.name, started.group)
        elif _PACKAGE in Path(path).parents:
            inside = Path(path).relative_to(_PACKAGE)
            collective = None
            # The collective is known from torch, so its caller outside of this folder says more.
            if inside.parts[0] != "distributed":
                function = f"{inside}: {name}"
    caller = function or "no function of this package"
    return caller if collective is None else f"{collective}, called by {caller}"


def _collective(name: str, group: dist.ProcessGroup | None) -> str:
    ranks: list[int] = []
    with suppress(Exception):  # a group that is being taken down
        ranks = dist.get_process_group_ranks(group)
    axis = (
        getattr(group, "group_desc", "")
        if group is not None and group is not dist.group.WORLD
        else "all ranks"
    )
    shown = ", ".join(map(str, ranks[:16])) + (", ..." if len(ranks) > 16 else "")
    return f"{name} over {axis or 'a group'}" + (f" (ranks {shown})" if ranks else "")


def _collective_of_device() -> str | None:
    """Return the first NCCL collective in torch's flight recorder that is not done."""
    with suppress(Exception):  # the record is private to torch; the report is whole without it
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
