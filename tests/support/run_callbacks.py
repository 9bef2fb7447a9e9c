"""Callbacks of runs in tests, and functions that add them to a run of the script."""

import hashlib
import os
from collections.abc import Callable as Function
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from megatron_packed.training import pretrain
from megatron_packed.training.callback import Callback
from megatron_packed.training.trainer import Trainer


class WeightAverage(Callback):
    """Exponential moving average of the weights, in float32."""

    def __init__(self, decay: float = 0.9) -> None:
        self.decay = decay
        self.average: dict[str, torch.Tensor] = {}
        self.calls = 0

    def on_train_start(self, trainer: Trainer) -> None:
        if not self.average:
            weights = trainer.model.named_parameters()
            self.average = {name: weight.detach().float().clone() for name, weight in weights}

    @torch.no_grad()
    def on_step_end(self, trainer: Trainer, step: int) -> None:
        share = (1 - self.decay) * trainer.update_applied
        for name, weight in trainer.model.named_parameters():
            self.average[name] += share * (weight.float() - self.average[name])
        self.calls = step
        repeated = step < trainer.progress.iteration
        assert not (repeated and trainer.pause()), "weights are those before a counted step"

    def state_dict(self) -> dict[str, Any]:
        return {"average": self.average, "calls": self.calls}

    def load_state_dict(self, state: Any) -> None:
        self.average, self.calls = state["average"], state["calls"]


class PrintedAverage(WeightAverage):
    """Average that prints the hash of the state that it loads."""

    name = "WeightAverage"

    def load_state_dict(self, state: Any) -> None:
        super().load_state_dict(state)
        print("loaded", hash_of(self.average), flush=True)


def hash_of(tensors: dict[str, torch.Tensor]) -> str:
    """Return the hash of all bytes of tensors."""
    contents = (tensors[name].numpy().tobytes() for name in sorted(tensors))
    return hashlib.sha256(b"".join(contents)).hexdigest()


class RankState(Callback):
    """State that belongs to one rank: a tensor and a number."""

    def state_dict(self) -> dict[str, Any]:
        rank = int(os.environ["RANK"])
        return {"tensor": torch.full((2,), rank), "rank": rank}

    def load_state_dict(self, state: Any) -> None:
        print("loaded", state["tensor"].tolist(), state["rank"], flush=True)


class StopOnRank(Callback):
    """Request of one rank to stop after a step."""

    def __init__(self, rank: int, step: int) -> None:
        self.rank = rank
        self.step = step

    def on_metrics(self, trainer: Trainer, metrics: Any) -> None:
        if trainer.groups.rank == self.rank and metrics["iteration"] == self.step:
            trainer.request_stop()


class FailOnRank(StopOnRank):
    """Error of one rank in a step."""

    def on_metrics(self, trainer: Trainer, metrics: Any) -> None:
        if trainer.groups.rank == self.rank and metrics["iteration"] == self.step:
            raise KeyError("no such metric")


def add_callbacks(make: Function[[], Sequence[Callback]]) -> None:
    """Let the run of this process have callbacks; for `runs.run`."""
    pretrain.run_job = partial(pretrain.run_job, callbacks=make())


def averages() -> list[Callback]:
    return [WeightAverage()]


def printed_averages() -> list[Callback]:
    return [PrintedAverage()]


def rank_states() -> list[Callback]:
    return [RankState()]


def stops_on_rank_1() -> list[Callback]:
    return [StopOnRank(rank=1, step=2)]


def fails_on_rank_1() -> list[Callback]:
    return [FailOnRank(rank=1, step=2)]
