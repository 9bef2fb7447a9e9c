"""Shared by all unit tests: they leave no environment behind, and what is said of captures does not
depend on how busy the machine is.
"""

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def environment_stays() -> Iterator[None]:
    """Commands that run in this process set variables for libraries, which another test's run would
    be refused for.
    """
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture(scope="session", autouse=True)
def quick_machine() -> Iterator[None]:
    """Tuning that takes a while says so between the sentences that tests look at."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megatron_packed.cuda_graphs.step_graphs._QUIET_SECONDS", float("inf"))
        yield
