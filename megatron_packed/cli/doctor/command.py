"""Report whether this machine can train, installed packages and kernels, and commands that help.

The first line is the verdict. Every package is imported. On a GPU, every kernel is run and compared
with its reference. Each check runs in a separate process, so a crash or a hang affects only its own
line. The command reads no data and needs no flags of a run. Exit code 1: an installed package does
not work, a required package is missing, or an unrelated package with a similar name is installed. A
missing or slow optional package is no failure.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import takewhile
from typing import Any

from megatron_packed import __version__
from megatron_packed.cli.command import UsageError, command
from megatron_packed.cli.doctor.findings import (
    ABSENT,
    BROKEN,
    FOUND,
    SLOW,
    WORKS,
    WRONG,
    Sections,
    machine_verdict,
)
from megatron_packed.cli.doctor.machine import machine_findings
from megatron_packed.cli.doctor.supervise import run_probes
from megatron_packed.config.kernel_options import OPTION_OF
from megatron_packed.config.kinds.layer_kind import KINDS
from megatron_packed.config.optional_packages import (
    PACKAGES,
    Package,
    package_of_kernel,
    strangers,
    version_of,
)
from megatron_packed.explain.capability import Capability, row, table

EXIT_PROBLEM = 1
LINE_EVERY = 10.0
"""Seconds between progress lines if standard error is not a terminal."""
FORCED_BY = {op: OPTION_OF[op] for kind in KINDS.values() for op in kind.backends}
"""Option that chooses the kernel of each op of the model."""
ProbeAnswers = dict[str, dict[str, Any]]


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--no-kernels",
        action="store_true",
        help="import the packages, but do not run their kernels",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=600.0,
        metavar="S",
        help="time limit of one check, in seconds; the first call of a kernel compiles it "
        "(default 600)",
    )


@command(
    "doctor",
    "report what works on this machine, and commands that help",
    _add_arguments,
    takes_run_flags=False,
)
def doctor_command(arguments: argparse.Namespace, run_flags: Sequence[str]) -> int:
    if not arguments.timeout > 0:
        raise UsageError(f"--timeout {arguments.timeout}: must be above 0.")
    findings = examine_machine(arguments.timeout, kernels=not arguments.no_kernels)
    verdict = machine_verdict(findings)
    # The verdict has a line for each problem.
    has_problem = len(verdict) > 1
    if arguments.json:
        sections = {name: [row._asdict() for row in rows] for name, rows in findings.items()}
        report = {
            "version": __version__,
            "python": platform.python_version(),
            "ok": not has_problem,
            "verdict": verdict[0],
        }
        print(json.dumps({**report, **sections}))
    else:
        print("\n".join([*verdict, "", *_lines(findings)]))
    return EXIT_PROBLEM if has_problem else 0


def examine_machine(seconds: float, *, kernels: bool = True) -> dict[str, list[Capability]]:
    """Examine packages, kernels and the machine; return the findings by section.

    Args:
        seconds: time limit of one probe.
        kernels: True to run kernels, if there is a GPU.
    """
    begins = _announcer()
    imports = [f"import:{package.module}" for package in PACKAGES]
    answers = run_probes([*imports, "gpu", "kernels"], seconds, begins)
    if kernels and answers["kernels"].get("device") == "cuda":
        answers |= run_probes(_to_run(answers["kernels"]["ops"]), seconds, begins)
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr, flush=True)
    gpus = answers["gpu"].get("findings", [])
    if "error" in answers["gpu"]:
        gpus = [Capability("GPU", BROKEN, answers["gpu"]["error"], "nvidia-smi")]
    return {
        "packages": [*_strangers(), *(_package(package, answers) for package in PACKAGES)],
        "kernels": _kernels(answers),
        "machine": [*gpus, *machine_findings()],
    }


def _announcer() -> Callable[[str], None]:
    """Return a function that shows progress: each running probe on a terminal, otherwise a line
    every `LINE_EVERY` seconds.
    """
    last = time.monotonic()

    def begins(name: str) -> None:
        nonlocal last
        if sys.stderr.isatty():
            print(f"\r\033[K{_activity(name)} ...", end="", file=sys.stderr, flush=True)
        elif time.monotonic() - last >= LINE_EVERY:
            last = time.monotonic()
            print(
                f"Still examining this machine: {_activity(name)} ...", file=sys.stderr, flush=True
            )

    return begins


def _activity(probe: str) -> str:
    """Return what a probe does, in words."""
    kind, _, what = probe.partition(":")
    op, _, backend = what.partition(".")
    return {
        "import": f"importing {what}",
        "gpu": "testing the GPUs",
        "kernels": "choosing kernels",
        "kernel": f"running the kernel {backend} of {op}",
    }[kind]


def _to_run(ops: dict[str, Any]) -> list[str]:
    """Return the probes of all backends that support the probe's inputs, except references."""
    return [
        f"kernel:{op}.{backend}"
        for op, choice in ops.items()
        for backend, reasons in choice["reasons"].items()
        if not reasons and backend not in ("reference", "local")
    ]


def _strangers() -> Iterator[Capability]:
    """Yield findings of unrelated packages that were installed by mistake. An unrelated package
    does no harm if the wanted package is installed too.
    """
    for stranger, version in strangers():
        wanted = stranger.wanted_package and version_of(stranger.wanted_package)
        state, fix = (FOUND, "") if wanted and not stranger.in_the_way else (WRONG, stranger.fix)
        yield Capability(stranger.name, state, stranger.what, fix, version)


def _package(package: Package, answers: ProbeAnswers) -> Capability:
    """Return the finding of a package."""
    answer, kernels = answers[f"import:{package.module}"], answers["kernels"]
    version, old = version_of(package.name), package.too_old()
    choices = [
        (op, backend, kernels["ops"][op])
        for op, _, backend in (name.partition(".") for name in package.kernels)
        if op in kernels.get("ops", {})
    ]
    absent = "absent" in answer
    missing, install = f"not installed; for {package.use}", package.command
    again = f"pip uninstall -y {package.name}; {install}"
    gains = kernels.get("device") == "cuda" and any(
        backend in takewhile(choice["chosen"].__ne__, choice["reasons"])
        for _, backend, choice in choices
    )
    working, failed = _outcomes(package.kernels, answers)
    reasons = [reason for _, name, choice in choices for reason in choice["reasons"].get(name, [])]
    finding = row(
        package.name,
        ("stranger" in answer, WRONG, answer.get("stranger"), "pip uninstall -y apex"),
        (absent and version, BROKEN, f"installed, but it has no module {package.module}", again),
        (absent and package.required, WRONG, missing, install),
        (absent and gains, SLOW, missing, install),
        (absent, ABSENT, missing, "" if package.kernels else install),
        ("error" in answer, BROKEN, answer.get("error"), again),
        (old, WRONG, old, install),
        (failed, BROKEN, "; ".join(failed), again),
        (working, WORKS, f"{', '.join(working)} ran"),
        (True, FOUND, [*reasons, package.use][0]),
    )
    others = (
        f"{op}: {choice['chosen']}" for op, name, choice in choices if choice["chosen"] != name
    )
    found, instead = version or answer.get("version", ""), ", ".join(dict.fromkeys(others))
    return finding._replace(found=found, instead=instead)


def _outcomes(
    kernels: Iterable[str], answers: ProbeAnswers
) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Return the answers of the kernels that worked, and a sentence for each that failed.

    Args:
        kernels: names such as ``ssd.triton``; kernels that did not run are left out.
    """
    ran = {name: answers[f"kernel:{name}"] for name in kernels if f"kernel:{name}" in answers}
    failed = [f"{name}: {answer['error']}" for name, answer in ran.items() if "error" in answer]
    return {name: answer for name, answer in ran.items() if "error" not in answer}, failed


def _kernels(answers: ProbeAnswers) -> list[Capability]:
    """Return a finding for each op: the backend that 'auto' chooses on this machine, and the
    results of the others. A reason that several ops share is given once.
    """
    kernels = answers["kernels"]
    if "error" in kernels:
        fix = next(package.command for package in PACKAGES if package.name == "torch")
        return [Capability("kernels", BROKEN, kernels["error"], fix)]
    findings = []
    first_op: dict[tuple[str, str], str] = {}
    for op, choice in kernels["ops"].items():
        chosen, reasons = choice["chosen"], choice["reasons"]
        working, failed = _outcomes([f"{op}.{name}" for name in reasons], answers)
        healthy = [name.removeprefix(f"{op}.") for name in working]
        texts = [sentence.removeprefix(f"{op}.") for sentence in failed]
        slow = kernels["device"] == "cuda" and chosen == "reference"
        if slow:
            texts.append(choice.get("cost", "").removeprefix(", "))
        texts += (
            f"{name} ran in {answer['seconds']:.1f} s, relative difference to the reference {answer['difference']:.1e}"
            for name, answer in zip(healthy, working.values())
        )
        texts += _refusals(op, reasons, answers, first_op)
        instead = (healthy or ["reference"])[0] if failed and chosen not in healthy else ""
        forced = instead and op in FORCED_BY
        fix = f"pretrain_hybrid.py {FORCED_BY[op]} {instead} ..." if forced else ""
        state = row(op, (failed, BROKEN), (slow, SLOW), (healthy, WORKS), (True, FOUND)).state
        findings.append(Capability(op, state, " | ".join(texts), fix, chosen, instead))
    return findings


def _refusals(
    op: str,
    reasons: dict[str, list[str]],
    answers: ProbeAnswers,
    first_op: dict[tuple[str, str], str],
) -> Iterator[str]:
    """Yield the reasons against the backends of an op, one text for each backend.

    Args:
        first_op: op that gave a reason of a backend first; extended. Later ops refer to it.
    """
    for name, whys in reasons.items():
        package = package_of_kernel(op, name)
        # The line of a missing package in PACKAGES is enough.
        if whys and not (package and "absent" in answers[f"import:{package.module}"]):
            firsts = [(why, first_op.setdefault((name, why), op)) for why in whys]
            texts = (why if first == op else f"as for {first}" for why, first in firsts)
            yield f"{name}: {'; '.join(dict.fromkeys(texts))}"


def _lines(findings: Sections) -> list[str]:
    lines = [
        f"megatron_packed {__version__}, Python {platform.python_version()}, {platform.platform()}"
    ]
    for title, section in findings.items():
        without = " (without backends of packages that are not installed)" * (title == "kernels")
        lines += ["", f"{title.upper()}{without}", *table(section)]
    return lines
