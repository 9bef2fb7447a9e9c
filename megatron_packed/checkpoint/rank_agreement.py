"""Agreement between the ranks of a save or a load.

Each rank runs its part and sends its result or its error to all ranks. If one rank fails, all ranks
raise the same error, so no rank waits in a collective that another rank never enters.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from megatron_packed.checkpoint.errors import CheckpointError, CheckpointMismatchError
from megatron_packed.checkpoint.sealed_json import Json

if TYPE_CHECKING:
    from megatron_packed.distributed.groups import ParallelGroups


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Outcome of one rank: its ``value``, or the ``problem`` that made it fail."""

    value: Json = None
    problem: str | None = None
    mismatch: bool = False
    """True if the files are intact, and the caller's request does not fit them."""


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """Ranks of one save or load. ``world_size`` 1 needs no process group."""

    rank: int = 0
    world_size: int = 1
    group: dist.ProcessGroup | None = None

    @classmethod
    def from_groups(cls, groups: ParallelGroups | None) -> Ranks:
        """Return all ranks of a run; None is one process."""
        if groups is None:
            return ONE_PROCESS
        return cls(rank=groups.rank, world_size=groups.world_size, group=groups.world_group)

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank {self.rank} is not in [0, world_size {self.world_size}).")
        if self.world_size > 1:
            if not dist.is_initialized():
                raise ValueError(
                    f"world_size {self.world_size} needs an initialized torch.distributed; initialize it, or pass 1."
                )
            actual = (dist.get_rank(self.group), dist.get_world_size(self.group))
            if actual != (self.rank, self.world_size):
                raise ValueError(
                    f"rank {self.rank} of {self.world_size} was passed, but this process is rank {actual[0]} of "
                    f"{actual[1]} in the process group; pass the rank and size of the group."
                )

    def gather(self, value: Json) -> list[Json]:
        """Return the values of all ranks, in rank order, on each rank.

        The values are encoded as JSON, not pickled. Two all-gathers exchange their sizes and bytes.
        """
        if self.world_size == 1:
            return [value]
        on_gpu = dist.get_backend(self.group) == "nccl"
        device = (
            torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
        )
        data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        sizes = torch.empty(self.world_size, dtype=torch.int64, device=device)
        dist.all_gather(
            list(sizes.view(-1, 1).unbind()),
            torch.tensor([len(data)], device=device),
            group=self.group,
        )
        lengths = sizes.tolist()
        padded = torch.zeros(max(lengths), dtype=torch.uint8, device=device)
        padded[: len(data)] = data
        everything = torch.empty((self.world_size, len(padded)), dtype=torch.uint8, device=device)
        dist.all_gather(list(everything.unbind()), padded, group=self.group)
        rows = everything.cpu().numpy()
        return [json.loads(row[:length].tobytes()) for row, length in zip(rows, lengths)]

    def try_all(self, action: Callable[[], Json]) -> list[Outcome]:
        """Run ``action`` on each rank and return the outcomes of all ranks.

        An exception becomes the ``problem`` of the rank's outcome and is not raised.
        """
        return [Outcome(**fields) for fields in self.gather(attempt(action).__dict__)]

    def agree(self, action: Callable[[], Json], what: str, *, cure: str) -> list[Json]:
        """Run ``action`` on each rank and return the values of all ranks, or raise on all ranks.

        Args:
            what: the activity, used in the message.
            cure: advice or consequence, used in the message.
        Raises:
            CheckpointError: ``action`` failed on a rank. The message lists the first eight ranks
                that failed, and each distinct problem once.
        """
        outcomes = self.try_all(action)
        failed = [
            (rank, outcome) for rank, outcome in enumerate(outcomes) if outcome.problem is not None
        ]
        if failed:
            said: dict[str | None, list[str]] = {}
            for rank, outcome in failed[:8]:
                said.setdefault(outcome.problem, []).append(str(rank))
            lines = "".join(
                f"\n  rank{'s' if len(who) > 1 else ''} {', '.join(who)}: {problem}"
                for problem, who in said.items()
            )
            kind = (
                CheckpointMismatchError
                if all(outcome.mismatch for _, outcome in failed)
                else CheckpointError
            )
            raise kind(f"{what} failed on {len(failed)} of {self.world_size} ranks; {cure}:{lines}")
        return [outcome.value for outcome in outcomes]

    def agree_with_rank_0(self, action: Callable[[], Any], what: str, *, cure: str) -> Any:
        """Run ``action`` on rank 0 and return its value on all ranks; see `agree`."""
        return self.agree(on_rank_0(self.rank, action), what, cure=cure)[0]


ONE_PROCESS = Ranks()


def attempt(action: Callable[[], Json]) -> Outcome:
    """Run ``action`` and return its value, or the message of the exception that it raised.

    `KeyboardInterrupt` and `SystemExit` are not caught.
    """
    try:
        return Outcome(value=action())
    except CheckpointError as error:
        return Outcome(problem=str(error), mismatch=isinstance(error, CheckpointMismatchError))
    except Exception as error:
        return Outcome(problem=f"{type(error).__name__}: {error}")


def on_rank_0(rank: int, action: Callable[[], Any]) -> Callable[[], Any]:
    """Return ``action`` on rank 0, and a function that does nothing on other ranks."""
    return action if rank == 0 else lambda: None
