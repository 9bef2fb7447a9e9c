"""Figures of copies, computed from events with given times."""

from types import SimpleNamespace

import pytest

from megatron_packed.memory.offload_figures import ENOUGH, CopyTimer

MIB = 2**20


def noted(waits, *, loads=((0, 8), (10, 22)), done=True):
    """Return the figures of a step whose events have the given begin and end times, in ms.

    The default copies from the host take 8 and 12 ms. Copies to the host take 3 and 5 ms.
    """
    ends = iter(end for pair in ((0, 3), (5, 10), *loads, *waits) for end in pair)
    watch = CopyTimer(
        SimpleNamespace(
            timing_event=lambda: next(ends),
            milliseconds=lambda begin, end: float(end - begin),
            done=lambda mark: done,
            capturing=lambda: False,
        )
    )
    for _ in range(2):
        watch.copied_to_host(watch.begin(), 3 * MIB)
    for _ in loads:
        watch.copied_from_host(watch.begin(), 2 * MIB)
    for _ in waits:
        watch.waited(watch.begin())
    assert watch.end_step(2) == 6 * MIB and watch.figures is None
    assert watch.end_step(1) == 0  # bytes of the next step, which copied nothing
    return watch.figures


def test_times_are_means_and_the_share_under_computation_is_of_all_copies_back():
    found = noted([(1, 4), (20, 22)])
    assert (found.buffers, found.moved_mib, found.loaded_mib) == (2, 6, 4)
    assert (found.put_ms, found.load_ms, found.hidden) == (4, 10, pytest.approx(1 - 5 / 20))
    assert found.load_gb_per_s == pytest.approx(4 * MIB / 20e-3 / 1e9)
    assert found.compute_ms is None is found.cannot_pay  # too few waits for a median
    assert noted([(0, 30)]).hidden == 0.0  # not negative


def test_computation_is_between_the_end_of_a_wait_and_the_next():
    waits = [(0, 5), (9, 11), (14, 20), (27, 28), (37, 37)]  # gaps of 4, 3, 7 and 9 ms
    assert len(waits) == ENOUGH + 1
    found = noted(waits)
    assert found.compute_ms == 7
    assert (
        found.cannot_pay
        == "a copy back takes 10.00 ms, and the computation that could hide it takes 7.00 ms"
    )
    assert (
        noted(waits, loads=((0, 7),)).cannot_pay is None
    )  # copies that take as long as the computation are hidden
    assert noted(waits[1:]).compute_ms is None


def test_what_the_device_is_not_through_with_is_not_read():
    assert noted([(1, 4)], done=False) is None
