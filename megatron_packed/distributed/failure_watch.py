"""Watch that ends all ranks with one exit code and one reported reason when any rank fails.

[Note: failure protocol]
A rank that fails cannot notify the other ranks by a collective. The other ranks are in a different
collective, or wait for a device that waits for the failed rank. So every rank has a watch thread
that blocks in the torch.distributed store until a failure report appears. The watch adds no
collective and no device query to a training step.

1. A rank that fails claims the right to report. The store accepts one claim only. So an error that
   all ranks raise at the same time is reported once, and errors that follow from the first one (a
   closed connection) are not reported.
2. If the error only shows that another process is gone or does not arrive, the claiming rank asks
   all ranks for their last operation. The watch threads of the other ranks wake up and answer. A
   process that was killed or stopped does not answer.
3. The rank with the accepted claim prints and saves the reason, then publishes the report in the
   store. This rank is still running at that point. So no launcher ends the job before the reason is
   on disk, and no connection closes before the other ranks can read the report.
4. The watch threads of the other ranks read the report. The reporting rank and rank 0, which may
   host the store, wait until all ranks have read the report, or until a time limit.
5. The reporting rank ends first. The others end a moment later with the same exit code, because a
   launcher treats the first process that ends as the root cause.
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
"""Seconds that the reporting rank waits for the last operations of the other ranks.

A busy rank needs some time to answer. A rank that was killed never answers.
"""
_READ_SECONDS = 2.0
"""Seconds that the ranks wait for each other to read a report."""
BEHIND_SECONDS = 0.5
"""Seconds between the end of the rank that failed and the end of the other ranks.

Launchers poll their processes a few times a second.
"""
PATIENCE_SECONDS = 10.0
"""Seconds that a failed rank waits for the report of a rank that failed earlier."""
_FOREVER = timedelta(days=20)  # almost the limit of poll(2): 2^31 milliseconds
_CLAIM, _CALL, _ANSWERS, _REPORT, _READERS = "claim", "call", "answers", "report", "readers"
_NOTHING = "null"
"""Value that rank 0 publishes at the normal end of the job.

The value releases the watch threads before the host of the store ends. Under the key `_CALL` the
value means that the ranks need not answer.
"""
_WHERE = "where"
"""Value under the key `_CALL` that requests the last operation of every rank."""
_MOST_PLACES = 8
"""Largest number of different last operations, and of ranks in a list, that a message quotes."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Reason, exit code, rank and step of a failed run."""

    exit_code: int
    rank: int | None
    """Rank that failed; None for a failure that all ranks detected together."""
    step: int | None
    """Step in progress, counted from 1; None before the first step."""
    reason: str


class FailureWatch:
    """Watch for failures of other ranks, and reporter of a failure of this rank.

    Every rank creates a watch at the start of a job and closes it at the end. In a world of one
    process there is no watch thread. See [Note: failure protocol].

    Args:
        groups: process groups of this rank; torch.distributed is initialised.
        end: function that ends this process with an exit code. The watch thread calls it, because
            the main thread may be blocked forever.
    """

    def __init__(self, groups: ParallelGroups, *, end: Callable[[int], object] = os._exit) -> None:
        self.step: int | None = None
        """Step in progress; the training loop updates it."""
        self._world_size = groups.world_size
        self._end = end
        self._rank = groups.rank
        self._main = threading.main_thread().ident
        self._speaks = False
        self._first = threading.Lock()
        self._told = threading.Event()
        """Set when this rank has read another rank's report and is about to end."""
        if self._world_size > 1:
            # Open two connections to the store: the watch thread blocks one in a wait, and the main
            # thread sends the report over the other.
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
        """Report that this rank has failed, and return the exit code when this process may end.

        If another rank failed first, the call does not return. The watch thread then ends this
        process with the exit code of that other rank.

        Args:
            failure: reason, exit code, rank and step of the failure.
            speak: function that prints and saves the failure; called only on the reporting rank.
            lost: the error, if it only shows that another process is gone or does not arrive. The
                reported failure then names the rank that does not answer, or the last operation of
                every rank.
        """
        if not self._first.acquire(blocking=False):
            # Another thread of this process already reports and is about to end the process.
            threading.Event().wait()
        if self._world_size == 1:
            speak(failure)
            return failure.exit_code
        if self._told.is_set() or not self._claimed():
            # The watch thread ends this process, unless the rank with the accepted claim is dead.
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
                # This rank noticed the failure but did not cause it, so it names a silent rank.
                rank=silent[0] if len(silent) == 1 else None,
                reason=f"{failure.reason} {_in_words(silent, answers)}",
            )
        # `speak` runs before the report is published: the other ranks end as soon as they read the
        # report, and a launcher then kills this process.
        speak(failure)
        with suppress(RuntimeError):
            self._publish(json.dumps(asdict(failure)))
            self._wait_for(_READERS, self._world_size - len(silent), _READ_SECONDS)
        return failure.exit_code

    def close(self) -> None:
        """End the watch at the normal end of a job; call it after a barrier of all ranks."""
        if self._world_size == 1:
            return
        if self._rank == 0:
            self._publish(_NOTHING)
        self._thread.join(PATIENCE_SECONDS)

    def _claimed(self) -> bool:
        """Claim the right to report; return True if the store accepts the claim of this rank."""
        mine = str(self._rank)
        try:
            return self._store.compare_set(_CLAIM, "", mine) == mine.encode()
        except RuntimeError:  # no connection to the store: its host was killed
            return True

    def _call_the_roll(self, own_operation: str) -> tuple[dict[int, str], list[int]]:
        """Return the last operation of each rank that answers, and the ranks that do not answer.

        Args:
            own_operation: last operation of this rank.
        """
        answers = {self._rank: self._answer(own_operation)}
        others = [rank for rank in range(self._world_size) if rank != self._rank]
        try:
            self._store.set(_CALL, _WHERE)
            self._wait_for(_ANSWERS, len(others), ANSWER_SECONDS)
            answering = [rank for rank in others if self._store.check([f"{_ANSWERS}/{rank}"])]
            answers |= {rank: self._store.get(f"{_ANSWERS}/{rank}").decode() for rank in answering}
        except RuntimeError:
            # Without the store no rank can be queried. If rank 0 hosted the store, rank 0 is gone.
            hosted_by_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
            return answers, [] if hosted_by_launcher or self._rank == 0 else [0]
        return answers, [rank for rank in others if rank not in answering]

    def _answer(self, place: str) -> str:
        return place if self.step is None else f"{place}, in step {self.step}"

    def _publish(self, report: str) -> None:
        # Release threads that wait for the key `_CALL`, unless `_call_the_roll` has already set
        # this key.
        self._store.compare_set(_CALL, "", _NOTHING)
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
            return  # the host of the store was killed; the next collective will raise an error
        if self._rank == 0:
            # Rank 0 may host the store: if it ended now, other ranks could not read the report.
            self._wait_for(_READERS, self._world_size, _READ_SECONDS)
        if self._told.is_set():
            time.sleep(BEHIND_SECONDS)
            self._end(Failure(**report).exit_code)

    def _wait_for(self, counter: str, count: int, seconds: float) -> None:
        """Wait until ``count`` ranks have incremented ``counter``, at most ``seconds`` seconds."""
        deadline = time.monotonic() + seconds
        with suppress(RuntimeError):
            while self._store.add(counter, 0) < count and time.monotonic() < deadline:
                time.sleep(0.02)


def _in_words(silent: Sequence[int], answers: Mapping[int, str]) -> str:
    """Return ``"Rank 1 does not answer: it was killed or is stopped; rank 0 was in ..."``."""
    parts = []
    if silent:
        single_rank = len(silent) == 1
        predicate = (
            "does not answer: it was killed or is stopped"
            if single_rank
            else "do not answer: they were killed or are stopped"
        )
        parts.append(f"{_ranks(silent)} {predicate}")
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
    """Block until ``key`` appears in the store."""
    while True:
        try:
            store.wait([key], _FOREVER)
        except dist.DistStoreError:
            continue  # the time limit of 20 days has passed; wait again
        return


def _connection(store: Store) -> Store:
    """Open another connection to the host of ``store``, with a key prefix for this watch only."""
    return PrefixStore("failure", store.clone())  # type: ignore[attr-defined]  # missing in torch's stubs
