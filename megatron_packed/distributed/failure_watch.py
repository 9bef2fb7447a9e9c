"""An error on one rank ends all ranks: at once, with one exit code, and one of them says why.

[Note: failure protocol]
A rank that fails cannot tell the others by a collective: they are in another one, or wait for a device that waits for
it. So every rank has a thread that sleeps in the store until a report appears there; a step costs that nothing, neither
a collective nor a look at the device.

1. A rank that fails claims the report. One claim is accepted: what all ranks find at the same time is said once, and an
   error that is the consequence of another one (a connection that is gone) is not said at all.
2. The rank whose claim was accepted speaks, then publishes the report. It has not ended so far, so that no launcher
   ends the job before the reason is on disk, and no connection breaks before the reason can be read.
3. The threads of the other ranks wake up and read it. The rank that spoke and rank 0, which may be the host of the
   store, stay until all have, unless some do not answer.
4. The rank that spoke ends first and the others a moment later, with the same exit code: a launcher that watches them
   takes the first for the root cause.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store

from megatron_packed.distributed.groups import ParallelGroups

READ_SECONDS = 2.0
"""How long the ranks wait for each other to read a report; one that was killed never does."""
BEHIND_SECONDS = 0.5
"""How long the others end behind the rank that failed: launchers look a few times a second."""
PATIENCE_SECONDS = 10.0
"""After which a rank that failed no longer waits for one that failed before it to speak."""
_FOREVER = timedelta(days=20)  # poll(2) counts milliseconds in 32 bits
_CLAIM, _REPORT, _READERS = "claim", "report", "readers"
_NOTHING = "null"
"""Published at the orderly end, so that the threads leave the store before its host does."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Why a run has failed."""

    exit_code: int
    rank: int | None
    """Where; None for what all ranks agreed on."""
    step: int | None
    """The step under way, from 1; None before the first."""
    reason: str


class FailureWatch:
    """Watches for the failure of another rank, and reports that of this one. See [Note: failure protocol].

    From the start to the end of a job on every rank. In a world of one process it watches nothing.

    Args:
        groups: of this rank; torch.distributed is initialised.
        end: ends this process with an exit code; called in another thread than the main one, which may never wake up.
    """

    def __init__(self, groups: ParallelGroups, *, end: Callable[[int], object] = os._exit) -> None:
        self.step: int | None = None
        """The step under way, kept up to date by whoever runs the steps."""
        self._world_size, self._end = groups.world_size, end
        self._rank = groups.rank
        self._speaks = False
        self._told = threading.Event()
        """Another rank's report was read, and this process is about to end."""
        if self._world_size > 1:
            # Two connections of our own: one is busy sleeping.
            self._store, sleeping = (_connection(_get_default_store()) for _ in range(2))
            self._thread = threading.Thread(target=self._watch, args=(sleeping,), name="failures", daemon=True)
            self._thread.start()

    def report(self, failure: Failure, speak: Callable[[], None], *, gone: int = 0) -> int:
        """This rank has failed; returns the exit code to end with, when it is time to end.

        Does not return if another rank failed first: this process then ends as the other ranks do.

        Args:
            speak: says why and writes it down; called if this rank is the one to do so.
            gone: other processes that are known to be dead: nobody waits for them.
        """
        if self._world_size == 1:
            speak()
            return failure.exit_code
        if self._told.is_set() or not self._claimed():
            self._thread.join(PATIENCE_SECONDS)  # it ends this process, unless the rank that was to speak is dead
        self._speaks = True
        speak()
        with suppress(RuntimeError):
            self._store.set(_REPORT, json.dumps(asdict(failure)))
            self._wait_for_readers(self._world_size - gone)
        return failure.exit_code

    def close(self) -> None:
        """All ranks have come to the orderly end, which a barrier before this call makes sure of."""
        if self._world_size == 1:
            return
        if self._rank == 0:
            self._store.set(_REPORT, _NOTHING)
        self._thread.join(PATIENCE_SECONDS)

    def _claimed(self) -> bool:
        """Whether this rank is the one to speak."""
        mine = str(self._rank)
        try:
            return self._store.compare_set(_CLAIM, "", mine) == mine.encode()
        except RuntimeError:  # the store is gone, so its host was killed
            return True

    def _watch(self, store: Store) -> None:
        try:
            while not self._published(store):
                pass
            report = json.loads(store.get(_REPORT))
            if report is not None and not self._speaks:
                self._told.set()
            store.add(_READERS, 1)
        except RuntimeError:
            return  # the store's host was killed; the next collective will say so
        if self._rank == 0:
            self._wait_for_readers(self._world_size)
        if self._told.is_set():
            time.sleep(BEHIND_SECONDS)
            self._end(Failure(**report).exit_code)

    def _published(self, store: Store) -> bool:
        try:
            store.wait([_REPORT], _FOREVER)
        except dist.DistStoreError:  # so much time has passed
            return False
        return True

    def _wait_for_readers(self, count: int) -> None:
        """Until so many ranks have read the report, or some do not answer."""
        deadline = time.monotonic() + READ_SECONDS
        with suppress(RuntimeError):
            while self._store.add(_READERS, 0) < count and time.monotonic() < deadline:
                time.sleep(0.02)


def _connection(store: Store) -> Store:
    """A connection of its own to the host of ``store``, to keys that nobody else uses."""
    return PrefixStore("failure", store.clone())  # type: ignore[attr-defined]  # missing in torch's stubs
