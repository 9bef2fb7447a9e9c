"""Windows of attention layers: the spelling of the two options, their rules and their meaning."""

import pytest

from megatron_packed.config.errors import ConfigError
from megatron_packed.config.sections.model import ModelConfig
from megatron_packed.config.sections.model_parts.window import layers_with_window, window_sides


def model(pattern="*-*-*-", **changes):
    return ModelConfig(
        hybrid_layer_pattern=pattern, hidden_size=8, num_attention_heads=2, **changes
    )


@pytest.mark.parametrize(
    ("text", "layers"),
    [
        (None, "1111"),
        ("2", "1010"),
        (" 3 ", "1101"),
        ("5", "1111"),
        ("1", "0000"),
        ("[1]*3+[0]", "1110"),
        ("[0, 1] * 2", "0101"),
        ("2*[1,0]", "1010"),
        ("([1]+[0])*2", "1010"),
        ("[] + [1,0,0,1,]", "1001"),
        ("[1]*0 + [0]*2*2", "0000"),
    ],
)
def test_layers_with_the_window(text, layers):
    assert layers_with_window(text, 4) == tuple(layer == "1" for layer in layers)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0", "N of at least 1"),
        ("[1]*3", "3 entries, but the pattern has 4 layers"),
        ("[1]*3+", "lacks '['"),
        ("[1", "lacks ']'"),
        ("[1 1]", "lacks ']'"),
        ("[2]*4", "the entry 2"),
        ("[1]*4]", "']' after"),
        ("([1]*4", "lacks ')'"),
        ("[1]*[4]", "lacks a number"),
        ("[1]*3 - 1", "'-' at position 7"),
        ("__import__('os')", "'_' at position 1"),
        ("[1]*1000000000", "more than 10,000"),
        ("[[1]]*4", "lacks a number"),
        ("", "lacks '['"),
        ("-1", "'-'"),
    ],
)
def test_other_texts_are_refused(text, message):
    with pytest.raises(ValueError) as caught:
        layers_with_window(text, 4)
    assert message in str(caught.value)


def test_both_sides_of_a_window():
    assert window_sides("4095,0") == window_sides(" (4095, 0) ") == (4095, 0)
    for text in ("4095", "4095,0,0", "a,0", ""):
        with pytest.raises(ValueError, match="left,right"):
            window_sides(text)


def test_the_window_of_a_layer_counts_the_token_itself():
    limited = model(window_size="127,0", window_attn_skip_freq="3")
    assert [limited.window_of(number) for number in range(6)] == [128, None, None, None, 128, None]
    assert limited.attention_windows == (128, None)
    assert model().attention_windows == (None,) and model().window_of(0) is None
    assert model("--").attention_windows == ()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"window_size": "4096"}, "--window-size 4096"),
        ({"window_size": "128,64"}, "give 128,0"),
        ({"window_size": "-1,0"}, "leave it out"),
        ({"window_size": "8,0", "window_attn_skip_freq": "[1]*3"}, "3 entries"),
        ({"window_size": "8,0", "window_attn_skip_freq": "[0,1]*3"}, "no * layer"),
        ({"window_size": "8,0", "window_attn_skip_freq": "1"}, "no * layer"),
        (
            {"use_rope_scaling": True, "rope_scaling_low_freq_factor": 4.0},
            "--rope-scaling-low-freq-factor 4",
        ),
    ],
)
def test_rules(changes, message):
    with pytest.raises(ConfigError) as caught:
        model(**changes)
    assert message in str(caught.value)
