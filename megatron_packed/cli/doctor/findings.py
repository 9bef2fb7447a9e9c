"""States of what ``megatron-packed doctor`` finds, and the verdict about this machine.

Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megatron_packed.config.optional_packages import PACKAGES
from megatron_packed.explain.capability import Capability

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
"""An unrelated package with a similar name is installed, a package is too old, or a required package
is missing. Counts as a problem.
"""

Sections = Mapping[str, Sequence[Capability]]
_REQUIRED = {package.name for package in PACKAGES if package.required}


def is_problem(row: Capability) -> bool:
    """Return whether the state counts as a problem, which sets the exit code to 1."""
    return row.state in (BROKEN, WRONG)


def machine_verdict(sections: Sections) -> list[str]:
    """Return one line that says whether this machine can train, then a line for each problem."""
    problems = [row for section in sections.values() for row in section if is_problem(row)]
    lines = [f"  {row.name}: {row.detail}" + (row.fix and f" -> {row.fix}") for row in problems]
    return [_can_train(sections, problems), *lines]


def _can_train(sections: Sections, problems: Sequence[Capability]) -> str:
    missing = [row for row in problems if row.name in _REQUIRED]
    if missing:
        names, fix = ", ".join(row.name for row in missing), missing[0].fix
        verb = "is" if len(missing) == 1 else "are"
        return f"Not ready for training: {names} {verb} missing or broken; run {fix}"
    where, why = _device(sections)
    slow = [row.name for row in sections["kernels"] if row.state == SLOW]
    text = f"Ready for training on {where}"
    if problems:
        noun = "problem" if len(problems) == 1 else "problems"
        return f"{text}, with {len(problems)} {noun}{why}:"
    if slow:
        return f"{text}, but {', '.join(slow)} would run slow reference kernels; see KERNELS."
    return f"{text}{why}; no installed package is broken."


def _device(sections: Sections) -> tuple[str, str]:
    """Return the device of a training, and why a machine has no GPU for it."""
    machine = sections["machine"]
    gpus = [row for row in machine if row.name.startswith("GPU ")]
    sound = [row for row in gpus if not is_problem(row)]
    if sound:
        kind = sound[0].found.partition(",")[0]
        return f"{len(sound)} GPU{'s' if len(sound) > 1 else ''} ({kind})", ""
    reasons = ["no GPU works"] if gpus else []
    reasons += [row.detail for row in machine if row.name in ("CUDA", "GPU") and row.detail]
    return "the CPU only", f" ({reasons[0].partition(':')[0]})" if reasons else ""
