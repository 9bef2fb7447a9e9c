"""Comparison with transformers: its models run one document at a time, `HybridModel` runs the pack.

Together the four families cover every symbol of the pattern. They have Mamba-2, attention with and
without (partial) rotary positions, and a shared expert. They also cover squared ReLU, SwiGLU and
GELU, RMSNorm and LayerNorm, biases, softmax and sigmoid routing.
"""

import pytest
import torch
import torch.nn.functional as F

from megatron_packed.models.convert.import_huggingface import open_model
from megatron_packed.models.hybrid_model import HybridModel
from support import hybrid_cases as cases

transformers = pytest.importorskip("transformers")

TOLERANCE = 1e-4
HIDDEN, HEADS, GROUPS, WIDTH = 32, 4, 2, 8


def fill(model, seed=3):
    """Fill every parameter with random values large enough to show every part of the model."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
            if "norm" in name and name.endswith("weight"):
                parameter.add_(1.0)
    return model.eval()


def copy(ours: HybridModel, weights: dict) -> None:
    """Fill the parameters by name, and check that ``weights`` has exactly their names."""
    parameters = dict(ours.named_parameters())
    assert set(weights) == set(parameters), set(weights) ^ set(parameters)
    with torch.no_grad():
        for name, value in weights.items():
            parameters[name].copy_(value)


def compare(theirs, ours):
    documents = cases.make_documents(cases.AWKWARD)
    batch = cases.make_pack(documents, tail=5, spare=3)
    output = ours(batch)
    logits = ours.logits(batch.tokens, batch.packed)
    loss_sum = 0.0
    with torch.no_grad():
        for number, (tokens, mask) in enumerate(documents):
            tokens, mask = torch.as_tensor(tokens), torch.as_tensor(mask)
            expected = theirs(input_ids=tokens[None], use_cache=False).logits[0]
            mine = logits[batch.packed.seq_idx[0] == number]
            assert expected.shape == mine.shape
            assert (mine - expected).abs().max() <= TOLERANCE, (
                f"document {number} of {len(tokens)} tokens"
            )
            loss_sum = (
                loss_sum
                + (F.cross_entropy(expected[:-1], tokens[1:], reduction="none") * mask[1:]).sum()
            )
    assert abs(output.loss_sum - loss_sum) <= TOLERANCE * loss_sum


def build(pattern, **changes):
    return cases.tiny_model(
        pattern, hidden_size=HIDDEN, num_attention_heads=HEADS, kv_channels=WIDTH, **changes
    )


def test_nemotron_h(tmp_path):
    pattern = "ME*M-"
    config = transformers.NemotronHConfig(
        vocab_size=cases.VOCAB,
        hidden_size=HIDDEN,
        layers_block_type=None,
        hybrid_override_pattern=pattern,
        num_attention_heads=HEADS,
        num_key_value_heads=GROUPS,
        head_dim=WIDTH,
        intermediate_size=48,
        ssm_state_size=16,
        mamba_num_heads=4,
        mamba_head_dim=8,
        n_groups=2,
        chunk_size=8,
        n_routed_experts=5,
        moe_intermediate_size=16,
        moe_shared_expert_intermediate_size=24,
        num_experts_per_tok=3,
        routed_scaling_factor=2.5,
        time_step_min=1e-12,  # transformers clamps the step from below, Megatron's kernels do not
    )
    theirs = fill(transformers.NemotronHForCausalLM(config))
    for layer, symbol in zip(theirs.model.layers, pattern):
        if symbol == "E":
            layer.mixer.gate.e_score_correction_bias.copy_(torch.linspace(-0.3, 0.3, 5))
    compare(theirs, converted(theirs, tmp_path))


def converted(theirs, folder):
    """Return the model that `megatron-packed convert` makes, with large values in padded rows.

    The rows that pad the vocabulary must not affect the results.
    """
    theirs.save_pretrained(folder, max_shard_size="20KB")
    config, files, weights = open_model(folder, bf16=False)
    ours = HybridModel(config, vocab_size=config.vocab_size, max_positions=256)
    state = {name: weight.join(files.read) for name, weight in weights.items()}
    for name in {"embedding.weight", "output.weight"} & state.keys():
        state[name][cases.VOCAB :] = 50.0
    ours.load_state_dict(state)
    return ours


def padded(table, ours):
    """Return the table with large values in its padding rows. These must not affect the results."""
    return F.pad(table, (0, 0, 0, ours.embedding.weight.shape[0] - table.shape[0]), value=50.0)


COMMON = {
    "vocab_size": cases.VOCAB,
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS,
    "head_dim": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "rms_norm_eps": 1e-5,
}


def test_llama(tmp_path):
    theirs = fill(transformers.LlamaForCausalLM(transformers.LlamaConfig(**COMMON)))
    compare(theirs, converted(theirs, tmp_path))


def test_mixtral(tmp_path):
    config = transformers.MixtralConfig(
        **COMMON, num_local_experts=5, num_experts_per_tok=2, sliding_window=None, rope_theta=1e6
    )
    theirs = fill(transformers.MixtralForCausalLM(config))
    compare(theirs, converted(theirs, tmp_path))


def test_gpt_neox():
    config = transformers.GPTNeoXConfig(
        vocab_size=cases.VOCAB,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        intermediate_size=48,
        num_hidden_layers=2,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
        },
        use_parallel_residual=False,
        hidden_act="gelu",
        layer_norm_eps=1e-5,
    )
    theirs = fill(transformers.GPTNeoXForCausalLM(config))
    ours = build(
        "*-*-",
        num_query_groups=HEADS,
        position_embedding_type="rope",
        rotary_percent=0.5,
        squared_relu=False,
        normalization="LayerNorm",
        add_bias_linear=True,
    )
    state = theirs.state_dict()
    weights = {
        "embedding.weight": padded(theirs.get_input_embeddings().weight, ours),
        "output.weight": padded(theirs.get_output_embeddings().weight, ours),
    }
    # GPT-NeoX stores q, k and v of each head together. This equals the layout of `HybridModel`
    # with one query head in each group.
    names = {
        "input_layernorm": (0, "norm"),
        "attention.query_key_value": (0, "mixer.qkv"),
        "attention.dense": (0, "mixer.proj"),
        "post_attention_layernorm": (1, "norm"),
        "mlp.dense_h_to_4h": (1, "mixer.fc1"),
        "mlp.dense_4h_to_h": (1, "mixer.fc2"),
    }
    for kind in ("weight", "bias"):
        weights[f"final_norm.{kind}"] = state[f"gpt_neox.final_layer_norm.{kind}"]
        for number in range(2):
            for their, (half, mine) in names.items():
                value = state[f"gpt_neox.layers.{number}.{their}.{kind}"]
                weights[f"layers.{2 * number + half}.{mine}.{kind}"] = value
    copy(ours, weights)
    compare(theirs, ours)
