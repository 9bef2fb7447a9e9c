"""Modes of activation offload: gradients are the same bits, and selected tensors are offloaded."""

import pytest
import torch

from megatron_packed.config.sections.memory import OFFLOADED_IN, MemoryConfig
from megatron_packed.layers.joined import NamedCall
from megatron_packed.memory.activation_offload import Offload
from megatron_packed.memory.apply import offload_parts
from support import hybrid_cases as cases
from support.memory_modes import (
    BYTES,
    DOCUMENTS,
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

ALL = {"offload_buffers": 2, "min_offloaded_tensor_size": 1}


def inputs(method, number):
    recomputed = full(method, number)
    return MemoryConfig(
        recompute_granularity="full",
        recompute_method=recomputed.recompute_method,
        recompute_num_layers=number,
        offload_layer_inputs=True,
        **ALL,
    )


def parts(*modules, **options):
    return MemoryConfig(
        fine_grained_activation_offloading=True, offload_modules=modules, **ALL | options
    )


BOTH = MemoryConfig(
    recompute_granularity="full",
    recompute_method="block",
    recompute_num_layers=3,
    offload_layer_inputs=True,
    fine_grained_activation_offloading=True,
    offload_modules=tuple(OFFLOADED_IN),
    **ALL,
)
MODES = {
    "uniform 1": inputs("uniform", 1),
    "uniform 3": inputs("uniform", 3),
    "block 4": inputs("block", 4),
    "all parts": parts(*OFFLOADED_IN),
    "both": BOTH,
    "norms and cores": parts(
        *("attn_norm", "mamba_norm", "gdn_norm", "mlp_norm"),
        *("core_attn", "mamba_scan", "gdn_scan"),
    ),
    "beside recomputation": MemoryConfig(
        recompute_granularity="selective",
        recompute_modules=("core_attn", "layernorm"),
        fine_grained_activation_offloading=True,
        **ALL,
        offload_modules=(
            "mamba_scan",
            "gdn_out_proj",
            "mlp_act",
            "mlp_fc2",
            "attn_proj",
            "expert_fc1",
            "moe_act",
        ),
    ),
}


@pytest.fixture(scope="module", params=VARIANTS)
def expected(request):
    changes = VARIANTS[request.param]
    return changes, train(None, **changes)


@pytest.mark.shows(
    "offload",
    of=lambda expected: (1, {"hybrid_layer_pattern": PATTERN + "/*E/*E" * ("depths" in expected)}),
)
@pytest.mark.parametrize("name", MODES)
def test_gradients_and_outputs_are_those_of_none(name, expected):
    changes, wanted = expected
    for found, tensor in zip(train(MODES[name], **changes), wanted, strict=True):
        assert torch.equal(found, tensor)


def left_and_moved(memory=None, **changes):
    """Return the bytes that a forward pass saves on the device and those that it offloads."""
    model, pack = model_of(memory, **changes), cases.make_pack(DOCUMENTS, tail=TAIL)
    left = bytes_saved(model, lambda: model(pack))
    if model.offload is None:
        return left, 0
    moved = sum(
        layout.num_bytes for group in model.offload._offloaded.values() for layout in group.layouts
    )
    return left, moved


@pytest.mark.parametrize(
    ("method", "number", "groups"), [("uniform", 1, 7), ("uniform", 3, 3), ("block", 4, 4)]
)
def test_the_inputs_of_layers_have_left_and_nothing_else(method, number, groups):
    left, moved = left_and_moved(inputs(method, number))
    assert moved == groups * HIDDEN
    assert left == left_and_moved(full(method, number))[0] - moved


@pytest.mark.parametrize("module", OFFLOADED_IN)
def test_what_a_part_saves_has_left(module):
    (everything, _), (left, moved) = left_and_moved(), left_and_moved(parts(module))
    if module in ("core_attn", "mamba_scan", "gdn_scan"):
        # A fused projection is offloaded up to the end of its last view. `bytes_saved`
        # does not count document numbers.
        assert 0.8 < moved / (everything - left) < 1.2 and moved > 4 * HIDDEN
    elif module in ("expert_fc1", "expert_fc2"):
        # The reference also offloads masks, a byte for each expert and row. `bytes_saved` does
        # not count them.
        config = model_of().config
        masks = PATTERN.count("E") * config.num_experts * T * config.moe_router_topk
        assert moved == everything - left + masks > HIDDEN
    else:
        assert moved == everything - left > 0
        # Each projection offloads its input, in every layer that has the projection.
        layers = sum(symbol in OFFLOADED_IN[module] for symbol in PATTERN)
        projection = module == "qkv_linear" or module.endswith("_proj")
        # The value heads of a gated delta net have fewer channels than the hidden state.
        assert not projection or module == "gdn_out_proj" or moved >= layers * HIDDEN


def test_small_tensors_stay():
    memory = parts(*OFFLOADED_IN, min_offloaded_tensor_size=T * D)
    assert 0 < left_and_moved(memory)[1] < left_and_moved(parts(*OFFLOADED_IN))[1]
    too_small = parts(*OFFLOADED_IN, min_offloaded_tensor_size=2**21)
    assert left_and_moved(too_small) == left_and_moved()
    assert left_and_moved()[0] < BYTES * 2**21


def test_steps_are_counted_and_memory_goes_back():
    model = model_of(inputs("uniform", 1))
    for _ in range(2):
        model(cases.make_pack(DOCUMENTS, tail=TAIL)).loss.backward()
        model.offload.end_step()
    assert model.offload.figures.moved_mib == 7 * HIDDEN / 2**20
    # The tensor that was offloaded last was still on the device.
    assert model.offload.figures.loaded_mib == 6 * HIDDEN / 2**20
    assert model.offload.buffer_count.now == 2 and model.offload.pool.pinned == 7
    model.offload.close()
    assert model.offload.pool.num_bytes == 0
    model(cases.make_pack(DOCUMENTS, tail=TAIL)).loss.backward()
    assert model.offload.pool.pinned == 7


def test_what_layers_share_travels_with_each_of_them(monkeypatch):
    """A tensor that several layers save is offloaded and restored by each layer.

    Otherwise the backward pass of the last layer would restore the tensor of the first layer,
    which may belong to another graph.
    """
    offload, asked = Offload(torch.device("cpu"), min_elements=1, forced_buffers=2), []
    restore = offload.restore
    monkeypatch.setattr(offload, "restore", lambda number: asked.append(number) or restore(number))
    table, hidden = torch.randn(8), torch.randn(8, requires_grad=True)
    for _ in range(3):
        layer = torch.nn.Module()
        layer.mixer = torch.nn.Module()
        layer.mixer.core_attn = NamedCall()
        offload_parts(layer, ["core_attn"], offload)
        hidden = layer.mixer.core_attn(lambda x: torch.tanh(x) * table, hidden)
    hidden.sum().backward()
    assert asked == [2, 1, 0]
