"""Compares measured times of steps with the times that `megatron-packed plan` computes.

    python benchmarks/step_times.py

The script runs nothing on a GPU. It reads every whole step in CUDA graphs from `benchmarks/results`
that ran with today's default kernels, and computes the time of the same step on the meta device.
Eager steps are included where the GPU has no gaps. `plan_rates.py` reads none of these times.
`tables.py` writes the table to the page of measurements.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

import expert_graphs
import harness
import layouts
import offload
import real_sizes
from megatron_packed.config.parser.parse import parse_with_sources
from megatron_packed.config.run import RunConfig
from megatron_packed.config.sections.cuda_graph import FULL_ITERATION
from megatron_packed.layers.moe.expert_room import Load
from megatron_packed.models.estimate.gpu_rates import measured_rates
from megatron_packed.models.estimate.step_time import StepTime, step_time
from megatron_packed.models.trace import Imagined
from megatron_packed.torch_private import compiler_not_imported
from memory_peaks import CONVERSATIONS, IN_ORDER, KINDS, SMALL_PACKS, results
from model_step import CONFIGS, packings
from train_real import ROOT

COMMAND_LINES = "command_line_runs"
EXPERTS = ("expert_graphs", *SMALL_PACKS)
RESULTS = (COMMAND_LINES, *KINDS, *IN_ORDER, "full_step", "offload", *EXPERTS, *real_sizes.RESULTS)
"""Result files with steps of today's kernels, in the order of the table."""
TOLERANCE = 0.10
"""Largest relative error at which a computed time counts as right."""
_GPU = torch.device("cuda")
_COMMON = "--bf16 --data-path none --train-iters 10 --lr 1e-3 --tokenizer-type NullTokenizer"


class Step(NamedTuple):
    """Measured step."""

    name: str
    config: RunConfig
    processes: int
    vocab: int
    lengths: NDArray[np.int64]
    """Tokens of the documents of a pack."""
    measured_ms: float
    bounds: Load | None = None
    """Observed bounds of the expert buffers; None for those of balanced experts."""


class Compared(NamedTuple):
    """Computed and measured time of a step, in ms."""

    name: str
    gpus: int
    computed: float
    measured: float

    @property
    def ratio(self) -> float:
        return self.computed / self.measured


def command_lines() -> Iterator[Step]:
    """Yield whole runs from the command line on one and four GPUs."""
    found = results(COMMAND_LINES)
    documents = found["documents_per_pack"]
    lengths = np.full(documents, found["seq_length"] // documents)
    for name, run in found["runs"].items():
        words = shlex.split(f"{run['model']} {run['flags']} {_COMMON}")
        words += ["--moe-dispatch", "rows"]  # the default when they were measured
        words += ["--seq-length", str(found["seq_length"])]
        words += ["--global-batch-size", str(found["global_batch_size"])]
        words = [f"@{ROOT / word[1:]}" if word.startswith("@") else word for word in words]
        config = parse_with_sources(words, run["gpus"], on_this_machine=False).config
        vocab = config.model.vocab_size
        assert vocab is not None
        yield Step(name, config, run["gpus"], vocab, lengths, run["step_ms"])


def of_each_layout() -> Iterator[Step]:
    """Yield replayed steps of one and two processes."""
    models = KINDS | {result: model for result, (model, _) in IN_ORDER.items()}
    for result, model in models.items():
        c = layouts.MODELS[model]
        for name, found in results(result)[model]["layouts"].items():
            alone = name == layouts.ONE
            if not found["graphs"]:
                continue  # whole steps are not captured in this layout
            if alone and result in IN_ORDER and model in KINDS.values():
                continue  # the same steps are in another result
            options = {} if alone else layouts.recorded_layouts(2)[name]
            measured = found["graphs"][FULL_ITERATION]["step_ms"][0]
            config = layouts.config_of(c, 4, options, _GPU)
            yield Step(f"{model}, {name}", config, 1 if alone else 2, *_packs(c), measured)


def full_steps() -> Iterator[Step]:
    """Yield replayed steps of a rank's share of 8 B, with several numbers of micro-batches."""
    for name, found in results("full_step").items():
        c = CONFIGS[name]
        for micro_batches, sides in found["micro_batches"].items():
            config = layouts.config_of(c, int(micro_batches), {}, _GPU)
            measured = sides["sides"][FULL_ITERATION]["row_ms"][0]
            yield Step(f"{name}, {micro_batches} micro-batches", config, 1, *_packs(c), measured)


def offloads() -> Iterator[Step]:
    """Yield steps of 32,768 tokens that keep, recompute or offload activations."""
    for name, found in results("offload").items():
        c = offload.MODELS[name]
        replayed = found["graphs"].get(FULL_ITERATION, {})
        for side in (offload.NONE, offload.RECOMPUTE, offload.TWO):
            measured = replayed.get(side, found["sides"][side])["step_ms"][0]
            config = offload.config_of(c, offload.SIDES[side], _GPU)
            yield Step(f"32k {name}, {side}", config, 1, *_packs(c), measured)


def experts() -> Iterator[Step]:
    """Yield steps of two ranks with 16 experts each and whole E layers in graphs."""
    for result in EXPERTS:
        c = expert_graphs.model_of(2)
        c = {**c, "T": SMALL_PACKS.get(result, c["T"])}
        for dispatcher, kinds in results(result).items():
            for name, found in kinds.items():
                kind, backend = expert_graphs.Case.named(name)
                if kind != expert_graphs.WHOLE:
                    continue
                # The default when they were measured.
                sent = {"backend": backend, "dispatch": "rows"}
                config = expert_graphs.configured(c, 2, dispatcher, kind, _GPU, **sent)
                tokens = 2 * expert_graphs.PACKS_OF_RANK * c["T"]
                title = f"experts, {c['T']:,} tokens, {dispatcher}, {backend}"
                measured = 1e3 * tokens / found["tokens_per_second"]
                yield Step(title, config, 2, *_packs(c), measured, Load(*found["bounds"]))


def real_models() -> Iterator[Step]:
    """Yield runs of models of real sizes, with as many documents in a pack as conversations of their
    data."""
    for result, flags in real_sizes.RESULTS.items():
        found = results(result)
        for name, words, run in real_sizes.measured_runs(found, flags):
            config = parse_with_sources(words, found["gpus"], on_this_machine=False).config
            vocab = config.model.vocab_size
            assert vocab is not None
            tokens = config.packing.seq_length
            lengths = np.full(CONVERSATIONS, tokens // CONVERSATIONS)
            yield Step(name, config, found["gpus"], vocab, lengths, run["step_ms"][0])


def _packs(c: dict[str, Any]) -> tuple[int, NDArray[np.int64]]:
    """Return the entries of the vocabulary, and the documents of a pack."""
    return c["vocab"], np.array(packings(c["T"], 1)[0])


def computed(step: Step) -> StepTime:
    """Return the computed time of a step."""
    with compiler_not_imported():
        imagined = Imagined.from_config(step.config, step.processes, step.vocab)
        if step.bounds is not None:
            room = imagined.model.expert_room
            room.bounds, room.observed = step.bounds, True
        rates = measured_rates()["H200"]
        return step_time(step.config, imagined, layouts.CAPACITY, step.lengths, rates)


def compared() -> list[Compared]:
    """Return the computed and the measured time of each step."""
    kinds = (command_lines, of_each_layout, full_steps, offloads, experts, real_models)
    return [
        Compared(step.name, step.processes, 1e3 * computed(step).seconds, step.measured_ms)
        for kind in kinds
        for step in kind()
    ]


def rows_of(*_: Any) -> list[dict[str, object]]:
    """Return the rows of the table. The functions above read the result files."""
    return [
        {
            "step": row.name,
            "GPUs": row.gpus,
            "measured ms": f"{row.measured:.1f}",
            "computed ms": f"{row.computed:.1f}",
            "difference": f"{100 * (row.ratio - 1):+.1f} %",
        }
        for row in compared()
    ]


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    print(harness.table(rows_of()))


if __name__ == "__main__":
    main()
