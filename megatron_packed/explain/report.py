"""Report of ``--explain``: the verdict, facts about the run, and its capabilities on this machine.

The ops themselves choose their kernels (``Op.explain`` with the sizes of the run), so the report
shows the choices that training would make. No data is tokenised and no weights are allocated.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from math import ceil
from pathlib import Path

import numpy as np
import torch

from megatron_packed.config.errors import escaped
from megatron_packed.config.exit_codes import ExitCode
from megatron_packed.config.launch_checks import environment_number
from megatron_packed.config.run import RunConfig
from megatron_packed.data.errors import DataError
from megatron_packed.data.known_files import KnownData, file_sizes, first_lines_refusal
from megatron_packed.explain.capabilities import capabilities
from megatron_packed.explain.capability import beside, table
from megatron_packed.explain.kernel_reasons import check_implementation, chosen_kernels
from megatron_packed.models.estimate.parameter_count import count_parameters
from megatron_packed.models.estimate.run_estimate import (
    StepWork,
    documents_in_pack,
    estimates,
    step_work,
    usual,
)
from megatron_packed.models.run_model import device_of

_NAMED = 3
"""Largest number of data paths that a line lists."""


def explanation(config: RunConfig, data_facts: KnownData, other_model: str = "") -> str:
    """Return the verdict, facts about the run, and all capabilities as a table, for a terminal.

    Args:
        config: configuration of the run.
        data_facts: facts about its training data.
        other_model: reason why the model of the checkpoint is not this model; empty if it is.
    Raises:
        SystemExit: the machine lacks the configured device; the reason is printed first.
    """
    try:
        device = device_of(config)
    except ValueError as error:
        print(escaped(f"This run would be refused: {error}"), file=sys.stderr)
        raise SystemExit(ExitCode.USAGE) from None
    world_size = environment_number(os.environ, "WORLD_SIZE", 1, [])
    run = PlannedRun(config, device, world_size, data_facts, other_model)
    (_, verdict), *facts = run.lines()
    lines = [*beside("", verdict), ""]
    for title, text in facts:
        lines += beside(title.ljust(8), text)
    lines.append("")
    lines += table(list(capabilities(config, device, world_size, run.steps)))
    return "\n".join(lines) + "\n"


class PlannedRun:
    """Run that ``--explain`` describes.

    Args:
        config: configuration of the run.
        device: device of its ranks.
        world_size: number of its processes.
        data_facts: facts about its training data.
        other_model: reason why the model of the checkpoint is not this model; empty if it is.
    """

    def __init__(
        self,
        config: RunConfig,
        device: torch.device,
        world_size: int,
        data_facts: KnownData,
        other_model: str = "",
    ) -> None:
        self.config = config
        self.device = device
        self.world_size = world_size
        self.other_model = other_model
        self.work: StepWork | None = None
        """Work of a step; None if the options of packing drop all documents."""
        lengths = data_facts.lengths
        if lengths is None:
            lengths = np.array([config.packing.seq_length], dtype=np.int64)
        try:
            if data_facts.vocab_size is not None:
                self.work = step_work(config, data_facts.vocab_size, lengths)
        except ValueError as error:
            data_facts = data_facts._replace(refusal=str(error).rstrip("."))
        self.data_facts = data_facts
        self.steps = _steps(config, data_facts)
        """Number of steps; None if it depends on data that is not tokenised."""

    def lines(self) -> Iterator[tuple[str, str]]:
        """Yield title and text of each line; the first line is the verdict."""
        memory, fits = self._memory()
        yield "", self._verdict(fits)
        yield "data", self._data()
        yield "batch", self._batch()
        yield "steps", " ".join([*self._length(), self._rate(), *self._weight_decay()])
        yield "memory", memory

    def _verdict(self, fits: bool) -> str:
        refusal = self._refusal()
        if refusal:
            return f"This run would be refused: {refusal}."
        kind = "CPU" if self.device.type == "cpu" else torch.cuda.get_device_name(self.device)
        processes = f"{self.world_size} process{'es' if self.world_size > 1 else ''}"
        text = f"This run would start on {processes} ({kind}), {self._origin()}"
        return text + ("." if fits else ", but it would probably run out of GPU memory.")

    def _refusal(self) -> str:
        """Return the reason why the run would not start; empty if it would start."""
        try:
            check_implementation(self.config, self.device)
            chosen_kernels(self.config, self.device)
        except ValueError as error:
            return str(error).rstrip(".")
        if self.data_facts.refusal:
            return self.data_facts.refusal
        checkpoint = self.config.checkpoint
        if checkpoint.exit_on_missing_checkpoint and not self._loaded():
            return f"--load {checkpoint.load} has no checkpoint (--exit-on-missing-checkpoint)"
        if self.other_model:
            return self.other_model
        return first_lines_refusal(self.config.data) if self.data_facts.reason else ""

    def _loaded(self) -> str:
        """Return the name of the checkpoint that the run loads; empty if there is none."""
        from megatron_packed.checkpoint.load import find_checkpoints

        load = self.config.checkpoint.load
        checkpoints = find_checkpoints(Path(load)) if load and Path(load).is_dir() else []
        return checkpoints[0].path.name if checkpoints else ""

    def _origin(self) -> str:
        checkpoint, loaded = self.config.checkpoint, self._loaded()
        if loaded and not checkpoint.finetune:
            return f"continuing from {loaded} in {checkpoint.load}"
        adapters = f"with the adapters of {checkpoint.load_adapter}"
        weights = f"with the weights of {checkpoint.pretrained_checkpoint}"
        if loaded:
            weights = f"with the weights of {loaded} in {checkpoint.load}"
        parts = [weights] if loaded or checkpoint.pretrained_checkpoint else []
        parts += [adapters] if checkpoint.load_adapter else []
        return ", ".join(parts) or "from scratch"

    def _data(self) -> str:
        options, lengths = self.config.data, self.data_facts.lengths
        if options.mock_data:
            assert lengths is not None
            return (
                f"made documents (--mock-data): {lengths.size:,} with {int(lengths.sum()):,} tokens "
                "for training. They teach nothing, and no file is read."
            )
        paths = options.train_paths
        names = ", ".join(paths[:_NAMED]) + (f" and {len(paths) - _NAMED} more" * (len(paths) > 3))
        try:
            sizes = file_sizes(paths)
        except (DataError, OSError) as error:
            return f"{names}: {str(error).rstrip('.')}"
        files = f"{len(sizes)} file{'s' if len(sizes) > 1 else ''}, {_bytes(sum(sizes))}"
        if lengths is None:
            content = "not tokenised yet; the run tokenises the text first"
        else:
            content = (
                f"{lengths.size:,} documents with {int(lengths.sum()):,} tokens for training, "
                f"{lengths.mean():,.0f} on average, {int(lengths.max()):,} in the longest"
            )
        return f"{names} ({files}): {content}. {self._evaluation()}"

    def _evaluation(self) -> str:
        config = self.config
        if not config.data.has_validation:
            return "No validation data."
        source = f"--split {config.data.split}" if config.data.split else "files of their own"
        return f"Validation data from {source}."

    def _batch(self) -> str:
        config, packing = self.config, self.config.packing
        replicas = config.data_parallel_size(self.world_size)
        packs, micro = config.packs_per_step(), config.micro_batches_per_step(replicas)
        text = (
            f"A step takes {packs:,} pack{'s' if packs > 1 else ''} of {packing.tokens_per_pack:,} "
            f"tokens, {packs * packing.tokens_per_pack:,} tokens in all"
        )
        if self.data_facts.lengths is not None and self.work is not None:
            text += f", with about {self.work.documents_per_pack * packs:,.0f} documents"
        ramp = packing.batch_ramp
        if ramp is not None and ramp.sentence():
            text = f"{ramp.sentence()} {text.replace('A step', 'A later step', 1)}"
        ranks = f"Each of {replicas} data-parallel ranks" if replicas > 1 else "The model"
        if micro == 1:
            return f"{text}. {ranks} runs one pack in a step; no gradients are accumulated."
        return (
            f"{text}. {ranks} runs {micro:,} packs one after the other and adds up the gradients."
        )

    def _length(self) -> Iterator[str]:
        training, lengths = self.config.training, self.data_facts.lengths
        if self.steps is None:
            yield (
                f"{training.train_epochs:g} epochs; the number of steps follows when the data is "
                "tokenised."
            )
            return
        text = f"{self.steps:,} steps"
        if training.train_epochs is not None:
            text = f"About {self.steps:,} steps for {training.train_epochs:g} epochs"
        elif lengths is not None:
            packing = self.config.packing
            ahead = 0 if packing.batch_ramp is None else packing.batch_ramp.ahead()
            tokens = (self.steps * packing.global_batch_size + ahead) * packing.seq_length
            text += f", about {tokens / max(int(lengths.sum()), 1):.3g} epochs"
        yield text + "."

    def _rate(self) -> str:
        """Return the course of the learning rate."""
        config, optim = self.config, self.config.optim
        epochs = config.training.train_epochs is not None
        decay = optim.lr_decay_iters or self.steps if epochs else config.decay_iters
        if optim.lr_warmup_fraction is None:
            warmup = self._length_of(config.warmup_iters) if config.warmup_iters else ""
        elif decay is None:
            warmup = f"{100 * optim.lr_warmup_fraction:g} % of the steps"
        else:
            warmup = self._length_of(optim.lr_warmup_fraction * decay)
        rises = f"rises to {optim.lr:g} in {warmup} and " if warmup else ""
        if optim.lr_decay_style == "constant":
            return f"The learning rate {rises}stays at {optim.lr:g}."
        end = "the end"
        if decay is not None and decay != (self._samples() or self.steps):
            end = self._length_of(decay) if self._samples() else f"step {decay:,.0f}"
        begin = "" if warmup else f" from {optim.lr:g}"
        style = f"({optim.lr_decay_style})"
        return f"The learning rate {rises}falls{begin} to {optim.min_lr:g} by {end} {style}."

    def _weight_decay(self) -> Iterator[str]:
        """Yield the course of the weight decay, if it changes."""
        config, optim = self.config, self.config.optim
        if not optim.weight_decay_changes:
            return
        rise = optim.weight_decay_incr_iters or optim.weight_decay_incr_samples
        end = "the end"
        if rise and self._samples():
            end = self._length_of(config.weight_decay_incr_iters)
        elif rise:
            end = f"step {config.weight_decay_incr_iters:,.0f}"
        yield (
            f"The weight decay rises from {optim.start_weight_decay:g} to {optim.end_weight_decay:g} "
            f"by {end} ({optim.weight_decay_incr_style})."
        )

    def _samples(self) -> float:
        """Return the samples of a run whose batch grows, in full batches; otherwise 0."""
        ramp, samples = self.config.packing.batch_ramp, self.config.training.train_samples
        grows = ramp is not None and samples is not None and ramp.sentence()
        return (samples or 0) / self.config.packing.global_batch_size if grows else 0

    def _length_of(self, batches: float) -> str:
        """Return a length of the schedule in steps, or in samples if the batch grows."""
        if self._samples():
            return f"{batches * self.config.packing.global_batch_size:,.0f} samples"
        # A length is a fraction if the warm-up is given as a share.
        return f"{batches:,.0f} steps" if batches >= 10 else f"{batches:.2g} steps"

    def _memory(self) -> tuple[str, bool]:
        """Return the line about memory, and False if a GPU has too little."""
        vocab_size, work = self.data_facts.vocab_size, self.work
        if vocab_size is None or work is None:
            return f"not known: {self.data_facts.reason or self.data_facts.refusal}.", True
        documents = documents_in_pack(self.config, work)
        rank = usual(estimates(self.config, self.world_size, vocab_size, documents))
        parameters = count_parameters(self.config.model, vocab_size).total
        state = rank.static
        parts = (
            f"{_bytes(state.parameters)} of weights, {_bytes(state.gradients)} of gradients, "
            f"{_bytes(state.optimizer)} of optimizer state, and activations"
        )
        model = f"{parameters:,} parameters"
        if self.device.type == "cuda":
            limit = torch.cuda.get_device_properties(self.device).total_memory
            need = f"about {_bytes(rank.total)} of {_bytes(limit)} on each GPU"
        else:
            limit = rank.total
            need = f"about {_bytes(rank.allocated)} in each process (estimated for GPU kernels)"
        fits = rank.total <= limit
        cure = "" if fits else "; `megatron-packed plan` lists options that reduce it"
        return f"{model} need {need}: {parts}{cure}.", fits


def _steps(config: RunConfig, data_facts: KnownData) -> int | None:
    epochs = config.training.train_epochs
    if epochs is None:
        return config.last_iteration()
    if data_facts.lengths is None:
        return None
    packs = epochs * int(data_facts.lengths.sum()) / config.packing.tokens_per_pack
    return max(ceil(packs / config.packs_per_step()), 1)


def _bytes(number: int) -> str:
    for unit, name in ((2**30, "GiB"), (2**20, "MiB")):
        if number >= unit / 10:
            return f"{number / unit:,.1f} {name}"
    return f"{number / 2**10:,.1f} KiB"
