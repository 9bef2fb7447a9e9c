"""The kernels of a run: which backend each op takes, by the ops' own choice, and what a plain
reference costs.

`op_inputs` asks the ops what the model will ask them, with the sizes of a rank, so nothing here
repeats their rules.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple

import torch

from megatron_packed.config.errors import ConfigError, Problem
from megatron_packed.config.kernel_options import OPTION_OF, attention_op, fast_kernels_missing
from megatron_packed.config.layer_pattern import ATTENTION, MAMBA, MLP, MOE
from megatron_packed.config.optional_packages import is_installed, package_of_kernel
from megatron_packed.config.run import RunConfig
from megatron_packed.layers.backends import Backends
from megatron_packed.layers.implementation import TRANSFORMER_ENGINE_NAME
from megatron_packed.ops.activation import api as activation
from megatron_packed.ops.backend_dispatch import NoBackendError, Op
from megatron_packed.ops.causal_conv1d import api as causal_conv1d
from megatron_packed.ops.context_parallel_attention import api as context_parallel_attention
from megatron_packed.ops.cross_entropy import api as cross_entropy
from megatron_packed.ops.gated_rms_norm import api as gated_rms_norm
from megatron_packed.ops.grouped_mlp import api as grouped_mlp
from megatron_packed.ops.permute import api as permute
from megatron_packed.ops.rms_norm import api as rms_norm
from megatron_packed.ops.rope import api as rope
from megatron_packed.ops.ssd import api as ssd
from megatron_packed.ops.varlen_attention import api as varlen_attention
from megatron_packed.optim import adamw
from megatron_packed.training.build_job import backends_of, dtype_of

UNKNOWN_VOCABULARY = 32_768
"""Entries to ask the loss's kernels about while no tokenizer was read."""

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
    option: str
    """The flag that named it; empty where the op chose."""

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
            name = op.select(inputs, asked).name
        except NoBackendError:
            problems.append(_refusal(config, op, inputs, asked))
        else:
            found.append(Kernel(op, inputs, name, _option_of(config, op)))
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
    refusals = kernel.op.explain(kernel.inputs)
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


def _backends(config: RunConfig) -> Backends:
    return Backends.of(backends_of(config))  # type: ignore[arg-type]


def asked_of(config: RunConfig, op: Op, device: torch.device) -> str:
    """Return the backend that the run asks an op for: a name, or ``auto``."""
    if op is adamw.OP:
        return config.optim.optimizer_backend
    if op is context_parallel_attention.OP:
        return context_parallel_attention.resolved_backend(
            _backends(config).context_parallel_attention, device.type
        )
    if op is activation.OP and not _has_mlp(config):
        # Inside experts: their product brings its activation along, and its reference the
        # activation's.
        inputs = next(
            inputs for other, inputs in op_inputs(config, device) if other is grouped_mlp.OP
        )
        return "reference" if grouped_mlp.OP.select(inputs).name == "reference" else "auto"
    return str(getattr(_backends(config), op.name))


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


def op_inputs(
    config: RunConfig, device: torch.device, documents: int | None = None
) -> Iterator[tuple[Op, Hashable]]:
    """Yield every op that a rank runs, with the inputs by which it chooses its kernel.

    Args:
        documents: the most of a pack; by default those of the largest capture size, or one.
    """
    model, dtype, kind = config.model, dtype_of(config), device.type
    if ATTENTION in model.hybrid_layer_pattern:
        yield from _attention_ops(config, device, documents)
    if MAMBA in model.hybrid_layer_pattern:
        yield from _mamba_ops(config, kind)
    if (
        model.normalization == "RMSNorm"
        and config.training.transformer_impl != TRANSFORMER_ENGINE_NAME
    ):
        yield (
            rms_norm.OP,
            rms_norm.RMSNormInputs(
                features=model.hidden_size, dtype=dtype, weight_dtype=dtype, device_type=kind
            ),
        )
    yield from _feed_forward_ops(config, kind)
    tp = config.parallel.tensor_model_parallel_size
    rows = model.padded_vocab_size(model.vocab_size or UNKNOWN_VOCABULARY, tp) // tp
    yield (
        cross_entropy.OP,
        cross_entropy.CrossEntropyInputs(vocab_rows=rows, dtype=dtype, device_type=kind),
    )
    yield adamw.OP, adamw.AdamWInputs(device_type=kind)


def _attention_ops(
    config: RunConfig, device: torch.device, documents: int | None
) -> Iterator[tuple[Op, Hashable]]:
    model, parallel, dtype = config.model, config.parallel, dtype_of(config)
    tp, cp = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    heads, kv_heads = model.num_attention_heads // tp, max(model.num_query_groups // tp, 1)
    deterministic = config.training.deterministic_mode
    if attention_op(config) == varlen_attention.OP.name:
        yield (
            varlen_attention.OP,
            varlen_attention.inputs_of_pack(
                tokens=config.packing.tokens_per_pack,
                num_heads=heads // cp,
                num_kv_heads=max(kv_heads // cp, 1),
                head_dim=model.head_dim,
                dtype=dtype,
                device=device,
                deterministic=deterministic,
                automatic=_backends(config).varlen_attention == "auto",
                documents=documents or (config.cuda_graph.capacities or (1,))[-1],
            ),
        )
    else:
        yield (
            context_parallel_attention.OP,
            context_parallel_attention.ContextParallelAttentionInputs(
                num_heads=heads,
                num_kv_heads=kv_heads,
                head_dim=model.head_dim,
                dtype=dtype,
                device_type=device.type,
                comm_type=parallel.cp_comm_type,
                deterministic=deterministic,
            ),
        )
    if model.position_embedding_type == "rope":
        yield (
            rope.OP,
            rope.RopeInputs(
                dtype=dtype,
                device_type=device.type,
                head_dim=model.head_dim,
                rotary_dim=model.rotary_dim,
            ),
        )


def _mamba_ops(config: RunConfig, kind: str) -> Iterator[tuple[Op, Hashable]]:
    model, parallel, dtype = config.model, config.parallel, dtype_of(config)
    tokens = config.packing.tokens_per_pack
    tp, cp = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    heads, groups = (
        model.mamba_num_heads // tp // cp,
        max(max(model.mamba_num_groups // tp, 1) // cp, 1),
    )
    inner, states = heads * model.mamba_head_dim, groups * model.mamba_state_dim
    channels = inner + 2 * states
    yield (
        causal_conv1d.OP,
        causal_conv1d.CausalConvInputs(
            tokens=tokens,
            channels=channels,
            width=model.mamba_d_conv,
            row_stride=(inner if cp == 1 else 0) + channels + heads,
            dtype=dtype,
            weight_dtype=dtype,
            bias_dtype=dtype,
            device_type=kind,
        ),
    )
    yield (
        ssd.OP,
        ssd.SSDInputs(
            tokens=tokens,
            heads=heads,
            head_dim=model.mamba_head_dim,
            groups=groups,
            state_dim=model.mamba_state_dim,
            chunk_size=model.mamba_chunk_size,
            row_stride=channels,
            dtype=dtype,
            device_type=kind,
        ),
    )
    yield (
        gated_rms_norm.OP,
        gated_rms_norm.GatedRMSNormInputs(
            channels=inner * cp,
            group_size=model.d_inner // model.mamba_num_groups,
            unit_channel_stride=True,
            dtype=dtype,
            device_type=kind,
            split_group=model.mamba_num_groups < tp,
        ),
    )


def _feed_forward_ops(config: RunConfig, kind: str) -> Iterator[tuple[Op, Hashable]]:
    model, parallel, dtype = config.model, config.parallel, dtype_of(config)
    gated = 2 if model.activation == "swiglu" else 1
    width = model.ffn_hidden_size // parallel.tensor_model_parallel_size
    if MOE in model.hybrid_layer_pattern:
        expert = model.moe_ffn_hidden_size // parallel.expert_tensor_parallel_size
        yield (
            grouped_mlp.OP,
            grouped_mlp.GroupedMLPInputs(
                channels=model.hidden_size,
                experts=model.num_experts // parallel.expert_model_parallel_size,
                hidden_in=expert * gated,
                hidden_out=expert,
                dtype=dtype,
                weight_dtype=dtype,
                device_type=kind,
            ),
        )
        yield (
            permute.OP,
            permute.PermuteInputs(
                channels=model.hidden_size,
                routes=model.moe_router_topk,
                dtype=dtype,
                device_type=kind,
            ),
        )
        if MLP not in model.hybrid_layer_pattern:
            shared = model.moe_shared_expert_intermediate_size
            width = shared // parallel.tensor_model_parallel_size if shared else expert
    if MLP in model.hybrid_layer_pattern or MOE in model.hybrid_layer_pattern:
        yield (
            activation.OP,
            activation.ActivationInputs(
                kind=model.activation, features=width * gated, dtype=dtype, device_type=kind
            ),
        )


def _has_mlp(config: RunConfig) -> bool:
    """Return whether activations run outside of experts, too."""
    return MLP in config.model.hybrid_layer_pattern or bool(
        config.model.moe_shared_expert_intermediate_size
    )
