"""Report of ``--explain``: the verdict, facts about the run, and its capabilities on this machine.

The ops themselves choose their kernels (``Op.explain`` with the sizes of the run), so the report
shows the choices that training would make. No data is tokenised and no weights are allocated.
"""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Hashable, Iterator

import torch

from megatron_packed.config.errors import escaped
from megatron_packed.config.exit_codes import ExitCode
from megatron_packed.config.kinds.experts import EXPERT_ACTIVATION
from megatron_packed.config.launch_checks import environment_number
from megatron_packed.config.optional_packages import is_installed
from megatron_packed.config.run import RunConfig
from megatron_packed.config.sections.memory import (
    MODULES,
    OFFLOADED_IN,
    RECOMPUTED_IN,
)
from megatron_packed.data.known_files import KnownData
from megatron_packed.explain.capability import OFF, ON, PARTIAL, Capability
from megatron_packed.explain.graphs import graph_capabilities
from megatron_packed.explain.kernel_reasons import choose, layer_reasons
from megatron_packed.explain.op_requests import op_requests, served_by, useless_recomputation
from megatron_packed.explain.parallelism import parallel_capabilities
from megatron_packed.explain.planned_run import PlannedRun
from megatron_packed.layers.transformer_impl import LOCAL_NAME
from megatron_packed.models.convert.trained_config import nearest_families
from megatron_packed.models.peak_flops import peak_flops
from megatron_packed.models.run_model import device_of
from megatron_packed.ops.backend_dispatch import NoBackendError, Op

WIDTH = 118
"""Largest number of characters of a line."""


def explanation(config: RunConfig, data_facts: KnownData, other_model: str = "") -> str:
    """Return the verdict, facts about the run, and all capabilities as a table, for a terminal.

    Args:
        config: configuration of the run.
        data_facts: facts about its training data.
        other_model: reason why the model of the checkpoint is not this model; empty if it is.
    Raises:
        SystemExit: the machine lacks the configured device; the reason is printed first.
    """
    try:
        device = device_of(config)
    except ValueError as error:
        print(escaped(f"This run would be refused: {error}"), file=sys.stderr)
        raise SystemExit(ExitCode.USAGE) from None
    world_size = environment_number(os.environ, "WORLD_SIZE", 1, [])
    lines = []
    for title, text in PlannedRun.from_config(
        config, device, world_size, data_facts, other_model
    ).lines():
        indent = " " * (8 if title else 0)
        wrapped = textwrap.wrap(
            text, WIDTH - len(indent), break_long_words=False, break_on_hyphens=False
        )
        lines += [
            f"{title.ljust(len(indent))}{wrapped[0]}",
            *(indent + each for each in wrapped[1:]),
        ]
        lines += [] if title else [""]
    lines.append("")
    rows = list(capabilities(config, device, world_size))
    width = max(len(row.name) for row in rows)
    for row in rows:
        text = row.reason + (f" -> {row.advice}" if row.advice else "")
        wrapped = textwrap.wrap(
            text, WIDTH - width - 11, break_long_words=False, break_on_hyphens=False
        ) or [""]
        lines.append(f"{row.name.ljust(width)}  {row.state.ljust(7)}  {wrapped[0]}")
        lines += [" " * (width + 11) + line for line in wrapped[1:]]
    return "\n".join(lines) + "\n"


def capabilities(
    config: RunConfig, device: torch.device, world_size: int = 1
) -> Iterator[Capability]:
    """Yield all capabilities of the configuration on ``device`` with ``world_size`` processes."""
    yield from _machine(config, device)
    yield _layers(config, device)
    requests = op_requests(config, device)
    # Several layers may have equal rows.
    yield from dict.fromkeys(
        kernel(request.op, request.inputs, served_by(request, requests), device)
        for request in requests
    )
    yield from graph_capabilities(config, device)
    yield _recomputation(config, device)
    yield _offload(config, device)
    yield from parallel_capabilities(config, world_size, device)
    if config.model.mtp_depths:
        yield _depths(config)
    yield from _saved_and_logged(config)
    yield _export(config)


def _machine(config: RunConfig, device: torch.device) -> Iterator[Capability]:
    training = config.training
    if device.type == "cuda":
        yield Capability("device", ON, torch.cuda.get_device_name())
        knows_peak = peak_flops(device) is not None
        yield Capability(
            "MFU",
            ON if knows_peak else OFF,
            "the peak FLOP/s of this GPU is known"
            if knows_peak
            else "the peak FLOP/s of this GPU is not known",
        )
    elif training.device == "cpu" or not torch.cuda.is_available():
        why = "--device cpu" if training.device == "cpu" else "torch sees no GPU"
        yield Capability(
            "device",
            PARTIAL,
            f"{why}: every op runs its plain PyTorch reference",
            "use a machine with a GPU, with the extra 'gpu' installed",
        )
    precision = "bf16 with fp32 masters" if training.bf16 else "fp32"
    yield Capability(
        "precision", ON, precision, "--bf16" if device.type == "cuda" and not training.bf16 else ""
    )
    if training.deterministic_mode:
        yield Capability("determinism", ON, "every run computes the same bits")
    else:
        yield Capability(
            "determinism",
            PARTIAL if device.type == "cuda" else ON,
            "some GPU kernels add numbers in an order that differs from run to run"
            if device.type == "cuda"
            else "CPU kernels compute the same bits in every run",
            "--deterministic-mode" if device.type == "cuda" else "",
        )
    if training.isolation_self_test:
        yield Capability(
            "isolation self-test",
            ON,
            "checks before the first step that documents of a pack do not influence each other",
        )
    else:
        yield Capability(
            "isolation self-test",
            OFF,
            "--no-isolation-self-test",
            "remove --no-isolation-self-test",
        )


def _layers(config: RunConfig, device: torch.device) -> Capability:
    """Return which library's linear layers and norms run."""
    name, impl = "layers", config.training.transformer_impl
    if impl == LOCAL_NAME:
        return Capability(name, ON, "local: linear layers and norms of megatron_packed")
    for reason in layer_reasons(config, device)[impl]:
        why, _, advice = reason.rpartition("; ")
        return Capability(name, OFF, f"{impl}: {why}", advice)
    return Capability(
        name,
        ON,
        f"{impl}: its parallel linear layers and norms; experts and router of megatron_packed",
    )


def kernel(op: Op, inputs: Hashable, backend: str, device: torch.device) -> Capability:
    """Return which backend of an op runs, and why no faster backend does."""
    name = f"kernel {op.name}"
    try:
        chosen = choose(op, inputs, backend)
    except NoBackendError as error:
        return Capability(name, OFF, str(error), "choose another backend, or auto")
    if device.type == "cpu" and chosen.name == "reference":
        return Capability(name, PARTIAL, "reference: plain PyTorch, the backend for CPUs")
    cost = chosen.cost if device.type == "cuda" else ""
    if backend != "auto":
        state, advice = (PARTIAL, "auto") if cost else (ON, "")
        return Capability(name, state, f"{chosen.name}, as requested{cost}{chosen.remark}", advice)
    faster = chosen.passed_over
    if not faster:
        return Capability(name, ON, f"{chosen.name}, the fastest backend{chosen.remark}")
    why = "; ".join(f"{other}: {reasons[0]}" for other, reasons in faster.items())
    missing = any("does not import" in reasons[0] for reasons in faster.values())
    advice = "install the extra 'gpu'" if missing else ""
    return Capability(
        name, PARTIAL, f"{chosen.name}{cost}; faster backends cannot be used: {why}", advice
    )


def _recomputation(config: RunConfig, device: torch.device) -> Capability:
    """Return which activations the backward pass recomputes."""
    name, memory, layers = "recomputation", config.memory, len(config.model.layer_types)
    if memory.recomputes_layers:
        size, count = memory.layers_per_unit, sum(map(memory.recomputes_layer, range(layers)))
        saved = (
            "only the input of each is saved"
            if size == 1
            else f"in groups of {size}: only the input of each group is saved"
        )
        return Capability(
            name,
            ON,
            f"{count} of {layers} layers, {saved}; MFU does not count recomputed operations",
        )
    if not memory.modules:
        return Capability(
            name,
            OFF,
            "every activation that the backward pass needs is saved",
            "--recompute-granularity reduces memory",
        )
    parts = []
    for module in memory.modules:
        count = (
            config.model.hybrid_layer_pattern.count(RECOMPUTED_IN[module])
            if module in RECOMPUTED_IN
            else layers
        )
        parts.append(f"{module} of {count} layer{'s' if count > 1 else ''}")
    text = f"{', '.join(parts)}; MFU does not count recomputed operations"
    if useless := useless_recomputation(config, device):
        advice = f"leave {EXPERT_ACTIVATION} out of {MODULES}"
        return Capability(name, PARTIAL, f"{text}; {useless}", advice)
    return Capability(name, ON, text)


def _offload(config: RunConfig, device: torch.device) -> Capability:
    """Return which activations are offloaded to host memory."""
    symbols = config.model.layer_types
    name, memory, layers = "offload", config.memory, range(len(symbols))
    if not memory.offloads:
        cure = (
            "--offload-layer-inputs"
            if memory.recomputes_layers
            else "--fine-grained-activation-offloading"
        )
        return Capability(
            name, OFF, "saved activations stay on the device", f"{cure} reduces device memory"
        )
    moved = {"the inputs": sum(map(memory.offloads_input, layers))}
    for module in memory.offloaded_modules:
        of_layers = (n for n in layers if symbols[n] in OFFLOADED_IN[module])
        moved[module] = sum(memory.offloads_module(module, number) for number in of_layers)
    what = ", ".join(f"{part} of {n} layer{'s' if n > 1 else ''}" for part, n in moved.items() if n)
    if device.type != "cuda":
        return Capability(
            name,
            PARTIAL,
            f"{what}: without a GPU the copies reduce no memory",
            "use a machine with a GPU",
        )
    return Capability(
        name,
        ON,
        f"{what}, in pinned host memory; at most {memory.offload_buffers} device buffers",
    )


def _depths(config: RunConfig) -> Capability:
    """Return the depths of multi-token prediction and the weight of their losses."""
    model, depths = config.model, config.model.mtp_depths
    how = (
        f"{depths} depths of {model.mtp_layers}"
        if depths > 1
        else f"one depth of {model.mtp_layers}"
    )
    if depths > 1:
        how += (
            " with the same weights" if model.mtp_use_repeated_layer else " with their own weights"
        )
    mean = "their mean loss" if depths > 1 else "its loss"
    return Capability(
        "multi-token prediction",
        ON,
        f"{how}; {mean} counts {model.mtp_loss_scaling_factor:g}; validation and answers use the "
        "main model alone",
    )


def _saved_and_logged(config: RunConfig) -> Iterator[Capability]:
    checkpoint, logging = config.checkpoint, config.logging
    if checkpoint.save is None:
        yield Capability(
            "checkpoints", OFF, "no checkpoint is saved", "--save DIRECTORY --save-interval N"
        )
    elif checkpoint.save_interval is None:
        yield Capability(
            "checkpoints",
            PARTIAL,
            "saved only at the end of the run and when the run is stopped",
            "--save-interval N",
        )
    else:
        how = ", written in the background" if checkpoint.async_save else ""
        yield Capability(
            "checkpoints",
            ON,
            f"every {checkpoint.save_interval} iterations in {checkpoint.save}{how}",
        )
    yield Capability(
        "log",
        ON if logging.log_jsonl else OFF,
        logging.log_jsonl or "console only",
        "" if logging.log_jsonl else "--log-jsonl FILE",
    )
    if logging.tensorboard_dir and not is_installed("tensorboard"):
        yield Capability(
            "TensorBoard",
            OFF,
            "the package tensorboard is not installed",
            "install the extra 'log'",
        )


def _export(config: RunConfig) -> Capability:
    """Return the Hugging Face family that can hold the trained model, or what no family has."""
    name = "export to transformers"
    nearest, differences = next(iter(nearest_families(config.model).items()))
    if differences:
        why = f"the nearest family, {nearest}, cannot express {'; '.join(differences)}"
        return Capability(name, OFF, why)
    return Capability(name, ON, f"as a {nearest} model, by `megatron-packed convert --to-hf`")
