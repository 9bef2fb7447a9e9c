"""Evidence for docs/support_matrix.md: the marker ``shows`` and the option ``--record-shown FILE``.

A test lists the cells of docs/support_matrix.md that it proves: one column, and rows. Rows are
given by name, or derived from the configuration that the test trains. ``of`` takes parameters of
the test and returns the number of processes and their configuration::

    @pytest.mark.shows("eager", of=lambda way: (way.processes, config_of(way)))

``--record-shown FILE`` records which of these tests passed on this machine. A record belongs to one
machine: a GPU, with the tests that need a GPU, or a CPU, with the other tests. A run adds its
results to the record, each with the date, the commit and the card of the run. It also adds
fingerprints of the test's code (`code_prints.py`) and of the default kernels that the test runs
(`kernel_code.py`).

``--collect-only`` runs no tests. It removes claims that tests no longer make and adds new claims as
"not run". A test also becomes "not run" if its claims, its code or its default kernels have changed
since it ran. A renamed or moved test with the same code keeps its result.
"""

from __future__ import annotations

import inspect
import json
import platform
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import is_dataclass
from datetime import datetime, timezone
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from support import kernel_code
from support.code_prints import Sources, fingerprint_of_test

TP, CP, EP = "tensor_model_parallel_size", "context_parallel_size", "expert_model_parallel_size"
SIZES = {"tp_size": TP, "cp_size": CP, "ep_size": EP}
LAYERS = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
AXES: dict[str, dict[str, Any]] = {
    "one process": {},
    "DP": {},
    "ZeRO-1": {"use_distributed_optimizer": True},
    "overlapped sums": {"overlap_grad_reduce": True},
    "overlapped gathers": {
        "overlap_param_gather": True,
        "overlap_grad_reduce": True,
        "use_distributed_optimizer": True,
    },
    "TP": {TP: 2, "sequence_parallel": False},
    "TP + SP": {TP: 2, "sequence_parallel": True},
    "TP overlap": {TP: 2, "sequence_parallel": True, "tp_comm_overlap": True},
    **{f"CP {how}": {CP: 2, "cp_comm_type": how} for how in ("a2a", "all_gather", "p2p")},
    "CP contiguous": {CP: 2, "cp_comm_type": "p2p", "cp_partition_mode": "contiguous"},
    "CP state": {CP: 2, "mamba_cp_comm_type": "state"},
    "CP chunkwise": {CP: 2, "linear_cp_mode": "chunkwise"},
    **{f"EP {how}": {EP: 2, "moe_token_dispatcher_type": how} for how in ("allgather", "alltoall")},
    "copied all-to-alls": {"all_to_all_backend": "symmetric_memory"},
}
"""Rows for parallelism, each with its options."""
GRAPHS = {
    f"graphs: {i}": {"cuda_graph_impl": i}
    for i in ("local", "full_iteration", "transformer_engine")
}
MODES: dict[str, dict[str, Any]] = {
    "recompute": LAYERS,
    "offload": {**LAYERS, "offload_layer_inputs": True},
    "TE layers": {"transformer_impl": "transformer_engine"},
}
LAYERS: dict[str, tuple[str, dict[str, Any]]] = {
    "Mamba": ("M", {}),
    "attention": ("*", {}),
    "MLP": ("-", {}),
    "experts": ("E", {}),
    "latent experts": ("E", {"moe_latent_size": 32}),
    "gated delta net": ("G", {"hybrid_layer_pattern": "M*-EG"}),
    "MTP": ("/", {"hybrid_layer_pattern": "M*-E/*"}),
    "adapters": ("", {"lora_rank": 8}),
}
"""Rows for parts of models, each with its symbol in the pattern and the options of a model with it.

Any pattern has the empty symbol.
"""
ROWS = {**AXES, **MODES, **{row: options for row, (_, options) in LAYERS.items()}}
COLUMNS: dict[str, dict[str, Any]] = {
    "eager": {},
    **GRAPHS,
    **MODES,
    "isolation": {},
    "checkpoint": {},
    "no host sync": {},
}
OTHERS = {
    "Data": (
        "messages",
        "ShareGPT",
        "Alpaca",
        "prompt and completion",
        "text",
        "Parquet",
        "Hugging Face data set",
        ".bin and .idx",
        "blend",
    ),
    "Tokenizer": (
        "tokenizer.json",
        "GPT-2's two files",
        "bytes",
        "BPE trained on the data",
        "tiktoken",
        "SentencePiece",
        "token numbers",
    ),
    "Prompt format": ("nemotron-h-aligned", "nemotron-nano-v2", "identity", "default"),
    "Precision": ("float32", "bf16", "bf16 moments, masters with remainders"),
    "Parallelism": ("pipeline", "CP a2a+p2p"),
}
"""Other columns, each with its rows."""
OPTIONS = {
    **ROWS,
    "pipeline": {"pipeline_model_parallel_size": 2},
    "CP a2a+p2p": {"cp_comm_type": "a2a+p2p"},
}
"""Options of rows that a configuration may refuse."""


def axes_of(processes: int, *configurations: Any) -> list[str]:
    """Return the rows for the options of sections, complete configurations or mappings.

    A mapping may use sizes by name (``tp_size``). Later arguments override earlier ones.
    """
    options = {
        SIZES.get(name, name): value for one in configurations for name, value in _options(one)
    }

    def chosen(name: str, wanted: Any) -> bool:
        found = options.get(name, False)
        return found > 1 if name in SIZES.values() else found == wanted

    known = {**AXES, "TE layers": ROWS["TE layers"]}
    rows = [
        row
        for row, wanted in known.items()
        if wanted and all(chosen(*option) for option in wanted.items())
    ]
    replicated = processes > (options.get(TP) or 1) * (options.get(CP) or 1)
    return rows + ["DP"] * replicated + ["one process"] * (processes == 1)


def layers_of(*configurations: Any) -> list[str]:
    """Return the rows for the parts of a model. The arguments are those of `axes_of`."""
    options = dict(option for one in configurations for option in _options(one))
    pattern = options.get("hybrid_layer_pattern") or ""
    return [
        row
        for row, (symbol, wanted) in LAYERS.items()
        if symbol in pattern and all(options.get(name) for name in wanted)
    ]


def _options(of: Any) -> Iterator[tuple[str, Any]]:
    for name, value in (of if isinstance(of, Mapping) else vars(of)).items():
        yield from _options(value) if is_dataclass(value) else [(name, value)]


def claims_of(item: pytest.Item) -> dict[str, list[str]]:
    """Return the cells that a test proves: column -> rows.

    Raises:
        pytest.UsageError: the matrix has no such cell.
    """
    given = item.callspec.params if hasattr(item, "callspec") else {}

    def asked(function: Callable[..., Any]) -> Any:
        return function(**{name: given[name] for name in inspect.signature(function).parameters})

    claims: dict[str, set[str]] = {}
    for marker in item.iter_markers("shows"):
        column, *rows = (asked(word) if callable(word) else word for word in marker.args)
        if "of" in marker.kwargs:
            processes, *configurations = asked(marker.kwargs["of"])
            rows += axes_of(processes, *configurations) + layers_of(*configurations)
        if not rows or not {*rows} <= {*(ROWS if column in COLUMNS else OTHERS.get(column, ()))}:
            raise pytest.UsageError(
                f"{item.nodeid} shows {rows} of {column}, which the matrix does not have"
            )
        claims.setdefault(column, set()).update(rows)
    return {column: sorted(rows) for column, rows in sorted(claims.items())}


def outcome_of(phases: list[pytest.TestReport]) -> str:
    """Return the outcome of a test from its phases; "not run" if the test was never called."""
    outcomes, called = (
        {report.outcome for report in phases},
        any(report.when == "call" for report in phases),
    )
    worst = next(outcome for outcome in ("failed", "skipped", "passed") if outcome in outcomes)
    return worst if called or worst != "passed" else "not run"


@cache
def _sources() -> tuple[Sources, Sources]:
    """Return the files of the tests and of the ops, which all records read once.

    A process reads them as they are when it collects its tests.
    """
    tests = Path(__file__).resolve().parents[1]
    return Sources(tests, tests, fixtures=True), kernel_code.ops_sources()


class Evidence:
    """Claims of tests with the fingerprints of their code and of their kernels.

    Args:
        gpu: True for the kernels of GPUs, False for those of CPUs.
    """

    def __init__(self, *, gpu: bool) -> None:
        self._gpu = gpu
        self._tests, self._ops = _sources()
        self._kernels: dict[tuple[str, ...], str] = {}

    def of(self, item: pytest.Item) -> dict[str, Any]:
        """Return the evidence that a test gives if it passes; empty for a test without claims."""
        claims = claims_of(item)
        if not claims:
            return {}
        owner = f"{item.cls.__name__}." if getattr(item, "cls", None) else ""
        function = owner + getattr(item, "originalname", item.name)
        ops = tuple(kernel_code.ops_of(claims, LAYERS))
        if ops not in self._kernels:
            self._kernels[ops] = kernel_code.fingerprint(self._ops, ops, gpu=self._gpu)
        return {
            "code": fingerprint_of_test(self._tests, item.path, function),
            "kernels": self._kernels[ops],
            "shows": claims,
        }


def tested_commit(root: Path, given: str | None) -> str:
    """Return the commit of the tested code.

    Args:
        given: commit that the user gave, for a copy of the files without their repository.
    Raises:
        pytest.UsageError: there is no repository and no given commit, or Python files differ from
            the commit.
    """
    if given:
        return given[:8]

    def git(*command: str) -> str:
        done = subprocess.run(["git", *command], cwd=root, capture_output=True, text=True)
        if done.returncode:
            raise pytest.UsageError(
                f"{root} has no git repository; give the commit of these files by --record-commit."
            )
        return done.stdout.rstrip()

    changed = git("status", "--porcelain", "--", "megatron_packed", "tests")
    if changed:
        raise pytest.UsageError(
            "Results of tests are recorded with their commit, and these files differ from it: "
            f"{', '.join(line[3:] for line in changed.splitlines())}; commit them first."
        )
    return git("rev-parse", "--short=8", "HEAD")


def _parameters(name: str) -> str:
    """Return the parameters in the name of a test, with brackets."""
    return name.partition("::")[2].partition("[")[2]


def _has(entry: Mapping[str, Any], values: Mapping[str, Any]) -> bool:
    return all(entry.get(key) == value for key, value in values.items())


class Recorder:
    """Plugin for ``--record-shown``.

    Raises:
        pytest.UsageError: the record has results from another machine or other versions, the
            commit of the tested code is not known, or this machine lacks a default kernel.
    """

    def __init__(self, config: pytest.Config, path: Path) -> None:
        self._path, self._collects = path, config.option.collectonly
        # The main process gets the reports of all workers.
        self._writes = not hasattr(config, "workerinput")
        self._phases: dict[str, list[pytest.TestReport]] = {}
        machine = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
        here = {"machine": machine, "python": platform.python_version(), "torch": torch.__version__}
        self._record = json.loads(path.read_text()) if path.exists() else {**here, "tests": {}}
        self._run: dict[str, str] = {}
        if self._collects or not self._writes:
            return
        ran = any(entry["outcome"] != "not run" for entry in self._record["tests"].values())
        if ran and here != {name: self._record[name] for name in here}:
            raise pytest.UsageError(f"{path} is of another machine or other versions than {here}")
        missing = kernel_code.missing_kernels() if machine != "CPU" else []
        if missing:
            raise pytest.UsageError(
                f"This machine lacks default kernels: {'; '.join(missing)}; install their packages, "
                "because the records are of the default kernels."
            )
        self._run = {
            "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
            "commit": tested_commit(config.rootpath, config.getoption("--record-commit")),
            "card": machine,
        }
        self._record |= here

    @pytest.hookimpl(tryfirst=True)  # before other plugins deselect tests
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        evidence, gpu = {}, self._record["machine"] != "CPU"
        source = Evidence(gpu=gpu)
        for item in items:
            needs_gpu = any(item.get_closest_marker(name) for name in ("gpu", "multi_gpu"))
            if needs_gpu == gpu and (found := source.of(item)):
                evidence[item.nodeid] = found
                item.user_properties.append(("shown", found))
        if self._collects:
            self._write(self._after_collection(items, evidence))

    def _after_collection(
        self, items: list[pytest.Item], evidence: dict[str, dict[str, Any]]
    ) -> dict[str, Any]:
        """Return the record with the results that are still of the collected tests."""
        files, before = {item.path for item in items}, self._record["tests"]
        root = items[0].config.rootpath if items else Path()
        kept, left = {}, {}
        for name, entry in before.items():
            path = root / name.split("::")[0]
            if path not in files and path.exists():
                kept[name] = entry
            elif name not in evidence:
                left[name] = entry  # removed, renamed or moved

        for name, found in evidence.items():
            candidates = [before.get(name, {})]
            candidates += [
                entry for old, entry in left.items() if _parameters(old) == _parameters(name)
            ]
            not_run = {"outcome": "not run", "shows": found["shows"]}
            kept[name] = next((entry for entry in candidates if _has(entry, found)), not_run)
        return kept

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Write each result at once, so that an interrupted run loses none."""
        found, tests = dict(report.user_properties).get("shown"), self._record["tests"]
        if found is None or not self._writes:
            return
        phases = self._phases.setdefault(report.nodeid, [])
        phases.append(report)
        entry = {"outcome": outcome_of(phases), **self._run, **found}
        if entry["outcome"] == "not run":
            entry = {"outcome": "not run", "shows": found["shows"]}
        before = tests.get(report.nodeid, {})
        # A test that is skipped here may have passed on a machine with more GPUs.
        passed = {"outcome": "passed", **found}
        if entry["outcome"] != "skipped" or not _has(before, passed):
            self._write(tests | {report.nodeid: entry})

    def _write(self, tests: dict[str, Any]) -> None:
        self._record["tests"] = tests
        head = json.dumps({name: value for name, value in self._record.items() if name != "tests"})
        lines = (
            f"{json.dumps(name)}: {json.dumps(entry)}" for name, entry in sorted(tests.items())
        )
        self._path.write_text(f'{head[:-1]}, "tests": {{\n' + ",\n".join(lines) + "\n}}\n")
