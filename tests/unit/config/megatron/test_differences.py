"""The documentation tells the truth about defaults."""

import re
from pathlib import Path

from megatron_packed.config.environment_variables import DETERMINISTIC, FASTEST
from megatron_packed.config.megatron.differences import differences, differences_table
from megatron_packed.config.parser.flag_registry import known_flags, spellings

DOCUMENT = (Path(__file__).parents[4] / "docs" / "configuration.md").read_text()


def test_the_table_of_differences_is_the_data() -> None:
    assert differences_table() in DOCUMENT
    assert {"--hidden-dropout", "--log-interval", "--position-embedding-type"} <= {
        row[0] for row in differences()
    }
    assert len(differences()) == len({row[0] for row in differences()})


def test_flags_that_decide_about_tokens_and_samples_are_among_the_differences() -> None:
    """A script of Megatron that is taken unchanged trains on other samples."""
    told = {row[0] for row in differences()}
    assert told >= {
        "--micro-batch-size",
        "--seq-length",
        "--data-path",
        "--sft",
        "--global-batch-size",
    }
    assert told >= {"--reset-attention-mask", "--reset-position-ids", "--eod-mask-loss"}
    page = (Path(__file__).parents[4] / "docs" / "coming_from_megatron.md").read_text()
    same = page.partition("## Same")[2].partition("## Different")[0]
    assert [flag for flag in told if f"| `{flag}` |" in same] == []


def test_flags_and_variables_in_the_text_exist() -> None:
    written = set(re.findall(r"--[a-z][a-z0-9-]+", DOCUMENT))
    assert written - known_flags() == {"--no-x"}
    for name in DETERMINISTIC | FASTEST:
        assert f"`{name}`" in DOCUMENT


def test_defaults_are_megatrons_unless_the_table_says_otherwise() -> None:
    """Facts about Megatron-LM's defaults, for the options where a silent difference would change a
    result.
    """
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
    told = {row[0] for row in differences()}
    for flag, default in {
        "--hidden-dropout": 0.1,
        "--attention-dropout": 0.1,
        "--log-interval": 100,
    }.items():
        assert spellings()[flag].field.default != default
        assert flag in told
