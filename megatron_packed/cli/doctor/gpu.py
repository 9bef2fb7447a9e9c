"""Findings about this machine's GPUs, obtained with torch. The checks run in the process of the
probes, because a driver may hang or crash.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from megatron_packed.cli.doctor.findings import ABSENT, BROKEN, FOUND, SLOW, WORKS
from megatron_packed.explain.capability import Capability

PINNED = 2**28
"""Bytes of page-locked memory to allocate as a test; the data loader and offload to the host need
more.
"""
_THROTTLES = {
    0x8: "the hardware",
    0x20: "its temperature",
    0x40: "its temperature",
    0x80: "a power brake",
}
"""NVML's reasons for lower clocks that show a problem: neither an idle GPU nor the usual power cap.
"""


def gpu_findings() -> Iterator[Capability]:
    """Yield findings about torch's CUDA, NCCL, page-locked memory, and every GPU with its clocks."""
    name, built = "CUDA", torch.version.cuda
    if built is None:
        detail = f"torch {torch.__version__} is built for CPUs only"
        yield Capability(name, ABSENT, detail, instead="the CPU")
    elif not torch.cuda.is_available():
        detail = (
            "torch sees no GPU: there is none, or its driver is too old for this version of CUDA"
        )
        yield Capability(name, SLOW, detail, "nvidia-smi", built, "the CPU")
    else:
        yield Capability(name, WORKS, found=built)
        yield _cudnn()
        yield _nccl()
        yield from map(_gpu, range(torch.cuda.device_count()))
        yield _pinned()


def _cudnn() -> Capability:
    try:
        version = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    except RuntimeError as error:  # torch loaded another cuDNN than that for which it was built
        detail = f"torch refuses this version, so its own convolutions fail: {_first_line(error)}"
        fix, instead = "unset LD_LIBRARY_PATH", "kernels of other packages"
        return Capability("cuDNN", SLOW, detail, fix, instead=instead)
    return Capability("cuDNN", FOUND, found=str(version))


def _nccl() -> Capability:
    if not torch.distributed.is_nccl_available():
        return Capability("NCCL", SLOW, "torch is built without NCCL", instead="one GPU, or gloo")
    version = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return Capability("NCCL", FOUND, found=version)


def _gpu(number: int) -> Capability:
    properties = torch.cuda.get_device_properties(number)
    name = f"GPU {number}"
    size = f"{properties.total_memory / 2**30:.0f} GiB, capability {properties.major}.{properties.minor}"
    found = f"{properties.name}, {size}"
    try:
        value = torch.ones(1024, device=f"cuda:{number}").sum().item()
        fault = "" if value == 1024 else f"1,024 ones add up to {value}"
    except RuntimeError as error:
        fault = f"adding numbers on the GPU fails: {_first_line(error)}"
    if fault:
        fix = "nvidia-smi -q -d ECC,ROW_REMAPPER,PAGE_RETIREMENT"
        return Capability(name, BROKEN, fault, fix, found)
    clocks, slowed = _clocks(properties)
    return Capability(name, SLOW if slowed else WORKS, clocks, found=found)


def _clocks(properties: object) -> tuple[str, bool]:
    """Return the GPU's clocks as text, read with NVML, and whether a problem lowers them."""
    try:
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{properties.uuid}")  # type: ignore[attr-defined]
        clock, most = (
            read(handle, pynvml.NVML_CLOCK_SM)
            for read in (pynvml.nvmlDeviceGetClockInfo, pynvml.nvmlDeviceGetMaxClockInfo)
        )
        bits = pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
    except ImportError:
        return "nvidia-ml-py is needed to read its clocks", False
    except Exception as error:  # for example in a MIG slice, or in a container without NVML
        return f"its clocks cannot be read: {error}", False
    reasons = sorted({reason for bit, reason in _THROTTLES.items() if bits & bit})
    slowed = f", lowered by {' and '.join(reasons)}" if reasons else ""
    return f"clock {clock} of {most} MHz{slowed}", bool(reasons)


def _pinned() -> Capability:
    name, size = "page-locked memory", f"{PINNED >> 20} MiB"
    try:
        torch.empty(PINNED, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        detail = f"{size} cannot be allocated: {_first_line(error)}"
        return Capability(name, BROKEN, detail, "ulimit -l unlimited")
    return Capability(name, WORKS, f"{size} were allocated")


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]
