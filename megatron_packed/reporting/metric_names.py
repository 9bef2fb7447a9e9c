"""Names of metrics in TensorBoard, W&B and MLflow, in groups that these services show as sections.

The log of ``--log-jsonl`` keeps the field names of `StepRecord`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

LARGEST_LOSS = 20.0
"""Nats per token. A perplexity is shown as at most e to this power."""

_TRAIN = (
    "aux_loss",
    "grad_norm",
    "learning_rate",
    "weight_decay",
    "params_norm",
    "num_zeros",
    "skipped",
    "loss_median",
    "grad_norm_median",
    "expert_load_max",
    "expert_load_min",
    "expert_dropped",
    "expert_dropped_share",
    "expert_rank_load",
    "expert_rank_bound",
    "expert_peer_load",
    "expert_peer_bound",
    "expert_repeats",
)
_PERF = (
    "step_time_ms",
    "tokens_per_second",
    "tflops_per_gpu",
    "mfu",
    "data_wait_ms",
    "dp_imbalance",
    "memory_gib",
    "memory_reserved_gib",
    "host_memory_gib",
    "graph_replays",
    "graph_fallbacks",
    "graph_captures",
    "graph_memory_mib",
    "graph_hit_rate",
    "offload_buffers",
    "offload_moved_mib",
    "offload_loaded_mib",
    "offload_put_ms",
    "offload_load_ms",
    "offload_load_gb_per_s",
    "offload_hidden",
    "offload_compute_ms",
)
_DATA = (
    "real_tokens",
    "target_tokens",
    "padded_tokens",
    "consumed_tokens",
    "num_seqs",
    "docs_per_pack",
    "pack_fill",
    "epoch",
)
SECTIONS = {
    "lm_loss": "train",
    **dict.fromkeys(_TRAIN, "train"),
    **dict.fromkeys(_PERF, "perf"),
    **dict.fromkeys(_DATA, "data"),
}
"""Field of the log -> section of a tracking service."""


def tracked_name(field: str) -> str:
    """Return the name of a field of the log in a tracking service.

    Example:
        ``valid_loss`` is ``valid/loss``, and ``grad_norm`` is ``train/grad_norm``.
    """
    group, _, name = field.partition("_")
    if name and group in ("valid", "test"):
        return f"{group}/{name}"
    return f"{SECTIONS.get(field, 'train')}/{'loss' if field == 'lm_loss' else field}"


def tracked(record: Mapping[str, object]) -> dict[str, float]:
    """Return the numbers of a record under their names in tracking services.

    The iteration, which is the x axis, is left out. A validation or test loss adds its perplexity.
    """
    metrics = {
        tracked_name(field): float(value)
        for field, value in record.items()
        if isinstance(value, (int, float)) and field != "iteration"
    }
    for group in ("valid", "test"):
        if (loss := metrics.get(f"{group}/loss")) is not None:
            metrics[f"{group}/perplexity"] = math.exp(min(loss, LARGEST_LOSS))
    return metrics


def answers_text(record: Mapping[str, object]) -> str:
    """Return the answers to sample prompts in a record as text; empty without any."""
    return "\n\n".join(
        "\n".join(f"{k}: {v}" for k, v in answers.items()) for answers in samples_of(record)
    )


def samples_of(record: Mapping[str, object]) -> list[dict[str, str]]:
    """Return the sample prompts with their answers in a record."""
    samples = record.get("samples")
    return samples if isinstance(samples, list) else []
