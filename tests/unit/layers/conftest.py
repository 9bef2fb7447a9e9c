"""Fixture of layers with the products of quack."""

import pytest

from support.quack_stand_in import quack_stand_in


@pytest.fixture
def package(monkeypatch):
    """Stand-in for quack, on a GPU that is a Hopper."""
    with quack_stand_in(monkeypatch) as stand_in:
        yield stand_in
