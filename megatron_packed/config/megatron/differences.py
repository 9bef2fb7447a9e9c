"""Differences from Megatron-LM's flags as data, for the tables of docs/coming_from_megatron.md."""

from __future__ import annotations

from megatron_packed.config.parser.help_text import default_text
from megatron_packed.config.run import every_field

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
        "always used",
        "a user who gives a number expects it to be used",
    ),
    (
        "--micro-batch-size",
        "required; number of rows of --seq-length tokens, which affects memory only",
        "1; the samples form one pack, so the number also decides which documents share a pack",
        "documents are stored in packs, not in rows",
    ),
    (
        "--seq-length",
        "documents are concatenated and cut at every multiple of it",
        "maximum slots of a document; a longer text is split there, a longer conversation is "
        "shortened, and both are counted",
        "a document is never cut only because a pack is full",
    ),
    (
        "--data-path",
        "split 969, 30, 1; a sample may begin inside a document",
        "all data is for training; every token of text is used, in packs of whole documents or "
        "pieces of long ones",
        "no data is set aside without --split",
    ),
    (
        "--sft",
        "each line of JSONL is a sample, padded to --seq-length",
        "a pack holds as many lines as fit into its slots",
        "no time is spent on padding; --train-iters, --train-samples and --lr-decay-samples "
        "cover more lines",
    ),
    (
        "--global-batch-size",
        "samples of a step; with --sft the number of lines",
        "samples of a step, each with --seq-length slots filled with documents; with --sft a "
        "step has many more lines",
        "the tokens of a step do not depend on the lengths of documents; for as many lines as "
        "in Megatron, give fewer samples",
    ),
    (
        "--train-samples",
        "a sample is a cut of --seq-length tokens; with --sft a line",
        "a sample is a part of a pack, with --seq-length slots",
        "all options with samples in their names count slots, not documents",
    ),
    (
        "--reset-attention-mask",
        "off: attention crosses documents",
        "always on",
        "no token attends to another document",
    ),
    (
        "--reset-position-ids",
        "off: positions continue through documents",
        "always on",
        "the position of a document in its pack has no influence",
    ),
    (
        "--eod-mask-loss",
        "off: the first token of a document is predicted from the end of the previous document",
        "always on; the end-of-document token itself is a target",
        "no document predicts another",
    ),
    (
        "--split",
        "in file order",
        "with --sft in random order; --split-order file gives Megatron's order",
        "data files are often sorted by task",
    ),
    (
        "--moe-router-dtype",
        "the dtype of the model",
        "always fp32",
        "routing in bf16 changes which experts are chosen",
    ),
    (
        "--moe-router-load-balancing-type",
        "global_aux_loss: a micro-batch with n tokens has weight (mean tokens of the micro-batches so far) / n",
        "global_aux_loss: all micro-batches have the same weight, whatever their number of tokens",
        "packs have unequal numbers of tokens; with equal ones the values agree",
    ),
    (
        "--calculate-per-token-loss",
        "off",
        "always on",
        "each target token has the same weight in every pack",
    ),
    (
        "--check-for-spiky-loss",
        "off; on: warns when a micro-batch's loss is 10 times the largest of the first 100",
        "on, unless --loss-spike-policy off: warns when a step's loss is above --loss-spike-factor times its running "
        "median",
        "the first losses are the largest ones and are seldom exceeded ten times",
    ),
    (
        "--check-for-large-grads",
        "off; on: warns when a bucket's gradient norm is 10 times the largest of the first 100",
        "on, unless --loss-spike-policy off: warns when the gradient norm is above --grad-norm-spike-factor times its "
        "running median",
        "the norm of all gradients is computed in any case",
    ),
    (
        "--exit-signal-handler",
        "off",
        "always on",
        "a job that receives a stop signal saves a checkpoint",
    ),
    (
        "--load",
        "a missing directory is ignored",
        "an error, unless it is also --save",
        "a mistyped directory would start the run from scratch",
    ),
)


def differences() -> list[tuple[str, str, str, str]]:
    """Return rows of (flag, Megatron-LM's behaviour, this project's behaviour, reason)."""
    rows = []
    for described in every_field():
        if described.option.megatron is not None:
            theirs, why = described.option.megatron
            rows.append((described.flag, theirs, default_text(described), why))
    return [*rows, *_BEHAVIOURS]
