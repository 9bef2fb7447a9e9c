"""States of the gated delta rule for generation: prompts, then one token at a time."""

import pytest
import torch

from megatron_packed.ops.gated_delta_rule import recurrence
from megatron_packed.ops.gated_delta_rule.step import final_states, update_next
from support.op_packs import relative_error

LENGTHS = [1, 70, 64, 3]


def make(dtype, sizes):
    key_heads, value_heads, key_dim, value_dim = sizes
    generator, tokens = torch.Generator().manual_seed(0), sum(LENGTHS)
    shapes = [(key_heads, key_dim)] * 2 + [(value_heads, value_dim)] + [(value_heads,)] * 2
    random = [torch.randn(tokens, *s, generator=generator, dtype=torch.float64) for s in shapes]
    constants = [torch.linspace(-1, 1, value_heads), torch.linspace(0, 0.5, value_heads)]
    return [x.to(dtype).split(LENGTHS) for x in random], [x.to(dtype) for x in constants]


@pytest.mark.parametrize("doubled", [False, True])
@pytest.mark.parametrize("sizes", [(1, 1, 3, 2), (2, 6, 5, 7)], ids=str)
def test_tokens_one_by_one_are_the_whole_documents(sizes, doubled):
    """Compare prompts of n tokens and 5 steps with the recurrence over all n tokens and 5 more."""
    tokens, constants = make(torch.float64, sizes)
    prompts = [[x[d][: -5 if len(x[d]) > 5 else 1] for d in range(4)] for x in tokens]
    lengths = [len(x) for x in prompts[0]]
    inputs = [torch.cat(x) for x in prompts]
    state = final_states(*inputs[1:], *constants, lengths, allow_neg_eigval=doubled)
    assert state.shape == (4, sizes[1], sizes[2], sizes[3])
    steps = torch.Generator().manual_seed(1)
    added = [torch.randn(5, 4, *x[0].shape[1:], generator=steps).double() for x in tokens]
    outputs = []
    for i in range(5):
        o_BNV, state = update_next(
            state, *(x[i] for x in added), *constants, allow_neg_eigval=doubled
        )
        outputs.append(o_BNV)
    for d in range(4):
        whole = [torch.cat([x[d], new[:, d]]) for x, new in zip(prompts, added)]
        offsets = torch.tensor([0, lengths[d] + 5])
        want = recurrence.run(
            *whole,
            *constants,
            None,
            offsets,
            allow_neg_eigval=doubled,
            tables=None,
            deterministic=False,
        )
        assert relative_error(torch.stack(outputs)[:, d], want[-5:]) < 1e-12


def test_states_are_those_of_transformers():
    qwen3_next = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    (q, k, v, a, b), (A_log, dt_bias) = make(torch.float32, (2, 4, 5, 3))
    rows = [torch.cat([*x, x[0]]) for x in (k, v, a, b)]  # the last row belongs to no document
    got = final_states(*rows, A_log, dt_bias, LENGTHS)
    for d in range(4):
        g = -A_log.exp() * torch.nn.functional.softplus(a[d] + dt_bias)
        # Before transformers 5.23 the form takes one key for each value head.
        queries, keys = (x[d].repeat_interleave(2, dim=1) for x in (q, k))
        _, want = qwen3_next.torch_recurrent_gated_delta_rule(
            *(x[None] for x in (queries, keys, v[d], g, b[d].sigmoid())),
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        assert relative_error(got[d], want[0]) < 5e-6


def test_states_stay_float32_for_bfloat16_tokens():
    (q, k, v, a, b), constants = make(torch.bfloat16, (1, 2, 4, 4))
    state = final_states(*(torch.cat(x) for x in (k, v, a, b)), *constants, LENGTHS)
    one = [torch.stack([document[0] for document in x]) for x in (q, k, v, a, b)]
    o_BNV, after = update_next(state, *one, *constants)
    assert state.dtype == after.dtype == torch.float32 and o_BNV.dtype == torch.bfloat16
    assert not torch.equal(state, after)
