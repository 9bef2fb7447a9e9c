"""Findings about this machine's GPUs, obtained with torch. The checks run in the process of the
probes, because a driver may hang or crash.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from megatron_packed.cli.doctor.findings import Finding, State

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


def gpu_findings() -> Iterator[Finding]:
    """Yield findings about torch's CUDA, NCCL, page-locked memory, and every GPU with its clocks."""
    built = torch.version.cuda
    if built is None:
        yield Finding(
            "CUDA",
            State.ABSENT,
            detail=f"torch {torch.__version__} is built for CPUs only",
            instead="the CPU",
        )
        return
    if not torch.cuda.is_available():
        yield Finding(
            "CUDA",
            State.SLOW,
            built,
            instead="the CPU",
            detail="torch sees no GPU: there is none, or its driver is too old for this version "
            "of CUDA",
            fix="nvidia-smi",
        )
        return
    yield Finding("CUDA", State.WORKS, built)
    yield _cudnn()
    yield _nccl()
    for number in range(torch.cuda.device_count()):
        yield _gpu(number)
    yield _pinned()


def _cudnn() -> Finding:
    try:
        version = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    except (
        RuntimeError
    ) as error:  # torch loaded another cuDNN than the version for which it was built
        return Finding(
            "cuDNN",
            State.SLOW,
            instead="kernels of other packages",
            detail="torch refuses this version, so its own convolutions fail: "
            f"{str(error).splitlines()[0]}",
            fix="unset LD_LIBRARY_PATH",
        )
    return Finding("cuDNN", State.FOUND, str(version))


def _nccl() -> Finding:
    if not torch.distributed.is_nccl_available():
        return Finding(
            "NCCL",
            State.SLOW,
            detail="torch is built without NCCL",
            instead="one GPU, or gloo",
        )
    version = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return Finding("NCCL", State.FOUND, version)


def _gpu(number: int) -> Finding:
    properties = torch.cuda.get_device_properties(number)
    name = f"GPU {number}"
    size = f"{properties.total_memory / 2**30:.0f} GiB, capability {properties.major}.{properties.minor}"
    properties_text = f"{properties.name}, {size}"
    try:
        value = torch.ones(1024, device=f"cuda:{number}").sum().item()
    except RuntimeError as error:
        text = str(error).splitlines()[0]
        return Finding(
            name,
            State.BROKEN,
            properties_text,
            detail=f"adding numbers on the GPU fails: {text}",
            fix="nvidia-smi -q -d ECC,ROW_REMAPPER,PAGE_RETIREMENT",
        )
    if value != 1024:
        return Finding(
            name,
            State.BROKEN,
            properties_text,
            detail=f"1,024 ones add up to {value}",
            fix="nvidia-smi -q -d ECC,ROW_REMAPPER,PAGE_RETIREMENT",
        )
    clocks, slowed = _clocks(properties)
    return Finding(name, State.SLOW if slowed else State.WORKS, properties_text, detail=clocks)


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


def _pinned() -> Finding:
    name = "page-locked memory"
    try:
        torch.empty(PINNED, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        return Finding(
            name,
            State.BROKEN,
            detail=f"{PINNED >> 20} MiB cannot be allocated: {str(error).splitlines()[0]}",
            fix="ulimit -l unlimited",
        )
    return Finding(name, State.WORKS, detail=f"{PINNED >> 20} MiB were allocated")
