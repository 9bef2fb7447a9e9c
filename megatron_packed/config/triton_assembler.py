"""Choice of the ptxas that makes Triton's machine code.

ptxas 12.8 takes a wrong register for the address of a product in some kernels. It is in the packages of
Triton 3.4 to 3.7, which use it for all GPUs before Blackwell. For Blackwell, Triton 3.6 and 3.7 have a
second, newer ptxas, which supports the other GPUs too. Triton 3.9 uses it for Hopper.
"""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from megatron_packed.config.kernel_options import may_have_gpu

RIGHT_PTXAS = (12, 9)
"""First version without the fault."""


@cache
def assembler_variables() -> dict[str, str]:
    """Return ``TRITON_PTXAS_PATH`` if Triton has an old ptxas, and a right one that the driver supports."""
    triton = find_spec("triton")
    if triton is None or triton.origin is None or not may_have_gpu(os.environ):
        return {}
    folder = Path(triton.origin).parent / "backends" / "nvidia" / "bin"
    usual, second = _version(folder / "ptxas"), _version(folder / "ptxas-blackwell")
    if usual is None or second is None or usual >= RIGHT_PTXAS or second < RIGHT_PTXAS:
        return {}
    # A driver may refuse machine code of a later major version of CUDA.
    if second[0] > _driver_version() // 1000:
        return {}
    return {"TRITON_PTXAS_PATH": str(folder / "ptxas-blackwell")}


def _version(ptxas: Path) -> tuple[int, int] | None:
    """Return the version, such as (12, 8); None if the file does not say it."""
    try:
        text = subprocess.run(
            [ptxas, "--version"], capture_output=True, text=True, check=True, timeout=60
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    release = re.search(r"release (\d+)\.(\d+)", text)
    return (int(release[1]), int(release[2])) if release else None


def _driver_version() -> int:
    """Return the latest version of CUDA that the driver supports, such as 12080; 0 if unknown."""
    version = ctypes.c_int()
    failed = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    return 0 if failed else version.value
