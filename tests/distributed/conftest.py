"""Settings of the distributed tests: their processes start with everything imported."""

import pytest

from support import process_pools
from support.fork_server import fork_server

# On a CPU, starting the processes of a pool takes longer than what the waiting groups of 25 layouts use.
process_pools._LAYOUTS_OF_A_POOL = 25


@pytest.fixture(scope="session", autouse=True)
def quick_processes() -> None:
    """Start the fork server before a test that has pools of its own starts a smaller one."""
    fork_server()
