"""Optimizer state of a Megatron checkpoint: Adam's moments, masters, counters and the schedule.

Optimizers that Megatron saves in any layout (``fully_sharded_model_space``, ``fully_reshardable``,
and optimizers that are not distributed) have a tensor ``optimizer.state.KIND.NAME`` for each tensor
NAME of the model, of the same shape. KIND is ``exp_avg``, ``exp_avg_sq``, or for the float32 values
of the parameter ``param`` (``fully_reshardable``) or ``fp32_param``. The precision-aware optimizer
saves int16 remainders of bf16 parameters in its place. In ``fully_reshardable``, all of its tensors
become float32, also these whole numbers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

import torch

from megatron_packed.checkpoint.errors import CheckpointError, printable_message
from megatron_packed.config.errors import ConfigError
from megatron_packed.config.sections.optim import OptimizerConfig
from megatron_packed.config.serialise import section_to_dict
from megatron_packed.config.value_checks import INT32_MAX
from megatron_packed.models.convert.import_huggingface import TrainedState
from megatron_packed.models.convert.megatron.folders import damage
from megatron_packed.models.convert.megatron.names import (
    OPTIMIZER,
    NamedWeights,
    Source,
    first_of,
)
from megatron_packed.models.convert.megatron.torch_dist import TorchDist
from megatron_packed.models.convert.weight_rows import Weight

_TENSOR = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.([a-z0-9_]+)\.(.+)")
"""Name of a tensor of the optimizer. Checkpoints with several optimizers may have their numbers."""
FIRST, SECOND, MASTER = "exp_avg", "exp_avg_sq", "master"
_KINDS = {FIRST: FIRST, SECOND: SECOND, "fp32_param": MASTER, "param": MASTER}
"""Kinds of tensors, and their names in a checkpoint of this project."""
_DEEPEST = 6
"""Levels of dictionaries in which groups of parameters are looked for."""
_ALONE = "only the weights are imported, and training begins with new moments"
_MOST_SAMPLES = 1 << 62


@dataclass(frozen=True, kw_only=True)
class FoundState:
    """State of an optimizer that a run can continue.

    Args:
        trained: what is saved with the weights.
        masters: tensor with float32 values for parts of the model's parameters.
        notes: sentences for the user.
    """

    trained: TrainedState
    masters: Mapping[str, Source]
    notes: tuple[str, ...]


class _Alone(Exception):
    """Reason why only the weights of a checkpoint can be imported, as a sentence."""


def optimizer_state(source: TorchDist, parameters: NamedWeights) -> FoundState | str:
    """Return the state of the optimizer, or the reason why there is none; empty if none was saved.

    Args:
        source: the open checkpoint.
        parameters: the parameters, and the tensor of the checkpoint for each part.
    Raises:
        CheckpointError: a tensor has another shape than its parameter, or counters are damaged.
    """
    stored = _by_kind(source)
    if not stored and not source.has_buckets:
        return ""
    try:
        return _read_state(source, parameters, stored)
    except _Alone as reason:
        return f"{reason}: {_ALONE}."


def _read_state(
    source: TorchDist, parameters: NamedWeights, stored: dict[str, dict[str, str]]
) -> FoundState:
    if not stored:
        raise _Alone(
            "The optimizer was saved in flat buffers that depend on its layout (dp_reshardable); "
            "save it with Megatron's --dist-ckpt-optim-fully-reshardable to import it"
        )
    names = [name[:80] for name in sorted(stored)]
    if not {FIRST, SECOND} <= stored.keys() <= {FIRST, SECOND, MASTER}:
        raise _Alone(f"The optimizer is not Adam (it has {', '.join(first_of(names, 4))})")
    _check_names(source, parameters, stored)
    groups = list(_values(source.common.get("optimizer"), "param_groups"))
    steps, iteration = _steps(source, groups), _iteration(source)
    samples, tokens = _samples(source, iteration)
    found = {
        kind: dict(_sources(source, parameters, kind, stored.get(kind, {})))
        for kind in (FIRST, SECOND, MASTER)
    }
    tensors: dict[str, tuple[Weight, Any]] = {}
    for weight in parameters.weights.values():
        if weight.name in parameters.buffers:
            continue
        for kind, sources in found.items():
            complete = all(part.name in sources for part in weight.parts)
            if not complete and kind != MASTER:
                raise _Alone(f"The optimizer has no {kind} of {weight.name}")
            # Float32 parameters are their own masters. Without masters, weights are copied to them.
            if kind == MASTER and weight.dtype != torch.bfloat16:
                continue
            if not complete:
                _check_exact(source, parameters, weight, stored)
            values = source.reader(sources if complete else parameters.sources)
            name = f"optimizer/{kind}/{weight.name}"
            tensors[name] = (replace(weight, dtype=torch.float32), values)
    schedule, notes = _schedule(source, groups, samples)
    progress = {
        "iteration": iteration,
        "validated_at": iteration,
        "plan_samples": samples,
        "consumed_tokens": tokens,
    }
    trained = TrainedState(
        iteration=iteration, steps=steps, progress=progress, optim=schedule, tensors=tensors
    )
    return FoundState(trained=trained, masters=found[MASTER], notes=notes)


def _by_kind(source: TorchDist) -> dict[str, dict[str, str]]:
    """Return for each kind the tensor of the optimizer for each tensor of the model.

    A tensor with an unknown name is a kind of its own.
    """
    by_kind: dict[str, dict[str, str]] = {}
    for name in (name for name in source.tensors if name.startswith(OPTIMIZER)):
        match = _TENSOR.fullmatch(name)
        if match is None:
            by_kind[name] = {}
            continue
        names = by_kind.setdefault(_KINDS.get(match[1], match[1]), {})
        if match[2] in names:
            raise CheckpointError(
                f"has {match[1]} of {match[2]} twice", path=source.directory, cure="copy it again"
            )
        names[match[2]] = name
    return by_kind


def _check_names(
    source: TorchDist, parameters: NamedWeights, stored: Mapping[str, Mapping[str, str]]
) -> None:
    """Check that each tensor of the optimizer belongs to a tensor of the model."""
    model_tensors = {model_source.tensor for model_source in parameters.sources.values()}
    for names in stored.values():
        for model, name in names.items():
            if model not in model_tensors:
                raise damage(source.directory, f"{name} belongs to no tensor of the model")


def _check_exact(
    source: TorchDist,
    parameters: NamedWeights,
    weight: Weight,
    stored: Mapping[str, Mapping[str, str]],
) -> None:
    """Check that a weight without float32 values in the optimizer was saved in float32.

    Optimizers that are not distributed have no second copy of float32 parameters. Optimizers of
    float32 models have none of any parameter.
    """
    rounded = [
        tensor
        for tensor in (parameters.sources[part.name].tensor for part in weight.parts)
        if source.tensors[tensor].dtype != torch.float32
    ]
    if rounded and stored.get(MASTER):
        raise damage(source.directory, f"the optimizer has no float32 values of {rounded[0]}")


def _sources(
    source: TorchDist, parameters: NamedWeights, kind: str, names: Mapping[str, str]
) -> Iterator[tuple[str, Source]]:
    """Yield the tensors of one kind for the parts of all parameters."""
    precision_aware = _mapping(source.common.get("args")).get("use_precision_aware_optimizer")
    of_masters = {torch.int16, torch.float32} if precision_aware else {torch.int16}
    for part, model in parameters.sources.items():
        name = names.get(model.tensor)
        if name is None:
            continue
        stored, expected = source.tensors[name], source.tensors[model.tensor]
        low = kind == MASTER and expected.dtype == torch.bfloat16
        remainders = low and stored.dtype in of_masters
        valid = remainders or stored.dtype.is_floating_point
        if stored.shape != expected.shape or not valid:
            raise CheckpointError(
                f"{name} is {list(stored.shape)} of {stored.dtype}, but its parameter is "
                f"{list(expected.shape)}",
                path=source.directory,
                cure="save the checkpoint again",
            )
        yield part, Source(name, model.layer, model.tensor if remainders else None)


def _values(value: Any, key: str, depth: int = _DEEPEST) -> Iterator[Any]:
    """Yield the entries of all lists under ``key``, and all other values under it."""
    if depth == 0:
        return
    # NeMo has a list of optimizers.
    if isinstance(value, list):
        for entry in value:
            yield from _values(entry, key, depth - 1)
    for name, entry in _mapping(value).items():
        if name == key:
            yield from entry if isinstance(entry, list) else [entry]
        else:
            yield from _values(entry, key, depth - 1)


def _steps(source: TorchDist, groups: list[Any]) -> int:
    """Return the number of steps that Adam has made."""
    optimizer = source.common.get("optimizer")
    counters = [group["step"] for group in groups if isinstance(group, Mapping) and "step" in group]
    counters += list(_values(optimizer, "common_step"))
    steps = [count for count in counters if count is not None]
    if not steps:
        raise _Alone("The optimizer's number of steps is not in the checkpoint")
    if any(count != steps[0] for count in steps) or not _is_count(steps[0], INT32_MAX):
        shown = ", ".join(sorted({printable_message(str(count))[:40] for count in steps})[:4])
        raise damage(source.directory, f"its optimizer has the steps {shown}")
    return int(steps[0])


def _iteration(source: TorchDist) -> int:
    # NeMo counts iterations as global_step.
    names = source.common.get("iteration"), source.train_state.get("step")
    choices = [*names, source.common.get("global_step")]
    _, _, number = source.directory.name.partition("iter_")
    if number.isdecimal():
        choices.append(int(number))
    missing = "The iteration of the optimizer is not in the checkpoint"
    iteration = _first_count(source, choices, INT32_MAX, missing, "its iteration")
    if iteration == 0:
        raise _Alone(missing)
    return iteration


def _samples(source: TorchDist, iteration: int) -> tuple[int, int]:
    """Return the samples and the tokens of the run so far."""
    args = _mapping(source.common.get("args"))
    scheduler = _mapping(source.common.get("opt_param_scheduler"))
    batch = args.get("global_batch_size")
    choices = (
        args.get("consumed_train_samples"),
        source.train_state.get("consumed_train_samples"),
        scheduler.get("num_steps"),
        iteration * batch if _is_count(batch, INT32_MAX) else None,
        *_values(source.common, "consumed_samples"),  # NeMo's data module
    )
    missing = "The number of samples so far is not in the checkpoint"
    samples = _first_count(source, choices, _MOST_SAMPLES, missing, "its number of samples")
    length = args.get("seq_length")
    tokens = samples * int(length) if _is_count(length, INT32_MAX) else 0
    return samples, min(tokens, _MOST_SAMPLES)


def _first_count(
    source: TorchDist, choices: Iterable[Any], most: int, missing: str, counted: str
) -> int:
    """Return the first value that the checkpoint has, as a number from 0 to ``most``.

    Args:
        missing: reason if it has none.
        counted: subject of the sentence about another value.
    """
    value = next((choice for choice in choices if choice is not None), None)
    if value is None:
        raise _Alone(missing)
    if not _is_count(value, most):
        reason = f"{counted} is {printable_message(str(value))[:40]}"
        raise damage(source.directory, reason)
    return int(value)


def _schedule(
    source: TorchDist, groups: list[Any], samples: int
) -> tuple[dict[str, Any] | None, tuple[str, ...]]:
    """Return the options of the schedule and of Adam, with all lengths in samples, and notes."""
    scheduler = _mapping(source.common.get("opt_param_scheduler"))
    args = _mapping(source.common.get("args"))
    if "max_lr" not in scheduler:
        return None, ("The checkpoint has no learning-rate schedule; give its flags.",)
    try:
        values = _schedule_values(scheduler, args, groups)
        config = OptimizerConfig(
            **{
                name: option_value
                for name, option_value in values.items()
                if option_value is not None
            }
        )
    except (ConfigError, ArithmeticError, LookupError, TypeError, ValueError) as error:
        # The values may have any type and size, so conversions fail in many ways.
        first = error.problems[0] if isinstance(error, ConfigError) else error
        said = " ".join(printable_message(str(first)).split())[:200].rstrip(".")
        return None, (f"The schedule is not imported ({said}); give its flags.",)
    return section_to_dict(config), tuple(_schedule_notes(scheduler, samples))


def _schedule_values(
    scheduler: Mapping[str, Any], args: Mapping[str, Any], groups: list[Any]
) -> dict[str, Any]:
    """Return the values of options, unchecked; None for those that the checkpoint does not have."""
    constants = _mapping(next((group for group in groups if group), None))
    betas = constants.get("betas") or [None, None]
    batch, iters = args.get("global_batch_size"), args.get("lr_wsd_decay_iters")
    of_iters = iters * batch if _is_count(iters, INT32_MAX) and _is_count(batch, INT32_MAX) else 0
    values = {
        "lr": scheduler["max_lr"],
        "min_lr": scheduler.get("min_lr"),
        "lr_decay_style": scheduler.get("lr_decay_style"),
        "lr_decay_samples": scheduler.get("lr_decay_steps"),
        "lr_warmup_samples": scheduler.get("lr_warmup_steps"),
        "lr_warmup_init": args.get("lr_warmup_init"),
        "lr_wsd_decay_samples": args.get("lr_wsd_decay_samples") or of_iters or None,
        "lr_wsd_decay_style": args.get("lr_wsd_decay_style"),
        **_weight_decay(scheduler),
        "adam_beta1": betas[0],
        "adam_beta2": betas[1],
        "adam_eps": constants.get("eps"),
        "clip_grad": args.get("clip_grad"),
    }
    # Megatron computes lengths in samples as products with a fraction.
    lengths = {
        name: int(value)
        for name, value in values.items()
        if name.endswith("_samples") and isinstance(value, float)
    }
    return values | lengths


def _schedule_notes(scheduler: Mapping[str, Any], samples: int) -> Iterator[str]:
    done = scheduler.get("num_steps", samples)
    if done != samples and _is_count(done, _MOST_SAMPLES):
        yield (
            f"The schedule continues at {samples:,} samples; in Megatron it was at {done:,}, because "
            "skipped steps do not count there."
        )


def _weight_decay(scheduler: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of the weight decay, with a length in samples."""
    start, end = scheduler.get("start_wd"), scheduler.get("end_wd")
    if start == end:
        return {"weight_decay": end}
    return {
        "weight_decay_incr_style": scheduler.get("wd_incr_style"),
        "start_weight_decay": start,
        "end_weight_decay": end,
        "weight_decay_incr_samples": scheduler.get("wd_incr_steps"),
    }


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _is_count(value: object, most: int) -> TypeGuard[int | float]:
    """Return whether a value is a whole number of steps or samples; Adam counts in floats."""
    return (
        isinstance(value, (int, float))
        and not isinstance(value, bool)
        and 0 <= value <= most  # also excludes NaN and infinity
        and value == int(value)
    )
