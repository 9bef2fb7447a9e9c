"""Checks of kernels that options request, and of the GPU, package or layer that they need.

The ops themselves check sizes and dtypes after the start (`explain.kernel_reasons`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

from megatron_packed.config.errors import Problem, Problems
from megatron_packed.config.kinds.layer_kind import KINDS
from megatron_packed.config.optional_packages import is_installed, package_of_kernel
from megatron_packed.config.section import Sound

if TYPE_CHECKING:
    from megatron_packed.config.run import RunConfig


OPTION_OF = {
    **{op: f"--{name.replace('_', '-')}" for op, name in KINDS.backends.items()},
    "adamw": "--optimizer-backend",
    "layers": "--transformer-impl",
}
"""Option that chooses the kernel of each op."""

ON_ANY_DEVICE = ("reference", "sdpa", "torch", "local")
"""Backends that need no GPU; all other backends that an option can request need one."""
PLAIN = ("reference", "sdpa")
"""Backends that an option can request and that have no fast kernel."""

_KEYS = (
    *(f"training.{name}" for name in KINDS.backends.values()),
    "training.transformer_impl",
    "optim.optimizer_backend",
    "model.hybrid_layer_pattern",
    "parallel.cp_comm_type",
    "parallel.cp_partition_mode",
    "parallel.context_parallel_size",
    "training.device",
)


class NamedKernel(NamedTuple):
    """Kernel that an option requests for an op that the run uses."""

    op: str
    value: str

    @property
    def option(self) -> str:
        """Flag that requests the kernel."""
        return OPTION_OF[self.op]

    @property
    def cure(self) -> str:
        """Setting that trains without the kernel, as a cure."""
        return "give local, which computes the same" if self.op == "layers" else "leave it out"

    def problem(self, rule: str, cure: str = "", *, node_dependent: bool = False) -> Problem:
        """Return a problem of the request; the usual cure is `cure`."""
        return Problem(self.option, self.value, rule, cure or self.cure, node_dependent)


def named_kernels(run: RunConfig) -> Iterator[NamedKernel]:
    """Yield the kernels that options request, for ops that the model uses; ``auto`` requests none.

    An option that chooses the backends of several ops yields the kernel of the first one.
    """
    training = run.training
    chosen = {"layers": training.transformer_impl, "adamw": run.optim.optimizer_backend}
    options: dict[str, str] = {}
    for kind in run.model.kinds:
        for op, name in kind.backends.items():
            options.setdefault(name, op)
    chosen |= {op: getattr(training, name) for name, op in options.items()}
    for op, value in chosen.items():
        if value not in ("auto", "local"):
            yield NamedKernel(op, value)


def kernel_rules(run: RunConfig, sound: Sound) -> Problems:
    """Yield problems of kernels that other options exclude; `kernels_missing_here` checks this
    machine.
    """
    if not sound(*_KEYS):
        return
    training = run.training
    for kernel in named_kernels(run):
        if training.device == "cpu" and kernel.value not in ON_ANY_DEVICE and kernel.op != "layers":
            yield kernel.problem("runs only on GPUs, and --device is cpu")
        elif training.require_fast_kernels and kernel.value in PLAIN:
            rule = "is not a fast kernel, but --require-fast-kernels is given"
            yield kernel.problem(rule, "leave one of the two options out")
    if training.require_fast_kernels and training.device == "cpu":
        yield fast_kernels_missing("--device is cpu")


def kernels_missing_here(run: RunConfig, environ: Mapping[str, str], sound: Sound) -> Problems:
    """Yield problems of requested kernels whose GPU or package is missing on this machine."""
    training = run.training
    if not sound(*_KEYS) or training.device == "cpu":
        return
    no_gpu = training.device == "auto" and not may_have_gpu(environ)
    for kernel in named_kernels(run):
        package = package_of_kernel(*kernel)
        missing = package is not None and not is_installed(package.module)
        # If the package of the layers is missing, `package_problems` reports that.
        if kernel.value in ON_ANY_DEVICE or (kernel.op == "layers" and missing):
            continue
        if no_gpu:
            rule = "runs only on GPUs, and no GPU is visible on this machine"
            yield kernel.problem(rule, node_dependent=True)
        elif package is not None and missing:
            yield kernel.problem(
                f"needs {package.name}, which is not installed",
                f"{package.command}, or {kernel.cure}",
                node_dependent=True,
            )
    if training.require_fast_kernels and no_gpu:
        yield fast_kernels_missing("no GPU is visible on this machine")


def not_fast(rule: str, cure: str = "") -> Problem:
    """Return a problem of a run that requires fast kernels."""
    return Problem("--require-fast-kernels", "", rule, cure or "leave it out")


def fast_kernels_missing(why: str) -> Problem:
    """Return the problem that a run requires fast kernels without a GPU."""
    return not_fast(f"needs a GPU, but {why}; on a CPU only the plain PyTorch references run")


def may_have_gpu(environ: Mapping[str, str]) -> bool:
    """Return False if torch cannot see a GPU, because no GPU is visible to this process or CUDA has
    no driver.
    """
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.split(",")[0].strip() in ("", "-1"):
        return False
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def count_gpus(environ: Mapping[str, str]) -> int:
    """Return the number of GPUs that CUDA shows to this process, without importing torch."""
    if not may_have_gpu(environ):
        return 0
    driver, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value
