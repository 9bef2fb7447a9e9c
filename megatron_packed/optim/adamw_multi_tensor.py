"""AdamW by the multi-tensor kernels of NVIDIA apex and TransformerEngine.

Their FusedAdam classes launch these kernels with ``capturable=True`` and share most of their code.
This module calls the kernels without the classes, for two reasons found in the source
(TransformerEngine 2.20.2). First, the class advances ``step`` by the overflow flag of the *previous*
step, so a skipped step is counted until the next step. Second, the class creates ``step`` by a copy
from pageable memory, which waits for the host. The kernel itself has all required features. It reads
learning rate and step from device tensors, writes nothing if ``noop_flag`` is 1, and multiplies
gradients by ``inv_scale``. Kernels without ``capturable`` take learning rate and step from the host
and ignore the flag.

Both kernels take beta1 and beta2 as float32 and subtract them from 1 in float32. For beta2 = 0.999,
their second moments differ from exact values by a relative error of 1.3e-5. The bias correction has
the same error, so parameters hardly differ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from megatron_packed.optim.adamw import (
    AdamWInputs,
    Control,
    Slices,
    kernel_decay,
    wide_state_reasons,
)

_DECOUPLED_WEIGHT_DECAY = 1
_BIAS_CORRECTION = 1


def launch_per_decay(
    apply: Callable[..., Any],
    kernel: Callable[..., Any],
    slices: Sequence[Slices],
    control: Control,
) -> None:
    """Call the kernel once per weight decay; clipped gradients are written back.

    The call is ``apply(kernel, noop_flag, [grads, params, exp_avgs, exp_avg_sqs], ...)``.
    """
    # The kernels need int32 for flag and step, and vectors of one element. The conversions run on
    # the device, since the host must not read these numbers.
    noop_flag = control.skip.to(torch.int32).reshape(1)
    step = control.step.to(torch.int32).reshape(1)
    lr = control.lr.reshape(1)
    divisor = control.grad_divisor
    inv_scale = torch.ones_like(lr) if divisor is None else divisor.reciprocal().reshape(1)
    for group in slices:
        weight_decay = kernel_decay(group, control)
        apply(
            kernel,
            noop_flag,
            [list(group.grads), list(group.params), list(group.exp_avgs), list(group.exp_avg_sqs)],
            lr,
            control.beta1,
            control.beta2,
            control.eps,
            step,
            _DECOUPLED_WEIGHT_DECAY,
            _BIAS_CORRECTION,
            weight_decay,
            inv_scale,
        )


def _device_reasons(inputs: AdamWInputs) -> list[str]:
    reasons = wide_state_reasons(inputs)
    if inputs.device_type != "cuda":
        reasons.append(f"the kernel runs on cuda, not on {inputs.device_type}.")
    return reasons


class TransformerEngine:
    """Implementation by TransformerEngine's kernel."""

    @staticmethod
    def not_supported_reasons(inputs: AdamWInputs) -> list[str]:
        try:
            import transformer_engine.pytorch.optimizers  # noqa: F401
        except Exception as error:  # a broken package may raise anything at import
            return [f"{__name__} does not import: {type(error).__name__}: {error}"]
        return _device_reasons(inputs)

    @staticmethod
    @torch.no_grad()
    def run(slices: Sequence[Slices], control: Control) -> None:
        """Update all slices, with one launch per weight decay. See [Note: predicated step]."""
        from transformer_engine.pytorch.optimizers import (
            multi_tensor_adam_capturable,
            multi_tensor_applier,
        )

        launch_per_decay(multi_tensor_applier, multi_tensor_adam_capturable, slices, control)


class Apex:
    """Implementation by the kernel of NVIDIA's apex, which must be built from source."""

    @staticmethod
    def not_supported_reasons(inputs: AdamWInputs) -> list[str]:
        return _device_reasons(inputs) + apex_problems()

    @staticmethod
    @torch.no_grad()
    def run(slices: Sequence[Slices], control: Control) -> None:
        """Update all slices, with one launch per weight decay. See [Note: predicated step]."""
        from amp_C import multi_tensor_adam_capturable
        from apex.multi_tensor_apply import multi_tensor_applier

        launch_per_decay(multi_tensor_applier, multi_tensor_adam_capturable, slices, control)


def apex_problems() -> list[str]:
    """Return why the installed ``apex`` cannot be used; empty if it can be used.

    Nothing is imported before the package is identified, since ``apex`` on PyPI is another project.
    """
    if find_spec("apex") is None:
        return ["NVIDIA's apex is not installed."]
    stranger = stranger_by_its_name()
    if stranger is not None:
        return [stranger]
    if find_spec("amp_C") is None:
        return [
            "apex is installed without its CUDA extensions (no module amp_C); build it with --cuda_ext."
        ]
    import amp_C

    if not hasattr(amp_C, "multi_tensor_adam_capturable"):
        return [
            "this apex is too old: amp_C has no multi_tensor_adam_capturable, so a step cannot be skipped on the GPU."
        ]
    return []


def stranger_by_its_name() -> str | None:
    """Return a sentence about an installed ``apex`` that is not NVIDIA's; None if there is none."""
    spec = find_spec("apex")
    if spec is None:
        return None
    places = [Path(place) for place in spec.submodule_search_locations or []]
    if any((place / "multi_tensor_apply").is_dir() for place in places):
        return None
    where = spec.origin or ", ".join(map(str, places))
    return (
        f"the installed package 'apex' ({where}) is not NVIDIA's: it has no multi_tensor_apply. The apex on PyPI "
        "is another project; uninstall it, and build NVIDIA's from github.com/NVIDIA/apex if you want it."
    )
