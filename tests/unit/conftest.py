"""Shared by all unit tests: what is said of captures does not depend on how busy the machine is."""

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def quick_machine() -> Iterator[None]:
    """Tuning that takes a while says so between the sentences that tests look at."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megatron_packed.cuda_graphs.progress._QUIET_SECONDS", float("inf"))
        yield
