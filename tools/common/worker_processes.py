"""Processes that take jobs in turns and share the visible GPUs."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

_CHECK_EVERY = 2.0


class Worker:
    """Process with the job that it works on."""

    def __init__(self, number: int, task: Callable[[Any], Any]) -> None:
        context = multiprocessing.get_context("spawn")
        self.number = number
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(number, task, theirs), daemon=True)
        self.process.start()
        theirs.close()  # The pipe then ends with the process.
        self.job: Any = None
        self.started = 0.0

    def start(self, job: Any) -> None:
        self.job = job
        self.started = time.monotonic()
        self.pipe.send(job)


def _serve(number: int, task: Callable[[Any], Any], pipe: Connection) -> None:
    """Run jobs from the pipe and send each result, and whether the process can take another job."""
    torch.set_num_threads(1)
    if torch.cuda.is_available():
        torch.cuda.set_device(number % torch.cuda.device_count())
    usable = True
    while usable:
        result = task(pipe.recv())
        try:
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
        except RuntimeError:  # An illegal access makes CUDA unusable in this process.
            usable = False
        pipe.send((result, usable))


def run_in_processes(
    task: Callable[[Any], Any],
    jobs: Iterator[Any],
    processes: int,
    patience: float,
    lost: Callable[[Any, str], Any],
) -> Iterator[Any]:
    """Yield the results of jobs in the order in which they end.

    A process that ends or takes too long is replaced.

    Args:
        task: function of one job; it can be pickled.
        jobs: next job; read when a process is free.
        patience: longest time of a job, in seconds.
        lost: returns the result of a job without a result, given the job and the reason.
    """
    # Compilers start threads and processes for all cores of the host unless these are set.
    os.environ.setdefault("LOCAL_WORLD_SIZE", str(processes))
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    busy: dict[Connection, Worker] = {}

    def give(worker: Worker) -> None:
        for job in jobs:
            worker.start(job)
            busy[worker.pipe] = worker
            return
        worker.process.kill()

    for number in range(processes):
        give(Worker(number, task))
    while busy:
        for pipe in wait(list(busy), timeout=_CHECK_EVERY):
            worker = busy.pop(pipe)
            try:
                result, usable = pipe.recv()
            except (EOFError, ConnectionResetError):
                worker.process.join()
                result, usable = lost(worker.job, f"ended with {worker.process.exitcode}"), False
            yield result
            give(worker if usable else Worker(worker.number, task))
        for pipe, worker in list(busy.items()):
            if time.monotonic() - worker.started > patience:
                worker.process.kill()
                del busy[pipe]
                yield lost(worker.job, f"took more than {patience:g} s")
                give(Worker(worker.number, task))
