"""Agreement of launchers on whether a restart helps, without other machines."""

import pytest

from megatron_packed.launch.local_ranks import RankFailure
from megatron_packed.launch.nodes_and_restarts import OneNode


@pytest.mark.parametrize(
    ("lost", "restart_helps"),
    [
        pytest.param([True], True, id="lost"),
        pytest.param([False], False, id="defect"),
        pytest.param([None], False, id="no reason"),
        pytest.param([False, True], False, id="a defect, and a loss that follows from it"),
        pytest.param([True, False], True, id="a loss, and a defect that follows from it"),
        pytest.param([None, True], True, id="no reason, because of a rank that is lost"),
        pytest.param([None, False], False, id="no reason, because of a rank with a defect"),
    ],
)
def test_the_first_failure_with_a_reason_decides_on_a_restart(
    lost: list[bool | None], restart_helps: bool
) -> None:
    """A rank that another rank has ended has no reason; its failure may be seen first."""
    nodes = OneNode()
    nodes.join(restarts=0, processes=1, leaves=None)
    for number, loss in enumerate(lost):
        nodes.publish(RankFailure(exit_code=number + 1, lost=loss))
    end = nodes.agree(stopped=False)
    assert end.failure is not None and end.failure.exit_code == 1
    assert end.restart_helps == restart_helps
    assert not nodes.agree(stopped=True).restart_helps
