"""Flags of a model in model.args: they give the model back, and none is without effect."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_packed.config.idle_options import without_effect
from megatron_packed.config.parser.parse import parse
from megatron_packed.config.sections.model import ModelConfig
from megatron_packed.config.serialise import model_flags
from megatron_packed.models.convert.huggingface_config import model_of
from support.converted_model import FAMILIES

RUN = ["--mock-data", "--seq-length", "32", "--train-iters", "1", "--lr", "1e-3"]
PATTERNS = {"all": "ME*M-", "attention": "**", "Mamba": "MM", "experts": "*E", "MLP": "M-"}


@pytest.mark.parametrize("name", [*FAMILIES, *PATTERNS])
def test_flags_of_a_converted_model_have_an_effect_and_give_the_model_back(name):
    fields = FAMILIES.get(name, {})
    if name in PATTERNS:
        fields = {**FAMILIES["nemotron_h"], "hybrid_override_pattern": PATTERNS[name]}
    model = model_of(fields, Path())[1]
    words = [word for flag in model_flags(model) for word in flag.replace("'", "").split()]
    run = parse([*words, *RUN])
    assert run.model == model
    assert not without_effect(run, 1)


def test_a_derived_option_that_has_an_effect_stays():
    model = ModelConfig(hybrid_layer_pattern="M-", hidden_size=64, mamba_num_groups=2)
    assert {"--ffn-hidden-size 256", "--mamba-num-heads 2"} <= set(model_flags(model))
    assert not any(flag.startswith("--moe-ffn-hidden-size") for flag in model_flags(model))
