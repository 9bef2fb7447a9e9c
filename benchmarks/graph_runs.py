"""Checks runs of `pretrain_hybrid.py` with CUDA graphs on real documents.

    python benchmarks/graph_runs.py runs/real.zip [SET ...]

The archive comes from `prepare_real.py`. The runs are separate processes that share the device, so
no times are measured.

*Equal*: each set trains for 200 steps in deterministic mode, once eagerly and once with graphs for
64 documents. The best-fit packer fills the packs and does not respect the limit of 64. Losses and
gradient norms must be equal. The micro-batches that fell back must be those that have more than 64
documents in the pack plan. An audit must pass every 50 steps.

*Epochs*: each set trains for three epochs with the capacities that `auto` chooses from the first
epoch, and validates after every 100th step. No micro-batch may fall back.
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
import time
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

import harness
from megatron_packed.config.parser.parse import parse
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.inputs.run_data import RunData, build_data
from train_real import COMMON, TINY_MODEL, command_line, read_log
from workloads import device_from

CAPACITY = 64
EPOCHS, STRIDE = 3, 50
"""Number of epochs to train, and step interval in which the end of the last epoch is searched."""
ROWS = (8192, 32768)
"""Pack lengths in tokens, for the runs over epochs."""
MODEL = {
    "hybrid-layer-pattern": "M*-EM*",
    "hidden-size": 256,
    "num-attention-heads": 4,
    "num-query-groups": 2,
    "kv-channels": 64,
    "ffn-hidden-size": 512,
    "mamba-num-heads": 8,
    "mamba-num-groups": 2,
    "num-experts": 8,
    "moe-ffn-hidden-size": 256,
    "bf16": True,
}
SCHEDULE = {"lr": 1e-3, "min-lr": 1e-4, "lr-warmup-iters": 20, "no-isolation-self-test": True}
EQUAL = {
    "train-iters": 200,
    "global-batch-size": 2,
    "seq-length": ROWS[0],
    "packing-method": "best_fit_decreasing",
    "deterministic-mode": True,
    "eval-interval": 100,
    "eval-iters": 4,
}
GRAPHS = {
    "cuda-graph-impl": "local",
    "cuda-graph-max-packed-seqs": CAPACITY,
    "cuda-graph-audit-interval": 50,
}
AUTO = {"global-batch-size": 2, "eval-interval": 100, "eval-iters": 8, "cuda-graph-impl": "local"}
QUICK = {
    "train-iters": 4,
    "lr-warmup-iters": 2,
    "eval-interval": 2,
    "eval-iters": 1,
    "seq-length": 256,
}


class Run:
    """One training process, started with the command that a user would type."""

    def __init__(self, name: str, folder: Path, options: dict[str, Any]) -> None:
        self.log = folder / f"{name}.jsonl"
        self.command = command_line(folder.name, folder, {**options, "log-jsonl": self.log})
        self.console = folder / f"{name}.txt"
        self._process = subprocess.Popen(
            self.command, stdout=self.console.open("w"), stderr=subprocess.STDOUT
        )

    def running(self) -> bool:
        return self._process.poll() is None

    def result(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Wait for the end of the run, and return its records of steps and of validations.

        Raises:
            SystemExit: the run failed.
        """
        code = self._process.wait()
        if code != 0:
            raise SystemExit(
                f"{self.log.stem} failed with exit code {code}\n{self.console.read_text()[-4000:]}"
            )
        return read_log(self.log)

    def data(self) -> RunData:
        """Build the run's data again, with the same pack plan."""
        return build_data(parse(self.command[2:], 1), ParallelGroups.single(), lambda line: None)

    def said(self, word: str) -> list[str]:
        return [line for line in self.console.read_text().splitlines() if word in line]


def documents(data: RunData, steps: int) -> list[list[int]]:
    """Return the number of documents in each micro-batch of each step, read from the pack plan."""
    return [
        [len(pieces) for pieces in data.train.plan.step(step).packs[0]] for step in range(steps)
    ]


def compared(eager: Run, graphs: Run) -> dict[str, Any]:
    """Compare the two runs of a set step by step."""
    (steps, valid), (graph_steps, graph_valid) = eager.result(), graphs.result()
    with_plan = documents(graphs.data(), len(graph_steps))
    beyond = [sum(count > CAPACITY for count in counts) for counts in with_plan]
    figures = ("lm_loss", "aux_loss", "grad_norm", "plan_hash")
    return {
        "plan_hash": steps[0]["plan_hash"],
        "steps": len(steps),
        "steps_that_differ": sum(
            any(a[name] != b[name] for name in figures) for a, b in zip(steps, graph_steps)
        ),
        "validations_that_differ": sum(
            a["valid_loss"] != b["valid_loss"] for a, b in zip(valid, graph_valid)
        ),
        "last_loss": steps[-1]["lm_loss"],
        "micro_batches": sum(map(len, with_plan)),
        "replays": sum(step.get("graph_replays", 0) for step in graph_steps),
        "fallbacks": sum(step.get("graph_fallbacks", 0) for step in graph_steps),
        "beyond_by_the_plan": sum(beyond),
        "steps_counted_wrongly": sum(
            step.get("graph_fallbacks") != n for step, n in zip(graph_steps, beyond)
        ),
        "audits": graphs.said("audit at step"),
    }


def over_epochs(run: Run) -> dict[str, Any]:
    """Return the fallbacks in each epoch of training, and the replays and fallbacks of the whole
    run.
    """
    steps, valid = run.result()
    by_epoch: Counter[int] = Counter()
    for step in steps:
        by_epoch[step["epoch"]] += step.get("graph_fallbacks", 0)
    return {
        "plan_hash": steps[0]["plan_hash"],
        "steps": len(steps),
        "validations": len(valid),
        "epochs": sorted(by_epoch),
        "fallbacks_by_epoch": [by_epoch[epoch] for epoch in sorted(by_epoch)],
        "replays": sum(step.get("graph_replays", 0) for step in steps),
        "captured": run.said("captured ") + run.said("not captured"),
        "in_all": "".join(run.said("micro-batches replayed")[-1:]),
        "last_loss": steps[-1]["lm_loss"],
    }


def problems_of(results: dict[str, Any]) -> list[str]:
    problems = []
    for name, found in results["equal"].items():
        for what in ("steps_that_differ", "validations_that_differ", "steps_counted_wrongly"):
            if found[what]:
                problems.append(f"{name}: {found[what]} {what.replace('_', ' ')}")
        if found["replays"] + found["fallbacks"] != found["micro_batches"] or not found["audits"]:
            problems.append(
                f"{name}: replays plus fallbacks differ from the micro-batches, or no audit ran"
            )
    for name, found in results["epochs"].items():
        if (
            any(found["fallbacks_by_epoch"])
            or len(found["epochs"]) < EPOCHS
            or not found["replays"]
        ):
            problems.append(f"{name}: fallbacks by epoch {found['fallbacks_by_epoch']}")
        if ", 0 run eagerly" not in found["in_all"]:
            problems.append(f"{name}: {found['in_all']}")
    return problems


def steps_of_epochs(name: str, folder: Path, options: dict[str, Any]) -> int:
    """Return the steps that cover all epochs, rounded up to a multiple of `STRIDE`."""
    command = command_line(folder.name, folder, {**options, "train-iters": 1000})
    plan = build_data(parse(command[2:], 1), ParallelGroups.single(), lambda line: None).train.plan
    step = 0
    while plan.step(step).epoch < EPOCHS:
        step += STRIDE
    return step


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("archive", type=Path, help="file made by prepare_real.py")
    parser.add_argument("sets", nargs="*", help="names in the archive (default: all)")
    harness.common_arguments(parser)
    arguments = parser.parse_args()
    device_from(arguments.device)
    common = {
        **COMMON,
        **(TINY_MODEL if arguments.quick else MODEL),
        **SCHEDULE,
        "device": arguments.device,
    }
    quick = QUICK if arguments.quick else {}
    results: dict[str, Any] = {"equal": {}, "epochs": {}}
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        with zipfile.ZipFile(arguments.archive) as archive:
            archive.extractall(folder)
        pairs, epochs = {}, {}
        for name in arguments.sets or sorted(path.name for path in Path(folder).iterdir()):
            place = Path(folder) / name
            equal = {**common, **EQUAL, **quick}
            pairs[name] = Run("eager", place, equal), Run("graphs", place, {**equal, **GRAPHS})
            for rows in (QUICK["seq-length"],) if arguments.quick else ROWS:
                options = {**common, **AUTO, **quick, "seq-length": rows}
                options["train-iters"] = steps_of_epochs(name, place, options)
                epochs[f"{name} {rows}"] = Run(f"epochs_{rows}", place, options)
        for name, pair in pairs.items():
            results["equal"][name] = compared(*pair)
        for name, run in epochs.items():
            results["epochs"][name] = over_epochs(run)
    path = harness.save("graph_runs", results, folder=arguments.results)
    print(harness.table(equal_rows_of(results)))
    print(harness.table(epoch_rows_of(results)))
    print(f"{path}, {time.perf_counter() - begun:.0f} s")
    problems = problems_of(results)
    if problems:
        raise SystemExit("failed: " + "; ".join(problems))


def equal_rows_of(results: dict[str, Any]) -> list[dict[str, object]]:
    """Return the rows of the table of equal runs, from results in the form of a result file."""
    return [
        {
            "set": name,
            "steps": found["steps"],
            "steps that differ": found["steps_that_differ"],
            "validations that differ": found["validations_that_differ"],
            "last loss": found["last_loss"],
            "replayed": found["replays"],
            "eager": found["fallbacks"],
            "beyond by the plan": found["beyond_by_the_plan"],
            "audits passed": len(found["audits"]),
            "plan": found["plan_hash"][:12],
        }
        for name, found in results["equal"].items()
    ]


def epoch_rows_of(results: dict[str, Any]) -> list[dict[str, object]]:
    """Return the rows of the table of epochs, from results in the form of a result file."""
    return [
        {
            "set, tokens of a pack": name,
            "steps": found["steps"],
            "validations": found["validations"],
            "epochs": len(found["epochs"]),
            "replayed": found["replays"],
            "eager, by epoch": " ".join(map(str, found["fallbacks_by_epoch"])),
            "last loss": found["last_loss"],
            "plan": found["plan_hash"][:12],
        }
        for name, found in results["epochs"].items()
    ]


if __name__ == "__main__":
    main()
