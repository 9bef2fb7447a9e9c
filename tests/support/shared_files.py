"""Stand-in for the mapping of symmetric memory: bytes of each rank in files that processes map."""

from __future__ import annotations

from pathlib import Path
from tempfile import gettempdir
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class SharedFiles:
    """Stand-in for `SharedBuffer` on CPUs, over gloo."""

    def __init__(self, group: dist.ProcessGroup, nbytes: int) -> None:
        self.group = group
        named = [f"{group.group_name}-{dist.get_process_group_ranks(group)[0]}"]
        dist.broadcast_object_list(named, group=group, group_src=0)
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        paths = [Path(gettempdir()) / f"shared-{named[0]}-{each}" for each in range(size)]
        self.of_ranks: list[Tensor] = [
            torch.from_file(str(path), shared=True, size=nbytes, dtype=torch.uint8)
            for path in paths
        ]
        self.barrier()
        paths[rank].unlink()

    def barrier(self, stream: Any = None) -> None:
        dist.barrier(self.group)


class StreamAtOnce(SimpleNamespace):
    """Stand-in for a stream whose operations have run when they are queued."""

    def wait_stream(self, other: object) -> None:
        pass

    def wait_event(self, event: object) -> None:
        pass

    def record_event(self) -> None:
        pass
