"""Metadata of a run's checkpoint: the progress of the run, and validation of all its values.

The checksum of a manifest detects accidental damage. A file that was changed on purpose may have a
valid checksum, and its values must still lead to an error message instead of a crash.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

from megatron_packed.config import flag_names as flags
from megatron_packed.config.hub_paths import is_hub_path
from megatron_packed.config.sections.checkpoint import PHASE_NAME
from megatron_packed.config.sections.packing import PackingConfig
from megatron_packed.config.stored_config import is_number, stored_problem, wrong
from megatron_packed.config.value_checks import INT32_MAX

Metadata = Mapping[str, Any]
"""Metadata of a checkpoint by key; `metadata_problem` finds what is wrong with it."""
MOST_PACKS_PER_STEP = 1 << 20
"""Largest accepted number of packs per step.

It limits the position in the data, because a resumed run packs every epoch before its position.
"""
_MOST = 1 << 62
SPIKE_WINDOW = "spike_window"
"""Key of the recent losses and gradient norms for spike detection; older checkpoints lack it."""
EXPERT_BOUNDS = "expert_bounds"
"""Key of the bounds of expert buffers; older checkpoints and runs without bounds lack it."""
PHASES = "phases"
"""Key of the phases of the run so far, the current one last; older checkpoints lack it."""
BEST_STEP = "best_step"
"""Key of the step with the lowest validation loss so far, or None."""
ORIGINAL = "original"
"""Key of the facts of a Hugging Face model (`original_facts.py`). Models that were trained from
scratch and older checkpoints lack it.
"""
CALLBACKS = "callbacks"
"""Key of the states of callbacks: name -> one `CallbackRecord`, or one for each rank, which is None
for a rank without a state. Older checkpoints and runs without callbacks lack it.
"""
ADAPTERS = "adapters"
"""Key of the base of a checkpoint that holds adapters alone (`BaseWeights`); others lack it."""
FOLDER = "folder"
"""Key of the working directory of the run, for relative paths; older checkpoints lack it."""


class CallbackRecord(TypedDict):
    """State of a callback on one rank. A place is ``device`` or ``host``."""

    values: dict[str, Any]
    """The state without its tensors."""
    parameters: dict[str, str]
    """Path of a tensor that is stored like a parameter -> its place."""
    tensors: dict[str, str]
    """Path of a tensor of this rank -> its place."""


class Phase(NamedTuple):
    """Part of a run that ``--begin-phase`` began."""

    name: str
    iteration: int
    """Steps of the run before the phase."""


class BaseWeights(NamedTuple):
    """Weights that adapters belong to; a checkpoint of adapters names them and does not hold them."""

    hash: str
    """`weights_hash` of the model without its adapters, before their training."""
    path: str | None
    """Checkpoint from which the weights were loaded; None for random weights."""
    seed: int
    """Seed of random weights."""

    @property
    def name(self) -> str:
        """Origin of the weights, as messages name it."""
        random = f"the random weights of {flags.SEED} {self.seed}"
        return random if self.path is None else self.path


class DataHashes(NamedTuple):
    """Hashes of the data of a run; each is empty if it is unknown, as in older checkpoints."""

    data_hash: str = ""
    """Hash of the training tokens."""
    tokenizer_hash: str = ""
    """`meaning_hash` of the tokenizer."""
    validation_hash: str = ""
    """Hash of the documents of a validation. A run without validations keeps that of its checkpoint."""

    @classmethod
    def from_metadata(cls, metadata: Metadata) -> DataHashes:
        """Return the hashes of the run that saved this metadata."""
        return cls(*(metadata.get(name, "") for name in cls._fields))

    def has_tokenizer_of(self, other: DataHashes) -> bool | None:
        """Return whether both have the same tokenizer; None if that is unknown."""
        both = (self.tokenizer_hash, other.tokenizer_hash)
        return None if "" in both else both[0] == both[1]

    def validates_otherwise(self, other: DataHashes) -> bool:
        """Return whether both are known to validate on different documents."""
        return self.keeping(other).validation_hash != other.keeping(self).validation_hash

    def keeping(self, before: DataHashes) -> DataHashes:
        """Return the hashes, with the validation of an earlier run if this run has none."""
        return self._replace(validation_hash=self.validation_hash or before.validation_hash)


NO_HASHES = DataHashes()


@dataclass
class RunProgress:
    """Progress of a run, stored in its checkpoints."""

    iteration: int = 0
    """Optimizer steps done, skipped steps included, since their data was used."""
    consumed_packs: int = 0
    """Packs of all ranks so far, in all phases."""
    plan_packs: int = 0
    """Packs of earlier phases, which had other plans. The plan's position is counted from here."""
    plan_samples: int = 0
    """Samples of those packs."""
    consumed_tokens: int = 0
    """Real tokens of all ranks so far."""
    flops: float = 0.0
    """FLOPs of the model so far, of all ranks."""
    skipped_steps: int = 0
    """Steps with a non-finite loss or gradient; their updates were not applied."""
    steps_without_targets: int = 0
    """Steps without a target token; their updates were not applied."""
    spikes: int = 0
    """Steps whose loss or gradient norm was far above its running median."""
    skipped_spikes: int = 0
    """Spikes whose updates were not applied."""
    validated_at: int = 0
    """Iteration of the last validation, so that a resumed run neither omits nor repeats one."""
    best_loss: float = 0.0
    """Lowest validation loss so far, if ``best_at`` is not 0."""
    best_at: int = 0
    """Iteration of the lowest validation loss; 0 before the first validation with a finite loss."""
    validations_since_best: int = 0
    """Validations after that iteration, none of which had a lower loss."""

    def samples(self, micro_batch_size: int) -> int:
        """Return the samples so far, if the current plan's packs have this number of them."""
        return self.plan_samples + (self.consumed_packs - self.plan_packs) * micro_batch_size

    def samples_ahead(self, packing: PackingConfig) -> int:
        """Return the samples so far, minus ``global_batch_size`` for each step.

        This number is 0 unless earlier steps had another batch size. If the batch still grows, the
        number is that of the first step with the full batch.
        """
        so_far, ramp = self.samples(packing.micro_batch_size), packing.batch_ramp
        if ramp is not None:
            return ramp.ahead(self.iteration, so_far)
        return so_far - self.iteration * packing.global_batch_size

    def count_validation(self, loss: float) -> bool:
        """Count a validation of the current iteration; return whether its loss is the lowest.

        A loss that is not finite is never the lowest.
        """
        improved = isfinite(loss) and (not self.best_at or loss < self.best_loss)
        if improved:
            self.best_loss = loss
            self.best_at = self.iteration
        self.validations_since_best = 0 if improved else self.validations_since_best + 1
        return improved

    def without_best(self) -> RunProgress:
        """Return the progress with a new search for the lowest validation loss."""
        return replace(self, best_loss=0.0, best_at=0, validations_since_best=0)


def tokenizer_warning(checkpoint: Path, metadata: Metadata, tokenizer_hash: str) -> str | None:
    """Return a warning if weights were trained with another tokenizer than the one used now."""
    now = DataHashes(tokenizer_hash=tokenizer_hash)
    if now.has_tokenizer_of(DataHashes.from_metadata(metadata)) is not False:
        return None
    return (
        f"{checkpoint} was trained with another tokenizer, so the same token numbers mean other text. "
        "Give the tokenizer of its training; a TrainedBPETokenizer depends on the training data."
    )


def metadata_problem(metadata: Metadata) -> str | None:
    """Return the first problem of the metadata of a checkpoint or of converted weights, or None."""
    from megatron_packed.checkpoint.original_facts import facts_problem

    # Check every value before any value is used. Types are not enough: a very large position, for
    # example, would make a run pack epochs for years.
    text = _expecting("text", _is_text)
    checks: Mapping[str, Callable[[Any], str | None]] = {
        "config": stored_problem,
        **dict.fromkeys(("plan_hash", *DataHashes._fields, FOLDER), text),
        "layout": _expecting("an object of whole numbers", _is_layout),
        "progress": _progress_problem,
        "rng": _rng_problem,
        "room": _expecting("null or a number above 0", _is_room),
        BEST_STEP: _expecting("null or a step", lambda step: step is None or _is_whole(step)),
        SPIKE_WINDOW: _expecting(
            "an object with as many losses as gradient norms", _is_spike_window
        ),
        PHASES: _phases_problem,
        EXPERT_BOUNDS: _expecting("the bounds of expert buffers", _are_bounds),
        CALLBACKS: _callbacks_problem,
        ADAPTERS: _expecting("the hash, path and seed of base weights", _is_base),
        ORIGINAL: facts_problem,
    }
    problems = ((key, checks[key](metadata[key])) for key in checks if key in metadata)
    found = next((f"{key}{problem}" for key, problem in problems if problem is not None), None)
    found = found or next((f"{name} is missing" for name in _missing(metadata)), None)
    return None if found is None else f"has invalid metadata: {found}; use another checkpoint"


def _missing(metadata: Metadata) -> Iterator[str]:
    """Yield the missing keys of metadata; converted weights, which have no packing, need fewer keys."""
    yield from (key for key in ("config", "plan_hash", "progress") if key not in metadata)
    if "packing" not in metadata["config"]:
        return
    if "iteration" not in metadata["progress"]:
        yield "progress.iteration"
    if "layout" in metadata:  # each rank of the layout has a random state
        ranks = metadata["layout"].get("world_size")
        if ranks is None:
            yield "layout.world_size"
        elif len(metadata.get("rng", ())) < ranks:
            yield f"rng[{len(metadata.get('rng', ()))}]"


def _is_whole(value: Any, most: int = _MOST) -> bool:
    return type(value) is int and 0 <= value <= most


def _expecting(expected: str, is_sound: Callable[[Any], bool]) -> Callable[[Any], str | None]:
    """Return a function that returns a clause for a value that is not sound."""
    return lambda value: None if is_sound(value) else wrong(value, expected)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_room(value: Any) -> bool:
    return value is None or (_is_whole(value) and value > 0)


def _is_layout(value: Any) -> bool:
    return isinstance(value, dict) and all(_is_whole(size, INT32_MAX) for size in value.values())


def _is_spike_window(value: Any) -> bool:
    if not isinstance(value, dict) or value.keys() != {"loss", "grad_norm"}:
        return False
    rows = list(value.values())
    return all(
        isinstance(row, list) and len(row) == len(rows[0]) and all(map(is_number, row))
        for row in rows
    )


def _are_bounds(value: Any) -> bool:
    whole, factors = ("ep_size", "repeats"), ("rank", "peer")
    return (
        isinstance(value, dict)
        and value.keys() == {*whole, *factors}
        and all(_is_whole(value[name], INT32_MAX) for name in whole)
        and all(is_number(value[name]) and value[name] >= 0 for name in factors)
    )


def _is_base(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and value.keys() == set(BaseWeights._fields)
        and isinstance(value["hash"], str)
        and (value["path"] is None or isinstance(value["path"], str))
        and _is_whole(value["seed"])
    )


def _phases_problem(value: Any) -> str | None:
    if not isinstance(value, list):
        return wrong(value, "a list")
    for number, phase in enumerate(value):
        sound = (
            isinstance(phase, dict)
            and phase.keys() == set(Phase._fields)
            and isinstance(phase["name"], str)
            and PHASE_NAME.fullmatch(phase["name"])
            and _is_whole(phase["iteration"], INT32_MAX)
        )
        if not sound:
            return f"[{number}]{wrong(phase, 'the name and the first step of a phase')}"
    return None


def _callbacks_problem(value: Any) -> str | None:
    if not isinstance(value, dict):
        return wrong(value, "an object")
    for name, records in value.items():
        if not isinstance(records, list) or not records or not all(map(_is_record, records)):
            return f".{name}{wrong(records, 'the states of a callback')}"
    return None


def _is_record(record: Any) -> bool:
    if record is None:
        return True
    if not isinstance(record, dict) or record.keys() != CallbackRecord.__annotations__.keys():
        return False
    places = [record["parameters"], record["tensors"]]
    return (
        isinstance(record["values"], dict)
        and all(isinstance(paths, dict) for paths in places)
        and all(place in ("device", "host") for paths in places for place in paths.values())
        and all(_has_object(record["values"], path) for paths in places for path in paths)
    )


def _has_object(values: Any, path: str) -> bool:
    """Return whether the objects that contain a tensor's path are in the values of a state."""
    for key in path.split("/")[:-1]:
        values = values.get(key) if isinstance(values, dict) else None
    return isinstance(values, dict)


def _progress_problem(value: Any) -> str | None:
    if not isinstance(value, dict):
        return wrong(value, "an object")
    known = {described.name: described.type for described in fields(RunProgress)}
    for name, number in value.items():
        most = _MOST if name.startswith(("consumed_", "plan_")) else INT32_MAX
        if name not in known:
            return f".{name} is not a counter that this version knows"
        if not (
            _is_whole(number, most) if known[name] == "int" else is_number(number) and number >= 0
        ):
            return f".{name}{wrong(number, 'a number that is 0 or more')}"
    most = value.get("iteration", 0) * MOST_PACKS_PER_STEP
    if value.get("consumed_packs", 0) > most:
        return f".consumed_packs{wrong(value['consumed_packs'], f'at most {most} for its number of steps')}"
    if value.get("plan_packs", 0) > value.get("consumed_packs", 0):
        return f".plan_packs{wrong(value['plan_packs'], 'at most consumed_packs')}"
    return None


def _rng_problem(value: Any) -> str | None:
    if not isinstance(value, list):
        return wrong(value, "a list")
    for rank, state in enumerate(value):
        try:
            python, numpy = state["python"], state["numpy"]
            sound = (
                python["version"] == 3
                and (python["gauss"] is None or is_number(python["gauss"]))
                and _is_whole(numpy["position"], 624)
                and _is_whole(numpy["has_gauss"], 1)
                and is_number(numpy["cached"])
            )
        except (TypeError, KeyError, IndexError):
            sound = False
        if not sound:
            return f"[{rank}]{wrong(state, 'the states of random generators')}"
    return None


def found_paths(data: Mapping[str, Any], folder: str | None) -> dict[str, str]:
    """Return absolute paths of a tokenizer's files that exist only below the folder of the training.

    Args:
        data: options of the data, by name.
        folder: working directory of the run that gave them; None if it is unknown.
    """
    if folder is None:
        return {}
    found = {}
    for name in ("tokenizer_model", "vocab_file", "merge_file"):
        path = data.get(name)
        if path is None or is_hub_path(path) or Path(path).exists():
            continue
        then = Path(folder, path)
        if then.exists():
            found[name] = str(then)
    return found
