"""Metrics arrive one step late, in order, and none is lost."""

import os
import signal

import torch

from megatron_packed.distributed.hang_detection import DeviceWatch
from megatron_packed.training import late_metrics, signals
from megatron_packed.training.late_metrics import LateMetrics
from megatron_packed.training.signals import SignalFlag


def test_values_arrive_one_step_late_and_are_not_those_of_the_next_step():
    late, vector = LateMetrics(2, torch.device("cpu")), torch.zeros(2)
    got = []
    for step in range(5):
        vector.fill_(step)  # the device vector is the same memory every step
        got.append(late.push(step, vector))
    assert got[0] is None
    assert [(one.facts, one.values) for one in got[1:]] == [
        (step, [float(step)] * 2) for step in range(4)
    ]
    last = late.flush()
    assert (last.facts, last.values) == (4, [4.0, 4.0])
    assert late.flush() is None


def test_a_step_lasts_from_the_end_of_the_one_before_and_pauses_count_for_none(monkeypatch):
    clock = [10.0]
    monkeypatch.setattr(late_metrics.time, "perf_counter", lambda: clock[0])
    late, vector, seconds = LateMetrics(1, torch.device("cpu")), torch.zeros(1), []
    for step, lasts in enumerate([3.0, 1.0, 2.0]):
        clock[0] += lasts
        arrived = late.push(step, vector)
        seconds += [] if arrived is None else [arrived.seconds]
    seconds.append(late.flush().seconds)
    clock[0] += 100.0  # a validation
    late.restart()
    clock[0] += 4.0
    late.push(3, vector)
    assert [*seconds, late.flush().seconds] == [3.0, 1.0, 2.0, 4.0]


def test_a_host_that_waits_for_the_device_gives_signs():
    class Event:
        polls = 3

        def query(self) -> bool:
            self.polls -= 1
            return self.polls < 0

        def elapsed_time(self, end: "Event") -> float:
            return 7.0

    class Watch(DeviceWatch):
        looks = 0

        def waits(self) -> None:
            self.looks += 1

    watch = Watch()
    late = LateMetrics(1, torch.device("cpu"), hang_detector=watch)
    late._mark = Event
    late.restart()
    late.push(0, torch.zeros(1))
    assert not watch.looks
    assert late.flush().seconds == 7e-3 and watch.looks == 3


def test_first_signal_sets_the_flag_and_a_later_one_exits_at_once(monkeypatch, capfd):
    codes, clock = [], [100.0]
    monkeypatch.setattr(signals.time, "monotonic", lambda: clock[0])
    before = signal.getsignal(signal.SIGUSR1)
    with SignalFlag(exit_now=codes.append, speaks=True) as flag:
        os.kill(os.getpid(), signal.SIGUSR1)
        clock[0] += 0.9  # the second signal, forwarded by torchrun, is a duplicate
        os.kill(os.getpid(), signal.SIGTERM)
        assert flag.received == signal.SIGUSR1 and codes == []
        clock[0] += 0.2
        os.kill(os.getpid(), signal.SIGTERM)
        assert codes == [128 + signal.SIGTERM]
    assert signal.getsignal(signal.SIGUSR1) == before
    heard = "SIGUSR1: the run will stop after its next step; a second signal ends it at once.\n"
    assert capfd.readouterr().err == heard
