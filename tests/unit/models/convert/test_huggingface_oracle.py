"""Comparison with transformers: its models run one document at a time, `HybridModel` runs the pack.

Each family has two random models with odd settings; `tools/transformers_models.py` makes more.
Together the families cover every symbol of the pattern and GPT-NeoX adds GELU, LayerNorm and biases.
"""

import random

import pytest
import torch
import torch.nn.functional as F

from megatron_packed.models.hybrid_model import HybridModel
from support import hybrid_cases as cases

transformers = pytest.importorskip("transformers")
from support.converted_model import assert_same, contents, from_hf, opened, to_hf  # noqa: E402
from support.huggingface_models import FAMILIES, computes_wrong_groups, filled  # noqa: E402

TOLERANCE, RELATIVE = 1e-4, 1e-5
HIDDEN, HEADS, WIDTH = 32, 4, 8


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
            assert torch.allclose(mine, expected, rtol=RELATIVE, atol=TOLERANCE), (
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


OTHER = {"nemotron_h": 2, "mixtral": 2, "qwen2": 3, "qwen3_moe": 3}
"""Number of the second model of a family, if it is not 1: with a window in some layer."""
CASES = [(family, number) for family in FAMILIES for number in (0, OTHER.get(family, 1))]


@pytest.mark.parametrize(("family", "number"), CASES)
def test_documents_of_a_pack_have_their_logits(family, number, tmp_path, capsys):
    """A random model has the logits of transformers; its tensors return to the bit."""
    theirs = FAMILIES[family](random.Random(f"{family} {number}"), number)
    if computes_wrong_groups(theirs):
        pytest.skip("this version of transformers computes wrong logits of several groups")
    hf, ours, back = tmp_path / "hf", tmp_path / "ours", tmp_path / "back"
    compare(theirs, converted(theirs, hf))
    assert from_hf(hf, ours) == 0
    assert to_hf(back, ours, "--hf-base", hf) == 0 and "rounded" not in capsys.readouterr().out
    assert_same(contents(back), contents(hf))


def converted(theirs, folder):
    """Return the model that `megatron-packed convert` makes, with large values in padded rows.

    The rows that pad the vocabulary must not affect the results.
    """
    theirs.save_pretrained(folder, max_shard_size="20KB")
    config, state = opened(folder)
    ours = HybridModel(config, vocab_size=config.vocab_size, max_positions=256)
    for name in {"embedding.weight", "output.weight"} & state.keys():
        state[name][cases.VOCAB :] = 50.0
    ours.load_state_dict(state)
    return ours


def padded(table, ours):
    """Return the table with large values in its padding rows. These must not affect the results."""
    return F.pad(table, (0, 0, 0, ours.embedding.weight.shape[0] - table.shape[0]), value=50.0)


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
    theirs = filled(transformers.GPTNeoXForCausalLM(config), random.Random(3))
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
