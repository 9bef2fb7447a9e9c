"""Faults of a run's processes.

A process calls one of these functions before it runs the script. The functions take plain
arguments; most of them install a fault that happens later.
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
from unittest.mock import patch

import torch
import torch.distributed as dist

from megatron_packed.data.errors import DataError
from megatron_packed.data.loader import Loader
from megatron_packed.distributed import failure_watch, groups
from megatron_packed.distributed.flat_buffers import FlatBuffers
from megatron_packed.distributed.hang_detection import HangDetector
from megatron_packed.inputs import open_documents as run_documents
from megatron_packed.layers import attention
from megatron_packed.models.hybrid_model import HybridModel
from megatron_packed.optim.optimizer import Optimizer
from megatron_packed.packed.micro_batch import NO_LABEL
from megatron_packed.reporting import run_writers
from megatron_packed.reporting.log_file import JsonlWriter
from megatron_packed.resume import run_and_random_state as run_state
from megatron_packed.training import failures, pretrain
from megatron_packed.training.late_metrics import LateMetrics
from megatron_packed.training.train_step import TrainStep
from megatron_packed.training.trainer import Trainer

LOG_SITE = "before a line of the log"
"""Place among `SITES` that only rank 0 passes."""
SITES: dict[str, tuple[Any, str]] = {
    "before a micro-batch": (TrainStep, "_run"),
    "before a forward pass": (HybridModel, "forward"),
    "between backward and all-reduce": (FlatBuffers, "all_reduce"),
    "between all-reduce and update": (Optimizer, "step"),
    "in the update, weights changed": (Optimizer, "write_params"),
    LOG_SITE: (JsonlWriter, "write"),
}
"""Places in a step where a fault can happen."""


def do_not_wait_for_the_dead() -> None:
    """Shorten the wait for answers of other processes, because one of them is dead."""
    failure_watch.ANSWER_SECONDS = 0.1


def on_call(owner: Any, name: str, number: int, action: Callable[[Any], None]) -> None:
    """Run ``action(self)`` before the ``number``-th call (from 1) of a method in this process.

    Calls of a planned rank's model, on the meta device, do not count.
    """
    original, calls = getattr(owner, name), count(1)

    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        planned = isinstance(self, HybridModel) and self.output_weight.is_meta
        if not planned and next(calls) == number:
            action(self)
        return original(self, *args, **kwargs)

    setattr(owner, name, wrapped)


def kill_at(site: str, call: int, rank: int) -> None:
    """Kill the process of ``rank`` at the ``call``-th passing of ``site``, one of `SITES`."""
    do_not_wait_for_the_dead()
    if int(os.environ["RANK"]) == rank:
        on_call(*SITES[site], call, lambda _: os.kill(os.getpid(), signal.SIGKILL))


def stop_at(site: str, call: int, rank: int, seconds: float) -> None:
    """Suspend (not kill) the process of ``rank`` at ``site``; collectives wait ``seconds``."""
    do_not_wait_for_the_dead()
    wait_for_collectives(seconds)
    on_rank(rank, site, call, lambda _: os.kill(os.getpid(), signal.SIGSTOP))


def sleep_at(site: str, call: int, rank: int, seconds: float) -> None:
    """Let the process of ``rank`` sleep at ``site``, alive; collectives wait ``seconds``."""
    wait_for_collectives(seconds)
    on_rank(rank, site, call, lambda _: time.sleep(3600))


def wait_for_collectives(seconds: float) -> None:
    """Set the timeout of collectives in seconds; ``--distributed-timeout-minutes`` takes minutes.

    The timeout starts with the update of the second step, because processes may be slow to start.
    """

    def shorten(_: Any) -> None:
        for group in dist.distributed_c10d._world.pg_map:
            group._get_backend(torch.device("cpu"))._set_default_timeout(timedelta(seconds=seconds))

    on_call(Optimizer, "step", 2, shorten)


def stop_beside_gpus(site: str, call: int, rank: int, seconds: float) -> None:
    """Suspend a process like `stop_at`, with hosts that wait for GPUs and a timeout at once."""
    patch.object(groups, "timedelta", lambda **_: timedelta(seconds=seconds)).start()
    on_rank(rank, site, call, lambda _: os.kill(os.getpid(), signal.SIGSTOP))


def one_pack_fewer(step: int, rank: int) -> None:
    """Drop the last micro-batch of the ``step``-th step from the loader of ``rank``."""
    original, calls = Loader.micro_batches, count(1)

    def fewer(self: Loader, number: int) -> list[Any]:
        found = original(self, number)
        return found[:-1] if next(calls) == step else found

    if int(os.environ["RANK"]) == rank:
        Loader.micro_batches = fewer  # type: ignore[method-assign]


def full_log(line: int) -> None:
    """Report a full disk for two lines of the log, from the ``line``-th line on."""

    def fail(_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "log.jsonl")

    on_call(JsonlWriter, "write", line, fail)
    on_call(JsonlWriter, "write", line + 1, fail)


def in_save(site: str, save: int, rank: int, action: Callable[[], None]) -> None:
    """Run ``action()`` on ``rank`` at a place of the commit protocol in its ``save``-th save."""
    if int(os.environ["RANK"]) != rank:
        return
    original, calls = run_state.save_checkpoint, count(1)

    def at(number: int) -> Callable[[str], None]:
        return lambda passed: action() if number == save and passed == site else None

    run_state.save_checkpoint = lambda *args, **kwargs: original(
        *args, **kwargs, on_site=at(next(calls))
    )


def kill_in_save(site: str, save: int, rank: int) -> None:
    """Kill the process of ``rank`` at a place of the commit protocol in its ``save``-th save."""
    do_not_wait_for_the_dead()
    in_save(site, save, rank, lambda: os.kill(os.getpid(), signal.SIGKILL))


def until_logged(save: int, rank: int, iteration: int, log: Path) -> None:
    """Delay the ``save``-th save of ``rank`` until the log has the line of ``iteration``."""

    def wait() -> None:
        deadline = time.monotonic() + 20
        while f'{{"iteration": {iteration},'.encode() not in log.read_bytes():
            assert time.monotonic() < deadline, "training waits for the save"
            time.sleep(0.01)

    in_save("shard.opened", save, rank, wait)


def own_folder(folder: Path) -> None:
    """Work in a folder of this rank, as on machines that share no file system."""
    mine = folder / f"rank_{os.environ['RANK']}"
    mine.mkdir()
    os.chdir(mine)


def tear_line(line: int) -> None:
    """Kill rank 0 after it has written half of a line of its log."""
    do_not_wait_for_the_dead()

    def half(writer: Any) -> None:
        writer._file.append(b'{"iteration": 99, "lm_lo')
        os.kill(os.getpid(), signal.SIGKILL)

    on_call(JsonlWriter, "write", line, half)


def poison_forward(call: int, rank: int, value: float) -> None:
    """Multiply the embeddings of one forward pass of ``rank`` by ``value``: nan, inf or a spike."""
    if int(os.environ["RANK"]) == rank:
        on_call(HybridModel, "forward", call, lambda model: _poison_next_embedding(model, value))


def _poison_next_embedding(model: HybridModel, value: float) -> None:
    def poison(_module: Any, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
        handle.remove()
        return output * value

    handle = model.embedding.register_forward_hook(poison)


def signal_at(owner: Any, name: str, call: int, rank: int, number: int) -> None:
    """Send a signal to the process of ``rank`` before the ``call``-th call of a method."""
    if int(os.environ["RANK"]) == rank:
        on_call(owner, name, call, lambda _: os.kill(os.getpid(), number))


def signal_all(owner: Any, name: str, call: int, number: int) -> None:
    """Send a signal twice to every process, as a scheduler and the launcher do."""

    def twice(_: Any) -> None:
        for _ in range(2):
            os.kill(os.getpid(), number)

    on_call(owner, name, call, twice)


def signal_in_save(save: int, number: int) -> None:
    """Send a signal to rank 0 while its ``save``-th checkpoint is half written."""
    in_save("shard.synced", save, 0, lambda: os.kill(os.getpid(), number))


def impatience(number: int, seconds: float) -> None:
    """Send two signals within one step, so far apart that a person must have sent both."""

    def send(_: Any) -> None:
        os.kill(os.getpid(), number)
        time.sleep(seconds)
        os.kill(os.getpid(), number)

    on_call(Optimizer, "step", 4, send)


def as_if_begun_earlier(rank: int, seconds: float) -> None:
    """Move the start of the run on ``rank`` to ``seconds`` earlier."""

    def move(trainer: Trainer) -> None:
        trainer._started -= seconds

    if int(os.environ["RANK"]) == rank:
        on_call(Trainer, "run", 1, move)


def full_disk(save: int, rank: int) -> None:
    """Report a full disk in the ``save``-th save of ``rank``."""

    def fail() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    in_save("shard.synced", save, rank, fail)


def full_console() -> None:
    """Put standard output on a full disk, and standard error into a pipe without a reader."""
    reader, writer = os.pipe()
    os.close(reader)
    os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
    os.dup2(writer, 2)


def unreadable_data(rank: int) -> None:
    """Make the data unreadable for ``rank`` only."""

    def fail(*_: Any, **__: Any) -> None:
        raise DataError("shard_7.jsonl cannot be read by this machine.")

    if int(os.environ["RANK"]) == rank:
        run_documents.open_dataset = fail


def on_rank(rank: int, site: str, call: int, action: Callable[[Any], None]) -> None:
    """Run ``action`` on ``rank`` when it passes ``site``, one of `SITES`, the ``call``-th time."""
    if int(os.environ["RANK"]) == rank:
        on_call(*SITES[site], call, action)


def out_of_memory(call: int, rank: int) -> None:
    """Raise an out-of-memory error in the ``call``-th forward pass of ``rank``."""

    def fail(_: Any) -> None:
        raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB")

    on_rank(rank, "before a forward pass", call, fail)


def defect(site: str, call: int, rank: int) -> None:
    """Fail an assertion of the package in the process of ``rank``."""

    def fail(_: Any) -> None:
        raise AssertionError("the sum is 3")

    on_rank(rank, site, call, fail)


def damaged_block(micro_batch: int, rank: int) -> None:
    """Damage the tokens that ``rank`` reads when it prepares its ``micro_batch``-th micro-batch."""

    def damage(loader: Loader) -> None:
        blocks = loader.dataset._tokens
        blocks._checked[:] = False
        blocks.checksums = blocks.checksums ^ 1

    if int(os.environ["RANK"]) == rank:
        on_call(Loader, "_prepare", micro_batch, damage)


class _Done:
    """Device event that is always complete."""

    def query(self) -> bool:
        return True


def watched(patience: float, site: tuple[Any, str], call: int, seconds: float) -> None:
    """Install the hang detector as on a GPU, and delay the ``call``-th call of a method."""

    def hang_detector_of(_: Any, report: Callable[[Exception], int]) -> HangDetector:
        return HangDetector(patience, lambda error: os._exit(report(error)), _Done)

    pretrain.hang_detector_of = hang_detector_of
    on_call(*site, call, lambda _: time.sleep(seconds))


class _Moment:
    """Device event that completes at a given time of the host's clock, or never."""

    def __init__(self, at: float) -> None:
        self.at = at

    def query(self) -> bool:
        return time.monotonic() >= self.at

    def elapsed_time(self, end: _Moment) -> float:
        return 1e3 * (end.at - self.at)


def stands_still(patience: float, seconds: float, mark: int, rank: int) -> None:
    """Let the device of ``rank`` stop before the ``mark``-th mark of the heartbeat (from 1).

    It takes ``seconds`` from each mark to the next. A hang detector watches it as it watches a GPU,
    and the host waits for the device at the end of a step.
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
    """Let ``rank`` wait without end, as for a GPU that waits for another, and install a fault."""
    on_rank(rank, "between backward and all-reduce", 5, lambda _: time.sleep(3600))
    fault()


def without_agent(fault: Callable[[], None], port: int) -> None:
    """Start the ranks without torchrun: rank 0 hosts the store through which they connect."""
    del os.environ["TORCHELASTIC_USE_AGENT_STORE"]
    os.environ["MASTER_PORT"] = str(port)
    fault()


def fail_at_the_end() -> None:
    """Fail on rank 0 in its last task, slowly, after the other ranks have finished."""

    def fail(*_: Any, **__: Any) -> None:
        time.sleep(2)
        raise RuntimeError("no curves today")

    failure_watch.PATIENCE_SECONDS = 1.0
    run_writers._write_report = fail


def all_out_of_memory(call: int) -> None:
    """Raise an out-of-memory error on all ranks at the same time, with a slow disk."""
    original = failures.write_status

    def slowly(*args: Any) -> None:
        time.sleep(0.5)
        original(*args)

    failures.write_status = slowly
    out_of_memory(call, int(os.environ["RANK"]))


def leaking_attention(rank: int) -> None:
    """Let the attention of ``rank`` see the complete pack as one document."""
    if int(os.environ["RANK"]) != rank:
        return
    original = attention.varlen_attention

    def leak(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cu_seqlens: torch.Tensor,
        **names: Any,
    ):
        joined = torch.full_like(cu_seqlens, len(q))
        joined[0] = 0
        one = {"max_seqlen": len(q), "seq_idx_1T": torch.zeros_like(names["seq_idx_1T"])}
        return original(q, k, v, joined, **{**names, **one})

    attention.varlen_attention = leak


def hide_package(name: str) -> None:
    """Hide a package as if it were not installed."""
    sys.modules[name] = None  # type: ignore[assignment]


def forget_step(number: int) -> None:
    """Undo all changes of the ``number``-th step: the result that a skipped step must have."""
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
    """Flip a bit of a bfloat16 weight's first element on ``rank`` before its ``step``-th step."""

    def flip(train_step: TrainStep) -> None:
        train_step.buffers.wait_params()
        train_step.buffers.parameters[name].data.view(-1).view(torch.int16)[0] ^= 1 << bit

    if int(os.environ["RANK"]) == rank:
        on_call(TrainStep, "__call__", step, flip)


def spoil_steps(spikes: tuple[int, ...], without_targets: tuple[int, ...]) -> None:
    """Multiply the loss of some steps by 100, and remove all targets from others.

    Steps count from 1 over the complete run.
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
    """Install two faults in one process."""
    first()
    second()
