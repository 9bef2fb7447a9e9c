"""The kernels of a run: the backend that each op takes, why no faster one serves, and what a plain
reference costs.

Training, ``--explain`` and ``megatron-packed doctor`` all ask here: `choose` for an op, and
`layer_reasons` for the linear layers and norms.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch

from megatron_packed.config.errors import ConfigError, Problem
from megatron_packed.config.kernel_options import OPTION_OF, attention_op, fast_kernels_missing
from megatron_packed.config.optional_packages import is_installed, package_of_kernel
from megatron_packed.config.run import RunConfig
from megatron_packed.layers.transformer_impl import (
    LOCAL_NAME,
    TRANSFORMER_ENGINE_NAME,
    transformer_engine_refusal,
)
from megatron_packed.ops.activation import api as activation
from megatron_packed.ops.backend_dispatch import NoBackendError, Op
from megatron_packed.ops.context_parallel_attention import api as context_parallel_attention
from megatron_packed.ops.grouped_mlp import api as grouped_mlp
from megatron_packed.ops.varlen_attention import backends as varlen_attention
from megatron_packed.training.build_job import dtype_of
from megatron_packed.training.kernel_inputs import asked_of, op_inputs

LABELS = {
    "varlen_attention": "attention",
    "context_parallel_attention": "attention",
    "rope": "rope",
    "causal_conv1d": "convolution",
    "ssd": "scan",
    "gated_rms_norm": "gated norm",
    "rms_norm": "norm",
    "grouped_mlp": "grouped product",
    "permute": "permute",
    "activation": "activation",
    "cross_entropy": "loss",
    "adamw": "optimizer",
}
"""Names of the ops for a reader of the console, in the order of the block."""

MEASURED = {
    "attention": {"reference": 56, "sdpa": 16},
    "attention_deterministic": {"reference": 47},
    "ssd": {"reference": 7.1},
    "causal_conv1d": {"reference": 16},
    "rope": {"reference": 13},
    "rms_norm": {"reference": 12},
    "gated_rms_norm": {"reference": 9.5},
    "activation_squared_relu": {"reference": 7.0},
    "activation_swiglu": {"reference": 5.0},
    "moe": {"reference": 7.0},  # an expert layer, with its permutation
    "cross_entropy": {"reference": 2.6},
}
"""Time of slow backends over that of the fastest, by the cases of benchmarks/op_backends.py:
forward and backward of 4,096 tokens in bf16 on an H200, replayed from a graph.
"""

WIDTH = 118
NO_FLOAT32 = "torch.float32"
"""In the reasons of backends that do not take a run without --bf16."""


class Kernel(NamedTuple):
    """The backend that an op of the run takes."""

    op: Op
    inputs: Hashable
    name: str
    option: str = ""
    """The flag that named it; empty where the op chose."""

    @property
    def reasons(self) -> dict[str, list[str]]:
        """Reasons against every backend of the op, fastest first; none against those that serve."""
        return self.op.explain(self.inputs)

    @property
    def passed_over(self) -> dict[str, list[str]]:
        """Backends that ``auto`` would take before this one, and the reasons against them."""
        automatic = [backend.name for backend in self.op.backends if backend.automatic]
        reasons = self.reasons
        return {name: reasons[name] for name in automatic[: automatic.index(self.name)]}

    @property
    def label(self) -> str:
        """The op's name for a reader of the console."""
        return LABELS[self.op.name]

    @property
    def fastest(self) -> str:
        """The op's fastest backend, as measured."""
        return next(backend.name for backend in self.op.backends if backend.automatic)

    @property
    def is_plain(self) -> bool:
        """True for plain PyTorch, which ``auto`` takes only where no kernel serves."""
        chosen = next(backend for backend in self.op.backends if backend.name == self.name)
        return chosen.name == "reference" or not chosen.automatic

    @property
    def cost(self) -> str:
        """Return what a plain backend costs on a GPU, with a comma before it; empty for others."""
        factor = MEASURED.get(_case(self), {}).get(self.name)
        if not self.is_plain:
            return ""
        if factor is None:
            return f", and how much longer than {self.fastest} it takes is not measured"
        return f", {factor:g} times as long as {self.fastest} (measured on an H200)"


def choose(op: Op, inputs: Hashable, asked: str = "auto", option: str = "") -> Kernel:
    """Return the kernel that an op takes.

    Args:
        asked: a backend, or ``auto``.
        option: the flag that named it.
    Raises:
        NoBackendError: what was asked for cannot serve.
    """
    return Kernel(op, inputs, op.select(inputs, asked).name, option)


def layer_reasons(config: RunConfig, device: torch.device) -> dict[str, list[str]]:
    """Return the reasons against each ``--transformer-impl`` on ``device``."""
    refusal = transformer_engine_refusal(device, dtype_of(config))
    return {LOCAL_NAME: [], TRANSFORMER_ENGINE_NAME: [] if refusal is None else [refusal]}


def chosen_kernels(
    config: RunConfig, device: torch.device, documents: int | None = None
) -> list[Kernel]:
    """Return the kernel of every op that a rank runs, as its forward pass and its optimizer will
    choose them.

    Args:
        documents: as for `op_inputs`.
    Raises:
        ConfigError: a kernel that an option names cannot serve; says why.
    """
    found, problems = [], []
    for op, inputs in op_inputs(config, device, documents):
        asked = asked_of(config, op, device)
        try:
            found.append(choose(op, inputs, asked, _option_of(config, op)))
        except NoBackendError:
            problems.append(_refusal(config, op, inputs, asked))
    if problems:
        raise ConfigError(problems)
    return found


def check_kernels(
    config: RunConfig, device: torch.device, documents: int | None = None
) -> list[Kernel]:
    """Return `chosen_kernels`, after the check of ``--require-fast-kernels``.

    Raises:
        ConfigError: a named kernel cannot serve, or a plain reference would run where none is
            allowed.
    """
    kernels = chosen_kernels(config, device, documents)
    if config.training.require_fast_kernels:
        if device.type != "cuda":
            raise ConfigError([fast_kernels_missing("torch sees none here")])
        problems = [
            Problem(
                "--require-fast-kernels",
                "",
                slow_sentence(kernel),
                cure_of(kernel) or "leave it out",
            )
            for kernel in kernels
            if kernel.is_plain
        ]
        if problems:
            raise ConfigError(problems)
    return kernels


def kernel_names(config: RunConfig, kernels: Sequence[Kernel]) -> dict[str, str]:
    """Return what the block says: the name of each op's kernel by the op's label, norms of other
    origin included.
    """
    names = {kernel.label: kernel.name for kernel in kernels}
    if config.training.transformer_impl == TRANSFORMER_ENGINE_NAME:
        names["norm"] = TRANSFORMER_ENGINE_NAME
    elif config.model.normalization == "LayerNorm":
        names["norm"] = "torch"
    if "attention" in names and config.parallel.context_parallel_size > 1:
        names["attention"] += f" ({config.parallel.cp_comm_type})"
    return {label: names[label] for label in dict.fromkeys(LABELS.values()) if label in names}


def kernel_block(names: dict[str, str]) -> str:
    """Return the block at the start of a run.

    Example:
        ``kernels: attention flash_attn_4 · scan mamba_ssm · loss triton · optimizer torch``.
    """
    parts = (
        "\0".join(f"{label} {name}" for label, name in names.items())
        .replace(" ", "\1")
        .replace("\0", " · ")
    )
    wrapped = textwrap.fill(
        f"kernels: {parts}", WIDTH, subsequent_indent="  ", break_long_words=False
    )
    return wrapped.replace("\1", " ")


def slow_kernel_warnings(kernels: Sequence[Kernel], device: torch.device) -> list[str]:
    """Return a sentence for every plain reference that a GPU would run; none on a CPU, where they
    are the kernels.
    """
    if device.type != "cuda":
        return []
    slow = [kernel for kernel in kernels if kernel.is_plain]
    return [
        "; ".join(filter(None, (slow_sentence(kernel), cure_of(kernel)))) + "." for kernel in slow
    ]


def slow_sentence(kernel: Kernel) -> str:
    """Return what a plain reference costs, and why it runs, without a full stop."""
    return f"{kernel.label} runs {kernel.name}, plain PyTorch{kernel.cost}: {_why(kernel)}"


def _why(kernel: Kernel) -> str:
    if kernel.option:
        return f"{kernel.option} names it"
    name, reasons = _refused(kernel)
    if not reasons:  # nothing but the product that the activation is a part of
        return f"{LABELS[grouped_mlp.OP.name]} runs its own reference"
    return f"{name} cannot serve: {'; '.join(map(without_module, reasons))}"


def _refused(kernel: Kernel) -> tuple[str, list[str]]:
    """Return a faster backend with its reasons: one that takes no float32 if there is one, else the
    fastest.
    """
    refusals = kernel.reasons
    name = next(
        (name for name, reasons in refusals.items() if NO_FLOAT32 in "".join(reasons)),
        kernel.fastest,
    )
    return name, refusals[name]


def cure_of(kernel: Kernel) -> str:
    """Return how to get a faster kernel than a plain one; empty where no setting helps."""
    if kernel.option:
        return f"leave {kernel.option} out"
    reasons = "".join(_refused(kernel)[1])
    if NO_FLOAT32 in reasons:
        return "add --bf16"
    for name in (backend.name for backend in kernel.op.backends if backend.automatic):
        package = package_of_kernel(kernel.op.name, name)
        if package is not None and not is_installed(package.module):
            return package.command
    return "megatron-packed doctor says what is broken" if "does not import" in reasons else ""


def without_module(reason: str) -> str:
    """Return a reason without the names of this package's own modules, which say nothing to a user."""
    return re.sub(r"^megatron_packed\S* does not import: \w+: ", "", reason).rstrip(".")


def _case(kernel: Kernel) -> str:
    """Return the case of benchmarks/op_backends.py that measured a kernel."""
    inputs = kernel.inputs
    if isinstance(inputs, varlen_attention.VarlenAttentionInputs):
        return "attention_deterministic" if inputs.deterministic else "attention"
    if isinstance(inputs, activation.ActivationInputs):
        return f"activation_{inputs.kind}"
    return "moe" if isinstance(inputs, grouped_mlp.GroupedMLPInputs) else kernel.op.name


def _option_of(config: RunConfig, op: Op) -> str:
    """Return the flag that names an op's kernel; empty where none was given."""
    given = {**config.training.backends, "adamw": config.optim.optimizer_backend}
    given["context_parallel_attention"] = config.training.attention_backend
    if given.get(op.name, "auto") != "auto":
        return OPTION_OF[op.name]
    return (
        OPTION_OF["layers"]
        if config.training.uses_transformer_engine_attention and op.name == attention_op(config)
        else ""
    )


def _refusal(config: RunConfig, op: Op, inputs: Hashable, asked: str) -> Problem:
    """Return why the kernel that was asked for cannot serve."""
    reasons = op.explain(inputs)
    why = "; ".join(
        map(without_module, reasons[asked] if asked in reasons else reasons[op.names()[0]])
    )
    label, option = LABELS[op.name], _option_of(config, op)
    if option == OPTION_OF["layers"]:
        return Problem(
            option,
            TRANSFORMER_ENGINE_NAME,
            f"its attention cannot serve: {why}",
            "name another --attention-backend beside it, or give local",
        )
    if not option and op is context_parallel_attention.OP:
        return Problem(
            "--cp-comm-type",
            config.parallel.cp_comm_type,
            f"has one kernel on GPUs, {asked}, which cannot serve: {why}",
            "give a2a, which every attention kernel serves",
        )
    return Problem(
        option, asked, f"cannot serve as {label}: {why}", "leave it out, or name another"
    )
