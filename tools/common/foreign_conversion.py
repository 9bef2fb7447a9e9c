"""Conversion of a folder of Hugging Face files beside transformers: equal logits, or a refusal."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor

from megatron_packed.checkpoint.errors import CheckpointError
from megatron_packed.checkpoint.manifest import read_manifest
from megatron_packed.checkpoint.read_tensors import read_tensor
from megatron_packed.cli.export_trained import export_trained
from megatron_packed.cli.main import main
from megatron_packed.config.sections.model import ModelConfig
from megatron_packed.models.convert.export_huggingface import to_huggingface
from megatron_packed.models.convert.huggingface_files import ModelFiles
from megatron_packed.models.convert.import_huggingface import from_huggingface
from megatron_packed.models.hybrid_model import HybridModel
from support import hybrid_cases as cases

TOLERANCE = 2e-4
"""Largest relative error: float32 with another order of summation."""
LENGTHS = (1, 3, 9, 75)
"""Lengths of the documents; the last is beyond all windows and positions of the random models."""
SENTENCE = 4100
"""Most characters of an error message."""
OTHER_MODEL = "config.json and the weights belong to different models"
"""Part of a refusal that names tensors with other shapes than config.json implies."""
_VISION = ("qwen3_5", "qwen3_5_moe")
EQUAL, REFUSED, ACCEPTED = "equal logits", "refused by name", "refused by transformers alone"
WRONG, UNNAMED, TRACEBACK, LEFT = "OTHER LOGITS", "NOT NAMED", "TRACEBACK", "LEFT BEHIND"
OUTCOMES = (EQUAL, REFUSED, ACCEPTED, WRONG, UNNAMED, TRACEBACK, LEFT)
BAD = (WRONG, UNNAMED, TRACEBACK, LEFT)


class Outcome(NamedTuple):
    """Result of the conversion of one folder."""

    outcome: str
    """One of `OUTCOMES`."""
    said: str
    """Message of the refusal, or the difference of the logits."""


class NotTheirs(Exception):
    """transformers does not load a folder, or it makes up weights."""


def documents() -> list[Any]:
    return cases.make_documents(LENGTHS)


def load_theirs(folder: Path) -> Any:
    """Return the model that transformers loads, in float32.

    Raises:
        NotTheirs: transformers refuses the folder, or fills tensors with random numbers.
    """
    kind = json.loads((folder / "config.json").read_text()).get("model_type")
    classes = transformers.AutoModelForCausalLM
    if kind in _VISION:
        classes = transformers.AutoModelForImageTextToText
    try:
        model, info = classes.from_pretrained(
            folder, dtype=torch.float32, output_loading_info=True, local_files_only=True
        )
    except Exception as error:  # transformers raises all kinds of errors
        raise NotTheirs(f"{type(error).__name__}: {error}"[:300]) from None
    if info["missing_keys"]:
        raise NotTheirs(f"made up: {sorted(info['missing_keys'])}"[:300])
    return model.eval()


def theirs_logits(model: Any) -> list[Tensor]:
    """Return the logits of each document.

    Raises:
        NotTheirs: the model does not run.
    """
    try:
        with torch.no_grad():
            return [
                model(input_ids=torch.as_tensor(tokens)[None], use_cache=False).logits[0]
                for tokens, _ in documents()
            ]
    except Exception as error:
        raise NotTheirs(f"{type(error).__name__}: {error}"[:300]) from None


def our_logits(checkpoint: Path) -> list[Tensor]:
    """Return the logits of each document, from one pack of all documents.

    The rows that pad the vocabulary get large values, which must not affect the results.
    """
    manifest = read_manifest(checkpoint)
    config = ModelConfig(**manifest.metadata["config"]["model"])
    model = HybridModel(config, vocab_size=config.vocab_size, max_positions=256)
    state = {
        name.removeprefix("model/"): read_tensor(checkpoint, name, manifest)
        for name in manifest.tensors
    }
    for name in {"embedding.weight", "output.weight"} & state.keys():
        state[name][config.vocab_size :] = 50.0
    model.load_state_dict(state)
    batch = cases.make_pack(documents(), tail=5, spare=3)
    with torch.no_grad():
        logits = model.logits(batch.tokens, batch.packed)
    return [logits[batch.packed.seq_idx[0] == number] for number in range(len(LENGTHS))]


def difference(mine: list[Tensor], theirs: list[Tensor]) -> float:
    """Return the largest error relative to the largest value; infinite for other NaN or shapes."""
    worst = 0.0
    for one, other in zip(mine, theirs, strict=True):
        if one.shape != other.shape or not torch.equal(one.isfinite(), other.isfinite()):
            return float("inf")
        one, other = one[other.isfinite()], other[other.isfinite()]
        if one.numel():
            largest = other.abs().max().clamp(min=1e-6)
            worst = max(worst, float((one - other).abs().max() / largest))
    return worst


def convert(folder: Path, root: Path, *, command: bool) -> Path:
    """Convert a folder, and return the checkpoint.

    Args:
        command: convert with the command instead of the function.
    Raises:
        CheckpointError: the refusal, also of the command.
    """
    if not command:
        return from_huggingface(folder, root).saved.path
    printed, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(errors):
        code = main(["convert", "--from-hf", str(folder), "--save", str(root)])
    if code:
        raise CheckpointError(errors.getvalue().strip())
    return next(root.glob("step_*"))


def outcome(
    folder: Path,
    root: Path,
    named: tuple[str, ...],
    *,
    command: bool = False,
) -> Outcome:
    """Convert a folder, and compare the logits with those of transformers for the same files.

    Args:
        root: new folder of the checkpoint, in a folder with nothing else.
        named: words of which a refusal must contain one; empty if none is needed.
    """
    try:
        checkpoint = convert(folder, root, command=command)
    except CheckpointError as error:
        said = str(error)
        if list(root.parent.iterdir()):
            return Outcome(LEFT, f"{[path.name for path in root.parent.iterdir()]}: {said}")
        if "\n" in said or len(said) > SENTENCE or "Traceback" in said:
            return Outcome(TRACEBACK, said)
        flags = [word.replace("_", "-") for word in named]  # sizes that contradict each other
        if named and not any(word in said for word in (*named, *flags, OTHER_MODEL)):
            return Outcome(UNNAMED, said)
        return Outcome(REFUSED, said)
    except Exception as error:
        return Outcome(TRACEBACK, f"{type(error).__name__}: {error}")
    mine = our_logits(checkpoint)
    try:
        theirs = theirs_logits(load_theirs(folder))
    except NotTheirs as error:
        return Outcome(ACCEPTED, str(error))
    error = difference(mine, theirs)
    return Outcome(EQUAL if error <= TOLERANCE else WRONG, f"{error:.1e}")


WITH_BASE, NEW_CONFIG = "exported with its original", "exported with a new config.json"
WITH_CONFIG = "exported with its config.json alone"


def exports(folder: Path, checkpoint: Path, out: Path) -> Iterator[tuple[str, Outcome]]:
    """Yield the outcome of each way to export a conversion of ``folder``.

    The logits of the exported model in transformers are those of the original, and the tensors are
    equal to the bit. With the original, the files are, too. A model with vision needs its original.

    Args:
        out: new folder for the exported models.
    """
    theirs = load_theirs(folder)
    logits = theirs_logits(theirs)
    for case in (WITH_BASE, NEW_CONFIG, WITH_CONFIG):
        back = out / case.replace(" ", "_")
        if case == WITH_CONFIG and theirs.config.model_type in _VISION:
            continue
        try:
            export(case, folder, checkpoint, back)
            again = load_theirs(back)
            error = difference(theirs_logits(again), logits)
        except CheckpointError as refusal:
            yield case, Outcome(REFUSED, str(refusal))
            continue
        except Exception as fault:
            yield case, Outcome(TRACEBACK, f"{type(fault).__name__}: {fault}")
            continue
        same = same_files(folder, back) if case == WITH_BASE else same_tensors(theirs, again)
        equal = same and error <= TOLERANCE
        said = f"{error:.1e}" + ", other tensors" * (not same)
        yield case, Outcome(EQUAL if equal else WRONG, said)


def export(case: str, folder: Path, checkpoint: Path, back: Path) -> None:
    """Export the conversion of ``folder`` to ``back``."""
    config = folder / "config.json"
    if case == WITH_BASE:
        to_huggingface(checkpoint, back, config, base=folder)
    elif case == NEW_CONFIG:
        kind = json.loads(config.read_text())["model_type"]
        export_trained(checkpoint, back, family=f"{kind}_text" if kind in _VISION else kind)
    else:
        alone = back.with_name("config")
        alone.mkdir(parents=True)
        shutil.copy(config, alone)
        to_huggingface(checkpoint, back, alone / config.name)


def same_files(one: Path, other: Path) -> bool:
    """Return whether config.json and all tensors of two folders are the same to the bit."""
    first, second = ModelFiles(one), ModelFiles(other)
    return (
        (one / "config.json").read_bytes() == (other / "config.json").read_bytes()
        and first.dtypes == second.dtypes
        and all(torch.equal(first.read(name), second.read(name)) for name in first.places)
    )


def same_tensors(one: Any, other: Any) -> bool:
    """Return whether two models have the same text model to the bit."""
    states = [
        {
            name.replace("language_model.", ""): value
            for name, value in model.state_dict().items()
            if ".visual." not in name
        }
        for model in (one, other)
    ]
    return states[0].keys() == states[1].keys() and all(
        torch.equal(value, states[1][name]) for name, value in states[0].items()
    )
