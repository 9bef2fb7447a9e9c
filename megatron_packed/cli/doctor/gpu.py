"""Findings of torch about this machine's GPUs; runs in the process of the probes, since a driver may
hang or crash.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from megatron_packed.cli.doctor.findings import Finding, State

PINNED = 2**28
"""Bytes of page-locked memory that are tried: a loader and offload to the host take more."""
_THROTTLES = {
    0x8: "the hardware",
    0x20: "its temperature",
    0x40: "its temperature",
    0x80: "a power brake",
}
"""Bits of NVML's reasons for lower clocks that are no rest and no usual power cap."""


def gpu_findings() -> Iterator[Finding]:
    """CUDA of torch, every GPU with its clocks, NCCL, and page-locked memory."""
    built = torch.version.cuda
    if built is None:
        yield Finding(
            name="CUDA",
            state=State.ABSENT,
            detail=f"torch {torch.__version__} is a build for CPUs",
            instead="the CPU",
        )
        return
    if not torch.cuda.is_available():
        yield Finding(
            name="CUDA",
            state=State.SLOW,
            found=built,
            instead="the CPU",
            detail="torch sees no GPU: there is none, or its driver is too old for this CUDA",
            fix="nvidia-smi",
        )
        return
    yield Finding(name="CUDA", state=State.WORKS, found=built)
    yield _cudnn()
    yield _nccl()
    for number in range(torch.cuda.device_count()):
        yield _gpu(number)
    yield _pinned()


def _cudnn() -> Finding:
    try:
        version = torch.backends.cudnn.version()
    except RuntimeError as error:  # another one lies in front of the one that torch was built with
        return Finding(
            name="cuDNN",
            state=State.SLOW,
            instead="kernels that are not torch's",
            detail=f"torch refuses it, and with it its own convolutions: {str(error).splitlines()[0]}",
            fix="unset LD_LIBRARY_PATH",
        )
    return Finding(name="cuDNN", state=State.FOUND, found=str(version))


def _nccl() -> Finding:
    if not torch.distributed.is_nccl_available():
        return Finding(
            name="NCCL",
            state=State.SLOW,
            detail="torch was built without it",
            instead="one GPU, or gloo",
        )
    version = ".".join(map(str, torch.cuda.nccl.version()))
    return Finding(name="NCCL", state=State.FOUND, found=version)


def _gpu(number: int) -> Finding:
    properties = torch.cuda.get_device_properties(number)
    name = f"GPU {number}"
    size = f"{properties.total_memory / 2**30:.0f} GiB, capability {properties.major}.{properties.minor}"
    found = f"{properties.name}, {size}"
    try:
        value = torch.ones(1024, device=f"cuda:{number}").sum().item()
    except RuntimeError as error:
        text = str(error).splitlines()[0]
        return Finding(
            name=name,
            state=State.BROKEN,
            found=found,
            detail=f"adding numbers fails: {text}",
            fix="nvidia-smi -q -d ECC,ROW_REMAPPER,PAGE_RETIREMENT",
        )
    if value != 1024:
        return Finding(
            name=name,
            state=State.BROKEN,
            found=found,
            detail=f"1,024 ones add up to {value}",
            fix="nvidia-smi -q -d ECC,ROW_REMAPPER,PAGE_RETIREMENT",
        )
    clocks, slowed = _clocks(properties)
    return Finding(
        name=name, state=State.SLOW if slowed else State.WORKS, found=found, detail=clocks
    )


def _clocks(properties: object) -> tuple[str, bool]:
    """Clocks in words by NVML, and whether something holds them down."""
    try:
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{properties.uuid}")  # type: ignore[attr-defined]
        now, most = (
            read(handle, pynvml.NVML_CLOCK_SM)
            for read in (pynvml.nvmlDeviceGetClockInfo, pynvml.nvmlDeviceGetMaxClockInfo)
        )
        bits = pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
    except ImportError:
        return "its clocks are read with nvidia-ml-py", False
    except Exception as error:  # a part of a GPU, or a container without NVML
        return f"its clocks cannot be read: {error}", False
    reasons = sorted({reason for bit, reason in _THROTTLES.items() if bits & bit})
    slowed = f", held down by {' and '.join(reasons)}" if reasons else ""
    return f"clock {now} of {most} MHz{slowed}", bool(reasons)


def _pinned() -> Finding:
    name = "page-locked memory"
    try:
        torch.empty(PINNED, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        return Finding(
            name=name,
            state=State.BROKEN,
            detail=f"{PINNED >> 20} MiB cannot be had: {str(error).splitlines()[0]}",
            fix="ulimit -l unlimited",
        )
    return Finding(name=name, state=State.WORKS, detail=f"{PINNED >> 20} MiB were had")
