"""Choice of a backend, and the cache of choices."""

import sys
from dataclasses import dataclass, replace
from types import ModuleType

import pytest
import torch

from megatron_packed.ops import backend_dispatch
from megatron_packed.ops.backend_dispatch import (
    Backend,
    GPUBackend,
    NoBackendError,
    Op,
    complete_machine,
)
from megatron_packed.ops.dense_mlp import api as dense_mlp
from megatron_packed.ops.grouped_mlp import api as grouped_mlp
from megatron_packed.ops.residual_projection import api as residual_projection


@pytest.fixture
def op(monkeypatch):
    """Provide an op on numbers with two backends, which record the numbers that they are checked for.

    The first backend supports only small numbers.
    """
    asked = []
    for name, largest in (("small", 9), ("any", float("inf"))):
        module = ModuleType(name)
        module.not_supported_reasons = lambda number, largest=largest: (
            asked.append(number) or ([] if number <= largest else [f"{number} is above {largest}"])
        )
        monkeypatch.setitem(sys.modules, f"backend_{name}", module)
    op = Op("count", (Backend("small", "backend_small"), Backend("any", "backend_any")))
    op.asked = asked
    return op


def test_a_choice_is_made_once_for_equal_inputs(op):
    assert [op.select(number).name for number in (3, 3, 12, 12)] == ["small", "small", "any", "any"]
    assert op.asked == [3, 12, 12]  # Both backends are checked for 12: the first refuses it.
    with pytest.raises(NoBackendError, match="12 is above 9"):
        op.select(12, "small")


def test_what_is_remembered_is_bounded(op, monkeypatch):
    monkeypatch.setattr(backend_dispatch, "_REMEMBERED", 5)
    for number in range(100, 123):
        assert op.select(number).name == "any"
        assert len(op.chosen) <= 5


@dataclass(frozen=True)
class OnDevice:
    device_type: str


@pytest.mark.parametrize(
    ("device", "interpreted", "chosen", "asks"),
    [
        ("cpu", False, "any", False),
        ("cpu", True, "kernel", True),
        ("cuda", False, "kernel", True),
    ],
)
def test_a_choice_for_a_cpu_does_not_import_kernels_of_gpus(
    monkeypatch, device, interpreted, chosen, asks
):
    """The reasons against them are reported in any case."""
    asked = []
    module = ModuleType("kernel")
    module.not_supported_reasons = lambda inputs: (
        asked.append(inputs) or (["no"] if chosen == "any" else [])
    )
    monkeypatch.setitem(sys.modules, "backend_kernel", module)
    monkeypatch.setitem(sys.modules, "backend_any", ModuleType("any"))
    monkeypatch.setenv("TRITON_INTERPRET", str(int(interpreted)))
    op = Op("count", (GPUBackend("kernel", "backend_kernel"), Backend("any", "backend_any")))
    inputs = OnDevice(device)
    assert op.select(inputs).name == chosen
    assert bool(asked) == asks
    assert op.explain(inputs) == {"kernel": ["no"] if chosen == "any" else [], "any": []}
    if chosen == "any":
        with pytest.raises(NoBackendError, match=r"'kernel' does not support .*: kernel: no"):
            op.select(inputs, "kernel")


def test_a_complete_machine_joins_what_the_inputs_allow():
    """The reasons of the stand-ins on the meta device do not depend on this machine."""
    sizes = {"channels": 16, "inner": 16, "dtype": torch.bfloat16, "device_type": "cuda"}
    inputs = dense_mlp.DenseMLPInputs(kind="squared_relu", **sizes)
    others = [
        replace(inputs, apart="it is recomputed"),
        replace(inputs, inner=12),
        replace(inputs, kind="gelu"),
        replace(inputs, device_type="cpu"),
        replace(inputs, dtype=torch.float32),
    ]
    added = residual_projection.ResidualProjectionInputs(**sizes)
    experts = grouped_mlp.GroupedMLPInputs(
        channels=16,
        experts=4,
        hidden_in=16,
        hidden_out=16,
        activation="squared_relu",
        dtype=torch.bfloat16,
        weight_dtype=torch.bfloat16,
        device_type="cuda",
    )
    joined, adding = dense_mlp.OP.backends[0], residual_projection.OP.backends[0]
    with complete_machine():
        assert joined.supports(inputs) and adding.supports(added)
        assert not any(map(joined.supports, others))
        assert not adding.supports(replace(added, channels=12))
        assert grouped_mlp.JOINED.supports(experts)
        for other in ({"activation": "swiglu"}, {"apart": "offload"}, {"hidden_in": 12}):
            assert not grouped_mlp.JOINED.supports(replace(experts, **other))
    assert joined.supports(inputs) == (not joined.reasons(inputs))
