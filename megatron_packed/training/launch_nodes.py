"""Agreement of the launchers of one or several machines: ranks, first failure, restarts."""

from __future__ import annotations

import socket
from dataclasses import dataclass

from megatron_packed.training.local_ranks import Placement, RankFailure


class NodesError(Exception):
    """End of the launch without a run, with an exit code; the text may be empty."""

    def __init__(self, exit_code: int, sentence: str) -> None:
        super().__init__(sentence)
        self.exit_code = exit_code


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
        self._port: socket.socket | None = None

    def join(self, restarts: int, processes: int, leaves: int | None) -> Placement:
        """Return the ranks of this machine for the next attempt.

        Args:
            restarts: restarts of the run so far.
            processes: processes on this machine.
            leaves: exit code of this machine if the machine takes no part in the attempt.
        Raises:
            NodesError: there is no further attempt.
        """
        if leaves is not None:
            raise NodesError(leaves, "")
        self._failures = []
        port = self._reserved_port() if processes > 1 else 0
        return Placement(world_size=processes, master_port=port, restarts=restarts)

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
        first = self.failure()
        lost = first is not None and first.lost
        return Agreement(failure=first, restart_helps=lost and not stopped)

    def close(self) -> None:
        """Free the port or the connections."""
        if self._port is not None:
            self._port.close()

    def _reserved_port(self) -> int:
        """Return a free port for rank 0's store.

        A bound socket that does not listen reserves the port until rank 0 listens.
        """
        if self._port is None:
            self._port = socket.socket()
            # Lets rank 0, which sets the same option, bind the port too.
            self._port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._port.bind(("127.0.0.1", 0))
        port: int = self._port.getsockname()[1]
        return port
