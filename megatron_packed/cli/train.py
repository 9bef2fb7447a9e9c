"""Train: start the processes of a run on this machine, and end with the exit code of the run.

The options below are those of torchrun, with dashes or underscores. All other flags are the flags
of the run: --help-all lists them, and --explain, --print-config and --version work too. A wrong flag
is reported before torch is imported. Ctrl-C, SIGTERM, SIGUSR1 and SIGHUP let the run save and end
with exit code 75; a second signal ends the run at once.

Under srun, the number of this machine, the address of the first machine and the port come from
SLURM. docs/launching.md explains several machines and restarts, docs/cluster.md explains SLURM.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import entry_points
from typing import Any, TypeVar

from megatron_packed.cli.command import UsageError, command
from megatron_packed.cli.slurm_first_host import SlurmStep
from megatron_packed.config.kernel_options import count_gpus
from megatron_packed.launch.launcher import launch
from megatron_packed.launch.local_ranks import SHUTDOWN_SECONDS, LaunchOptions
from megatron_packed.launch.refused_nodes import C10D, STATIC, UNKNOWN_NODES

MASTER_PORT = 29500
BACKENDS = (STATIC, C10D, "etcd", "etcd-v2")
_Checked = TypeVar("_Checked")


OPTIONS: dict[str, dict[str, Any]] = {
    "nproc-per-node": {
        "metavar": "N",
        "help": "processes on this machine: a number, gpu (one per GPU), cpu (one per core), or auto "
        "(gpu where there is one, else cpu); default: one per GPU, without GPU 1",
    },
    "nnodes": {"metavar": "MIN[:MAX]", "default": "1", "help": "machines; default: 1"},
    "node-rank": {"metavar": "I", "help": "number of this machine, from 0"},
    "master-addr": {"metavar": "HOST", "help": "address of the first machine"},
    "master-port": {
        "metavar": "PORT",
        "help": f"free port of the first machine; default: {MASTER_PORT}",
    },
    "rdzv-backend": {
        "metavar": "NAME",
        "help": "way in which machines meet: static (with --node-rank and --master-addr) or c10d "
        "(with --rdzv-endpoint); default: c10d if --rdzv-endpoint is given without --node-rank",
    },
    "rdzv-endpoint": {
        "metavar": "HOST[:PORT]",
        "default": "",
        "help": "machine at which all machines meet; that machine hosts the store of c10d",
    },
    "rdzv-id": {"metavar": "ID", "help": "name of the run, the same on all machines"},
    "rdzv-conf": {
        "metavar": "KEY=VALUE,...",
        "default": "",
        "help": "more options of the rendezvous, for example join_timeout=1200 (seconds)",
    },
    "max-restarts": {
        "metavar": "N",
        "default": "0",
        "help": "restarts after a process was killed, hung or lost its connection; each restart "
        "resumes from --load; default: 0",
    },
    "shutdown-timeout": {
        "metavar": "SECONDS",
        "default": str(SHUTDOWN_SECONDS),
        "help": "time for the last step and its checkpoint after a signal, before the processes are "
        f"killed; default: {SHUTDOWN_SECONDS:g}",
    },
    "log-dir": {
        "metavar": "DIR",
        "help": "also write the output of each rank to DIR/attempt_K/rank_N.log",
    },
}


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = (
        "megatron-packed train [--nproc-per-node N] [--nnodes N --node-rank I --master-addr HOST] "
        "FLAGS_OF_A_RUN"
    )
    for name, settings in OPTIONS.items():
        # torchrun reads these variables too; Kubernetes operators set them.
        variable = f"PET_{name.upper().replace('-', '_')}"
        default = os.environ.get(variable, settings.get("default"))
        spellings = dict.fromkeys((f"--{name}", f"--{name.replace('-', '_')}"))
        parser.add_argument(*spellings, **{**settings, "default": default})
    parser.add_argument(
        "--standalone",
        action="store_true",
        help="one machine, without rendezvous; this is the default with one machine",
    )


@command(
    "train", "train a model: start one process per GPU, on one or several machines", _add_arguments
)
def train_command(arguments: argparse.Namespace, flags: Sequence[str]) -> int:
    if "TORCHELASTIC_RUN_ID" in os.environ and "LOCAL_RANK" in os.environ:
        raise UsageError(
            "megatron-packed train starts the processes itself; start the command without torchrun, "
            "or start pretrain_hybrid.py with torchrun."
        )
    options = launch_options(arguments, flags, os.environ)
    code = launch(options, flags)
    if options.max_nodes > 1 or options.rdzv_endpoint:
        sys.stdout.flush()
        sys.stderr.flush()
        # Not a return: threads of torch's rendezvous could keep this process alive.
        os._exit(code)
    return code


def launch_options(
    arguments: argparse.Namespace, flags: Sequence[str], environ: Mapping[str, str]
) -> LaunchOptions:
    """Return the checked options of the launcher.

    A wrong value on one of several machines is returned as the reason to refuse this machine.

    Raises:
        UsageError: a value is wrong and there are no other machines, or nothing says where they are.
    """
    checks = _Checks()
    min_nodes, max_nodes = checks.value(
        lambda: _nodes(arguments.nnodes), (UNKNOWN_NODES, UNKNOWN_NODES)
    )
    max_restarts = checks.value(lambda: _max_restarts(arguments.max_restarts), 0)
    shutdown_timeout = checks.value(
        lambda: _shutdown_timeout(arguments.shutdown_timeout), SHUTDOWN_SECONDS
    )
    if arguments.standalone and max_nodes > 1:
        checks.refuse(
            f"--standalone is for one machine, but --nnodes is {arguments.nnodes}; drop one."
        )
    one_machine = max_nodes == 1 and (
        arguments.standalone or (not arguments.rdzv_endpoint and arguments.node_rank in (None, "0"))
    )
    rendezvous: dict[str, Any] = {}
    if not one_machine:
        rendezvous = checks.value(
            lambda: _rendezvous(arguments, min_nodes, max_nodes, environ, checks), {}
        )
    processes = checks.value(lambda: _processes(arguments.nproc_per_node, flags, environ), 1)
    if checks.refusal is not None and not rendezvous:
        raise UsageError(checks.refusal)
    return LaunchOptions(
        processes=processes,
        refusal=checks.refusal,
        min_nodes=min_nodes,
        max_nodes=max_nodes,
        max_restarts=max_restarts,
        shutdown_timeout=shutdown_timeout,
        log_dir=arguments.log_dir,
        **rendezvous,
    )


_NO_PAIRS: tuple[tuple[str, str], ...] = ()


class _Checks:
    """Checks of options, of which the first failed one is the reason to refuse this machine.

    One of several machines goes on after a failed check: it must inform the others.
    """

    def __init__(self) -> None:
        self.refusal: str | None = None
        """Sentence of the first failed check."""

    def value(self, check: Callable[[], _Checked], otherwise: _Checked) -> _Checked:
        """Return the result of a check, or ``otherwise`` if the check raises `UsageError`."""
        try:
            return check()
        except UsageError as error:
            self.refuse(str(error))
            return otherwise

    def refuse(self, sentence: str) -> None:
        self.refusal = self.refusal or sentence


def _max_restarts(text: str) -> int:
    try:
        restarts = int(text)
    except ValueError:
        restarts = -1
    if restarts < 0:
        raise UsageError(f"--max-restarts {text}: give 0 or more.")
    return restarts


def _shutdown_timeout(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not seconds > 0:  # also refuses nan
        raise UsageError(f"--shutdown-timeout {text}: give a positive number of seconds.")
    return seconds


def _nodes(text: str) -> tuple[int, int]:
    fewest, _, most = str(text).partition(":")
    try:
        nodes = int(fewest), int(most or fewest)
    except ValueError:
        nodes = (0, 0)
    if not 1 <= nodes[0] <= nodes[1]:
        raise UsageError(f"--nnodes {text}: give a number of machines, or MIN:MAX such as 2:4.")
    return nodes


def _processes(text: str | None, flags: Sequence[str], environ: Mapping[str, str]) -> int:
    if text not in (None, "gpu", "cpu", "auto"):
        if not str(text).isdecimal() or int(text) < 1:
            raise UsageError(f"--nproc-per-node {text}: give a number from 1, gpu, cpu or auto.")
        return int(text)
    gpus = 0 if text == "cpu" or _device_is_cpu(flags) else count_gpus(environ)
    cores = len(os.sched_getaffinity(0))
    if text == "gpu" and gpus == 0:
        raise UsageError(
            "--nproc-per-node gpu: no GPU is visible on this machine; give a number or cpu."
        )
    count = gpus or (1 if text is None else cores)
    reason = f"{gpus} GPUs are visible" if gpus else "no GPU is used"
    if text is None and not set(flags) & {"-h", "--help-all", "--version", "--print-config"}:
        noun = "process" if count == 1 else "processes"
        print(
            f"{count} {noun}, because {reason}; --nproc-per-node sets another number.", flush=True
        )
    return count


def _device_is_cpu(flags: Sequence[str]) -> bool:
    from megatron_packed.config.parser.precedence import gather

    return gather(flags).values.get("training.device") == "cpu"


def _rendezvous(
    arguments: argparse.Namespace,
    min_nodes: int,
    max_nodes: int,
    environ: Mapping[str, str],
    checks: _Checks,
) -> dict[str, Any]:
    """Return the options with which machines meet; SLURM's variables are the defaults under srun.

    Raises:
        UsageError: no option says where the machines meet, so no other machine can be informed.
    """
    step = SlurmStep.from_environment(environ)
    backend = checks.value(lambda: _backend(arguments), None)
    if backend is None:
        backend = C10D if arguments.rdzv_endpoint and arguments.node_rank is None else STATIC
    endpoint, node_rank = arguments.rdzv_endpoint, None
    if backend == STATIC:
        if min_nodes != max_nodes:
            checks.refuse(
                f"--nnodes {arguments.nnodes}: a varying number of machines needs --rdzv-backend c10d "
                "and --rdzv-endpoint HOST:PORT."
            )
        node_rank = checks.value(lambda: _node_rank(arguments.node_rank, step, max_nodes), None)
        endpoint = endpoint or _first_machine(arguments, step, checks)
    elif not endpoint:
        raise UsageError(f"--rdzv-backend {backend} needs --rdzv-endpoint HOST:PORT.")
    elif step is not None:
        node_rank = step.node_rank
    return {
        "node_rank": node_rank,
        "rdzv_backend": backend,
        "rdzv_endpoint": endpoint,
        "rdzv_id": arguments.rdzv_id or ("none" if step is None else step.run_id),
        "rdzv_conf": checks.value(lambda: _pairs(arguments.rdzv_conf), _NO_PAIRS),
        "shared_console": step is not None,
    }


def _backend(arguments: argparse.Namespace) -> str | None:
    """Return the backend that is given; None without one."""
    backend = arguments.rdzv_backend
    others = {point.name for point in entry_points(group="torchrun.handlers")}
    if backend is not None and backend not in BACKENDS and backend not in others:
        raise UsageError(f"--rdzv-backend {backend}: give {STATIC} or {C10D}, or leave it out.")
    return None if backend is None else str(backend)


def _node_rank(text: str | None, step: SlurmStep | None, nodes: int) -> int | None:
    if text is None and step is not None:
        return step.node_rank
    try:
        node_rank = int(text or "")
    except ValueError:
        node_rank = -1
    if nodes == 1 and node_rank > 0:
        raise UsageError(
            f"--node-rank {text}: --nnodes is 1 on this machine; give all machines the same --nnodes."
        )
    if not 0 <= node_rank < nodes:
        machines = "machines" if nodes == UNKNOWN_NODES else f"{nodes} machines"
        last = "" if nodes == UNKNOWN_NODES else f" to {nodes - 1}"
        raise UsageError(
            f"--node-rank {'is missing' if text is None else text}: give each of the {machines} its "
            f"number, from 0{last}."
        )
    return node_rank


def _first_machine(arguments: argparse.Namespace, step: SlurmStep | None, checks: _Checks) -> str:
    host = arguments.master_addr or (None if step is None else step.first_host)
    if host is None:
        raise UsageError("--master-addr is missing: give the address of the first machine.")
    default = MASTER_PORT if step is None else step.port
    return f"{host}:{checks.value(lambda: _port(arguments.master_port), None) or default}"


def _port(text: str | None) -> int | None:
    if text is not None and not (text.isdecimal() and 0 < int(text) < 2**16):
        raise UsageError(f"--master-port {text}: give a port, from 1 to 65535.")
    return None if text is None else int(text)


def _pairs(text: str) -> tuple[tuple[str, str], ...]:
    pairs = tuple(
        (name.strip(), value.strip())
        for name, _, value in (entry.partition("=") for entry in text.split(",") if entry.strip())
    )
    if not all(name and value for name, value in pairs):
        raise UsageError(f"--rdzv-conf {text}: give KEY=VALUE,KEY=VALUE.")
    for name, value in pairs:
        if name in ("join_timeout", "timeout") and not (value.isdecimal() and int(value) > 0):
            raise UsageError(f"--rdzv-conf {name}={value}: give whole seconds, from 1.")
    return pairs
