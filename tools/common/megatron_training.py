"""Training of a model of megatron-core, and checkpoints with its optimizer."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.megatron_core import DOCUMENTS, LENGTH, ROWS

RATE, LOWEST, WARMUP, DECAY = 1e-2, 1e-3, 4, 40
"""Learning rates, and lengths of the schedule in samples."""


@dataclass
class Trainer:
    """Model of megatron-core with its Adam and its schedule.

    Args:
        model: the model of this rank.
        bf16: the weights are bf16, with float32 masters.
        distributed: each rank has a part of the optimizer's state.
    """

    model: nn.Module
    bf16: bool = False
    distributed: bool = True

    def __post_init__(self) -> None:
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
        )
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

        flags = {"use_distributed_optimizer": self.distributed}
        self.parallel = DistributedDataParallel(
            self.model.config, DistributedDataParallelConfig(**flags), self.model
        )
        config = OptimizerConfig(
            optimizer="adam",
            lr=RATE,
            min_lr=LOWEST,
            weight_decay=0.1,
            adam_beta1=0.9,
            adam_beta2=0.95,
            clip_grad=1.0,
            bf16=self.bf16,
            **flags,
        )
        self.optimizer = get_megatron_optimizer(config, [self.parallel])
        self.schedule = OptimizerParamScheduler(
            self.optimizer,
            init_lr=0.0,
            max_lr=RATE,
            min_lr=LOWEST,
            lr_warmup_steps=WARMUP,
            lr_decay_steps=DECAY,
            lr_decay_style="cosine",
            start_wd=0.1,
            end_wd=0.1,
            wd_incr_steps=DECAY,
            wd_incr_style="constant",
        )
        self.iteration = 0

    def step(self, documents: Tensor) -> float:
        """Train one step on this rank's ``(N, LENGTH + 1)`` tokens, and return its mean loss."""
        from megatron.core.distributed import finalize_model_grads

        self.parallel.zero_grad_buffer()
        self.optimizer.zero_grad()
        losses = []
        for tokens in documents:
            found = logits(self.parallel, tokens[:-1])
            loss = F.cross_entropy(found.float(), tokens[1:])
            losses.append(loss.item())
            (loss / len(documents)).backward()
        finalize_model_grads([self.parallel])
        self.optimizer.step()
        self.schedule.step(DOCUMENTS)
        self.iteration += 1
        return sum(losses) / len(losses)

    def state(
        self, args: dict[str, Any], sharding: str, *, loading: bool = False
    ) -> dict[str, Any]:
        """Return the state that a checkpoint of Megatron has."""
        from megatron.core import parallel_state

        about = {
            "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
            "distrib_optim_sharding_type": sharding,
            "singleton_local_shards": False,
            "chained_optim_avoid_prefix": True,
        }
        samples = self.iteration * DOCUMENTS
        state: dict[str, Any] = {
            "model": self.parallel.module.sharded_state_dict(metadata=about),
            "args": argparse.Namespace(**args, consumed_train_samples=samples, clip_grad=1.0),
            "iteration": self.iteration,
            "checkpoint_version": 3.0,
            "opt_param_scheduler": self.schedule.state_dict(),
        }
        state["optimizer"] = self.optimizer.sharded_state_dict(
            state, is_loading=loading, metadata=about
        )
        return state

    def load(self, args: dict[str, Any], folder: str) -> None:
        """Continue from a checkpoint that any layout wrote."""
        from megatron.core import dist_checkpointing
        from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

        # torch's Adam has no state before its first step.
        for inner in self.optimizer.chained_optimizers:
            for group in inner.optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = torch.zeros_like(parameter)
            inner.optimizer.step()
        own = DistributedOptimizer._set_main_param_and_optimizer_states

        def without_step(optimizer: Any, parameter: Any, tensors: dict[str, Any]) -> None:
            own(optimizer, parameter, {"step": None, **tensors})

        DistributedOptimizer._set_main_param_and_optimizer_states = without_step
        wanted = self.state(args, "fully_reshardable", loading=True)
        # Checkpoints that this project writes have no state of FP8 (_extra_state).
        found = dist_checkpointing.load(wanted, folder, strict="log_all")
        self.model.load_state_dict(found["model"], strict=False)
        self.optimizer.load_state_dict(found["optimizer"])
        self.schedule.load_state_dict(found["opt_param_scheduler"])
        self.iteration = found["iteration"]


def logits(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return megatron-core's logits ``(T, V)`` of one document."""
    length = len(tokens)
    mask = torch.ones(1, 1, length, length).triu(1).bool()
    found: Tensor = model(tokens[None], torch.arange(length)[None], mask)[0]
    return found


def documents_of(seed: int) -> Tensor:
    """Return ``(DOCUMENTS, LENGTH + 1)`` random tokens; the last one ends the document."""
    draw = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, ROWS - 1, (DOCUMENTS, LENGTH + 1), generator=draw)
    tokens[:, -1] = ROWS - 1
    return tokens
