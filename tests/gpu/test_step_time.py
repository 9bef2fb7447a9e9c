"""The logged time of a step is the time of the device, at whatever time the host reads it."""

import time

import pytest
import torch

from megatron_packed.training.late_metrics import LateMetrics

pytestmark = pytest.mark.gpu


def test_every_step_takes_the_time_that_the_device_took():
    """The last step before a pause counts too, although the host sees its end late."""
    cycles = 50_000_000
    torch.cuda._sleep(cycles)
    late, vector, seconds = LateMetrics(1, torch.device("cuda")), torch.zeros(1, device="cuda"), []
    for step in range(4):
        torch.cuda._sleep(cycles * (1 + step))
        arrived = late.push(step, vector)
        seconds += [] if arrived is None else [arrived.seconds]
    seconds.append(late.flush().seconds)
    time.sleep(0.5)
    late.restart()
    torch.cuda._sleep(cycles)
    late.push(4, vector)
    seconds.append(late.flush().seconds)
    assert [round(one / seconds[0], 1) for one in seconds] == pytest.approx(
        [1, 2, 3, 4, 1], rel=0.2
    ), seconds
