"""Real runs of ``pretrain_hybrid.py`` on the CPU: processes, exit codes, console, log, checkpoints.

`start` takes the processes from a fork server that has already imported torch, with the environment
that torchrun sets. So the real script starts in a fraction of a second. `torchrun` uses the real
launcher.
"""

from __future__ import annotations

import json
import os
import random
import re
import runpy
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_packed.checkpoint.load import find_checkpoints
from megatron_packed.checkpoint.manifest import read_manifest
from megatron_packed.checkpoint.read_tensors import read_tensor
from support.fork_server import fork_server
from support.json_lines import read_lines

REPOSITORY = Path(__file__).parents[2]
SCRIPT = REPOSITORY / "pretrain_hybrid.py"
TIMEOUT = 120.0
"""Seconds after which a run counts as hanging. A run takes a few seconds on an idle machine."""

_ROUNDED, _TOLERANCE = ("lm_loss", "aux_loss", "grad_norm", "valid_loss"), 1e-5
"""Fields that differ by rounding between layouts, because sums have another order; and their
tolerance.
"""
_OF_BUFFERS = ("expert_rank_", "expert_peer_", "expert_repeats")
"""Beginnings of fields that depend on the bounds of expert buffers."""
_TIMINGS = (
    "step_time_ms",
    "tokens_per_second",
    "tflops_per_gpu",
    "mfu",
    "memory_gib",
    "dp_imbalance",
    "memory_reserved_gib",
    "host_memory_gib",
    "data_wait_ms",
    "kernels",
    "run",
    "starts",
)

WORDS = [
    "north",
    "east",
    "south",
    "west",
    "river",
    "mountain",
    "harbour",
    "lantern",
    "copper",
    "silver",
]


def write_conversations(path: Path, count: int, seed: int) -> Path:
    """Write short and long questions whose answers repeat their words in reverse order.

    A model can learn this task.
    """
    draw = random.Random(seed)
    lines = []
    for _ in range(count):
        words = draw.choices(WORDS, k=min(1 + int(draw.expovariate(0.3)), 9))
        turns = [
            {"role": "user", "content": " ".join(words)},
            {"role": "assistant", "content": " ".join(words[::-1])},
        ]
        lines.append(json.dumps({"messages": turns}) + "\n")
    path.write_text("".join(lines))
    return path


@dataclass(frozen=True)
class Data:
    """Small data set and cache that all runs share."""

    folder: Path

    @property
    def train(self) -> Path:
        return self.folder / "train.jsonl"

    @property
    def valid(self) -> Path:
        return self.folder / "valid.jsonl"

    @classmethod
    def make(cls, folder: Path) -> Data:
        write_conversations(folder / "train.jsonl", 240, seed=1)
        write_conversations(folder / "valid.jsonl", 24, seed=2)
        return cls(folder)


TINY_MODEL: dict[str, Any] = {
    "hybrid_layer_pattern": "M*-E",
    "hidden_size": 32,
    "num_attention_heads": 2,
    "position_embedding_type": "rope",
    "mamba_head_dim": 16,
    "mamba_state_dim": 16,
    "mamba_num_groups": 1,
    "mamba_chunk_size": 32,
    "ffn_hidden_size": 64,
    "num_experts": 4,
    "moe_ffn_hidden_size": 32,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_aux_loss_coeff": 1e-3,
    "squared_relu": True,
    "disable_bias_linear": True,
    "normalization": "RMSNorm",
}
TINY_RUN: dict[str, Any] = {
    "sft": True,
    "seq_length": 128,
    "global_batch_size": 4,
    "lr": 3e-3,
    "lr_decay_style": "cosine",
    "lr_warmup_iters": 2,
    "device": "cpu",
    "no_isolation_self_test": True,
}

LAST = 22
"""Iterations of the run with which interrupted runs are compared."""


def tiny_options(data: Data, **changes: Any) -> dict[str, Any]:
    """Return options of a run by their Python names; an option with None is left out."""
    paths = {"train_data_path": data.train, "data_cache_path": data.folder / "cache"}
    return {**TINY_MODEL, **TINY_RUN, **paths, **changes}


def few_documents(folder: Path, **changes: Any) -> dict[str, Any]:
    """Return options of a run with so few documents that epochs end during the run.

    It has four micro-batches a step and validations. Packs ignore the capacities of graphs, so that
    they are the same with graphs and without.
    """
    data = Data(folder)
    write_conversations(data.train, 113, seed=1)
    write_conversations(data.valid, 24, seed=2)
    return tiny_options(
        data,
        seq_length=256,
        packing_method="best_fit_decreasing",
        valid_data_path=data.valid,
        eval_iters=2,
        **changes,
    )


def flags_of(path: Path) -> dict[str, Any]:
    """Return the flags of a model.args file as options of a run."""
    lines = [shlex.split(line) for line in path.read_text().splitlines()]
    return {words[0].removeprefix("--"): (words[1:] or [True])[0] for words in lines}


def in_folder(folder: Path) -> dict[str, Any]:
    """Return options that write checkpoints and log to ``folder`` and resume from there."""
    return {
        "save": folder / "checkpoints",
        "load": folder / "checkpoints",
        "log_jsonl": folder / "log.jsonl",
    }


def command_line(options: dict[str, Any]) -> list[str]:
    """Return the options as command-line flags."""
    words: list[str] = []
    for name, value in options.items():
        if value is None or value is False:
            continue
        words.append("--" + name.replace("_", "-"))
        if value is not True:
            words += [str(item) for item in (value if isinstance(value, tuple) else (value,))]
    return words


@dataclass(frozen=True)
class Finished:
    """Result of a run that has ended."""

    exit_codes: tuple[int, ...]
    """Exit code of every rank; the negative signal number if a signal killed it."""
    console: str
    """Standard output and error of all ranks, in the order of ranks."""

    @property
    def exit_code(self) -> int:
        """Exit code, which must be the same on all ranks."""
        assert len(set(self.exit_codes)) == 1, f"exit codes {self.exit_codes}\n{self.console}"
        return self.exit_codes[0]


@dataclass
class Run:
    """Processes of one run, in the order of ranks."""

    folder: Path
    processes: list[Any]
    outputs: list[Path]
    store: Any = field(repr=False)

    def kill(self, *ranks: int, number: int = signal.SIGKILL) -> None:
        """Send a signal to the ranks, by default to all of them."""
        for rank in ranks or range(len(self.processes)):
            if self.processes[rank].is_alive():
                os.kill(self.processes[rank].pid, number)

    def wait_for_line(self, iteration: int, log: Path) -> None:
        """Wait until the log has the line of a step, or the run has ended."""
        deadline = time.monotonic() + TIMEOUT
        while time.monotonic() < deadline and all(process.is_alive() for process in self.processes):
            if log.exists() and f'{{"iteration": {iteration},'.encode() in log.read_bytes():
                return
            time.sleep(0.005)
        assert time.monotonic() < deadline, self._console()

    def wait(self) -> Finished:
        """Wait until all ranks have ended; if ranks hang, kill them and fail the test."""
        deadline = time.monotonic() + TIMEOUT
        for process in self.processes:
            process.join(max(deadline - time.monotonic(), 0.1))
        hanging = [rank for rank, process in enumerate(self.processes) if process.is_alive()]
        self.kill(*hanging) if hanging else None
        for process in self.processes:
            process.join(10)
        assert not hanging, f"ranks {hanging} did not end in {TIMEOUT} s\n{self._console()}"
        return Finished(tuple(process.exitcode for process in self.processes), self._console())

    def _console(self) -> str:
        return "".join(
            f"[output of rank {rank}]\n{path.read_text()}" for rank, path in enumerate(self.outputs)
        )


def start(
    options: dict[str, Any],
    folder: Path,
    processes: int = 1,
    prepare: Callable[[], None] | None = None,
) -> Run:
    """Start the script in ``processes`` processes.

    Args:
        folder: receives standard output and error of the ranks.
        prepare: called in each process before the script (a function of a module, or a partial of
            one).
    """
    context = fork_server()
    folder.mkdir(parents=True, exist_ok=True)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    started, outputs = [], []
    for rank in range(processes):
        environment = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(processes),
            "LOCAL_WORLD_SIZE": str(processes),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        output = folder / f"output_{rank}.txt"
        arguments = (environment, command_line(options), output, prepare)
        process = context.Process(target=_script, args=arguments, daemon=True)
        process.start()
        started.append(process)
        outputs.append(output)
    return Run(folder, started, outputs, store)


def run(
    options: dict[str, Any],
    folder: Path,
    processes: int = 1,
    prepare: Callable[[], None] | None = None,
) -> Finished:
    """Start the script and wait until it ends."""
    return start(options, folder, processes, prepare).wait()


def _script(
    environment: dict[str, str],
    arguments: Sequence[str],
    output: Path,
    prepare: Callable[[], None] | None,
) -> None:
    file = os.open(output, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.environ.update(environment)
    sys.argv = [str(SCRIPT), *arguments]
    torch.set_num_threads(1)
    if prepare is not None:
        prepare()
    runpy.run_path(str(SCRIPT), run_name="__main__")


def torchrun_command(
    options: dict[str, Any], processes: int, programs: Path | None = None
) -> list[str]:
    """Return the command that a user types.

    Args:
        programs: folder with a `torchrun` that starts quickly; by default each process imports torch.
    """
    slow = [sys.executable, "-m", "torch.distributed.run"]
    return [
        *(slow if programs is None else [str(programs / "torchrun")]),
        "--nproc_per_node",
        str(processes),
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        "localhost:0",
        "--signals-to-handle",
        "SIGTERM,SIGINT,SIGUSR1",
        str(SCRIPT),
        *command_line(options),
    ]


def start_torchrun(
    options: dict[str, Any], folder: Path, processes: int, programs: Path | None = None
) -> subprocess.Popen[str]:
    """Start the script with the real launcher; both streams go to ``console.txt`` in ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    if programs is not None:
        environment["PYTHON_EXEC"] = str(programs / "python")
    with open(folder / "console.txt", "w") as console:
        return subprocess.Popen(
            torchrun_command(options, processes, programs),
            stdout=console,
            stderr=subprocess.STDOUT,
            env=environment,
            text=True,
        )


def torchrun(
    options: dict[str, Any], folder: Path, processes: int, programs: Path | None = None
) -> str:
    """Run the script with the real launcher, and return the output of both."""
    start_torchrun(options, folder, processes, programs).wait(TIMEOUT)
    return (folder / "console.txt").read_text()


def assert_only_ours(console: str) -> None:
    """Check that an output has no text of torch's launcher and no traceback."""
    foreign = r"Traceback|ChildFailedError|KeyboardInterrupt|elastic|torchrun|^\[?[WE]\d{4}"
    assert not re.search(foreign, console, re.MULTILINE), console


def steps(log: Path) -> list[dict[str, Any]]:
    """Return the records of steps and evaluations, without fields that differ between runs or layouts.

    These are times, memory, imbalance of ranks, names of kernels, facts about the run, and answers
    to sample prompts.
    """
    records = read_lines(log)
    return [
        {name: value for name, value in record.items() if name not in _TIMINGS}
        for record in records
        if not {"checkpoint", "end", "samples"} & record.keys()
    ]


def losses(log: Path) -> list[float]:
    return [record["lm_loss"] for record in steps(log) if "lm_loss" in record]


def saved_steps(folder: Path) -> list[int]:
    """Return the steps of the checkpoints, newest first, and check that all manifests are valid."""
    found = find_checkpoints(folder / "checkpoints")
    assert [candidate.problem for candidate in found if candidate.problem] == []
    return [candidate.manifest.step for candidate in found]


def final_state(checkpoints: Path, iteration: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors of a checkpoint and its metadata.

    The configuration is left out of the metadata, because it contains the folder.
    """
    [path] = [
        c.path
        for c in find_checkpoints(checkpoints)
        if c.manifest is not None and c.manifest.step == iteration
    ]
    manifest = read_manifest(path)
    tensors = {name: read_tensor(path, name) for name in manifest.tensors}
    return tensors, {name: value for name, value in manifest.metadata.items() if name != "config"}


def assert_close_state(
    folder: Path, other: Path, iteration: int, tolerance: float
) -> dict[str, Tensor]:
    """Compare the tensors of two runs, relative to the largest value of each, and return them."""
    state, expected = (
        {
            name: x
            for name, x in final_state(run / "checkpoints", iteration)[0].items()
            if "rng/" not in name
        }
        for run in (folder, other)
    )
    assert state.keys() == expected.keys()
    for name, tensor in expected.items():
        assert state[name].shape == tensor.shape
        assert (state[name] - tensor).abs().max() <= tolerance * tensor.abs().max(), name
    return state


def assert_same_state(found: Path, expected: Path, iteration: int) -> None:
    """Compare parameters, buffers, moments, random states and data position bit for bit."""
    tensors, metadata = final_state(found, iteration)
    expected_tensors, expected_metadata = final_state(expected, iteration)
    assert_same_tensors(tensors, expected_tensors)
    assert metadata == expected_metadata


def assert_same_tensors(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Check that names and all bits are equal."""
    assert found.keys() == expected.keys()
    different = [name for name, tensor in found.items() if not torch.equal(tensor, expected[name])]
    assert not different, different


def trained(folder: Path, processes: int, options: dict[str, Any], **more: Any) -> str:
    """Run in ``folder``, check that the run succeeds, and return its console."""
    finished = run({**options, **in_folder(folder), **more}, folder, processes)
    assert finished.exit_code == 0, finished.console
    return finished.console


def assert_same_log(found: Path, expected: Path, *, at_least: int = 6) -> None:
    """Check that losses and norms agree up to rounding, and that all other fields are equal.

    The other fields are counts of tokens, documents and packs, and the plan hash.
    """
    lines, wanted = (
        [
            {name: value for name, value in line.items() if not name.startswith(_OF_BUFFERS)}
            for line in steps(folder / "log.jsonl")
        ]
        for folder in (found, expected)
    )
    assert len(lines) == len(wanted) >= at_least
    for line, other in zip(lines, wanted):
        assert line == {
            name: pytest.approx(value, rel=_TOLERANCE) if name in _ROUNDED else value
            for name, value in other.items()
        }
