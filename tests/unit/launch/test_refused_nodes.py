"""Refusals that machines read before they have met, with several machines in one process."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from torch.distributed import TCPStore

from megatron_packed.launch.refused_nodes import Refusals


@pytest.fixture
def store() -> TCPStore:
    """Return the store of the rendezvous."""
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def machine(store: TCPStore, node_rank: int | None, **other: object) -> Refusals:
    options = {
        "min_nodes": 2,
        "max_nodes": 2,
        "node_rank": node_rank,
        "rdzv_backend": "static",
        "rdzv_endpoint": f"127.0.0.1:{store.port}",
        "rdzv_id": "run",
    }
    return Refusals(SimpleNamespace(**{**options, **other}))


@contextmanager
def watching(*machines: Refusals) -> Iterator[None]:
    """Let machines read refusals; on exit wait until they have read one."""
    threads = [threading.Thread(target=one.watch) for one in machines]
    for thread in threads:
        thread.start()
    try:
        yield
        for thread in threads:
            thread.join(30)
    finally:
        for one in machines:
            one.met.set()
        for thread in threads:
            thread.join()


def test_two_hosts_with_one_number_are_refused(
    store: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = machine(store, 1), machine(store, 1)
    monkeypatch.setattr(socket, "gethostname", lambda: "a")
    with watching(first):
        while not store.check(["megatron_packed/run/host/1"]):
            time.sleep(0.01)
        monkeypatch.setattr(socket, "gethostname", lambda: "b")
        with watching(second):
            pass
    for found in (first.found, second.found):
        assert found == (2, "b and a both have --node-rank 1; give each machine another number.")


def test_a_machine_that_started_again_on_its_host_is_not_refused(store: TCPStore) -> None:
    for refusals in (machine(store, 1), machine(store, 1)):
        with watching(refusals):
            time.sleep(0.3)
            refusals.met.set()
        assert refusals.found is None


def test_a_refusal_ends_when_all_machines_have_read_it(store: TCPStore) -> None:
    """A machine that comes later, with a correct command line, does not find it."""
    healthy = machine(store, 0)
    with watching(healthy):
        machine(store, None, min_nodes=1, max_nodes=1).publish(3, "wrong.")
    assert healthy.found is not None and healthy.found[0] == 3
    assert healthy.found[1].startswith("a machine (")
    assert healthy.found[1].endswith(") takes no part: wrong.")
    later = machine(store, 1)
    with watching(later):
        time.sleep(0.3)
        later.met.set()
    assert later.found is None
