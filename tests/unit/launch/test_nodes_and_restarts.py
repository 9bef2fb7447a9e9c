"""Agreement of launchers on the end of an attempt, without other machines and of two machines."""

import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from megatron_packed.launch.local_ranks import LaunchOptions, Placement, RankFailure
from megatron_packed.launch.nodes_and_restarts import Agreement, ManyNodes, OneNode


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


def test_machines_agree_on_ranks_exit_code_and_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two launchers in one process: the second one was started again, and knows no restarts."""
    monkeypatch.setenv("LOGLEVEL", "ERROR")  # no launcher changes the environment of the other
    with socket.create_server(("127.0.0.1", 0)) as free:
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    options = LaunchOptions(min_nodes=2, max_nodes=2, rdzv_backend="c10d", rdzv_endpoint=endpoint)
    machines = [ManyNodes(options, lambda: False) for _ in range(2)]

    def join(number: int) -> Placement:
        return machines[number].join(restarts=(3, 0)[number], processes=2, leaves=None)

    def agree(number: int) -> Agreement:
        return machines[number].agree(stopped=stopped == number)

    with ThreadPoolExecutor(2) as pool:
        for stopped in (None, 1):
            places = list(pool.map(join, range(2)))
            assert sorted(place.first_rank for place in places) == [0, 2]
            assert {(place.world_size, place.restarts) for place in places} == {(4, 3)}
            assert len({place.master_port for place in places}) == 1
            machines[0].publish(RankFailure(exit_code=4, lost=True))
            for end in pool.map(agree, range(2)):
                assert end.failure is not None and end.failure.exit_code == 4
                assert end.restart_helps == (stopped is None)
    for machine in machines:
        machine.close()
