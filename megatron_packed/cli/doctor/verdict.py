"""Verdict of ``megatron-packed doctor``: can this machine train, and on what? Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megatron_packed.cli.doctor.findings import Finding, State
from megatron_packed.config.optional_packages import PACKAGES

Sections = Mapping[str, Sequence[Finding]]
_REQUIRED = {package.name for package in PACKAGES if package.required}


def problems_of(sections: Sections) -> list[Finding]:
    return [one for section in sections.values() for one in section if one.state.problem]


def verdict(sections: Sections) -> list[str]:
    """Return one line that says whether this machine can train, then a line for each problem."""
    problems = problems_of(sections)
    return [
        _can_train(sections, problems),
        *(
            f"  {one.name}: {one.detail or one.state.value}{f' -> {one.fix}' if one.fix else ''}"
            for one in problems
        ),
    ]


def _can_train(sections: Sections, problems: Sequence[Finding]) -> str:
    missing = [one for one in problems if one.name in _REQUIRED]
    if missing:
        names, fix = ", ".join(one.name for one in missing), missing[0].fix
        verb = "is" if len(missing) == 1 else "are"
        return f"Not ready for training: {names} {verb} missing or broken; run {fix}"
    where, why = _device(sections)
    slow = [one.name for one in sections["kernels"] if one.state is State.SLOW]
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
    gpus = [one for one in machine if one.name.startswith("GPU ")]
    sound = [one for one in gpus if not one.state.problem]
    if sound:
        kind = sound[0].found.partition(",")[0]
        return f"{len(sound)} GPU{'s' if len(sound) > 1 else ''} ({kind})", ""
    if gpus:
        return "the CPU only", " (no GPU works)"
    reasons = [one.detail for one in machine if one.name in ("CUDA", "GPU") and one.detail]
    return "the CPU only", f" ({reasons[0].partition(':')[0]})" if reasons else ""
