"""Capture of layers with megatron-core's signature through `KeywordLayer`."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

from megatron_packed.cuda_graphs.replaced_forward import KeywordLayer
from support.foreign_chain import FIRST, ONE, Chain, D, hidden_states
from support.tiny_graph_jobs import pack


class TransformerLayer(nn.Module):
    """Fake layer with megatron-core's signature: keywords, ``(T, 1, D)``, and a tuple as result."""

    def __init__(self, context=None, as_tuple=True):
        super().__init__()
        torch.manual_seed(3)
        self.weight = nn.Parameter(torch.randn(D, D) / D)
        self.context, self.as_tuple = context, as_tuple

    def forward(
        self,
        hidden_states,
        attention_mask=None,
        context=None,
        rotary_pos_emb=None,
        *,
        packed_seq_params=None,
        sequence_len_offset=None,
    ):
        assert packed_seq_params.qkv_format == "thd" and attention_mask is None
        documents = packed_seq_params.seq_idx[0, :, None, None] + 1
        hidden = torch.tanh(hidden_states @ self.weight) * documents
        if rotary_pos_emb is not None:
            hidden = hidden * rotary_pos_emb
        return (hidden, self.context) if self.as_tuple else hidden


@pytest.fixture(autouse=True)
def megatron_core(monkeypatch):
    """Install a fake megatron.core with a `PackedSeqParams` class, for `to_megatron_core`."""
    module = ModuleType("megatron.core.packed_seq_params")
    module.PackedSeqParams = SimpleNamespace
    for name in ("megatron", "megatron.core"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)


class Model(Chain):
    """Model that calls its layers as megatron-core does, while graphs capture only the adapters."""

    def __init__(self, *layers, constants=None, keywords=None):
        self.layers = nn.ModuleList(layers)
        self.names = [name for name, _ in self.layers.named_parameters()]
        self.keywords = keywords or {}
        super().__init__(*(KeywordLayer(layer, **constants or {}) for layer in layers))

    def forward(self, hidden, packed):
        hidden = (hidden * 1)[:, None]
        for layer in self.layers:
            options = {"attention_mask": None, "packed_seq_params": packed, **self.keywords}
            hidden = layer(hidden_states=hidden, **options)
            if layer.as_tuple:
                hidden, context = hidden
                assert context is None
        return hidden[:, 0]


@pytest.mark.parametrize("as_tuple", [True, False], ids=["tuple", "tensor"])
def test_layers_are_replayed_when_a_model_calls_them_by_keywords(as_tuple):
    model = Model(
        TransformerLayer(as_tuple=as_tuple), TransformerLayer(as_tuple=as_tuple)
    ).capture()
    model.check()
    assert model.runner.counters.captures == 1 + 2 * 2 and model.runner.counters.replays == 3
    found = model.runner.audit(pack(FIRST, capture_sizes=ONE), deterministic=True)
    assert found.compared == 2 and found.largest_difference == 0


def test_the_model_keeps_its_parameters_names_and_modes_and_its_forward_comes_back():
    model = Model(TransformerLayer()).capture()
    layer, adapter = model.layers[0], model.modules[0]
    assert [name for name, _ in model.layers.named_parameters()] == model.names
    model.layers.eval()
    assert not adapter.training
    adapter.train()
    assert layer.training
    model.runner.close()
    adapter.remove()
    assert "forward" not in vars(layer)


def test_constants_are_those_of_every_call():
    rotary = torch.rand(D)
    model = Model(
        TransformerLayer(),
        constants={"rotary_pos_emb": rotary},
        keywords={"rotary_pos_emb": rotary, "context": None},
    ).capture()
    model.check()
    for keywords in ({"rotary_pos_emb": rotary.clone()}, {}, {"context": rotary}):
        model.keywords = keywords
        with pytest.raises(
            ValueError, match=r"(rotary_pos_emb|context) is not the object.*=\.\.\."
        ):
            model.place()
            model.forward(hidden_states(), model.place())


def test_what_a_graph_could_not_repeat_is_refused():
    model = Model(TransformerLayer(context=torch.ones(1)))
    with pytest.raises(TypeError, match="returns a context besides hidden states"):
        model.capture()
    packed = pack(FIRST, capture_sizes=ONE).packed.to_megatron_core()
    with pytest.raises(TypeError, match=r"packed_seq_params is a SimpleNamespace.*KeywordLayer"):
        Model(TransformerLayer()).forward(hidden_states(), packed)
