"""Agreement of the launchers of one or several machines: ranks, first failure, restarts.

[Note: agreement of launchers]
The launchers of several machines meet through a rendezvous of torch. It gives each machine a number
and all machines a key-value store. One thread of each launcher talks to the store, so that a broken
network never blocks the main thread, which handles signals. In every attempt:

1. Each launcher publishes its number of processes under ``here``. A machine that was stopped between
   two attempts publishes that it leaves, and why. All other machines then end with the same exit
   code. `refused_nodes` handles machines that were refused before the first attempt.
   ``join_timeout`` limits this step as a whole: a wait inside of torch may ignore its own limit.
2. The launcher of the first failed rank publishes the failure under ``first``. The store accepts one
   failure only. All machines end their ranks because of this failure, with its exit code.
3. Each launcher counts up ``beat``. If the count of a machine rests, machine 0 publishes the loss of
   this machine as the failure.
4. When its ranks have ended, each launcher publishes under ``end`` whether it received a stop signal.
   All launchers read these values, so that all of them restart the run or none does.
"""

from __future__ import annotations

import json
import logging
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from megatron_packed.config.exit_codes import ExitCode
from megatron_packed.launch.attempt import LaunchAttempt, wait_for_readers
from megatron_packed.launch.local_ranks import LaunchOptions, Placement, RankFailure
from megatron_packed.launch.refused_nodes import STATIC, Refusals, different_nodes

LEAVE_SECONDS = 60.0
"""Seconds that a machine which takes no part waits to inform the others."""
_ANSWER_SECONDS = 6.0
"""Seconds after ``join_timeout`` in which torch may still name the reason."""
END_SECONDS = 150.0
"""Seconds to wait for the ends of other machines, whose ranks may still close files."""
JOIN_SECONDS = 600
"""Default of ``join_timeout`` in ``--rdzv-conf``."""
_HERE = "here"


class NodesError(Exception):
    """End of the launch without a run, with an exit code; the text may be empty."""

    def __init__(self, exit_code: int, sentence: str) -> None:
        super().__init__(sentence)
        self.exit_code = exit_code


@dataclass(frozen=True)
class Leave:
    """Reason for which a machine takes no part in an attempt; the machine has printed it."""

    exit_code: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """End of an attempt on all machines."""

    failure: RankFailure | None
    """First failure of any machine; None if all ranks ended with exit code 0."""
    restart_helps: bool
    """True if a process was lost, and no machine received a stop signal."""


class OneNode:
    """Launcher without other machines: every answer is its own."""

    def __init__(self) -> None:
        self._failures: list[RankFailure] = []
        self._socket: socket.socket | None = None

    def join(self, restarts: int, processes: int, leaves: Leave | None) -> Placement:
        """Return the ranks of this machine for the next attempt.

        Args:
            restarts: restarts of the run so far.
            processes: processes on this machine.
            leaves: reason for which this machine takes no part in the attempt.
        Raises:
            NodesError: there is no further attempt.
        """
        if leaves is not None:
            raise NodesError(leaves.exit_code, "")
        self._failures = []
        self.close()
        if processes == 1:
            return Placement(world_size=1, restarts=restarts)
        # A new socket in each attempt: connections of lost ranks may wait at the old one.
        self._socket = socket.socket()
        self._socket.bind(("127.0.0.1", 0))
        return Placement(
            world_size=processes,
            master_port=self._socket.getsockname()[1],
            store_socket=self._socket,
            restarts=restarts,
        )

    def publish(self, failure: RankFailure) -> None:
        """Report a failure on this machine to the other machines."""
        self._failures.append(failure)

    def failure(self) -> RankFailure | None:
        """Return the first failure of any machine so far."""
        return self._failures[0] if self._failures else None

    def agree(self, *, stopped: bool) -> Agreement:
        """Wait until the processes of all machines have ended; return how the attempt ended.

        Args:
            stopped: this machine has received a stop signal.
        """
        first, lost = self.failure(), any(failure.lost for failure in self._failures)
        return Agreement(failure=first, restart_helps=_is_lost(first, lost) and not stopped)

    def close(self) -> None:
        """Free the port or the connections."""
        if self._socket is not None:
            self._socket.close()


def _is_lost(first: RankFailure | None, any_lost: bool) -> bool:
    """Return True if the first failure is the loss of a process.

    Args:
        first: the first failure; a rank that another rank has ended reports no reason.
        any_lost: True if any failed rank has reported the loss of a process.
    """
    if first is None or first.lost is not None:
        return first is not None and bool(first.lost)
    return any_lost


class ManyNodes(OneNode):
    """Launcher that agrees with the launchers of other machines.

    See [Note: agreement of launchers].

    Args:
        options: options of the rendezvous.
        stopped: returns True after a stop signal, which ends the wait for other machines.
    """

    def __init__(self, options: LaunchOptions, stopped: Callable[[], bool]) -> None:
        super().__init__()
        self._options = options
        self._stopped = stopped
        self._handler: Any = None
        self._run_store: Any = None
        self._attempt: LaunchAttempt | None = None
        conf = dict(options.rdzv_conf)
        self._join_seconds = int(conf.get("join_timeout", JOIN_SECONDS))
        self._refusals = Refusals(options)
        self._met_by = math.inf
        """Time at which all machines must have met; it is set after the import of torch."""

    def join(self, restarts: int, processes: int, leaves: Leave | None) -> Placement:
        entry = {
            "processes": processes,
            "restarts": restarts,
            "leaves": None if leaves is None else [leaves.exit_code, leaves.reason],
            "nodes": [self._options.min_nodes, self._options.max_nodes],
            "host": socket.gethostname(),
        }
        placements: list[Placement | NodesError] = []
        thread = threading.Thread(
            target=lambda: placements.append(self._meet(entry)), name="rendezvous", daemon=True
        )
        thread.start()
        told_by = math.inf if leaves is None else time.monotonic() + LEAVE_SECONDS
        while thread.is_alive():
            thread.join(0.1)
            clock = time.monotonic()
            if self._refusals.found is not None:
                raise NodesError(*self._refusals.found)
            if leaves is not None and (self._stopped() or clock > told_by):
                raise NodesError(leaves.exit_code, "")
            if self._stopped():
                raise NodesError(
                    ExitCode.PREEMPTED, "The run has not started. Run the same command again."
                )
            if clock > self._met_by + _ANSWER_SECONDS:
                raise self._unmet(
                    f"no machine has answered for {self._join_seconds} s, or another program uses "
                    "this port"
                )
        if not placements:
            raise NodesError(ExitCode.UNFORESEEN, "the rendezvous has failed.")
        [placement] = placements
        if isinstance(placement, NodesError):
            raise placement
        return placement

    @property
    def _current(self) -> LaunchAttempt:
        assert self._attempt is not None, "`join` begins an attempt"
        return self._attempt

    def publish(self, failure: RankFailure) -> None:
        self._current.own_failure = self._current.own_failure or failure

    def failure(self) -> RankFailure | None:
        return self._current.first

    def agree(self, *, stopped: bool) -> Agreement:
        attempt = self._current
        own_failure = attempt.own_failure
        attempt.own_end = {
            "stopped": stopped,
            "lost": own_failure is not None and bool(own_failure.lost),
        }
        attempt.thread.join(END_SECONDS)
        ends = [attempt.own_end, *attempt.ends.values()]
        lost = _is_lost(attempt.first, any(end["lost"] for end in ends))
        return Agreement(
            failure=attempt.first or own_failure,
            restart_helps=lost and not any(end["stopped"] for end in ends),
        )

    def close(self) -> None:
        if self._handler is not None:
            # In a thread, because a lost machine may host the store.
            closing = threading.Thread(target=self._handler.shutdown, daemon=True)
            closing.start()
            closing.join(2.0)

    def _meet(self, entry: dict[str, Any]) -> Placement | NodesError:
        """Join the rendezvous and publish ``entry``; return the ranks of this machine."""
        try:
            with _quiet_torch():
                if self._attempt is None and self._refusals.supported:
                    if entry["leaves"] is not None:
                        self._refusals.publish(*entry["leaves"])
                        return NodesError(entry["leaves"][0], "")
                    threading.Thread(target=self._refusals.watch, daemon=True).start()
                placement, store = self._rendezvous(entry)
        except NodesError as error:
            return error
        except Exception as error:
            # An error of torch may have no text. Its later lines are a C++ backtrace.
            text = str(error) or "a machine did not arrive in time"
            return self._unmet(text.splitlines()[0].split(". ")[0].rstrip("."))
        finally:
            self._refusals.met.set()
        self._attempt = LaunchAttempt(store, placement.node, placement.nodes)
        return placement

    def _unmet(self, reason: str) -> NodesError:
        options = self._options
        return NodesError(
            ExitCode.UNFORESEEN,
            f"the machines did not meet at {options.rdzv_endpoint} (--rdzv-backend "
            f"{options.rdzv_backend}): {reason}. Check that this address is the first "
            f"machine's, and that all {options.min_nodes} machines start the same command.",
        )

    def _new_handler(self) -> Any:
        """Return torch's handler of the rendezvous, which serves all attempts."""
        from torch.distributed.elastic.rendezvous import RendezvousParameters
        from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

        options = self._options
        conf: dict[str, Any] = {
            "join_timeout": self._join_seconds,
            "timeout": self._join_seconds,
            "read_timeout": min(60, self._join_seconds),
            **dict(options.rdzv_conf),
        }
        if options.rdzv_backend == STATIC:
            conf["rank"] = options.node_rank
        parameters = RendezvousParameters(
            options.rdzv_backend,
            options.rdzv_endpoint,
            options.rdzv_id,
            options.min_nodes,
            options.max_nodes,
            **conf,
        )
        return get_rendezvous_handler(parameters)

    def _rendezvous(self, own_entry: dict[str, Any]) -> tuple[Placement, Any]:
        from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

        options = self._options
        self._met_by = time.monotonic() + self._join_seconds
        if self._handler is None:
            self._handler = self._new_handler()
        met = self._handler.next_rendezvous()
        store, host = met.store, met.bootstrap_store_info.master_addr
        if met.rank == 0:
            # A new store for the ranks of each attempt: an old one holds keys of lost ranks.
            self._run_store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
            own_entry = {**own_entry, "port": self._run_store.port}
        if options.rdzv_backend == STATIC:  # its store is the same in each attempt
            store = PrefixStore(f"attempt_{own_entry['restarts']}", store)
        # At least a second: this machine has met the others, which only have to write their entries.
        seconds = max(self._met_by - time.monotonic(), 1.0)
        entries = _exchange(store, met.rank, met.world_size, own_entry, seconds)
        _check_entries(entries, met.rank, own_entry)
        counts = [entry["processes"] for entry in entries]
        placement = Placement(
            first_rank=sum(counts[: met.rank]),
            world_size=sum(counts),
            node=met.rank,
            nodes=met.world_size,
            master_addr=host,
            master_port=entries[0]["port"],
            hosted_store=True,
            run_id=options.rdzv_id,
            restarts=max(entry["restarts"] for entry in entries),
        )
        return placement, store


def _check_entries(entries: Sequence[dict[str, Any]], own: int, own_entry: dict[str, Any]) -> None:
    """Check that every machine takes part, with the same number of machines.

    Args:
        entries: entries of all machines, in their order.
        own: number of this machine.
        own_entry: what this machine has written.
    Raises:
        NodesError: a machine takes no part, or the machines differ.
    """
    if own_entry["leaves"] is not None:
        raise NodesError(own_entry["leaves"][0], "")
    for node, entry in enumerate(entries):
        if entry["leaves"] is not None:
            code, reason = entry["leaves"]
            raise NodesError(code, f"machine {node} ({entry['host']}) takes no part: {reason}")
        if entry["nodes"] != own_entry["nodes"]:
            machines = (f"machine {own}", own_entry["nodes"], f"machine {node}", entry["nodes"])
            raise NodesError(ExitCode.USAGE, different_nodes(*machines))


def _exchange(
    store: Any, node: int, nodes: int, own_entry: dict[str, Any], seconds: float
) -> list[dict[str, Any]]:
    """Return the entries of all machines, after this machine has published ``own_entry``.

    Raises:
        TimeoutError: a machine has published nothing in time.
    """
    store.set(f"{_HERE}/{node}", json.dumps(own_entry))
    deadline = time.monotonic() + seconds
    entries: list[dict[str, Any]] = []
    while len(entries) < nodes:
        key = f"{_HERE}/{len(entries)}"
        if store.check([key]):
            entries.append(json.loads(store.get(key)))
            if entries[-1]["nodes"] != own_entry["nodes"]:
                break  # the other machines may never come
        elif time.monotonic() > deadline:
            raise TimeoutError(f"machine {len(entries)} did not arrive in time")
        else:
            time.sleep(0.05)
    ends = any(
        entry["leaves"] is not None or entry["nodes"] != own_entry["nodes"] for entry in entries
    )
    fewest = min(entry["nodes"][0] for entry in entries)
    wait_for_readers(store, min(nodes, fewest) if ends else nodes, 5.0 if ends else 0)
    return entries


@contextmanager
def _quiet_torch() -> Iterator[None]:
    """Switch off the log lines of torch's rendezvous, unless the user has set a log level."""
    variable = "TORCH_CPP_LOG_LEVEL"
    if "LOGLEVEL" in os.environ or variable in os.environ:
        yield
        return
    os.environ[variable] = "FATAL"  # torch reads the variable when it is imported
    try:
        import torch.distributed  # noqa: F401

        logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
        yield
    finally:
        del os.environ[variable]
