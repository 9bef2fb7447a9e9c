"""Fine-tune small models like published ones, export them, and compare the answers of transformers.

Each model is converted, trained for 40 steps by two processes, and exported with ``--hf-base``.
transformers answers with the exported template and the ends of generation_config.json.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import transformers

import common  # noqa: F401  paths of helpers
from support.served_models import MODELS, TEMPLATES, check

NEAR_TIE = 2.0**-6
"""Largest relative difference of two logits that bf16 may exchange: some roundings of 2^-9."""


def main(names: Sequence[str], templates: Sequence[str], precisions: Sequence[bool]) -> int:
    """Return the exit code."""
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    cases = [(a, b, c) for a in names for b in templates for c in precisions]
    good = 0
    for name, template, bf16 in cases:
        with tempfile.TemporaryDirectory() as folder:
            found = check(name, template, Path(folder), bf16=bf16)
        agrees = found.gap <= (NEAR_TIE if bf16 else 0.0) and found.stopped
        good += agrees
        equal = sum(mine == other for mine, other in zip(found.ours, found.theirs, strict=True))
        print(
            f"{name}, template {template}, {'bf16' if bf16 else 'float32'}: {equal} of {len(found.ours)} answers "
            f"equal, largest near-tie {found.gap:.1e}, {'all stop' if found.stopped else 'not all stop'}"
            + ("" if agrees else ": FAILED"),
            flush=True,
        )
    print(f"{good} of {len(cases)} models agree")
    return int(good != len(cases))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", action="append", choices=MODELS, help="may be repeated")
    parser.add_argument("--template", action="append", choices=TEMPLATES, help="may be repeated")
    parser.add_argument("--float32-only", action="store_true")
    given = parser.parse_args()
    sys.exit(
        main(
            given.model or list(MODELS),
            given.template or list(TEMPLATES),
            (False,) if given.float32_only else (False, True),
        )
    )
