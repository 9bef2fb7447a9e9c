"""Trace a run of four steps on the CPU: package files, functions and file switches of each phase.

    python tools/traced_run.py [--list PHASE] [FLAGS ...]

The run is `worker.run_worker` with a model ``M*-E`` and 60 lines of text. A file is visited if one of its
functions runs. Files that only define classes, or only call functions while they are imported, are
counted apart. A switch is a call whose file differs from that of the previous call in the same
thread. A phase begins with the first call of its function.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NoReturn

import common  # noqa: F401  # makes this checkout importable

MODEL = (
    "--hybrid-layer-pattern M*-E --disable-bias-linear --hidden-size 32 --ffn-hidden-size 48 "
    "--num-attention-heads 4 --num-query-groups 2 --mamba-head-dim 8 --mamba-state-dim 16 "
    "--mamba-num-groups 2 --mamba-chunk-size 8 --num-experts 4 --moe-ffn-hidden-size 16"
)
RUN = (
    "--seq-length 128 --micro-batch-size 1 --global-batch-size 2 --train-iters 4 --lr 1e-3 "
    "--data-path d.jsonl --tokenizer-type ByteTokenizer --device cpu --save ckpt --log-jsonl log.jsonl"
)
STARTS = {
    ("parse", "parse_or_exit"): "command line",
    ("pretrain", "run_job"): "processes",
    ("run_data", "build_data"): "data",
    ("build_job", "build_job"): "model",
    ("run_description", "describe"): "checks of the model",
    ("run_facts", "opening_of"): "loop",
}
"""File and function whose first call begins a phase; each call of the step begins another."""
STEP = ("train_step", "__call__")
STEADY = "step 3"
"""Step with its loading, its metrics and its log, from its call to the call of the next step."""
BEFORE_SECOND_STEP = "before the second step"


@dataclass
class Phase:
    """Calls between two marks of a run."""

    functions: set[CodeType] = field(default_factory=set)
    switches: int = 0
    imported: set[str] = field(default_factory=set)
    """Files that defined a class or called a function while they were imported."""

    @property
    def files(self) -> set[str]:
        return {code.co_filename for code in self.functions}


class RunTracer:
    """Profile function of all threads that counts calls of a package's functions by phase."""

    def __init__(self, package: Path) -> None:
        self.package = f"{package}{os.sep}"
        self.phases: dict[str, Phase] = {}
        self._phase = self._begin("start")
        self._steps = 0
        self._last_files: defaultdict[int, str] = defaultdict(str)

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(self.package):
            return
        if code not in self._phase.functions and self._is_of_import(frame):
            if code.co_name != "<module>":
                self._phase.imported.add(code.co_filename)
            return
        mark = Path(code.co_filename).stem, code.co_name
        if mark == STEP:
            self._steps += 1
            self._phase = self._begin(f"step {self._steps}")
        elif mark in STARTS and STARTS[mark] not in self.phases:
            self._phase = self._begin(STARTS[mark])
        self._phase.functions.add(code)
        thread = threading.get_ident()
        self._phase.switches += code.co_filename != self._last_files[thread]
        self._last_files[thread] = code.co_filename

    def _is_of_import(self, frame: FrameType | None) -> bool:
        """Return whether a frame is the body of a class or module, or is called by one."""
        while frame is not None:
            code = frame.f_code
            if not code.co_flags & inspect.CO_OPTIMIZED and code.co_filename.startswith(
                self.package
            ):
                return True
            frame = frame.f_back
        return False

    def _begin(self, name: str) -> Phase:
        return self.phases.setdefault(name, Phase())

    def total_before_second_step(self) -> Phase:
        """Return all calls of the run before the second call of the step."""
        early = list(self.phases.values())[: list(self.phases).index("step 2")]
        return Phase(
            functions=set().union(*(phase.functions for phase in early)),
            switches=sum(phase.switches for phase in early),
            imported=set().union(*(phase.imported for phase in early)),
        )


def trace_run(flags: Sequence[str] = ()) -> RunTracer:
    """Trace the run in a temporary folder, with more flags than its own.

    Raises:
        RuntimeError: the run failed; its output has the reason.
    """
    import megatron_packed

    assert megatron_packed.__file__ is not None
    tracer = RunTracer(Path(megatron_packed.__file__).parent)
    home, argv, end = Path.cwd(), sys.argv, os._exit
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        lines = (json.dumps({"text": f"Line {n} of a text. " * (1 + n % 5)}) for n in range(60))
        Path("d.jsonl").write_text("\n".join(lines) + "\n")
        sys.argv = ["pretrain_hybrid.py", *MODEL.split(), *RUN.split(), *flags]
        os._exit = _raise_exit  # type: ignore[assignment]
        threading.setprofile(tracer)
        sys.setprofile(tracer)
        try:
            from megatron_packed.training.worker import run_worker

            run_worker()
        except SystemExit as ended:
            if ended.code:
                raise RuntimeError(f"the run ended with exit code {ended.code}") from None
        finally:
            sys.setprofile(None)
            threading.setprofile(None)  # type: ignore[arg-type]
            sys.argv, os._exit = argv, end
            os.chdir(home)
    return tracer


def _raise_exit(code: int) -> NoReturn:
    raise SystemExit(code)


def print_table(phases: Mapping[str, Phase]) -> None:
    """Print files, functions and switches of each phase, and files that are only imported."""
    print(f"{'phase':<24}{'files':>8}{'functions':>11}{'switches':>10}{'imported only':>15}")
    for name, phase in phases.items():
        print(
            f"{name:<24}{len(phase.files):>8}{len(phase.functions):>11}{phase.switches:>10,}"
            f"{len(phase.imported - phase.files):>15}"
        )


def print_functions(phase: Phase, package: str) -> None:
    """Print each file of a phase with the functions that ran."""
    for file in sorted(phase.files):
        names = sorted({code.co_name for code in phase.functions if code.co_filename == file})
        print(f"{file.removeprefix(package)}: {', '.join(names)}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=f"{__doc__.splitlines()[0]} Other flags are added to those of the run."
    )
    parser.add_argument(
        "--list",
        metavar="PHASE",
        help=f"print the files of a phase with their functions, for example '{STEADY}' or "
        f"'{BEFORE_SECOND_STEP}'",
    )
    options, flags = parser.parse_known_args()
    tracer = trace_run(flags)
    phases = {**tracer.phases, BEFORE_SECOND_STEP: tracer.total_before_second_step()}
    print_table(phases)
    if options.list is None:
        return
    if options.list not in phases:
        parser.error(f"--list {options.list}: no such phase; choose one of {', '.join(phases)}.")
    print_functions(phases[options.list], tracer.package)


if __name__ == "__main__":
    main()
