"""Import of a Megatron checkpoint: its weights, and the state of its optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from megatron_packed.checkpoint.errors import CheckpointError
from megatron_packed.config import flag_names as flags
from megatron_packed.config.sections.model import ModelConfig
from megatron_packed.models.convert.import_huggingface import (
    Imported,
    OnProgress,
    check_empty,
    import_weights,
    silent,
)
from megatron_packed.models.convert.megatron.arguments import model_of_arguments
from megatron_packed.models.convert.megatron.names import (
    WORD_TABLE,
    NamedWeights,
    named_weights,
    prefix_of,
)
from megatron_packed.models.convert.megatron.optimizer_state import FoundState, optimizer_state
from megatron_packed.models.convert.megatron.torch_dist import TorchDist


def from_megatron(
    directory: Path,
    root: Path,
    *,
    bf16: bool = False,
    iteration: int | None = None,
    model: ModelConfig | None = None,
    on_progress: OnProgress = silent,
) -> Imported:
    """Write the weights of a Megatron checkpoint under ``root``.

    If the state of its optimizer can be read, the checkpoint is one of the same iteration, from
    which ``--load`` continues. Otherwise it is a checkpoint of step 0 with only the weights. The
    checkpoint may have been written in any parallel layout. The flags of the model are written to
    ``root/model.args``. Host memory: the largest tensor, twice.

    Args:
        directory: folder that Megatron, NeMo or Megatron-Bridge saved to, in the format
            ``torch_dist``.
        bf16: write weights for training with ``--bf16``.
        iteration: iteration to take; the newest when not given.
        model: the model, for a checkpoint without Megatron's options. Given, it replaces them.
    Raises:
        CheckpointError: the checkpoint cannot be imported, or ``root`` contains checkpoints.
    """
    check_empty(root)
    with closing(TorchDist(directory, iteration)) as source:
        prefix = prefix_of(source.tensors)
        if prefix is None:
            raise CheckpointError(
                f"has no {WORD_TABLE}", path=source.directory, cure="give a GPT or hybrid model"
            )
        rows = source.tensors[prefix + WORD_TABLE].shape[0]
        if model is None:
            model = model_of_arguments(
                source.common.get("args"), rows, source.directory, source.model_problem
            )
        elif model.vocab_size is None:
            model = replace(model, vocab_size=rows)
        dtype = torch.bfloat16 if bf16 else torch.float32
        parameters = named_weights(model, source.tensors, dtype, path=source.directory)
        state = optimizer_state(source, parameters)
        if not isinstance(state, str):
            _take_masters(parameters, state)
        trained = None if isinstance(state, str) else state.trained

        def dtype_of(part: str) -> torch.dtype:
            return source.tensors[parameters.sources[part].tensor].dtype

        with in_one_sentence():
            return import_weights(
                root,
                source.directory,
                model,
                source.reader(parameters.sources),
                parameters.weights,
                dtype_of,
                bf16=bf16,
                notes=_notes(state),
                on_progress=on_progress,
                trained=trained,
            )


def _take_masters(parameters: NamedWeights, state: FoundState) -> None:
    """Read float32 parameters from the optimizer's float32 values instead of rounded weights."""
    for weight in parameters.weights.values():
        if weight.dtype == torch.float32:
            parts = [part.name for part in weight.parts if part.name in state.masters]
            parameters.sources.update({name: state.masters[name] for name in parts})


def _notes(state: FoundState | str) -> tuple[str, ...]:
    """Return sentences about the state of the optimizer."""
    if isinstance(state, str):
        return (state,) if state else ()
    trained = state.trained
    first = (
        f"Moments, counters and schedule of iteration {trained.iteration:,} are imported: "
        f"{flags.LOAD} continues after {trained.progress['plan_samples']:,} samples, and the data "
        "begins with its first pack."
    )
    return (first, *state.notes)


@contextmanager
def in_one_sentence() -> Iterator[None]:
    """Report an error of a rank, which has a line of its own in the message, in one line."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(" ".join(str(error).split())) from None
