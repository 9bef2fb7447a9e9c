"""Attention layers of a pack against the modules of transformers, document by document."""

import pytest
import torch

from megatron_packed.config.sections.model import ModelConfig
from megatron_packed.layers.attention import Attention, Rotary
from megatron_packed.packed.params import PackedSeqParams

transformers = pytest.importorskip("transformers")
from transformers.models.olmo2 import modeling_olmo2 as olmo2  # noqa: E402
from transformers.models.qwen3 import modeling_qwen3 as qwen3  # noqa: E402
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next  # noqa: E402

from support.hybrid_cases import CPU_BUILD  # noqa: E402

TOLERANCE = 1e-5
"""max |difference| / max |reference| of outputs and gradients, float32."""
LENGTHS, TOTAL = [1, 2, 9, 64, 5], 84
D, HEADS, GROUPS, H = 24, 6, 2, 16

COMMON = {
    "hybrid_layer_pattern": "*",
    "hidden_size": D,
    "num_attention_heads": HEADS,
    "num_query_groups": GROUPS,
    "kv_channels": H,
    "add_bias_linear": False,
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
    "norm_epsilon": 1e-6,
    "qk_layernorm": True,
}
THEIRS = {
    "hidden_size": D,
    "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS,
    "head_dim": H,
    "num_hidden_layers": 1,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 128,
    "attn_implementation": "eager",
}
CASES = {
    "Qwen3-Next": (
        qwen3_next.Qwen3NextAttention,
        qwen3_next.Qwen3NextRotaryEmbedding,
        transformers.Qwen3NextConfig(
            **THEIRS,
            rope_parameters={
                "rope_type": "default",
                "rope_theta": 500.0,
                "partial_rotary_factor": 0.25,
            },
        ),
        {
            "attention_output_gate": True,
            "apply_layernorm_1p": True,
            "rotary_percent": 0.25,
            "rotary_base": 500.0,
        },
    ),
    "Qwen3": (
        qwen3.Qwen3Attention,
        qwen3.Qwen3RotaryEmbedding,
        transformers.Qwen3Config(**THEIRS),
        {},
    ),
    "Qwen3 with scaled positions, a scale and a window": (
        qwen3.Qwen3Attention,
        qwen3.Qwen3RotaryEmbedding,
        transformers.Qwen3Config(
            **THEIRS,
            rope_parameters={
                "rope_type": "llama3",
                "rope_theta": 100.0,
                "factor": 4.0,
                "low_freq_factor": 0.5,
                "high_freq_factor": 3.0,
                "original_max_position_embeddings": 32,
            },
        ),
        {
            "rotary_base": 100.0,
            "use_rope_scaling": True,
            "rope_scaling_factor": 4.0,
            "rope_scaling_low_freq_factor": 0.5,
            "rope_scaling_high_freq_factor": 3.0,
            "rope_scaling_original_max_positions": 32,
            "window_size": "6,0",
            "softmax_scale": 0.3,
        },
    ),
    "OLMo 2": (
        olmo2.Olmo2Attention,
        olmo2.Olmo2RotaryEmbedding,
        transformers.Olmo2Config(**THEIRS),
        {"qk_layernorm_scope": "all_heads"},
    ),
}


def rows_of(theirs):
    """Return the rows of the fused projection, in the order of the groups."""
    queries = theirs.q_proj.weight.view(HEADS, -1, H, D)  # (heads, query or gate, H, D)
    keys, values = (x.weight.view(GROUPS, H, D) for x in (theirs.k_proj, theirs.v_proj))
    rows = []
    for group in range(GROUPS):
        heads = queries[group * HEADS // GROUPS : (group + 1) * HEADS // GROUPS]
        rows += [heads[:, part].reshape(-1, D) for part in range(heads.shape[1])]
        rows += [keys[group], values[group]]
    return torch.cat(rows)


def mask_of(length, window=None):
    places = torch.arange(length)
    distance = places[:, None] - places
    hidden = (distance < 0) | (distance >= (window or length))
    return torch.zeros(length, length).masked_fill(hidden, float("-inf"))[None, None]


@pytest.mark.parametrize("name", CASES)
def test_a_pack_gives_the_results_of_its_documents_by_transformers(name):
    made, rotary_of, config, changes = CASES[name]
    generator = torch.Generator().manual_seed(0)
    theirs, positions = made(config, 0), rotary_of(config)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(0.3, 0.3, generator=generator)
    ours_config = ModelConfig(**COMMON | changes)
    theirs.scaling = ours_config.softmax_scale or theirs.scaling
    ours = Attention(
        ours_config,
        CPU_BUILD,
        rotary=Rotary.from_config(ours_config, 128, backend="auto", device="cpu"),
    )
    weights = {
        "qkv.weight": rows_of(theirs),
        "proj.weight": theirs.o_proj.weight,
        "q_norm.weight": theirs.q_norm.weight,
        "k_norm.weight": theirs.k_norm.weight,
    }
    assert weights.keys() == dict(ours.named_parameters()).keys()
    with torch.no_grad():
        for key, parameter in ours.named_parameters():
            parameter.copy_(weights[key])

    x = torch.randn(TOTAL, D, generator=generator, requires_grad=True)
    upstream = torch.randn(TOTAL, D, generator=generator)
    packed = PackedSeqParams.from_lengths(LENGTHS, TOTAL, capacity=len(LENGTHS) + 2)
    real = sum(LENGTHS)
    got = ours(x, packed)[:real]
    expected = []
    for document in x[:real].split(LENGTHS):
        angles = positions(document[None], torch.arange(len(document))[None])
        mask = mask_of(len(document), ours_config.window_of(0))
        expected.append(theirs(document[None], angles, mask)[0][0])
    expected = torch.cat(expected)
    leaves = list(dict(ours.named_parameters()).values())
    grads = torch.autograd.grad(got, [x, *leaves], upstream[:real])
    sources = [
        theirs.q_proj,
        theirs.k_proj,
        theirs.v_proj,
        theirs.o_proj,
        theirs.q_norm,
        theirs.k_norm,
    ]
    wanted = torch.autograd.grad(expected, [x, *(s.weight for s in sources)], upstream[:real])
    for source, gradient in zip(sources, wanted[1:], strict=True):
        source.weight.data = gradient  # so that `rows_of` joins the gradients
    wanted = {
        "x": wanted[0],
        "qkv.weight": rows_of(theirs),
        "proj.weight": theirs.o_proj.weight,
        "q_norm.weight": theirs.q_norm.weight,
        "k_norm.weight": theirs.k_norm.weight,
    }
    found = dict(zip(["x", *dict(ours.named_parameters())], grads, strict=True))
    for key, value in {**wanted, "output": expected}.items():
        difference = ({**found, "output": got}[key] - value).abs().max() / value.abs().max()
        assert difference <= TOLERANCE, f"{key}: {difference:.1e}"
