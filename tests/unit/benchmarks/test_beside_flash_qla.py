"""`beside_flash_qla.py` with a stand-in for FlashQLA's package."""

import sys
from types import ModuleType

import pytest
import torch

import beside_flash_qla
from gated_delta_rule import QUICK, leaves, lengths_of


def rule(q, k, v, g, beta, *, cu_seqlens, auto_cp, use_qk_l2norm_in_kernel=False):
    """Return sums over the tokens of a document so far; with ``auto_cp`` over all documents."""
    tokens = torch.arange(v.shape[1])
    document = torch.searchsorted(cu_seqlens, tokens, right=True)
    seen = tokens[:, None] >= tokens
    if not auto_cp:
        seen = seen & (document[:, None] == document)
    scale = (q + k).sum(dim=(2, 3))[..., None] * g.exp() * beta
    return torch.einsum("ts,bsnv->btnv", seen.to(v), scale[..., None] * v), None


@pytest.fixture(autouse=True)
def package(monkeypatch):
    names = ("flash_qla", "flash_qla.utils", "flash_qla.utils.index")
    modules = {name: ModuleType(name) for name in names}
    modules["flash_qla"].chunk_gated_delta_rule = rule
    modules["flash_qla.utils.index"].prepare_varlen_metadata = lambda offsets, on_host: offsets
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)


def test_kernels_are_measured_in_both_forms_and_a_leak_is_in_the_bits():
    found = beside_flash_qla.measured(QUICK, torch.device("cpu"), quick=True)
    assert "failed" not in found and len(found["ratio"]) == 4
    assert set(found["errors"]) == {"megatron_packed", "whole", "whole, auto_cp"}
    assert found["errors"]["whole"]["o"] > 0.1  # the stand-in computes something else
    assert found["bits"] == {
        "whole": {"repeated": True, "isolated": True},
        "whole, auto_cp": {"repeated": True, "isolated": False},
    }
    [row] = beside_flash_qla.rows_of({"sizes": [found]})
    assert row["tokens"] == QUICK.tokens and row["whole / ours"]


def test_one_document_has_none_beside_it():
    size = QUICK._replace(documents=1)
    tensors = leaves(size, torch.float32, torch.device("cpu"))
    assert beside_flash_qla.bits(tensors, lengths_of(size), auto_cp=False) == {"repeated": True}
