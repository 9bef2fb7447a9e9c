"""What goes wrong in a process of a run: called there before the script, each a function with plain
arguments.
"""

from __future__ import annotations

import dataclasses
import errno
import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_packed.data.errors import DataError
from megatron_packed.data.loader import Loader
from megatron_packed.distributed import failure_watch, groups
from megatron_packed.distributed.flat_buffers import FlatBuffers
from megatron_packed.distributed.hang_detection import HangDetector
from megatron_packed.layers import attention
from megatron_packed.models.hybrid_model import HybridModel
from megatron_packed.optim.optimizer import Optimizer
from megatron_packed.packed.micro_batch import NO_LABEL
from megatron_packed.training import failures, pretrain
from megatron_packed.training import open_documents as run_documents
from megatron_packed.training import run_state as run_state
from megatron_packed.training.late_metrics import LateMetrics
from megatron_packed.training.metric_writers import JsonlWriter
from megatron_packed.training.train_step import TrainStep
from megatron_packed.training.trainer import Trainer

LOG_SITE = "before a line of the log"
"""The one of the places below that only rank 0 passes."""
SITES: dict[str, tuple[Any, str]] = {
    "before a micro-batch": (TrainStep, "_run"),
    "before a forward pass": (HybridModel, "forward"),
    "between backward and all-reduce": (FlatBuffers, "all_reduce"),
    "between all-reduce and update": (Optimizer, "step"),
    "in the update, weights changed": (Optimizer, "write_params"),
    LOG_SITE: (JsonlWriter, "write"),
}
"""Places inside a step."""


def do_not_wait_for_the_dead() -> None:
    """Of two processes one will be dead: nobody else could take his time to answer the other."""
    failure_watch.ANSWER_SECONDS = 0.1


def on_call(owner: Any, name: str, number: int, action: Callable[[Any], None]) -> None:
    """``action(self)`` before the ``number``-th call (from 1) of a method, in this process."""
    original, calls = getattr(owner, name), count(1)

    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        if next(calls) == number:
            action(self)
        return original(self, *args, **kwargs)

    setattr(owner, name, wrapped)


def kill_at(site: str, call: int, rank: int) -> None:
    """The process of ``rank`` is killed at the ``call``-th passing of one of `SITES`."""
    do_not_wait_for_the_dead()
    if int(os.environ["RANK"]) == rank:
        on_call(*SITES[site], call, lambda _: os.kill(os.getpid(), signal.SIGKILL))


def stop_at(site: str, call: int, rank: int, seconds: float) -> None:
    """The process of ``rank`` is stopped, not killed, at one of `SITES`; collectives wait
    ``seconds``.
    """
    do_not_wait_for_the_dead()
    wait_for_collectives(seconds)
    on_rank(rank, site, call, lambda _: os.kill(os.getpid(), signal.SIGSTOP))


def sleep_at(site: str, call: int, rank: int, seconds: float) -> None:
    """The process of ``rank`` lives and does nothing at one of `SITES`; collectives wait
    ``seconds``.
    """
    wait_for_collectives(seconds)
    on_rank(rank, site, call, lambda _: time.sleep(3600))


def wait_for_collectives(seconds: float) -> None:
    """In place of ``--distributed-timeout-minutes``, which counts in minutes.

    Not from the start, when processes may be late for good reasons: from the update of the second
    step on.
    """

    def shorten(_: Any) -> None:
        for group in dist.distributed_c10d._world.pg_map:
            group._get_backend(torch.device("cpu"))._set_default_timeout(timedelta(seconds=seconds))

    on_call(Optimizer, "step", 2, shorten)


def stop_beside_gpus(site: str, call: int, rank: int, seconds: float) -> None:
    """As `stop_at`, where the hosts wait for their GPUs, and from the start."""
    groups._timeout = lambda minutes: timedelta(seconds=seconds)
    on_rank(rank, site, call, lambda _: os.kill(os.getpid(), signal.SIGSTOP))


def one_pack_fewer(step: int, rank: int) -> None:
    """The loader of ``rank`` forgets the last micro-batch of its ``step``-th step."""
    original, calls = Loader.micro_batches, count(1)

    def fewer(self: Loader, number: int) -> list[Any]:
        found = original(self, number)
        return found[:-1] if next(calls) == step else found

    if int(os.environ["RANK"]) == rank:
        Loader.micro_batches = fewer  # type: ignore[method-assign]


def full_log(line: int) -> None:
    """The disk of the log is full from the ``line``-th line on, for two lines."""

    def fail(_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "log.jsonl")

    on_call(JsonlWriter, "write", line, fail)
    on_call(JsonlWriter, "write", line + 1, fail)


def in_save(site: str, save: int, rank: int, action: Callable[[], None]) -> None:
    """``action()`` in the process of ``rank`` at a place of the commit protocol in its ``save``-th
    save.
    """
    if int(os.environ["RANK"]) != rank:
        return
    original, calls = run_state.save_checkpoint, count(1)

    def at(number: int) -> Callable[[str], None]:
        return lambda passed: action() if number == save and passed == site else None

    run_state.save_checkpoint = lambda *args, **kwargs: original(
        *args, **kwargs, on_site=at(next(calls))
    )


def kill_in_save(site: str, save: int, rank: int) -> None:
    """The process of ``rank`` is killed at a place of the commit protocol in its ``save``-th save."""
    do_not_wait_for_the_dead()
    in_save(site, save, rank, lambda: os.kill(os.getpid(), signal.SIGKILL))


def until_logged(save: int, rank: int, iteration: int, log: Path) -> None:
    """The disk of ``rank`` is so slow in its ``save``-th save that the log has the line of a step
    before it is done.
    """

    def wait() -> None:
        deadline = time.monotonic() + 20
        while f'{{"iteration": {iteration},'.encode() not in log.read_bytes():
            assert time.monotonic() < deadline, "training waits for the save"
            time.sleep(0.01)

    in_save("shard.opened", save, rank, wait)


def tear_line(line: int) -> None:
    """Rank 0 is killed with half of a line of its log written."""
    do_not_wait_for_the_dead()

    def half(writer: Any) -> None:
        writer._file.write(b'{"iteration": 99, "lm_lo')
        os.kill(os.getpid(), signal.SIGKILL)

    on_call(JsonlWriter, "write", line, half)


def poison_forward(call: int, rank: int, value: float) -> None:
    """The ``call``-th forward pass of ``rank`` sees embeddings multiplied by ``value``: nan, inf,
    or a spike.
    """
    if int(os.environ["RANK"]) == rank:
        on_call(HybridModel, "forward", call, lambda model: _poison_next_embedding(model, value))


def _poison_next_embedding(model: HybridModel, value: float) -> None:
    def poison(_module: Any, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
        handle.remove()
        return output * value

    handle = model.embedding.register_forward_hook(poison)


def signal_at(owner: Any, name: str, call: int, rank: int, number: int) -> None:
    """The process of ``rank`` receives a signal before the ``call``-th call of a method."""
    if int(os.environ["RANK"]) == rank:
        on_call(owner, name, call, lambda _: os.kill(os.getpid(), number))


def signal_all(owner: Any, name: str, call: int, number: int) -> None:
    """Every process receives a signal twice in a row, as from a scheduler and from the launcher."""

    def twice(_: Any) -> None:
        for _ in range(2):
            os.kill(os.getpid(), number)

    on_call(owner, name, call, twice)


def signal_in_save(save: int, number: int) -> None:
    """Rank 0 receives a signal while its ``save``-th checkpoint is half written."""
    in_save("shard.synced", save, 0, lambda: os.kill(os.getpid(), number))


def impatience(number: int, seconds: float) -> None:
    """Two signals so far apart that a person sent both, within one step."""

    def send(_: Any) -> None:
        os.kill(os.getpid(), number)
        time.sleep(seconds)
        os.kill(os.getpid(), number)

    on_call(Optimizer, "step", 4, send)


def as_if_begun_earlier(rank: int, seconds: float) -> None:
    """On ``rank`` alone the run began so long ago."""

    def move(trainer: Trainer) -> None:
        trainer._started -= seconds

    if int(os.environ["RANK"]) == rank:
        on_call(Trainer, "run", 1, move)


def full_disk(save: int, rank: int) -> None:
    """The disk of ``rank`` is full in its ``save``-th save."""

    def fail() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    in_save("shard.synced", save, rank, fail)


def full_console() -> None:
    """Standard output on a full disk, and standard error a pipe that no process reads."""
    reader, writer = os.pipe()
    os.close(reader)
    os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
    os.dup2(writer, 2)


def unreadable_data(rank: int) -> None:
    """``rank`` alone cannot use the data."""

    def fail(*_: Any, **__: Any) -> None:
        raise DataError("shard_7.jsonl cannot be read by this machine.")

    if int(os.environ["RANK"]) == rank:
        run_documents.open_dataset = fail


def on_rank(rank: int, site: str, call: int, action: Callable[[Any], None]) -> None:
    """``action`` in the process of ``rank`` at the ``call``-th passing of one of `SITES`."""
    if int(os.environ["RANK"]) == rank:
        on_call(*SITES[site], call, action)


def out_of_memory(call: int, rank: int) -> None:
    """The ``call``-th forward pass of ``rank`` finds no memory."""

    def fail(_: Any) -> None:
        raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB")

    on_rank(rank, "before a forward pass", call, fail)


def defect(site: str, call: int, rank: int) -> None:
    """An assertion of ours is wrong in the process of ``rank``."""

    def fail(_: Any) -> None:
        raise AssertionError("the sum is 3")

    on_rank(rank, site, call, fail)


def damaged_block(micro_batch: int, rank: int) -> None:
    """To ``rank`` the disk gives other bytes than were written, when its ``micro_batch``-th is made
    ready.
    """

    def damage(loader: Loader) -> None:
        tokens = loader.dataset._tokens
        tokens._checked[:] = False
        tokens._checksums = tokens._checksums ^ 1

    if int(os.environ["RANK"]) == rank:
        on_call(Loader, "_prepare", micro_batch, damage)


class _Done:
    """An event of a device that is never behind."""

    def query(self) -> bool:
        return True


def watched(patience: float, site: tuple[Any, str], call: int, seconds: float) -> None:
    """As on a GPU that others wait for: a thread ends the run when nothing moves. And the
    ``call``-th call of a method begins after so many seconds.
    """

    def hang_detector_of(_: Any, report: Callable[[Exception], int]) -> HangDetector:
        return HangDetector(patience, lambda error: os._exit(report(error)), _Done)

    pretrain.hang_detector_of = hang_detector_of
    on_call(*site, call, lambda _: time.sleep(seconds))


class _Moment:
    """What a device comes to at a time of the host's clock, perhaps never."""

    def __init__(self, at: float) -> None:
        self.at = at

    def query(self) -> bool:
        return time.monotonic() >= self.at

    def elapsed_time(self, end: _Moment) -> float:
        return 1e3 * (end.at - self.at)


def stands_still(patience: float, seconds: float, mark: int, rank: int) -> None:
    """The device of ``rank`` takes so long from one mark of the heartbeat to the next, and never
    comes to the ``mark``-th (from 1). A thread watches it as it would a GPU, and the host waits for
    it to end a step.
    """
    if int(os.environ["RANK"]) != rank:
        return
    last, calls = _Moment(time.monotonic()), count(1)

    def next_mark() -> _Moment:
        nonlocal last
        last = _Moment(
            float("inf") if next(calls) >= mark else max(time.monotonic(), last.at) + seconds
        )
        return last

    def hang_detector_of(_: Any, report: Callable[[Exception], int]) -> HangDetector:
        return HangDetector(patience, lambda error: os._exit(report(error)), next_mark)

    pretrain.hang_detector_of = hang_detector_of
    LateMetrics._mark = lambda self: last  # type: ignore[method-assign,assignment,return-value]


def while_waiting(fault: Callable[[], None], rank: int) -> None:
    """Something goes wrong elsewhere while ``rank`` waits without end, as for a GPU that waits for
    another one.
    """
    on_rank(rank, "between backward and all-reduce", 5, lambda _: time.sleep(3600))
    fault()


def without_agent(fault: Callable[[], None], port: int) -> None:
    """The ranks are started by no torchrun: rank 0 is the host of the store they meet in."""
    del os.environ["TORCHELASTIC_USE_AGENT_STORE"]
    os.environ["MASTER_PORT"] = str(port)
    fault()


def fail_at_the_end() -> None:
    """Rank 0, which alone has something left to do, takes its time and cannot do it."""

    def fail(*_: Any, **__: Any) -> None:
        time.sleep(2)
        raise RuntimeError("no curves today")

    failure_watch.PATIENCE_SECONDS = 1.0
    pretrain.write_report = fail


def all_out_of_memory(call: int) -> None:
    """On all ranks at the same time, and on a slow disk."""
    original = failures.write_status

    def slowly(*args: Any) -> None:
        time.sleep(0.5)
        original(*args)

    failures.write_status = slowly
    out_of_memory(call, int(os.environ["RANK"]))


def leaking_attention(rank: int) -> None:
    """Attention of ``rank`` sees the whole pack as one document."""
    if int(os.environ["RANK"]) != rank:
        return
    original = attention.varlen_attention

    def leak(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cu_seqlens: torch.Tensor,
        *args: Any,
        **names: Any,
    ):
        joined = torch.full_like(cu_seqlens, len(q))
        joined[0] = 0
        return original(
            q,
            k,
            v,
            joined,
            len(q),
            **{**names, "seq_idx_1T": torch.zeros_like(names["seq_idx_1T"])},
        )

    attention.varlen_attention = leak


def hide_package(name: str) -> None:
    """A package that is not installed."""
    sys.modules[name] = None  # type: ignore[assignment]


def forget_step(number: int) -> None:
    """The ``number``-th step is computed, and all that it changed is put back: what a skipped step
    must equal.
    """
    original, calls = TrainStep.__call__, count(1)

    def wrapped(self: TrainStep, *args: Any, **kwargs: Any) -> torch.Tensor:
        if next(calls) != number:
            return original(self, *args, **kwargs)
        tensors = [held.shard.tensor for held in run_state.held_state(self.model, self.optimizer)]
        before = [tensor.clone() for tensor in tensors]
        metrics = original(self, *args, **kwargs)
        for tensor, old in zip(tensors, before):
            tensor.copy_(old)
        return metrics

    TrainStep.__call__ = wrapped  # type: ignore[method-assign]


def flip_weight(step: int, rank: int, name: str, bit: int) -> None:
    """A bit of the first element of a bfloat16 weight flips on ``rank`` before its ``step``-th
    step.
    """

    def flip(train_step: TrainStep) -> None:
        train_step.buffers.wait_params()
        train_step.buffers.parameters[name].data.view(-1).view(torch.int16)[0] ^= 1 << bit

    if int(os.environ["RANK"]) == rank:
        on_call(TrainStep, "__call__", step, flip)


def spoil_steps(spikes: tuple[int, ...], without_targets: tuple[int, ...]) -> None:
    """Steps (from 1, of the whole run) with a hundred times the loss, and steps that have nothing
    to learn.
    """
    original = Loader.micro_batches

    def spoilt(self: Loader, number: int) -> list[Any]:
        found = original(self, number)
        for micro_batch in found if number + 1 in spikes else ():
            micro_batch.scales[0] *= 100
        if number + 1 not in without_targets:
            return found
        for micro_batch in found:
            micro_batch.loss_mask.zero_()
            micro_batch.labels.fill_(NO_LABEL)
        return [dataclasses.replace(micro_batch, num_target_tokens=0) for micro_batch in found]

    Loader.micro_batches = spoilt  # type: ignore[method-assign]


def both(first: Callable[[], None], second: Callable[[], None]) -> None:
    """Two faults in one process."""
    first()
    second()
