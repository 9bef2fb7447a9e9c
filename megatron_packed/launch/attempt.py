"""Exchange of the launchers of several machines during one attempt: first failure, beats, ends.

See [Note: agreement of launchers] in ``nodes_and_restarts.py``.
"""

from __future__ import annotations

import json
import threading
import time
from typing import Any

from megatron_packed.config.exit_codes import ExitCode
from megatron_packed.launch.local_ranks import RankFailure

_SILENT_SECONDS = 60.0
"""Seconds without a sign of a launcher after which its machine counts as lost."""
SILENT_AFTER_FAILURE_SECONDS = 10.0
"""The same time after a failure, when launchers only wait for each other."""
_BEAT_SECONDS = 0.25
_FIRST, _BEAT, _END, _READ = "first", "beat", "end", "read"


class LaunchAttempt:
    """Exchange of failures and ends with the other launchers during one attempt, in a thread.

    The main thread sets `own_failure` and `own_end` and reads `first` and `ends`.
    """

    def __init__(self, store: Any, node: int, nodes: int) -> None:
        self.own_failure: RankFailure | None = None
        self.own_end: dict[str, Any] | None = None
        self.first: RankFailure | None = None
        """First failure of any machine; only the machine that must print it has its sentence."""
        self.ends: dict[int, dict[str, Any]] = {}
        self._store = store
        self._node = node
        self._nodes = nodes
        self._lost: set[int] = set()
        self._beats: dict[int, tuple[int, float]] = {}
        self.thread = threading.Thread(target=self._run, name="launchers", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            while not self._exchange():
                time.sleep(_BEAT_SECONDS)
            wait_for_readers(self._store, 2 * self._nodes - len(self._lost), 5.0)
        except RuntimeError:  # the machine that hosts the store is gone
            if self.first is None and (self.own_end is None or self.own_failure is not None):
                self.first = RankFailure(
                    exit_code=ExitCode.UNFORESEEN,
                    lost=True,
                    sentence="the connection to the launcher of the first machine was lost.",
                )

    def _exchange(self) -> bool:
        """Write and read the news once; return True if the attempt has ended on all machines."""
        end = self.own_end  # read first: a failure precedes the end that the main thread sets
        if self.own_failure is not None:
            self._claim(self.own_failure)
        self._store.add(f"{_BEAT}/{self._node}", 1)
        if self.first is None and self._store.check([_FIRST]):
            self._read_first()
        if end is not None:
            self._store.set(f"{_END}/{self._node}", json.dumps(end))
        if end is not None or self._node == 0:
            self._look_for_lost_machines()
        for node in range(self._nodes):
            if node not in self.ends and self._store.check([f"{_END}/{node}"]):
                self.ends[node] = json.loads(self._store.get(f"{_END}/{node}"))
        return end is not None and len(self.ends.keys() | self._lost) == self._nodes

    def _claim(self, failure: RankFailure, lost_node: int | None = None) -> None:
        """Write a failure to the store, unless the store has another one."""
        if self.first is not None:
            return
        # Only this machine prints the sentence, so the others do not receive it.
        record = {"exit_code": failure.exit_code, "lost": failure.lost, "lost_node": lost_node}
        value = json.dumps({**record, "node": self._node})
        if self._store.compare_set(_FIRST, "", value) == value.encode():
            self.first = failure

    def _read_first(self) -> None:
        record = json.loads(self._store.get(_FIRST))
        if record["lost_node"] is not None:
            self._lost.add(record["lost_node"])
        self.first = RankFailure(exit_code=record["exit_code"], lost=record["lost"])

    def _look_for_lost_machines(self) -> None:
        clock = time.monotonic()
        limit = _SILENT_SECONDS if self.first is None else SILENT_AFTER_FAILURE_SECONDS
        for node in set(range(self._nodes)) - {self._node, *self.ends, *self._lost}:
            count = self._store.add(f"{_BEAT}/{node}", 0)
            last_count, since = self._beats.get(node, (-1, clock))
            if count != last_count:
                self._beats[node] = (count, clock)
            elif clock - since > limit:
                self._lost.add(node)
                sentence = f"machine {node} is lost: its launcher has been silent for {limit:g} s."
                failure = RankFailure(exit_code=ExitCode.UNFORESEEN, lost=True, sentence=sentence)
                self._claim(failure, lost_node=node)


def wait_for_readers(store: Any, nodes: int, seconds: float) -> None:
    """Count this machine as a reader, and wait for the others: one of them may host the store."""
    readers, deadline = store.add(_READ, 1), time.monotonic() + seconds
    while readers < nodes and time.monotonic() < deadline:
        time.sleep(0.05)
        readers = store.add(_READ, 0)
    if seconds:
        time.sleep(0.2)  # the others look once more before the host of the store may end
