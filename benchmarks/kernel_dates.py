"""Kernels of measurements that are no longer the default.

`docs/default_kernels.json` lists the default backends of each op on GPUs, with their dates.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, cast

TABLE = Path(__file__).parent.parent / "docs" / "default_kernels.json"
EVERY_MODEL = "every model"
HYBRID = ("Mamba", "attention", "MLP", EVERY_MODEL)
WITH_EXPERTS = (*HYBRID, "experts")
PARTS: dict[str, tuple[str, ...]] = {
    "beside_flash_qla": ("gated_delta_rule",),
    "beside_megatron": HYBRID,
    "capacity_cost": ("varlen_attention", "ssd", "causal_conv1d", "gated_rms_norm"),
    "command_line_runs": (*WITH_EXPERTS, "gated delta net"),
    "doubled_beta": ("gated_delta_rule",),
    "doubled_beta_errors": ("gated_delta_rule",),
    "elementwise": ("activation", "causal_conv1d", "gated_rms_norm", "rms_norm"),
    "expert_gradients": ("grouped_mlp",),
    "expert_graphs": WITH_EXPERTS,
    "full_step": HYBRID,
    "gated_delta_rule": ("gated_delta_rule",),
    "generation": HYBRID,
    "gradient_sums": (),
    "graph_runs": WITH_EXPERTS,
    "graph_step": HYBRID,
    "layouts": HYBRID,
    "layouts_2_hybrid1b_moe": WITH_EXPERTS,
    "layouts_4_hybrid1b_moe": WITH_EXPERTS,
    "lora_expand": ("lora_expand",),
    "metadata_sync": HYBRID,
    "model_step": HYBRID,
    "offload": HYBRID,
    "op_backends": (*WITH_EXPERTS, "gated delta net"),
    "optimizer_step": (),
    "packed_vs_padded": HYBRID,
    "packing_report": (),
    "preprocess_speed": (),
    "real_sizes": (*WITH_EXPERTS, "gated delta net"),
    "recipe_gated_delta": ("gated delta net", "attention", "MLP", EVERY_MODEL),
    "repeatability": HYBRID,
    "same_numbers": HYBRID,
    "ssd": ("ssd",),
    "state_precision": HYBRID,
    "step_edge": HYBRID,
    "train_real": WITH_EXPERTS,
    "tune_prediction": HYBRID,
    "two_checkouts": HYBRID,
}
"""Beginning of the name of result files -> parts of models, or ops, whose kernels were measured.

The longest beginning decides.
"""


class OldKernel(NamedTuple):
    """Kernel of a measurement that is not the default now."""

    title: str
    """The op in words, for example ``Mamba-2 scan``."""
    kernels: str
    """The kernels of the measurement, for example ``mamba-ssm's scan``."""
    now: str
    """The kernels that are the default now."""


@cache
def table() -> dict[str, dict[str, Any]]:
    return cast("dict[str, dict[str, Any]]", json.loads(TABLE.read_text()))


def parts_of(result: str) -> tuple[str, ...]:
    """Return the parts of models, or the ops, that a result file measures.

    Raises:
        KeyError: `PARTS` does not have the result.
    """
    beginnings = [name for name in PARTS if result.startswith(name)]
    if not beginnings:
        raise KeyError(f"kernel_dates.PARTS does not say which kernels {result}.json measures.")
    return PARTS[max(beginnings, key=len)]


def old_kernels(result: str, document: Mapping[str, Any]) -> list[OldKernel]:
    """Return the kernels of a measurement that are not the default now.

    Args:
        result: name of the result file without suffix.
        document: content of the file, with date, device and versions of packages.
    """
    parts = parts_of(result)
    if document["device"].startswith("CPU"):
        return []
    old = []
    for op, entry in table().items():
        if op not in parts and not {*entry["parts"]} & {*parts}:
            continue
        # The first entry is used for the hours before the date that it names.
        past = [one for one in entry["defaults"] if one["since"] <= document["date"]]
        used = past[-1] if past else entry["defaults"][0]
        kernels = used["kernels"]
        if "package" in used and used["package"] not in document["versions"]:
            kernels = used["otherwise"]
        if kernels != (now := entry["defaults"][-1]["kernels"]):
            old.append(OldKernel(entry["title"], kernels, now))
    return old
