"""Place of this machine in a step of SLURM, read from the variables that srun sets.

The variables suffice: images of containers have no ``scontrol``, which expands lists of hosts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from megatron_packed.cli.command import UsageError

_HOST_LISTS = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
"""Variables with a list of hosts. A step may use some hosts of its job only, and SLURM_NODEID
counts the hosts of the step."""
_FIRST_PORT, _PORTS = 20_000, 20_000
_PORTS_BETWEEN_STEPS = 1009
"""A prime, so that steps 0 to 19,999 of one job have different ports. Jobs have consecutive numbers,
so ports of steps are further apart."""
_RANGES = r"\[\s*\d+(?:-\d+)?(?:\s*,\s*\d+(?:-\d+)?)*\s*\]"
_FIRST_ENTRY = re.compile(rf"\s*((?:[^\s\[\],]|{_RANGES})+)\s*(?:,|$)")
_FIRST_NUMBER = re.compile(r"\[\s*(\d+)[^\]]*\]")


@dataclass(frozen=True, kw_only=True)
class SlurmStep:
    """Number of this machine in a step, and what all machines of the step share."""

    node_rank: int
    job: int
    step: int
    hosts: str
    """SLURM's list of the hosts of this step, in short form; empty if no variable has it."""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> SlurmStep | None:
        """Return the step in which this process runs; None outside of srun.

        Raises:
            UsageError: a variable of SLURM is not what SLURM sets.
        """
        if "SLURM_STEP_ID" not in environ or "SLURM_NODEID" not in environ:
            return None
        return cls(
            node_rank=_number(environ, "SLURM_NODEID"),
            job=_number(environ, "SLURM_JOB_ID"),
            step=_number(environ, "SLURM_STEP_ID"),
            hosts=next((environ[name] for name in _HOST_LISTS if environ.get(name)), ""),
        )

    @property
    def run_id(self) -> str:
        """Name of this step in the notation of SLURM, such as ``4711.0``."""
        return f"{self.job}.{self.step}"

    @property
    def port(self) -> int:
        """Port at which the machines of this step meet, from 20000 to 39999.

        Steps of one job, and of jobs with similar numbers, may share their first machine.
        """
        return _FIRST_PORT + (self.job + _PORTS_BETWEEN_STEPS * self.step) % _PORTS

    @property
    def first_host(self) -> str:
        """Name of the host with number 0.

        Raises:
            UsageError: the list is missing or cannot be read.
        """
        host = first_host(self.hosts)
        if host is None:
            raise UsageError(
                f"SLURM names the hosts of this step {self.hosts!r}, which is no list such as "
                "gpu[1-4]; give --master-addr HOST."
            )
        return host


def first_host(hosts: str) -> str | None:
    """Return the first host of SLURM's short form of a list; None if the text is no such list.

    Example:
        ``gpu[007-009,12],login1`` gives ``gpu007``, ``rack[2-3]node[0-7]`` gives ``rack2node0``.
    """
    entry = _FIRST_ENTRY.match(hosts)
    # Zeros before a number belong to the name of the host.
    return None if entry is None else _FIRST_NUMBER.sub(r"\1", entry[1])


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name, "")
    if not (text.isascii() and text.isdecimal()):
        raise UsageError(
            f"{name} is {text!r}, not a number, although SLURM_STEP_ID is set; start the command "
            "with srun, or unset SLURM_STEP_ID."
        )
    return int(text)
