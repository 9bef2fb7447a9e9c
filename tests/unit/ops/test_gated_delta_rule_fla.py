"""The arguments that the backend ``fla`` passes to its package, and what it refuses."""

import importlib
import sys
from types import ModuleType

import pytest
import torch

from megatron_packed.ops.gated_delta_rule.api import GatedDeltaRuleInputs
from megatron_packed.ops.gated_delta_rule.tables import CHUNK

LENGTHS = [65, 1, 0, 70]
NAME = "megatron_packed.ops.gated_delta_rule.fla"


@pytest.fixture
def backend(monkeypatch):
    """Import the backend with a stand-in for the package, which records its arguments."""
    calls = []

    def op(q, k, v, g, b, **options):
        calls.append({"g": g, "b": b, **options})
        return v * 2, None

    modules = {name: ModuleType(name) for name in ("fla", "fla.utils", "fla.ops")}
    modules["fla"].utils = modules["fla.utils"]
    modules["fla.ops.gated_delta_rule"] = rule = ModuleType("fla.ops.gated_delta_rule")
    rule.chunk_gated_delta_rule = op
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    loaded = importlib.import_module(NAME)
    assert modules["fla.utils"].FLA_DISABLE_TENSOR_CACHE is True
    versions = {"fla-core": "0.6.0", "triton": "3.7.1"}
    monkeypatch.setattr(loaded, "version", versions.__getitem__)
    loaded.calls, loaded.versions = calls, versions
    yield loaded
    sys.modules.pop(NAME, None)


def test_chunks_and_gates_that_the_package_gets(backend):
    tokens, cu_seqlens = 136, torch.tensor([0, 65, 66, 66, 136], dtype=torch.int32)
    q, v = torch.randn(tokens, 1, 4).bfloat16(), torch.randn(tokens, 2, 4).bfloat16()
    a, b, A_log, dt_bias = (
        torch.randn(tokens, 2),
        torch.randn(tokens, 2),
        torch.ones(2),
        torch.ones(2),
    )
    o = backend.run(
        *(q, q, v, a, b, A_log, dt_bias, torch.zeros(1, tokens, dtype=torch.int32), cu_seqlens),
        allow_neg_eigval=True,
        tables=None,
        deterministic=False,
    )
    (call,) = backend.calls
    assert torch.equal(o, v * 2)
    assert call["cu_seqlens"].tolist() == [0, 65, 66, 66, 136, 136]
    # (136 + 4 * 63) // 64 = 6 rows; the spare one is the first chunk of the added empty document.
    rows = [[d, c] for d, n in enumerate(LENGTHS) for c in range(-(-n // CHUNK))]
    assert call["chunk_indices"].tolist() == [*rows, [4, 0]]
    assert torch.equal(call["g"][0], -A_log.exp() * torch.nn.functional.softplus(a + dt_bias))
    assert torch.equal(call["b"][0], b) and call["use_beta_sigmoid_in_kernel"]
    assert call["allow_neg_eigval"] and call["use_qk_l2norm_in_kernel"]


def inputs(**changes):
    usual = dict.fromkeys(("tokens", "key_heads", "value_heads"), 4)
    usual |= {"key_dim": 128, "value_dim": 128, "allow_neg_eigval": False, "deterministic": False}
    usual |= {"dtype": torch.bfloat16, "device_type": "cuda"}
    return GatedDeltaRuleInputs(**(usual | changes))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"device_type": "cpu"}, "runs on CUDA devices, not on cpu"),
        ({"dtype": torch.float32}, "bfloat16 and float16, not torch.float32"),
        ({"key_dim": 258}, "key dimension (258)"),
        ({"value_dim": 7}, "value dimension (7)"),
        ({"allow_neg_eigval": True}, "doubled beta"),
        ({"deterministic": True}, "not proven"),
    ],
    ids=["device", "dtype", "key", "value", "doubled", "deterministic"],
)
def test_inputs_that_the_kernels_do_not_support(backend, monkeypatch, changes, reason):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert backend.not_supported_reasons(inputs()) == []
    (found,) = backend.not_supported_reasons(inputs(**changes))
    assert reason in found


@pytest.mark.parametrize(
    ("triton", "capability", "refused"),
    [
        ("3.3.1", 9, False),
        ("3.4.0", 9, True),
        ("3.6.0", 9, True),
        ("3.7.0", 9, True),
        ("3.7.1", 9, False),
        ("3.6.0", 8, False),
        ("3.6.0", 10, False),
    ],
)
def test_triton_that_compiles_wrongly_for_hopper_is_refused(
    backend, monkeypatch, triton, capability, refused
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (capability, 0))
    backend.versions["triton"] = triton
    assert bool(backend.not_supported_reasons(inputs())) is refused


def test_an_old_package_is_refused(backend, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    backend.versions["fla-core"] = "0.5.9"
    assert "0.5.9 is older" in backend.not_supported_reasons(inputs())[0]
