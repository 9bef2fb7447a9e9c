"""Kernels of a run: each op's backend, reasons against faster backends, cost of plain references.

Training, ``--explain`` and ``megatron-packed doctor`` all use this module: `Kernel` for an op, and
`layer_reasons` for the linear layers and norms.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any, NamedTuple

import torch

from megatron_packed.config.errors import ConfigError, Problem
from megatron_packed.config.kernel_options import (
    OPTION_OF,
    PLAIN,
    NamedKernel,
    fast_kernels_missing,
    named_kernels,
    not_fast,
)
from megatron_packed.config.kinds.attention import partitions_that_fit
from megatron_packed.config.kinds.layer_kind import KINDS
from megatron_packed.config.optional_packages import is_installed, package_of_kernel
from megatron_packed.config.run import RunConfig
from megatron_packed.distributed.collectives import all_gather_json
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.explain.capability import OFF, ON, PARTIAL, WIDTH, Capability, row
from megatron_packed.explain.op_requests import op_requests, served_by
from megatron_packed.layers.transformer_impl import (
    LOCAL_NAME,
    TRANSFORMER_ENGINE_NAME,
    implementation,
    transformer_engine_refusal,
)
from megatron_packed.lazy_exports import lazy_function
from megatron_packed.models.run_model import dtype_of
from megatron_packed.ops.activation import api as activation
from megatron_packed.ops.backend_dispatch import NoBackendError, Op, Request
from megatron_packed.ops.grouped_mlp import api as grouped_mlp
from megatron_packed.ops.varlen_attention import api as varlen_attention

_OF_MIXERS = {
    "varlen_attention": "attention",
    "context_parallel_attention": "attention",
    "rope": "rope",
    "causal_conv1d": "convolution",
    "ssd": "scan",
}
"""Ops between the projections of mixers. Other ops that options of kinds choose keep their names."""
LABELS = {
    **_OF_MIXERS,
    **{op: op.replace("_", " ") for op in KINDS.backends if op not in _OF_MIXERS},
    "gated_rms_norm": "gated norm",
    "rms_norm": "norm",
    "grouped_mlp": "grouped product",
    "permute": "permute",
    "router_logits": "router",
    "activation": "activation",
    "dense_mlp": "dense MLP",
    "residual_projection": "residual product",
    "lora_expand": "adapters",
    "cross_entropy": "loss",
    "adamw": "optimizer",
}
"""Names of the ops in console output, in the order in which `kernel_block` lists them."""

MEASURED: dict[str, dict[str, float]] = {
    "attention": {"reference": 56, "sdpa": 16},
    "attention_deterministic": {"reference": 47},
    "ssd": {"reference": 13},
    "causal_conv1d": {"reference": 24},
    "rope": {"reference": 13},
    "rms_norm": {"reference": 12},
    "gated_rms_norm": {"reference": 11},
    "activation_squared_relu": {"reference": 7.8},
    "activation_swiglu": {"reference": 5.7},
    "moe": {"reference": 36},  # an expert layer, with its permutation
    "router_logits": {"reference": 2.2},
    "cross_entropy": {"reference": 3.6},
}
"""Time of slow backends divided by the time of the fastest, for cases of benchmarks/op_backends.py.

A case is forward and backward of 4,096 tokens in bf16 on an H200, replayed from a graph.
"""

NO_FLOAT32 = "torch.float32"
"""Text in the reasons of backends that do not support float32, that is, a run without --bf16."""


class Kernel(NamedTuple):
    """Backend of one op of the run."""

    op: Op
    inputs: Hashable
    name: str
    """Chosen backend; the requested one if there is a problem."""
    option: str = ""
    """Flag that named the backend; empty if the op chose it."""
    backend: str = "auto"
    """Requested backend."""
    problem: Problem | None = None
    """Refusal of the requested backend."""

    @property
    def reasons(self) -> dict[str, list[str]]:
        """Reasons against every backend of the op, fastest first; empty for usable backends."""
        return self.op.explain(self.inputs)

    @property
    def automatic(self) -> list[str]:
        """Backends that ``auto`` may choose, the one measured as fastest first."""
        return [backend.name for backend in self.op.backends if backend.automatic]

    @property
    def faster(self) -> list[str]:
        """Backends that ``auto`` prefers to this backend."""
        return list(takewhile(lambda name: name != self.name, self.automatic))

    @property
    def label(self) -> str:
        """Name of the op in console output."""
        return LABELS.get(self.op.name, self.op.name.replace("_", " "))

    @property
    def is_plain(self) -> bool:
        """True for plain PyTorch, which ``auto`` takes only if no kernel can be used."""
        return self.name in (*PLAIN, "recurrence")

    @property
    def cost(self) -> str:
        """Slowdown of a plain backend on a GPU, after a comma; empty for other backends."""
        if not self.is_plain:
            return ""
        factor = MEASURED.get(_case(self), {}).get(self.name)
        slower = f"slower than {self.automatic[0]} by a factor that is not measured"
        if factor is not None:
            slower = f"taking {factor:g} times as long as {self.automatic[0]} (measured on an H200)"
        return f", plain PyTorch, {slower}"

    @property
    def why(self) -> str:
        """Reason why no faster backend runs, as a clause; empty if none is faster."""
        if self.option:
            return f"{self.option} selects it"
        reasons = self.reasons
        refused = [
            f"{name}: {' and '.join(map(without_module, reasons[name]))}"
            for name in self.faster
            if reasons[name]
        ]
        if refused:
            return f"faster backends cannot be used: {'; '.join(refused)}"
        # The grouped product computes this activation as a part of its reference.
        product = LABELS[grouped_mlp.OP.name]
        return f"it is a part of the reference of the {product}" if self.faster else ""

    @property
    def remark(self) -> str:
        """Sentence part about how the backend computes these inputs, after a comma; or empty.

        The module of the backend may have a function ``remark`` that returns it.
        """
        backend = self.op.chosen[self.name, self.inputs].loaded
        remark: Callable[[Any], str] = getattr(backend, "remark", lambda inputs: "")
        return remark(self.inputs)


def requested_kernels(
    config: RunConfig, device: torch.device, documents: int | None = None
) -> list[Kernel]:
    """Return the kernel of each request of a rank, or the problem of a backend that cannot be used.

    Args:
        config: configuration of the run.
        device: device of the rank.
        documents: largest number of documents in a pack, as for `op_requests`.
    """
    requests = op_requests(config, device, documents)
    named = {kernel.option: kernel for kernel in named_kernels(config)}
    return [
        _kernel(config, request._replace(backend=served_by(request, requests)), named)
        for request in requests
    ]


def _kernel(config: RunConfig, request: Request, named: Mapping[str, NamedKernel]) -> Kernel:
    """Return the kernel of a request; ``named`` has the kernels that options name."""
    op, backend, inputs = request
    attends = any(kind.attends and op.name in kind.backends for kind in KINDS.values())
    of_layers = named.get(OPTION_OF["layers"]) if attends else None
    asked = named.get(OPTION_OF.get(op.name, ""), of_layers)
    kernel = Kernel(op, inputs, backend, asked.option if asked else "", backend)
    try:
        return kernel._replace(name=op.select(inputs, backend).name)
    except NoBackendError:
        return kernel._replace(problem=_refusal(config, kernel, asked))


def _refusal(config: RunConfig, kernel: Kernel, asked: NamedKernel | None) -> Problem:
    """Return the problem of a requested kernel that cannot be used."""
    reasons = kernel.reasons
    of_backend = reasons.get(kernel.backend, reasons[kernel.op.names()[0]])
    why = "; ".join(map(without_module, of_backend))
    if asked is None:  # context-parallel attention is the only op without a reference
        return Problem(
            "--cp-comm-type",
            config.parallel.cp_comm_type,
            f"has one kernel on GPUs, {kernel.backend}, which cannot be used: {why}",
            "give a2a, which works with every attention kernel",
        )
    if asked.op == "layers":
        cure = "name another --attention-backend as well, or give local"
        return asked.problem(f"its attention cannot be used: {why}", cure)
    cure = "leave it out, or name another"
    return asked.problem(f"cannot be used for {kernel.label}: {why}", cure)


def layer_reasons(config: RunConfig, device: torch.device) -> dict[str, list[str]]:
    """Return the reasons against each ``--transformer-impl`` on ``device``."""
    refusal = transformer_engine_refusal(device, dtype_of(config))
    return {LOCAL_NAME: [], TRANSFORMER_ENGINE_NAME: [] if refusal is None else [refusal]}


capture_of_transformer_engine = lazy_function(
    "megatron_packed.cuda_graphs.transformer_engine", "maker"
)
"""Imported only by a run whose graphs TransformerEngine captures."""


def check_implementation(config: RunConfig, device: torch.device) -> None:
    """Check TransformerEngine's linear layers, norms and capture of layers, if the options use them.

    Its attention is checked together with the other kernels (`chosen_kernels`). The check runs
    before ranks wait for each other.

    Raises:
        ValueError: a requested part cannot be used; the message has the reason and the cure.
    """
    implementation(config.training.transformer_impl, device, dtype_of(config))
    if config.cuda_graph.uses_transformer_engine and device.type == "cuda":
        capture_of_transformer_engine()


def chosen_kernels(
    config: RunConfig, device: torch.device, documents: int | None = None
) -> list[Kernel]:
    """Return the kernels that a rank's forward pass and optimizer will choose.

    An op has one kernel. It has several if kinds of layers have different sizes, for which the op
    chooses different backends. The arguments are those of `requested_kernels`.

    Raises:
        ConfigError: a kernel that an option names cannot be used; the message has the reasons.
    """
    kernels = requested_kernels(config, device, documents)
    if problems := list(dict.fromkeys(kernel.problem for kernel in kernels if kernel.problem)):
        raise ConfigError(problems)
    different: dict[tuple[Op, str], Kernel] = {}
    for kernel in kernels:
        different.setdefault((kernel.op, kernel.name), kernel)
    return list(different.values())


def check_kernels(
    config: RunConfig, device: torch.device, documents: int | None = None
) -> list[Kernel]:
    """Return the result of `chosen_kernels`, and refuse slow kernels if the run requires fast ones.

    Raises:
        ConfigError: a named kernel cannot be used, or a plain reference would run although the run
            requires fast kernels.
    """
    kernels = chosen_kernels(config, device, documents)
    if config.training.require_fast_kernels:
        if device.type != "cuda":
            raise ConfigError([fast_kernels_missing("torch sees none here")])
        if rows := _slow_rows(kernels, device):
            raise ConfigError([not_fast(f"{row.name} {row.detail}", row.fix) for row in rows])
    return kernels


def kernel_row(kernel: Kernel, device: torch.device) -> Capability:
    """Return which backend of an op runs, and why no faster backend does."""
    title, problem, name = f"kernel {kernel.op.name}", kernel.problem, kernel.name
    if problem is not None:
        return Capability(title, OFF, problem.rule, problem.cure)
    on_gpu, why, cure = device.type == "cuda", kernel.why, advice_of(kernel)
    on_cpu = not on_gpu and name == "reference"
    return row(
        title,
        (on_cpu, PARTIAL, "reference: plain PyTorch, the backend for CPUs"),
        (on_gpu and kernel.is_plain, PARTIAL, f"{name}{kernel.cost}; {why}", cure),
        (kernel.backend != "auto", ON, f"{name}, as requested{kernel.remark}"),
        (why, PARTIAL, f"{name}; {why}", cure),
        (True, ON, f"{name}, the fastest backend{kernel.remark}"),
    )


def with_usable_partition(config: RunConfig, groups: ParallelGroups) -> RunConfig:
    """Return the configuration with the partition of attention that alone has a kernel on all ranks,
    if the run may choose one. A collective.

    On a GPU, a partition with a plain kernel is taken only if no other one has a faster kernel.
    """
    if not config.parallel.chooses_partition:
        return config
    quality = {}
    for mode in partitions_that_fit(config):
        parallel = replace(config.parallel, cp_partition_mode=mode)
        kernels = requested_kernels(replace(config, parallel=parallel), groups.device)
        attention = [kernel for kernel in kernels if kernel.label == LABELS["varlen_attention"]]
        plain = groups.device.type == "cuda" and any(kernel.is_plain for kernel in attention)
        quality[mode] = 0 if any(kernel.problem for kernel in attention) else 2 - plain
    of_ranks = all_gather_json(quality, groups)
    least = {mode: min(of_rank.get(mode, 0) for of_rank in of_ranks) for mode in quality}
    best = [mode for mode, found in least.items() if found == max(least.values())]
    if len(best) != 1:
        return config
    return replace(config, parallel=replace(config.parallel, cp_partition_mode=best[0]))


def kernel_names(config: RunConfig, kernels: Sequence[Kernel]) -> dict[str, str]:
    """Return label of the op -> name of its kernel, as `kernel_block` prints them.

    Norms of TransformerEngine and ``torch``, which are no ops of this package, are included.
    """
    names: dict[str, str] = {}
    for kernel in kernels:
        other_name = names.get(kernel.label)
        names[kernel.label] = f"{other_name} and {kernel.name}" if other_name else kernel.name
    if config.training.transformer_impl == TRANSFORMER_ENGINE_NAME:
        names["norm"] = TRANSFORMER_ENGINE_NAME
    elif config.model.normalization == "LayerNorm":
        names["norm"] = "torch"
    if "attention" in names and config.parallel.context_parallel_size > 1:
        names["attention"] += f" ({config.parallel.attention_exchange})"
    return {label: names[label] for label in (*LABELS.values(), *names) if label in names}


def kernel_block(names: dict[str, str]) -> str:
    """Return the list of kernels that a run prints at its start.

    Example:
        ``kernels: attention flash_attn_4 · scan mamba_ssm · loss triton · optimizer torch``.
    """
    # Lines end between kernels only: textwrap does not break at this space.
    pairs = (f"{label} {name}".replace(" ", "\xa0") for label, name in names.items())
    text = f"kernels: {' · '.join(pairs)}"
    return textwrap.fill(
        text, WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    ).replace("\xa0", " ")


def slow_kernel_warnings(kernels: Sequence[Kernel], device: torch.device) -> list[str]:
    """Return a warning for every plain reference that a GPU would run.

    There are no warnings on a CPU, where the references are the intended kernels.
    """
    return [f"{row.name} {row.text}." for row in _slow_rows(kernels, device)]


def _slow_rows(kernels: Sequence[Kernel], device: torch.device) -> list[Capability]:
    """Return the rows of plain references that a GPU would run, named as in console output."""
    return [
        kernel_row(kernel, device)._replace(name=f"{kernel.label} runs")
        for kernel in kernels
        if kernel.is_plain and device.type == "cuda"
    ]


def advice_of(kernel: Kernel) -> str:
    """Return advice on getting a faster kernel; empty if no setting helps."""
    if kernel.option:
        return f"leave {kernel.option} out"
    reasons = "".join(reason for name in kernel.faster for reason in kernel.reasons[name])
    if NO_FLOAT32 in reasons:
        return "add --bf16"
    for package in (package_of_kernel(kernel.op.name, name) for name in kernel.faster):
        if package is not None and not is_installed(package.module):
            return package.command
    return "megatron-packed doctor finds the cause" if "does not import" in reasons else ""


def without_module(reason: str) -> str:
    """Return a reason without the names of internal modules, which do not help a user."""
    return re.sub(r"^megatron_packed\S* does not import: \w+: ", "", reason).rstrip(".")


def _case(kernel: Kernel) -> str:
    """Return the name of the case in benchmarks/op_backends.py that measured a kernel."""
    inputs = kernel.inputs
    if isinstance(inputs, varlen_attention.VarlenAttentionInputs):
        return "attention_deterministic" if inputs.deterministic else "attention"
    if isinstance(inputs, activation.ActivationInputs):
        return f"activation_{inputs.kind}"
    return "moe" if isinstance(inputs, grouped_mlp.GroupedMLPInputs) else kernel.op.name
