"""AdamW by NVIDIA apex's multi-tensor kernel: the one its FusedAdam launches with
``capturable=True``.

NVIDIA's apex is on no package index; the project called ``apex`` on PyPI is somebody else's. It is
recognised by what it contains, before anything of it is imported. The FusedAdam class itself is not
used, for the reasons given in ``adamw_transformer_engine.py`` (both classes share that code); its
kernels without ``capturable`` take the learning rate and the step from the host and ignore the
flag, so they cannot serve.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import torch

from megatron_packed.optim.adamw import Control, Inputs, Slices
from megatron_packed.optim.multi_tensor import launch


def not_supported_reasons(inputs: Inputs) -> list[str]:
    reasons = (
        []
        if inputs.device_type == "cuda"
        else [f"the kernel runs on cuda, not on {inputs.device_type}."]
    )
    return reasons + apex_problems()


def apex_problems() -> list[str]:
    """Why the installed ``apex`` cannot be used; empty when it can. Imports it only after
    recognising it.
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
            "this apex is too old: amp_C has no multi_tensor_adam_capturable, so a step cannot be predicated."
        ]
    return []


def stranger_by_its_name() -> str | None:
    """What is installed as ``apex`` and is not NVIDIA's, as a sentence; None where it is, or
    nothing is.
    """
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


@torch.no_grad()
def run(slices: Sequence[Slices], control: Control) -> None:
    """Reads: [Note: predicated step]. One launch per weight decay; clipped gradients are written
    back.
    """
    from amp_C import multi_tensor_adam_capturable
    from apex.multi_tensor_apply import multi_tensor_applier

    launch(multi_tensor_applier, multi_tensor_adam_capturable, slices, control)
