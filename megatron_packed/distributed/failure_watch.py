"""An error on one rank ends all ranks: at once, with one exit code, and one of them says why.

[Note: failure protocol]
A rank that fails cannot tell the others by a collective: they are in another one, or wait for a
device that waits for it. So every rank has a thread that sleeps in the store until a report appears
there; a step costs that nothing, neither a collective nor a look at the device.

1. A rank that fails claims the report. One claim is accepted: what all ranks find at the same time
   is said once, and an error that is the consequence of another one (a connection that is gone) is
   not said at all.
2. If all it knows is that another process is gone or does not come, it calls the roll. The threads
   of the other ranks wake up and answer where their main threads are; a process that was killed or
   stopped does not.
3. The rank whose claim was accepted speaks, then publishes the report. It has not ended so far, so
   that no launcher ends the job before the reason is on disk, and no connection breaks before the
   reason can be read.
4. The threads of the other ranks read it. The rank that spoke and rank 0, which may be the host of
   the store, stay until all have, unless some do not answer.
5. The rank that spoke ends first and the others a moment later, with the same exit code: a launcher
   that watches them takes the first for the root cause.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.distributed.last_operation import (
    last_operation_of_error,
    last_operation_of_thread,
)
from megatron_packed.torch_private import default_store

ANSWER_SECONDS = 5.0
"""Time that the rank that calls the roll waits. A busy rank takes a while to answer, one that was
killed never does.
"""
READ_SECONDS = 2.0
"""Time that the ranks wait for each other to read a report."""
BEHIND_SECONDS = 0.5
"""Time by which the others end after the rank that failed: launchers look a few times a second."""
PATIENCE_SECONDS = 10.0
"""After which a rank that failed no longer waits for one that failed before it to speak."""
_FOREVER = timedelta(days=20)  # poll(2) counts milliseconds in 32 bits
_CLAIM, _CALL, _ANSWERS, _REPORT, _READERS = "claim", "call", "answers", "report", "readers"
_NOTHING = "null"
"""Published at the orderly end, so that the threads leave the store before its host does. As a
call: do not answer.
"""
_WHERE = "where"
"""The call that every rank answers."""
_MOST_PLACES = 8
"""So many different answers are repeated."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Why a run has failed."""

    exit_code: int
    rank: int | None
    """The rank that failed; None for a failure that all ranks agreed on."""
    step: int | None
    """The step under way, from 1; None before the first."""
    reason: str


class FailureWatch:
    """Watches for the failure of another rank, and reports that of this one. See [Note: failure
    protocol].

    From the start to the end of a job on every rank. In a world of one process it watches nothing.

    Args:
        groups: of this rank; torch.distributed is initialised.
        end: ends this process with an exit code; called in another thread than the main one, which
            may never wake up.
    """

    def __init__(self, groups: ParallelGroups, *, end: Callable[[int], object] = os._exit) -> None:
        self.step: int | None = None
        """The step under way, kept up to date by whoever runs the steps."""
        self._world_size = groups.world_size
        self._end = end
        self._rank = groups.rank
        self._main = threading.main_thread().ident
        self._speaks = False
        self._first = threading.Lock()
        self._told = threading.Event()
        """Another rank's report was read, and this process is about to end."""
        if self._world_size > 1:
            # Two connections: one is blocked in a wait, and the other must still send the report.
            self._store, sleeping = (_connection(default_store()) for _ in range(2))
            self._thread = threading.Thread(
                target=self._watch, args=(sleeping,), name="failures", daemon=True
            )
            self._thread.start()

    def report(
        self,
        failure: Failure,
        speak: Callable[[Failure], None],
        *,
        lost: BaseException | None = None,
    ) -> int:
        """This rank has failed; returns the exit code to end with, when it is time to end.

        Does not return if another rank failed first: this process then ends as the other ranks do.

        Args:
            speak: says why and writes it down; called if this rank is the one to do so.
            lost: the error, if it says no more than that another process is gone or does not come.
                The failure then names the rank that does not answer, or where all are.
        """
        if not self._first.acquire(blocking=False):
            # Another thread of this process reports, and is about to end it: wait for that end.
            threading.Event().wait()
        if self._world_size == 1:
            speak(failure)
            return failure.exit_code
        if self._told.is_set() or not self._claimed():
            # The thread ends this process, unless the rank that was to speak is dead.
            self._thread.join(PATIENCE_SECONDS)
        self._speaks = True
        silent: list[int] = []
        if lost is not None:
            raised_here = lost.__traceback__ is not None
            place = (
                last_operation_of_error(lost)
                if raised_here
                else last_operation_of_thread(self._main)
            )
            answers, silent = self._call_the_roll(place)
            failure = replace(
                failure,
                # This rank is only the first that noticed.
                rank=silent[0] if len(silent) == 1 else None,
                reason=f"{failure.reason} {_in_words(silent, answers)}",
            )
        # Spoken before it is published: the others end as soon as they read it, and a launcher then
        # kills this process.
        speak(failure)
        with suppress(RuntimeError):
            self._publish(json.dumps(asdict(failure)))
            self._wait_for(_READERS, self._world_size - len(silent), READ_SECONDS)
        return failure.exit_code

    def close(self) -> None:
        """All ranks have come to the orderly end, which a barrier before this call makes sure of."""
        if self._world_size == 1:
            return
        if self._rank == 0:
            self._publish(_NOTHING)
        self._thread.join(PATIENCE_SECONDS)

    def _claimed(self) -> bool:
        """Claim the report; return True if this rank is the one to speak."""
        mine = str(self._rank)
        try:
            return self._store.compare_set(_CLAIM, "", mine) == mine.encode()
        except RuntimeError:  # the store is gone, so its host was killed
            return True

    def _call_the_roll(self, here: str) -> tuple[dict[int, str], list[int]]:
        """Return the last operation of every rank that answers, and the ranks that do not answer.

        Args:
            here: last operation of this rank.
        """
        answers = {self._rank: self._answer(here)}
        others = [rank for rank in range(self._world_size) if rank != self._rank]
        try:
            self._store.set(_CALL, _WHERE)
            self._wait_for(_ANSWERS, len(others), ANSWER_SECONDS)
            found = [rank for rank in others if self._store.check([f"{_ANSWERS}/{rank}"])]
            answers |= {rank: self._store.get(f"{_ANSWERS}/{rank}").decode() for rank in found}
        except RuntimeError:
            # The store is gone: no rank can be asked, and rank 0 is gone if it hosted the store.
            hosted_by_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
            return answers, [] if hosted_by_launcher or self._rank == 0 else [0]
        return answers, [rank for rank in others if rank not in found]

    def _answer(self, place: str) -> str:
        return place if self.step is None else f"{place}, in step {self.step}"

    def _publish(self, report: str) -> None:
        self._store.compare_set(_CALL, "", _NOTHING)  # unless the roll was called
        self._store.set(_REPORT, report)

    def _watch(self, store: Store) -> None:
        try:
            _sleep_until(store, _CALL)
            if store.get(_CALL).decode() == _WHERE and not self._speaks:
                store.set(
                    f"{_ANSWERS}/{self._rank}", self._answer(last_operation_of_thread(self._main))
                )
                store.add(_ANSWERS, 1)
            _sleep_until(store, _REPORT)
            report = json.loads(store.get(_REPORT))
            if report is not None and not self._speaks:
                self._told.set()
            store.add(_READERS, 1)
        except RuntimeError:
            return  # the store's host was killed; the next collective will say so
        if self._rank == 0:
            # Rank 0 may host the store: its end would cut off the others before they have read.
            self._wait_for(_READERS, self._world_size, READ_SECONDS)
        if self._told.is_set():
            time.sleep(BEHIND_SECONDS)
            self._end(Failure(**report).exit_code)

    def _wait_for(self, counter: str, count: int, seconds: float) -> None:
        """Until so many ranks have counted, or some do not come."""
        deadline = time.monotonic() + seconds
        with suppress(RuntimeError):
            while self._store.add(counter, 0) < count and time.monotonic() < deadline:
                time.sleep(0.02)


def _in_words(silent: Sequence[int], answers: Mapping[int, str]) -> str:
    """``"Rank 1 does not answer: it was killed or is stopped; rank 0 was in ..."``"""
    parts = []
    if silent:
        one = len(silent) == 1
        told = (
            "does not answer: it was killed or is stopped"
            if one
            else "do not answer: killed or stopped"
        )
        parts.append(f"{_ranks(silent)} {told}")
    together: dict[str, list[int]] = {}
    for rank, place in sorted(answers.items()):
        together.setdefault(place, []).append(rank)
    for place, ranks in list(together.items())[:_MOST_PLACES]:
        parts.append(f"{_ranks(ranks)} {'was' if len(ranks) == 1 else 'were'} in {place}")
    text = "; ".join(parts)
    return f"{text[:1].upper()}{text[1:]}."


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:_MOST_PLACES])) + (
        ", ..." if len(ranks) > _MOST_PLACES else ""
    )
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


def _sleep_until(store: Store, key: str) -> None:
    """Until ``key`` appears."""
    while True:
        try:
            store.wait([key], _FOREVER)
        except dist.DistStoreError:
            continue  # 20 days have passed
        return


def _connection(store: Store) -> Store:
    """Open another connection to the host of ``store``, to keys of this watch alone."""
    return PrefixStore("failure", store.clone())  # type: ignore[attr-defined]  # missing in torch's stubs
