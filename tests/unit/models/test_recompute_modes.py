"""Modes of recomputation: gradients are the same bits, and saved bytes follow from tensor sizes."""

import copy
import pickle
from functools import partial

import pytest
import torch

from megatron_packed.config.sections.memory import RECOMPUTED_IN, MemoryConfig
from megatron_packed.layers.attention import CoreAttention
from megatron_packed.ops.grouped_mlp import reference
from megatron_packed.torch_private import tree_leaves
from support import hybrid_cases as cases
from support.memory_modes import (
    BYTES,
    DOCUMENTS,
    DROPOUT,
    HIDDEN,
    PATTERN,
    TAIL,
    VARIANTS,
    D,
    T,
    bytes_saved,
    full,
    model_of,
    train,
)
from support.random_tensors import normal


def selective(*modules):
    return MemoryConfig(recompute_granularity="selective", recompute_modules=modules)


MODES = [full("uniform", n) for n in (1, 3, len(PATTERN))] + [full("block", n) for n in (1, 4)]
MODES += [selective(module) for module in (*RECOMPUTED_IN, "layernorm")]
MODES += [selective("layernorm", *RECOMPUTED_IN), selective("core_attn", "layernorm", "moe_act")]


def mode_id(memory):
    return " ".join(
        map(
            str, (memory.recompute_method or "", memory.recompute_num_layers or "", *memory.modules)
        )
    )


@pytest.fixture(scope="module", params=VARIANTS)
def expected(request):
    changes = dict(VARIANTS[request.param])
    if request.param == "depths":
        changes["mtp_use_repeated_layer"] = True
    with pytest.MonkeyPatch.context() as patch:
        if request.param == DROPOUT:
            patch.setattr(CoreAttention, "forward", drawing(CoreAttention.forward))
        yield changes, train(None, **changes)


def drawing(core):
    """Wrap an attention core to draw random numbers, as kernels do even without dropout."""

    def function(*args):
        torch.rand(3)
        return core(*args)

    return function


@pytest.mark.shows(
    "recompute",
    of=lambda expected: (1, {"hybrid_layer_pattern": PATTERN + "/*E/*E" * ("depths" in expected)}),
)
@pytest.mark.parametrize("memory", MODES, ids=mode_id)
def test_gradients_and_outputs_are_those_of_none(memory, expected):
    changes, wanted = expected
    for found, tensor in zip(train(memory, **changes), wanted, strict=True):
        assert torch.equal(found, tensor)
    assert wanted[0].abs().sum() > 0


def kept_by(memory=None, **changes):
    model = model_of(memory, **changes)
    pack = cases.make_pack(DOCUMENTS, tail=TAIL)
    return bytes_saved(model, lambda: model(pack))


def test_groups_keep_their_input_alone():
    """A recomputed group saves its input; tensors outside the layers are saved in any case."""
    outside = kept_by(full("uniform", len(PATTERN))) - HIDDEN
    for size in range(1, len(PATTERN)):
        groups = -(-len(PATTERN) // size)
        assert kept_by(full("uniform", size)) == outside + groups * HIDDEN
    assert kept_by(full("block", len(PATTERN))) == outside + len(PATTERN) * HIDDEN
    by_blocks = [kept_by(full("block", n)) for n in range(1, len(PATTERN) + 1)]
    assert sorted(by_blocks, reverse=True) == by_blocks and len(set(by_blocks)) == len(by_blocks)
    assert by_blocks[0] < kept_by() and 10 * by_blocks[-1] < kept_by()


def test_a_mixer_keeps_its_input_alone_and_attention_what_is_around_its_core():
    memory = selective("core_attn", "mamba", "gdn", "mlp", "moe")
    for dtype in (torch.float32, torch.bfloat16):
        model, pack = model_of(memory, dtype=dtype), cases.make_pack(DOCUMENTS, tail=TAIL)
        packed, config = model.prepare(pack.packed), model.config
        heads = config.num_attention_heads * config.head_dim
        qkv = heads + 2 * config.num_query_groups * config.head_dim
        for symbol, layer in zip(PATTERN, model.layers):
            x = torch.randn(T, D, dtype=dtype, requires_grad=True)
            kept = bytes_saved(model, partial(layer.mixer, x, packed))
            # Attention saves its input, q, k, v and the input of its last projection. Other mixers
            # save their input.
            assert kept == T * (D + qkv + heads if symbol == "*" else D) * dtype.itemsize, symbol


def test_outputs_of_norms_and_of_the_activation_are_not_kept(monkeypatch):
    """GELU saves its input in any case, so only the activation's output is saved less."""
    changes = {"squared_relu": False}
    monkeypatch.setattr(reference, "_BLOCK", model_of(**changes).expert_buffer(T).rows)
    all_of_it = kept_by(**changes)
    assert kept_by(selective("layernorm"), **changes) == all_of_it - len(PATTERN) * HIDDEN
    model = model_of(**changes)
    rows = model.expert_buffer(T).rows
    outputs = PATTERN.count("E") * rows * model.config.moe_ffn_hidden_size * BYTES
    assert kept_by(selective("moe_act"), **changes) == all_of_it - outputs


def test_what_reports_hold_is_not_the_hidden_state():
    """Reports of E layers hold only small tensors, not the hidden state.

    The reports live until the losses are added up.
    """
    loads = {"moe_router_load_balancing_type": "global_aux_loss"}
    model, pack = model_of(full("uniform", 2), **loads), cases.make_pack(DOCUMENTS, tail=TAIL)
    _, reports = model.hidden_states(pack.tokens, model.prepare(pack.packed))
    assert len(reports) == PATTERN.count("E")
    assert all(report.balance for report in reports)
    assert max(tensor.numel() for tensor in tree_leaves(reports)) <= model.config.num_experts


def test_a_layer_is_recomputed_once_and_only_if_requested():
    calls = []
    for memory, expected in (
        (full("block", 2), [0, 1, 2, 3, 4, 5, 6, 1, 0]),
        (full("uniform", 3), [0, 1, 2, 3, 4, 5, 6, 6, 3, 4, 5, 0, 1, 2]),
    ):
        model = model_of(memory)
        calls.clear()
        for number, layer in enumerate(model.layers):
            norm, number = layer.norm.with_residual, number
            layer.norm.with_residual = lambda x, norm=norm, number=number: (
                calls.append(number) or norm(x)
            )
        model(cases.make_pack(DOCUMENTS)).loss.backward()
        assert calls == expected


def pickled(module):
    return pickle.loads(pickle.dumps(module))


WRAPPED = [full("uniform", 2), full("block", 2), selective("layernorm"), selective("moe_act")]
WRAPPED.append(selective("layernorm", *RECOMPUTED_IN))


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
@pytest.mark.parametrize("memory", WRAPPED, ids=mode_id)
def test_wrapping_changes_no_name_and_a_copy_runs_its_own_modules(memory, copied):
    pack, names = cases.make_pack(DOCUMENTS), list(model_of().state_dict())
    model = model_of(memory)
    assert list(model.state_dict()) == names
    twin = copied(copied(model))
    twin(pack).loss.backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    model(pack).loss.backward()
    for parameter, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(parameter.grad, other.grad)


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
def test_a_mixer_is_copied_before_the_norm_that_shares_its_wrapper(copied):
    """A pickle then loads the norm, with its wrapper, while it loads the wrapper of the mixer."""
    model, pack = model_of(selective("layernorm", "mamba")), cases.make_pack(DOCUMENTS, tail=TAIL)
    layer, packed = model.layers[PATTERN.index("M")], model.prepare(pack.packed)
    found = []
    for mixer, norm in ((layer.mixer, layer.norm), copied((layer.mixer, layer.norm))):
        x = normal(T, D, seed=1).requires_grad_()
        y, residual = norm.with_residual(x)
        (mixer(y, packed) + residual).sum().backward()
        found.append([x.grad, norm.weight.grad, *(weight.grad for weight in mixer.parameters())])
    for tensor, other in zip(*found, strict=True):
        assert tensor is not other and torch.equal(tensor, other)
