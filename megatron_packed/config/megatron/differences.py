"""Differences from Megatron-LM's flags as data, for the tables of docs/coming_from_megatron.md."""

from __future__ import annotations

from megatron_packed.config.parser.flag_registry import every_field
from megatron_packed.config.parser.help_text import default_text

_BEHAVIOURS: tuple[tuple[str, str, str, str], ...] = (
    (
        "--distributed-backend",
        "nccl",
        "nccl on GPUs, gloo on CPUs",
        "the same command runs on a CPU",
    ),
    (
        "--num-query-groups",
        "ignored without --group-query-attention",
        "always meant",
        "a number is given on purpose",
    ),
    (
        "--micro-batch-size",
        "required; so many rows of --seq-length tokens, which changes memory alone",
        "1; its samples are one pack, and it also decides which documents share a pack",
        "documents lie in packs, not in rows",
    ),
    (
        "--seq-length",
        "documents are joined, and cut at every multiple of it",
        "a document fills at most so many slots; of a longer one text is split there and conversations are shortened, "
        "and both are counted",
        "a document is never cut because a pack is full",
    ),
    (
        "--data-path",
        "divided 969, 30, 1; a sample may begin inside a document",
        "all of it trains; every token of text is kept, in packs of whole documents or pieces of long ones",
        "nothing is cut off that --split does not ask for",
    ),
    (
        "--sft",
        "a line of JSONL is a sample, padded to --seq-length",
        "a pack holds as many lines as fit",
        "padding is not trained on; --train-iters, --train-samples and --lr-decay-samples cover more lines",
    ),
    (
        "--global-batch-size",
        "samples of a step; with --sft so many lines",
        "samples of a step, each of --seq-length slots filled with documents; with --sft many more lines",
        "a step has the same number of tokens whatever their length; give fewer samples for as many lines",
    ),
    (
        "--reset-attention-mask",
        "off: attention crosses documents",
        "always on",
        "no document sees another",
    ),
    (
        "--reset-position-ids",
        "off: positions run on through documents",
        "always on",
        "a document is learned alike wherever it lies in its pack",
    ),
    (
        "--eod-mask-loss",
        "off: a document's first token is learned from the end of the one before",
        "always on; the end-of-document token itself is learned",
        "no document predicts another",
    ),
    (
        "--split",
        "in file order",
        "with --sft by a draw; --split-order file is theirs",
        "data is often sorted by task",
    ),
    (
        "--moe-router-dtype",
        "the model's",
        "always fp32",
        "routing in bf16 changes which experts are chosen",
    ),
    (
        "--calculate-per-token-loss",
        "off",
        "always on",
        "documents count by their target tokens, whatever their pack",
    ),
    (
        "--check-for-spiky-loss",
        "off; on: warns when a micro-batch's loss is 10 times the largest of the first 100",
        "on, unless --loss-spike-policy off: warns when a step's loss is above --loss-spike-factor times its running "
        "median",
        "the first losses are the largest, and ten times those is seldom reached",
    ),
    (
        "--check-for-large-grads",
        "off; on: warns when a bucket's gradient norm is 10 times the largest of the first 100",
        "on, unless --loss-spike-policy off: warns when the gradient norm is above --grad-norm-spike-factor times its "
        "running median",
        "the norm of all gradients is at hand",
    ),
    ("--exit-signal-handler", "off", "always on", "a job that is told to stop keeps its work"),
    (
        "--load",
        "a missing directory is ignored",
        "an error, unless it is also --save",
        "a typing error costs a run",
    ),
)


def differences() -> list[tuple[str, str, str, str]]:
    """Rows of (flag, Megatron's default, ours, why)."""
    rows = []
    for described in every_field():
        if described.option.megatron is not None:
            theirs, why = described.option.megatron
            rows.append((described.flag, theirs, default_text(described), why))
    return [*rows, *_BEHAVIOURS]
