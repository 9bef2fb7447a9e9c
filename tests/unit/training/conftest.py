"""Fixtures of the tests of training."""

import pytest

from support.recomputed_steps import eager_steps as run_eager_steps


@pytest.fixture(scope="session")
def eager_steps():
    return run_eager_steps()
