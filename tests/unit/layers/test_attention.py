"""Tests of the layout of the fused projection, and of positions in a pack."""

import torch

from megatron_packed.config.sections.model import ModelConfig
from megatron_packed.layers.attention import Attention, Rotary
from megatron_packed.packed.params import PackedSeqParams, SharedTables
from support.hybrid_cases import CPU_BUILD
from support.random_tensors import filled, normal

HEADS, GROUPS, WIDTH = 4, 2, 8


def build(**changes):
    config = ModelConfig(
        hybrid_layer_pattern="*",
        hidden_size=16,
        num_attention_heads=HEADS,
        num_query_groups=GROUPS,
        kv_channels=WIDTH,
        add_bias_linear=False,
        **changes,
    )
    rotary = None
    if config.position_embedding_type == "rope":
        rotary = Rotary(
            max_positions=32, rotary_dim=config.rotary_dim, base=config.rotary_base, device="cpu"
        )
    return filled(Attention(config, CPU_BUILD, rotary=rotary))


def test_rows_go_group_by_group_queries_then_key_then_value():
    """Check the row order with values in the second group only.

    So only the two query heads of that group have outputs.
    """
    layer = build()
    rows = layer.qkv.weight.data.view(GROUPS, HEADS // GROUPS + 2, WIDTH, 16)
    rows[0, -1] = 0
    layer.proj = torch.nn.Identity()
    x = normal(6, 16, seed=1)
    heads = layer(x, PackedSeqParams.from_lengths([6], 6)).view(6, HEADS, WIDTH)
    assert heads[:, :2].abs().max() == 0
    value = x @ rows[1, -1].T
    torch.testing.assert_close(heads[0, 2], value[0])  # The first token attends only to itself.
    key, query = x[:2] @ rows[1, -2].T, x[1] @ rows[1, 1].T
    weights = torch.softmax(key @ query / WIDTH**0.5, dim=0)
    torch.testing.assert_close(heads[1, 3], weights @ value[:2])


def test_tables_of_the_pack_replace_its_positions():
    layer = build(position_embedding_type="rope")
    x = normal(6, 16, seed=1)
    packed = PackedSeqParams.from_lengths([6], 6)
    stretched = packed.with_tables(SharedTables(rope_position_ids=3 * packed.position_ids))
    assert torch.equal(
        layer(x, packed),
        layer(x, packed.with_tables(SharedTables(rope_position_ids=packed.position_ids))),
    )
    assert not torch.allclose(layer(x, packed), layer(x, stretched))


def test_a_tail_beyond_the_rotary_tables_keeps_real_rows_as_they_are():
    """Check rotary tables of 32 positions with a pack of 100 slots, without precomputed positions."""
    layer = build(position_embedding_type="rope")
    x = normal(100, 16, seed=1)
    out = layer(x, PackedSeqParams.from_lengths([32, 6], 100))
    assert torch.isfinite(out).all()
    alone = layer(x[32:38], PackedSeqParams.from_lengths([6], 6))
    torch.testing.assert_close(out[32:38], alone, rtol=1e-5, atol=1e-4)


def test_biases():
    assert build().qkv.bias is None
    layer = build(add_qkv_bias=True)
    assert layer.qkv.bias is not None and layer.proj.bias is None
