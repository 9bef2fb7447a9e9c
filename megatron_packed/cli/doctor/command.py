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
from functools import partial
from typing import Any

from megatron_packed import __version__
from megatron_packed.cli.command import UsageError, command
from megatron_packed.cli.doctor.findings import Finding, State, machine_verdict, problem_findings
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
from megatron_packed.explain.terminal_lines import beside

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
    sentences, problems = machine_verdict(findings), problem_findings(findings)
    if arguments.json:
        sections = {
            name: [finding.as_dict() for finding in section] for name, section in findings.items()
        }
        print(
            json.dumps(
                {
                    "version": __version__,
                    "python": platform.python_version(),
                    "ok": not problems,
                    "verdict": sentences[0],
                    **sections,
                }
            )
        )
    else:
        print("\n".join([*sentences, "", *_lines(findings)]))
    return EXIT_PROBLEM if problems else 0


def examine_machine(seconds: float, *, kernels: bool = True) -> dict[str, list[Finding]]:
    """Examine packages, kernels and the machine; return the findings by section.

    Args:
        seconds: time limit of one probe.
        kernels: True to run kernels, if there is a GPU.
    """
    begins = _announcer()
    imports = [f"import:{package.module}" for package in PACKAGES]
    answers = run_probes([*imports, "gpu", "kernels"], seconds, begins)
    chosen = answers["kernels"].get("ops", {})
    on_gpu = answers["kernels"].get("device") == "cuda"
    if kernels and on_gpu:
        answers |= run_probes(_to_run(chosen), seconds, begins)
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr, flush=True)
    gpu = [
        Finding(**{**fields, "state": State(fields["state"])})
        for fields in answers["gpu"].get("findings", [])
    ]
    if "error" in answers["gpu"]:
        gpu.append(
            Finding(
                "GPU",
                State.BROKEN,
                detail=answers["gpu"]["error"],
                fix="nvidia-smi",
            )
        )
    return {
        "packages": [
            *_strangers(),
            *(_package(package, answers, on_gpu) for package in PACKAGES),
        ],
        "kernels": _kernels(answers),
        "machine": [*gpu, *machine_findings()],
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


def _strangers() -> list[Finding]:
    """Return findings of unrelated packages that were installed by mistake. An unrelated package
    does no harm if the wanted package is installed too.
    """
    findings = []
    for stranger, version in strangers():
        wanted = next((each for each in PACKAGES if each.name == stranger.wanted_package), None)
        beside = (
            wanted is not None and not stranger.in_the_way and version_of(wanted.name) is not None
        )
        findings.append(
            Finding(
                stranger.name,
                State.FOUND if beside else State.WRONG,
                version,
                detail=stranger.what,
                fix="" if beside else stranger.fix,
            )
        )
    return findings


def _package(package: Package, answers: ProbeAnswers, on_gpu: bool) -> Finding:
    answer = answers[f"import:{package.module}"]
    version = version_of(package.name) or answer.get("version", "")
    finding = partial(Finding, package.name, found=version, instead=_instead(package, answers))
    if "stranger" in answer:
        return finding(State.WRONG, detail=answer["stranger"], fix="pip uninstall -y apex")
    again = f"pip uninstall -y {package.name}; {package.command}"
    if "absent" in answer:
        if version_of(package.name) is not None:
            detail = f"installed, but it has no module {package.module}"
            return finding(State.BROKEN, detail=detail, fix=again)
        state = State.WRONG if package.required else State.ABSENT
        wanted = on_gpu and _gains(package, answers)
        if wanted and state is State.ABSENT:
            state = State.SLOW
        fix = package.command if package.required or wanted or not package.kernels else ""
        return finding(state, detail=f"not installed; for {package.use}", fix=fix)
    if "error" in answer:
        return finding(State.BROKEN, detail=answer["error"], fix=again)
    if old := package.too_old():
        return finding(State.WRONG, detail=old, fix=package.command)
    working, failed = _outcomes(package.kernels, answers)
    if failed:
        return finding(State.BROKEN, detail="; ".join(failed), fix=again)
    if working:
        return finding(State.WORKS, detail=f"{', '.join(working)} ran")
    return finding(State.FOUND, detail=[*_reasons(package, answers), package.use][0])


def _choices(package: Package, answers: ProbeAnswers) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield op, backend and the op's choice on this machine, for each kernel of a package."""
    choices = answers["kernels"].get("ops", {})
    for op, _, backend in (name.partition(".") for name in package.kernels):
        if op in choices:
            yield op, backend, choices[op]


def _reasons(package: Package, answers: ProbeAnswers) -> list[str]:
    """Return the reasons why the kernels of a package cannot be used on this machine."""
    of_backends = (
        choice["reasons"].get(backend, []) for _, backend, choice in _choices(package, answers)
    )
    return [reason for reasons in of_backends for reason in reasons]


def _instead(package: Package, answers: ProbeAnswers) -> str:
    """Return the backends that ops choose instead of the package's backends, each op once."""
    others = (
        f"{op}: {choice['chosen']}"
        for op, backend, choice in _choices(package, answers)
        if choice["chosen"] != backend
    )
    return ", ".join(dict.fromkeys(others))


def _gains(package: Package, answers: ProbeAnswers) -> bool:
    """Return whether a backend of the package has a higher priority than the backend that an op
    chooses now.
    """
    for _, backend, choice in _choices(package, answers):
        names = list(choice["reasons"])
        if backend in names and names.index(backend) < names.index(choice["chosen"]):
            return True
    return False


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


def _kernels(answers: ProbeAnswers) -> list[Finding]:
    """Return a finding for each op: the backend that 'auto' chooses on this machine, and the
    results of the others. A reason that several ops share is given once.
    """
    if "error" in answers["kernels"]:
        fix = next(package.command for package in PACKAGES if package.name == "torch")
        return [Finding("kernels", State.BROKEN, detail=answers["kernels"]["error"], fix=fix)]
    findings = []
    first_op: dict[tuple[str, str], str] = {}
    for op, choice in answers["kernels"].get("ops", {}).items():
        chosen, reasons = choice["chosen"], choice["reasons"]
        working, failed = _outcomes([f"{op}.{name}" for name in reasons], answers)
        healthy = [name.removeprefix(f"{op}.") for name in working]
        failed = [sentence.removeprefix(f"{op}.") for sentence in failed]
        times = [
            f"{name} ran in {answer['seconds']:.1f} s, relative difference to the reference {answer['difference']:.1e}"
            for name, answer in zip(healthy, working.values())
        ]
        refused = _refusals(op, reasons, answers, first_op)
        slow = answers["kernels"]["device"] == "cuda" and chosen == "reference"
        cost = [choice.get("cost", "").removeprefix(", ")] if slow else []
        if failed:
            state = State.BROKEN
        elif slow:
            state = State.SLOW
        else:
            state = State.WORKS if healthy else State.FOUND
        instead = (healthy or ["reference"])[0] if failed and chosen not in healthy else ""
        fix = (
            f"pretrain_hybrid.py {FORCED_BY[op]} {instead} ..."
            if instead and op in FORCED_BY
            else ""
        )
        findings.append(
            Finding(
                op,
                state,
                chosen,
                detail=" | ".join([*failed, *cost, *times, *refused]),
                instead=instead,
                fix=fix,
            )
        )
    return findings


def _refusals(
    op: str,
    reasons: dict[str, list[str]],
    answers: ProbeAnswers,
    first_op: dict[tuple[str, str], str],
) -> list[str]:
    """Return the reasons against the backends of an op, one text for each backend.

    Args:
        first_op: op that gave a reason of a backend first; extended. Later ops refer to it.
    """
    refused = []
    for name, whys in reasons.items():
        package = package_of_kernel(op, name)
        # The line of a missing package in PACKAGES is enough.
        if not whys or (package and "absent" in answers[f"import:{package.module}"]):
            continue
        firsts = [(why, first_op.setdefault((name, why), op)) for why in whys]
        texts = [why if first == op else f"as for {first}" for why, first in firsts]
        refused.append(f"{name}: {'; '.join(dict.fromkeys(texts))}")
    return refused


def _lines(findings: dict[str, list[Finding]]) -> list[str]:
    lines = [
        f"megatron_packed {__version__}, Python {platform.python_version()}, {platform.platform()}"
    ]
    for title, section in findings.items():
        without = " (without backends of packages that are not installed)" * (title == "kernels")
        lines += ["", f"{title.upper()}{without}"]
        width = max(len(finding.name) for finding in section)
        value = min(max(len(finding.found) for finding in section), 24)
        for finding in section:
            texts = [finding.detail, f"used instead: {finding.instead}" if finding.instead else ""]
            text = ". ".join(text for text in texts if text)
            head = f"{finding.name.ljust(width)}  {finding.state.value.ljust(6)}  {finding.found.ljust(value)}  "
            lines += beside(head, text)
            if finding.fix:
                lines.append(f"{' ' * len(head)}fix: {finding.fix}")
    return lines
