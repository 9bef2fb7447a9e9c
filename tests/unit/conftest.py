"""Settings of all unit tests: no test changes the environment or depends on the machine's load."""

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def environment_stays() -> Iterator[None]:
    """Restore the environment variables after each test.

    Commands that run in this process set variables for libraries. A run of a later test would
    refuse these variables.
    """
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture(scope="session", autouse=True)
def quick_machine() -> Iterator[None]:
    """Suppress the message that tuning takes long.

    On a busy machine it would appear between the lines that tests check.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megatron_packed.cuda_graphs.step_graphs._QUIET_SECONDS", float("inf"))
        yield
