"""Settings of the distributed tests: their processes start with everything imported."""

import pytest

from support.fork_server import fork_server


@pytest.fixture(scope="session", autouse=True)
def quick_processes() -> None:
    """Start the fork server before a test that has pools of its own starts a smaller one."""
    fork_server()
