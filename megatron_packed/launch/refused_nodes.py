"""Refusals of machines, which all machines read while they meet.

[Note: refusals]
A machine with a wrong command line cannot join the rendezvous: it may not know its number or how
many machines there are. It only needs the address of the first machine. There it writes its reason
into the store of the rendezvous, next to the keys of torch. Each of the other machines reads this
store with a connection of its own until all machines have met. Machines with different ``--nnodes``,
or two hosts with one ``--node-rank``, are refused in the same way, and not after ``join_timeout``.

A refusal ends only the machines that are meeting. Machines that have met train, and do not read it.
"""

from __future__ import annotations

import json
import socket
import threading
import time
import uuid
from contextlib import suppress
from datetime import timedelta
from typing import Any

from megatron_packed.config.exit_codes import ExitCode
from megatron_packed.launch.local_ranks import LaunchOptions

READ_SECONDS = 45.0
"""Longest wait of a machine, which may host the store, until all machines have read a refusal."""
HOST_SECONDS = 10.0
"""Seconds without a store after which a refused machine without a number hosts it."""
C10D_PORT = 29400
"""Port of an endpoint without one, as in torch."""
UNKNOWN_NODES = 10**6
"""Number of machines if ``--nnodes`` is wrong on this machine."""
_REFUSAL = "refusal"
_READERS = "readers"
_NODES = "nodes"
_HOST = "host"
_POLL_SECONDS = 0.1
STATIC, C10D = "static", "c10d"
_STORE_BACKENDS = (STATIC, C10D)
"""Backends whose endpoint is a store of torch."""


class Refusals:
    """Connection to the refusals of all machines that meet at one endpoint.

    See [Note: refusals]. Another thread than the main thread calls the methods, since they block.

    Args:
        options: options of the rendezvous.
    """

    def __init__(self, options: LaunchOptions) -> None:
        self._options = options
        self._store: Any = None
        self.met = threading.Event()
        """Set when all machines have met: `watch` then ends."""
        self.found: tuple[int, str] | None = None
        """Exit code and sentence of a refusal that `watch` has read."""

    @property
    def supported(self) -> bool:
        """True if the rendezvous has a store that machines reach without joining."""
        return self._options.rdzv_backend in _STORE_BACKENDS

    def publish(self, exit_code: int, reason: str) -> None:
        """Write why this machine takes no part, and wait until all machines have read it."""
        # An error: the host of the store has read the refusal and ended, or the address is wrong.
        with suppress(RuntimeError, ValueError):
            self._connect(hosts=True)
            self._refuse(exit_code, f"{self._name} takes no part: {reason}")
            self._wait_for_readers()
            # Otherwise it would end a machine that arrives later, for example after a correction.
            self._store.delete_key(_REFUSAL)

    def watch(self) -> None:
        """Read refusals until all machines have met; set `found` if there is one."""
        try:
            if self._connect(hosts=False):
                self._compare()
                while not self.met.is_set() and not self._store.check([_REFUSAL]):
                    time.sleep(_POLL_SECONDS)
                if not self.met.is_set():
                    refusal = json.loads(self._store.get(_REFUSAL))
                    self._wait_for_readers()
                    self.found = refusal["exit_code"], refusal["sentence"]
        except (RuntimeError, ValueError):  # no store or a wrong address, as the rendezvous reports
            pass

    def _connect(self, *, hosts: bool) -> bool:
        """Connect to the store; return False if all machines have met before.

        Args:
            hosts: host the store if this is the first machine. Without a number, this may be the
                first machine if there is no store for `HOST_SECONDS`.
        """
        from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
        from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

        options = self._options
        host, port = parse_rendezvous_endpoint(options.rdzv_endpoint, default_port=C10D_PORT)
        may_host = hosts and (options.rdzv_backend == C10D or options.node_rank in (None, 0))
        is_master = may_host and options.rdzv_backend == STATIC and options.node_rank == 0
        while self._store is None:
            if self.met.is_set():
                return False
            try:
                self._store = TCPStore(
                    host,
                    port,
                    is_master=is_master,
                    timeout=timedelta(seconds=HOST_SECONDS),
                    wait_for_workers=False,
                )
            except RuntimeError:
                # Another launcher of this host may have the port, or no machine hosts the store.
                is_master = may_host and not is_master
                time.sleep(_POLL_SECONDS)
        self._store = PrefixStore(f"megatron_packed/{options.rdzv_id}", self._store)
        return True

    def _compare(self) -> None:
        """Refuse this machine if its options contradict those of a machine that came before."""
        options = self._options
        host = socket.gethostname()
        nodes = [options.min_nodes, options.max_nodes]
        mine = {"nodes": nodes, "host": host}
        first = json.loads(self._store.compare_set(_NODES, "", json.dumps(mine)))
        if first["nodes"] != nodes:
            self._refuse(
                ExitCode.USAGE,
                different_nodes(self._name, nodes, first["host"], first["nodes"]),
            )
        if options.rdzv_backend != STATIC:
            return
        other = self._store.compare_set(f"{_HOST}/{options.node_rank}", "", host).decode()
        if other != host:
            self._refuse(
                ExitCode.USAGE,
                f"{host} and {other} both have --node-rank {options.node_rank}; give each machine "
                "another number.",
            )

    @property
    def _name(self) -> str:
        rank = self._options.node_rank
        return f"{'a machine' if rank is None else f'machine {rank}'} ({socket.gethostname()})"

    def _refuse(self, exit_code: int, sentence: str) -> None:
        refusal = {
            "exit_code": exit_code,
            "sentence": sentence,
            "nodes": self._fewest_machines,
            "id": uuid.uuid4().hex,
        }
        self._store.compare_set(_REFUSAL, "", json.dumps(refusal))

    def _wait_for_readers(self) -> None:
        """Count this machine as a reader of the refusal, and wait for the others."""
        refusal = json.loads(self._store.get(_REFUSAL))
        readers = f"{_READERS}/{refusal['id']}"
        count, deadline = self._store.add(readers, 1), time.monotonic() + READ_SECONDS
        while count < self._expected_readers(refusal) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
            count = self._store.add(readers, 0)
        time.sleep(2 * _POLL_SECONDS)  # the others look once more before the host may end

    def _expected_readers(self, refusal: dict[str, Any]) -> int:
        """Return the smallest number of machines that any machine expects, but at least two."""
        fewest: int = min(self._fewest_machines, refusal["nodes"])
        if self._store.check([_NODES]):
            fewest = min(fewest, json.loads(self._store.get(_NODES))["nodes"][0])
        return max(fewest, 2)

    @property
    def _fewest_machines(self) -> int:
        # One machine meets no other, so this machine was refused because its number is wrong.
        return self._options.min_nodes if self._options.max_nodes > 1 else UNKNOWN_NODES


def different_nodes(name: str, nodes: list[int], other: str, others: list[int]) -> str:
    """Return the sentence for two machines with different values of ``--nnodes``.

    Args:
        name, nodes: a machine, and its smallest and largest number of machines.
        other, others: the same of the other machine.
    """
    of_this, of_other = (f"{a}" if a == b else f"{a}:{b}" for a, b in (nodes, others))
    return (
        f"{name} has --nnodes {of_this}, and {other} has --nnodes {of_other}; give all machines the "
        "same number."
    )
