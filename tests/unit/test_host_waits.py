"""The names that the proofs without waits read from a profile are those that the profiler lists."""

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from support.host_waits import names_inside


def test_names_inside_an_event_are_those_of_the_profiler() -> None:
    x = torch.ones(4, requires_grad=True)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        x.detach().exp()
        with record_function("steady_steps"):
            (x * 2 + 1).sum().backward()
        x.detach().log()
    listed = profiler.events()
    window = next(event for event in listed if event.name == "steady_steps").time_range
    expected = {
        event.name
        for event in listed
        if window.start <= event.time_range.start and event.time_range.end <= window.end
    }
    found = names_inside(profiler, "steady_steps")
    assert set(found) == expected
    assert found.count("aten::mul") == 2, "one in each pass"
    assert "aten::exp" not in found and "aten::log" not in found
