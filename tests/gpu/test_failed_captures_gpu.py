"""A module that cannot be captured runs eagerly, and its failure has no lasting effect."""

import threading
import time

import pytest
import torch

from support.failed_captures import (
    TROUBLES,
    Chain,
    fails_alone,
)

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("trouble", TROUBLES)
def test_a_module_that_cannot_be_captured_fails_alone(trouble):
    fails_alone(trouble)


def test_a_thread_that_pins_memory_does_not_disturb_captures():
    """The loader pins memory in a thread during captures.

    Sizes grow and stay allocated, so that each is a new allocation of page-locked memory.
    """
    kept, stop = [], threading.Event()

    def pin():
        while not stop.is_set() and len(kept) < 2000:
            kept.append(torch.empty(4096 * (1 + len(kept)), dtype=torch.uint8).pin_memory())
            time.sleep(1e-3)

    def waits_for_pins(result):
        """Keep the capture open until the thread has pinned memory."""
        if torch.cuda.is_current_stream_capturing():
            wanted, deadline = len(kept) + 3, time.monotonic() + 10
            while len(kept) < wanted and time.monotonic() < deadline:
                time.sleep(1e-3)
            during.append(len(kept) - wanted + 3)

    during: list[int] = []
    thread = threading.Thread(target=pin)
    thread.start()
    try:
        chain = Chain(None, waits_for_pins, waits_for_pins)
    finally:
        stop.set()
        thread.join()
    assert chain.runner.counters.captures == 1 + 2 * 3, chain.said
    assert len(during) == 2 and min(during) >= 3, during
    chain.check()
    chain.runner.close()
