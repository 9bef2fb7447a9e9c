"""Gloo groups of a test process that share one network thread.

Importing this module installs them. torch gives each group a thread that wakes 100 times a second.
A rank of a layout has about ten groups, and their threads used a fifth of the time of the tests of
several processes.

The thread polls while another thread has the lock of a connection. With the batch policy it does not
interrupt that thread. Four ranks on two busy processors, 400 exchanges of small tensors, five runs each:
mean processor time 3.5 to 2.5 s, with large noise.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

from torch.distributed import ProcessGroupGloo, Store, distributed_c10d

_devices: dict[int, Any] = {}
"""Device with the network thread of a process, by process: a thread does not survive a fork."""


class GroupOfOneLoop(ProcessGroupGloo):
    """Gloo group on the device that all groups of this process share."""

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        if os.getpid() not in _devices:
            interface = os.environ.get("GLOO_SOCKET_IFNAME", "lo").partition(",")[0]
            others = {*os.listdir("/proc/self/task")}
            _devices[os.getpid()] = ProcessGroupGloo.create_device(interface=interface)
            for thread in {*os.listdir("/proc/self/task")} - others:
                os.sched_setscheduler(int(thread), os.SCHED_BATCH, os.sched_param(0))
        options = ProcessGroupGloo._Options()
        options._devices = [_devices[os.getpid()]]
        options._timeout = timeout
        options._threads = 2
        super().__init__(store, rank, size, options)


distributed_c10d.ProcessGroupGloo = GroupOfOneLoop
