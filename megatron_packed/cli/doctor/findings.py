"""Findings of ``megatron-packed doctor``, one per line of its report, and the verdict about them.

Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass
from enum import Enum
from typing import Any

from megatron_packed.config.optional_packages import PACKAGES


class State(str, Enum):
    """Verdict of a finding."""

    WORKS = "works"
    """Installed, and everything that could be tested on this machine works."""
    FOUND = "found"
    """Installed and imported; nothing more can be tested on this machine."""
    ABSENT = "absent"
    """Not installed, but not required: something else is used instead."""
    SLOW = "slower"
    """Something slower is used instead, or a limit of the machine will slow runs down."""
    BROKEN = "broken"
    """Installed, but fails. Counts as a problem."""
    WRONG = "wrong"
    """An unrelated package with a similar name is installed, a package is too old, or a required
    package is missing. Counts as a problem.
    """

    @property
    def problem(self) -> bool:
        """Return whether the state counts as a problem, which sets the exit code to 1."""
        return self in (State.BROKEN, State.WRONG)


@dataclass(frozen=True)
class Finding:
    """Line of the report."""

    name: str
    state: State
    found: str = ""
    """Version or value."""
    _: KW_ONLY
    detail: str = ""
    """Observation, as a sentence without its full stop."""
    instead: str = ""
    """Replacement that is used instead."""
    fix: str = ""
    """Command that fixes or improves the state; empty if it would gain nothing."""

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "state": self.state.value}


Sections = Mapping[str, Sequence[Finding]]
_REQUIRED = {package.name for package in PACKAGES if package.required}


def problem_findings(sections: Sections) -> list[Finding]:
    return [
        finding for section in sections.values() for finding in section if finding.state.problem
    ]


def machine_verdict(sections: Sections) -> list[str]:
    """Return one line that says whether this machine can train, then a line for each problem."""
    problems = problem_findings(sections)
    return [
        _can_train(sections, problems),
        *(
            f"  {finding.name}: {finding.detail or finding.state.value}{f' -> {finding.fix}' if finding.fix else ''}"
            for finding in problems
        ),
    ]


def _can_train(sections: Sections, problems: Sequence[Finding]) -> str:
    missing = [finding for finding in problems if finding.name in _REQUIRED]
    if missing:
        names, fix = ", ".join(finding.name for finding in missing), missing[0].fix
        verb = "is" if len(missing) == 1 else "are"
        return f"Not ready for training: {names} {verb} missing or broken; run {fix}"
    where, why = _device(sections)
    slow = [finding.name for finding in sections["kernels"] if finding.state is State.SLOW]
    text = f"Ready for training on {where}"
    if problems:
        noun = "problem" if len(problems) == 1 else "problems"
        text += f", with {len(problems)} {noun}{why}"
    elif slow:
        text += f", but {', '.join(slow)} would run slow reference kernels; see KERNELS"
    else:
        text += f"{why}; no installed package is broken"
    return text + (":" if problems else ".")


def _device(sections: Sections) -> tuple[str, str]:
    """Return the device of a training, and why a machine has no GPU for it."""
    machine = sections["machine"]
    gpus = [finding for finding in machine if finding.name.startswith("GPU ")]
    sound = [finding for finding in gpus if not finding.state.problem]
    if sound:
        kind = sound[0].found.partition(",")[0]
        return f"{len(sound)} GPU{'s' if len(sound) > 1 else ''} ({kind})", ""
    if gpus:
        return "the CPU only", " (no GPU works)"
    reasons = [
        finding.detail for finding in machine if finding.name in ("CUDA", "GPU") and finding.detail
    ]
    return "the CPU only", f" ({reasons[0].partition(':')[0]})" if reasons else ""
