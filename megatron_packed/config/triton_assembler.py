"""Choice of the ptxas that makes Triton's machine code.

ptxas 12.8 takes a wrong register for the address of a product in some kernels. Triton 3.4 to 3.7 use it
for Hopper and older GPUs. Triton 3.6 also has ptxas 12.9, for Blackwell, which supports those GPUs too.
"""

from __future__ import annotations

import os
import re
import subprocess
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from megatron_packed.config.kernel_options import may_have_gpu

RIGHT_PTXAS = (12, 9)
"""First version without the fault. The ptxas 13.1 of Triton 3.7 is not chosen, because it was not tried."""


@cache
def assembler_variables() -> dict[str, str]:
    """Return ``TRITON_PTXAS_PATH`` if Triton has an old ptxas and ptxas 12.9; else nothing."""
    folder = _folder()
    if folder is None or not may_have_gpu(os.environ):
        return {}
    usual, second = folder / "ptxas", folder / "ptxas-blackwell"
    version = _version(usual)
    if version is None or version >= RIGHT_PTXAS or _version(second) != RIGHT_PTXAS:
        return {}
    return {"TRITON_PTXAS_PATH": str(second)}


def _folder() -> Path | None:
    """Return the folder of Triton's programs; None without Triton, which is not imported."""
    try:
        triton = find_spec("triton")
    except ValueError:  # a module without a specification has this name
        return None
    if triton is None or triton.origin is None:
        return None
    return Path(triton.origin).parent / "backends" / "nvidia" / "bin"


def _version(ptxas: Path) -> tuple[int, int] | None:
    """Return the version, such as (12, 8); None if the program does not say it."""
    command = [str(ptxas), "--version"]
    try:
        run = subprocess.run(
            command, capture_output=True, text=True, errors="replace", check=True, timeout=60
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return release_of(run.stdout)


def release_of(text: str) -> tuple[int, int] | None:
    """Return the version in the output of ``ptxas --version``; None if it has none."""
    release = re.search(r"release (\d+)\.(\d+)", text)
    return (int(release[1]), int(release[2])) if release else None
