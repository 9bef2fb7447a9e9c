"""``--explain``: what a configuration gets on this machine, capability by capability, with reasons
and what to try.

Asks the ops themselves (``Op.explain`` with the sizes of the run), so it says what training would
choose. Reads no data and builds no model.
"""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Hashable, Iterator

import torch

from megatron_packed.config.launch_checks import environment_number
from megatron_packed.config.optional_packages import is_installed
from megatron_packed.config.run import RunConfig
from megatron_packed.config.sections.memory import OFFLOADED_IN, RECOMPUTED_IN
from megatron_packed.layers.transformer_impl import LOCAL_NAME
from megatron_packed.ops.backend_dispatch import NoBackendError, Op
from megatron_packed.training.build_job import device_of
from megatron_packed.training.exit_codes import ExitCode
from megatron_packed.training.explain_capability import OFF, ON, PARTIAL, Capability
from megatron_packed.training.explain_graphs import graph_capabilities
from megatron_packed.training.explain_parallelism import parallel_capabilities
from megatron_packed.training.kernel_inputs import asked_of, op_inputs
from megatron_packed.training.kernels import choose, layer_reasons
from megatron_packed.training.metrics import peak_flops


def explain(config: RunConfig) -> str:
    """Return all capabilities as a table for a terminal.

    Raises:
        SystemExit: the device that the configuration names is not here; says so.
    """
    try:
        device = device_of(config)
    except ValueError as error:
        print(error, file=sys.stderr)
        raise SystemExit(ExitCode.USAGE) from None
    rows = list(capabilities(config, device, environment_number(os.environ, "WORLD_SIZE", 1, [])))
    width = max(len(row.name) for row in rows)
    lines = []
    for row in rows:
        text = row.reason + (f" -> {row.advice}" if row.advice else "")
        wrapped = textwrap.wrap(text, 118 - width - 11, break_long_words=False) or [""]
        lines.append(f"{row.name.ljust(width)}  {row.state.ljust(7)}  {wrapped[0]}")
        lines += [" " * (width + 11) + line for line in wrapped[1:]]
    return "\n".join(lines) + "\n"


def capabilities(
    config: RunConfig, device: torch.device, world_size: int = 1
) -> Iterator[Capability]:
    """Yield what the configuration gets on ``device``, with so many processes."""
    yield from _machine(config, device)
    yield _layers(config, device)
    for op, inputs in op_inputs(config, device):
        yield kernel(op, inputs, asked_of(config, op, device), device)
    yield from graph_capabilities(config, device)
    yield _recomputation(config)
    yield _offload(config, device)
    yield from parallel_capabilities(config, world_size)
    yield from _saved_and_logged(config)


def _machine(config: RunConfig, device: torch.device) -> Iterator[Capability]:
    training = config.training
    if device.type == "cuda":
        yield Capability("device", ON, torch.cuda.get_device_name())
        known = peak_flops(device) is not None
        yield Capability(
            "MFU",
            ON if known else OFF,
            "the GPU's peak is known" if known else "unknown GPU: no peak",
        )
    elif training.device == "cpu" or not torch.cuda.is_available():
        why = "--device cpu" if training.device == "cpu" else "torch sees no GPU"
        yield Capability(
            "device",
            PARTIAL,
            f"{why}: every kernel is its plain PyTorch reference",
            "a machine with a GPU and the extra 'gpu'",
        )
    precision = "bf16 with fp32 masters" if training.bf16 else "fp32"
    yield Capability(
        "precision", ON, precision, "--bf16" if device.type == "cuda" and not training.bf16 else ""
    )
    if training.deterministic_mode:
        yield Capability("determinism", ON, "the same bits in every run")
    else:
        yield Capability(
            "determinism",
            PARTIAL if device.type == "cuda" else ON,
            "some GPU kernels add in a changing order"
            if device.type == "cuda"
            else "CPU kernels repeat",
            "--deterministic-mode" if device.type == "cuda" else "",
        )
    if training.isolation_self_test:
        yield Capability(
            "isolation self-test", ON, "checks at the start that documents cannot see each other"
        )
    else:
        yield Capability("isolation self-test", OFF, "--no-isolation-self-test", "leave it out")


def _layers(config: RunConfig, device: torch.device) -> Capability:
    """Return whose linear layers and norms run."""
    name, impl = "layers", config.training.transformer_impl
    if impl == LOCAL_NAME:
        return Capability(name, ON, "local: linear layers and norms are this package's own")
    for reason in layer_reasons(config, device)[impl]:
        why, _, advice = reason.rpartition("; ")
        return Capability(name, OFF, f"{impl}: {why}", advice)
    return Capability(
        name,
        ON,
        f"{impl}: its parallel linear layers and norms; experts and router are this package's",
    )


def kernel(op: Op, inputs: Hashable, asked: str, device: torch.device) -> Capability:
    """Return which backend of an op runs, and why no faster one."""
    name = f"kernel {op.name}"
    try:
        chosen = choose(op, inputs, asked)
    except NoBackendError as error:
        return Capability(name, OFF, str(error), "another backend, or auto")
    if device.type == "cpu" and chosen.name == "reference":
        return Capability(name, PARTIAL, "reference: plain PyTorch, as on every CPU")
    cost = chosen.cost if device.type == "cuda" else ""
    if asked != "auto":
        state, advice = (PARTIAL, "auto") if cost else (ON, "")
        return Capability(name, state, f"{chosen.name}, as asked{cost}", advice)
    faster = chosen.passed_over
    if not faster:
        return Capability(name, ON, f"{chosen.name}, the fastest there is")
    why = "; ".join(f"{other}: {reasons[0]}" for other, reasons in faster.items())
    missing = any("does not import" in reasons[0] for reasons in faster.values())
    advice = "install the extra 'gpu'" if missing else ""
    return Capability(name, PARTIAL, f"{chosen.name}{cost}, because not {why}", advice)


def _recomputation(config: RunConfig) -> Capability:
    """Return what the backward pass computes again."""
    name, memory, layers = "recomputation", config.memory, config.model.num_layers
    if memory.recomputes_layers:
        size, count = memory.layers_per_unit, sum(map(memory.recomputes_layer, range(layers)))
        kept = (
            "the input of each" if size == 1 else f"in groups of {size} that keep their input alone"
        )
        return Capability(
            name, ON, f"{count} of {layers} layers, {kept}; MFU counts the model's operations alone"
        )
    if not memory.modules:
        return Capability(
            name,
            OFF,
            "every activation that the backward pass needs is kept",
            "--recompute-granularity saves memory",
        )
    found = []
    for module in memory.modules:
        count = (
            config.model.hybrid_layer_pattern.count(RECOMPUTED_IN[module])
            if module in RECOMPUTED_IN
            else layers
        )
        found.append(f"{module} of {count} layer{'s' if count > 1 else ''}")
    return Capability(name, ON, f"{', '.join(found)}; MFU counts the model's operations alone")


def _offload(config: RunConfig, device: torch.device) -> Capability:
    """Return what waits in the host's memory."""
    name, memory, layers = "offload", config.memory, range(config.model.num_layers)
    if not memory.offloads:
        cure = (
            "--offload-layer-inputs"
            if memory.recomputes_layers
            else "--fine-grained-activation-offloading"
        )
        return Capability(name, OFF, "what is kept is kept on the device", f"{cure} saves memory")
    moved = {"the inputs": sum(map(memory.offloads_input, layers))}
    for module in memory.offloaded_modules:
        of_layers = (
            n for n in layers if config.model.hybrid_layer_pattern[n] in OFFLOADED_IN[module]
        )
        moved[module] = sum(memory.offloads_module(module, number) for number in of_layers)
    what = ", ".join(f"{part} of {n} layer{'s' if n > 1 else ''}" for part, n in moved.items() if n)
    if device.type != "cuda":
        return Capability(
            name,
            PARTIAL,
            f"{what}: on this device they are copied, and no memory is saved",
            "a GPU",
        )
    return Capability(
        name, ON, f"{what}, in pinned memory; device buffers: at most {memory.offload_buffers}"
    )


def _saved_and_logged(config: RunConfig) -> Iterator[Capability]:
    checkpoint, logging = config.checkpoint, config.logging
    if checkpoint.save is None:
        yield Capability(
            "checkpoints", OFF, "nothing is saved", "--save DIRECTORY --save-interval N"
        )
    elif checkpoint.save_interval is None:
        yield Capability(
            "checkpoints",
            PARTIAL,
            "at the end and when the run is stopped only",
            "--save-interval N",
        )
    else:
        how = ", beside training" if checkpoint.async_save else ""
        yield Capability(
            "checkpoints",
            ON,
            f"every {checkpoint.save_interval} iterations in {checkpoint.save}{how}",
        )
    yield Capability(
        "log",
        ON if logging.log_jsonl else OFF,
        logging.log_jsonl or "the console alone",
        "" if logging.log_jsonl else "--log-jsonl FILE",
    )
    if logging.tensorboard_dir and not is_installed("tensorboard"):
        yield Capability(
            "TensorBoard", OFF, "the package tensorboard is not there", "install the extra 'log'"
        )
