"""Where a Megatron script would behave otherwise here: the table of docs/configuration.md, as data."""

from __future__ import annotations

from megatron_packed.config.help_text import default_text
from megatron_packed.config.registry import every_field

_BEHAVIOURS: tuple[tuple[str, str, str, str], ...] = (
    ("--distributed-backend", "nccl", "nccl on GPUs, gloo on CPUs", "the same command runs on a CPU"),
    ("--num-query-groups", "ignored without --group-query-attention", "always meant", "a number is given on purpose"),
    ("--data-path", "divided 969, 30, 1", "all of it trains", "nothing is cut off that --split does not ask for"),
    ("--split", "in file order", "with --sft by a draw; --split-order file is theirs", "data is often sorted by task"),
    ("--moe-router-dtype", "the model's", "always fp32", "routing in bf16 changes which experts are chosen"),
    ("--calculate-per-token-loss", "off", "always on", "documents count by their target tokens, whatever their pack"),
    ("--check-for-spiky-loss", "off; on: warns when a micro-batch's loss is 10 times the largest of the first 100",
     "on, unless --loss-spike-policy off: warns when a step's loss is above --loss-spike-factor times its running "
     "median",
     "the first losses are the largest, and ten times those is seldom reached"),
    ("--check-for-large-grads", "off; on: warns when a bucket's gradient norm is 10 times the largest of the first 100",
     "on, unless --loss-spike-policy off: warns when the gradient norm is above --grad-norm-spike-factor times its "
     "running median", "the norm of all gradients is at hand"),
    ("--exit-signal-handler", "off", "always on", "a job that is told to stop keeps its work"),
    ("--load", "a missing directory is ignored", "an error, unless it is also --save", "a typing error costs a run"),
)


def differences() -> list[tuple[str, str, str, str]]:
    """Rows of (flag, Megatron's default, ours, why)."""
    rows = []
    for described in every_field():
        if described.option.megatron is not None:
            theirs, why = described.option.megatron
            rows.append((described.flag, theirs, default_text(described), why))
    return [*rows, *_BEHAVIOURS]


def differences_table() -> str:
    """The rows as a Markdown table."""
    lines = ["| flag | Megatron-LM | here | why |", "|---|---|---|---|"]
    lines += [f"| `{flag}` | {theirs} | {ours} | {why} |" for flag, theirs, ours, why in differences()]
    return "\n".join(lines) + "\n"
