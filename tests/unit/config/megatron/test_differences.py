"""Differences from Megatron-LM that docs/ lists, and flags that docs/ names."""

import re
from pathlib import Path

from megatron_packed.config.environment_variables import ALWAYS, DETERMINISTIC, FASTEST
from megatron_packed.config.megatron.differences import differences
from megatron_packed.config.parser.command_line import known_flags, spellings

DOCS = Path(__file__).parents[4] / "docs"
CONFIGURATION = (DOCS / "configuration.md").read_text()
COMING_FROM_MEGATRON = (DOCS / "coming_from_megatron.md").read_text()


def test_each_difference_is_in_the_table_of_the_page() -> None:
    """The table of different flags has a row for each difference, and no flag has two."""
    table = COMING_FROM_MEGATRON.partition("## Different")[2].partition("## Refused")[0]
    listed = [flag for flag, *_ in differences()]
    assert [flag for flag in listed if f"| `{flag}` |" not in table] == []
    assert {"--hidden-dropout", "--log-interval", "--position-embedding-type"} <= set(listed)
    assert len(listed) == len(set(listed))


def test_flags_that_decide_about_tokens_and_samples_are_among_the_differences() -> None:
    """Flags whose meaning decides which samples are trained on are listed as different."""
    different = {row[0] for row in differences()}
    assert different >= {
        "--micro-batch-size",
        "--seq-length",
        "--data-path",
        "--sft",
        "--global-batch-size",
        "--train-samples",
        "--tokenizer-type",
    }
    assert different >= {"--reset-attention-mask", "--reset-position-ids", "--eod-mask-loss"}
    same = COMING_FROM_MEGATRON.partition("## Same")[2].partition("## Different")[0]
    assert [flag for flag in different if f"| `{flag}` |" in same] == []


def test_flags_and_variables_in_the_text_exist() -> None:
    """The guide about configuration names flags that exist, and every variable that a run sets."""
    written = set(re.findall(r"--[a-z][a-z0-9-]+", CONFIGURATION))
    assert written - known_flags() == {"--no-x"}
    for name in ALWAYS | DETERMINISTIC | FASTEST:
        assert f"`{name}`" in CONFIGURATION


def test_defaults_are_megatrons_unless_the_table_says_otherwise() -> None:
    """Options with an effect on results have Megatron-LM's default, or are listed as different."""
    megatron = {
        "--norm-epsilon": 1e-5,
        "--normalization": "LayerNorm",
        "--rotary-base": 10000,
        "--rotary-percent": 1.0,
        "--init-method-std": 0.02,
        "--make-vocab-size-divisible-by": 128,
        "--mamba-state-dim": 128,
        "--mamba-head-dim": 64,
        "--mamba-num-groups": 8,
        "--moe-router-topk": 2,
        "--moe-aux-loss-coeff": 0.0,
        "--moe-z-loss-coeff": None,
        "--moe-router-score-function": "softmax",
        "--moe-router-pre-softmax": False,
        "--moe-router-enable-expert-bias": False,
        "--moe-router-bias-update-rate": 1e-3,
        "--bf16": False,
        "--moe-router-load-balancing-type": "aux_loss",
        "--min-lr": 0.0,
        "--lr-decay-style": "linear",
        "--lr-warmup-iters": 0,
        "--lr-warmup-init": 0.0,
        "--lr-wsd-decay-style": "exponential",
        "--weight-decay": 0.01,
        "--clip-grad": 1.0,
        "--adam-beta1": 0.9,
        "--adam-beta2": 0.999,
        "--adam-eps": 1e-8,
        "--seed": 1234,
        "--eval-iters": 100,
        "--eval-interval": None,
        "--disable-bias-linear": True,
        "--squared-relu": False,
        "--swiglu": False,
        "--add-qkv-bias": False,
        "--untie-embeddings-and-output-weights": False,
        "--distributed-timeout-minutes": 10,
        "--num-workers": 2,
        "--sft": False,
        "--finetune": False,
        "--num-attention-heads": 0,
        "--tensor-model-parallel-size": 1,
        "--deterministic-mode": False,
        "--attention-backend": "auto",
    }
    for flag, default in megatron.items():
        assert spellings()[flag].field.default == default, flag
    different = {row[0] for row in differences()}
    for flag, default in {
        "--hidden-dropout": 0.1,
        "--attention-dropout": 0.1,
        "--log-interval": 100,
    }.items():
        assert spellings()[flag].field.default != default
        assert flag in different
