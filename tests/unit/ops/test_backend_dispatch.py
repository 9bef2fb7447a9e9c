"""Choice of a backend, and the cache of choices."""

import sys
from types import ModuleType

import pytest

from megatron_packed.ops import backend_dispatch
from megatron_packed.ops.backend_dispatch import Backend, NoBackendError, Op


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
