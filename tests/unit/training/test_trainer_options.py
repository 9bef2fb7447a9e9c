"""Options of the training loop: garbage collection, validation only, and start values."""

import gc
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_packed.checkpoint.errors import NoCheckpointError
from megatron_packed.checkpoint.run_metadata import DataHashes
from megatron_packed.config.exit_codes import ExitCode
from megatron_packed.config.parser.parse import parse_or_exit
from megatron_packed.config.run import RunConfig
from megatron_packed.reporting.loss_warnings import bad_places
from megatron_packed.resume import restore as restoring
from megatron_packed.resume.restore import restore
from megatron_packed.training import trainer as trainer_module
from megatron_packed.training.run_callbacks import GarbageCollection
from megatron_packed.training.trainer import Trainer


def config_of(flags: str) -> RunConfig:
    least = "--hybrid-layer-pattern - --hidden-size 64 --seq-length 64 --data-path x.jsonl --lr 1 --train-iters 9"
    return parse_or_exit([*least.split(), *flags.split()], launched=False, on_this_machine=False)


@pytest.mark.parametrize(
    ("flags", "at"),
    [
        ("", []),
        ("--manual-gc", ["start", "before", "after"]),
        ("--manual-gc --manual-gc-interval 2", ["start", 2, 4, "before", "after"]),
        ("--manual-gc --manual-gc-interval 4 --no-manual-gc-eval", ["start", 4]),
    ],
)
def test_garbage_is_collected_at_the_requested_steps(
    flags: str, at: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    garbage, now, collected = GarbageCollection(config_of(flags).training), ["start"], []
    monkeypatch.setattr(gc, "collect", lambda: collected.append(now[-1]))
    with garbage.in_training():
        assert gc.isenabled() == (flags == "")
        for step in range(1, 5):
            now.append(step)
            garbage.on_step_end(None, step)  # type: ignore[arg-type]
        now.append("before")
        with garbage.in_validation():
            now.append("after")
    assert gc.isenabled() and collected == at


def trainer_of(flags: str, **stand_ins: Any) -> Trainer:
    """Return a trainer without a model."""
    progress = SimpleNamespace(iteration=0, validated_at=0)
    nothing = SimpleNamespace(wait_params=lambda: None, spikes=None)
    parts: dict[str, Any] = {
        "config": config_of(flags),
        "groups": SimpleNamespace(device=torch.device("cpu")),
        "step": SimpleNamespace(buffers=nothing, numbers=torch.zeros(1)),
        "state": SimpleNamespace(progress=progress, saved=lambda wait=False: None),
        "data": SimpleNamespace(validations={"validation": None}, test=None),
        **dict.fromkeys(("schedule", "weight_decay", "flops", "console", "signal", "watch")),
        "writers": [],
        "last_iteration": 9,
    }
    return Trainer(**{**parts, **stand_ins})


@pytest.mark.parametrize(
    "data", ["--valid-data-path v.jsonl --eval-interval 1", "--test-data-path t.jsonl"]
)
def test_skip_train_evaluates_and_stops(data: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    trainer = trainer_of(f"--skip-train {data}")
    monkeypatch.setattr(trainer, "validate", lambda: calls.append("validation"))
    monkeypatch.setattr(
        trainer_module, "evaluate_end", lambda trainer, complete: calls.append("test")
    )
    assert trainer.run() == ExitCode.DONE and calls == ["validation", "test"]


@pytest.mark.parametrize(
    ("begun", "expected"), [(0, [(3, 2), (6, 6), (9, 9)]), (9, [(9, 9)])], ids=["new", "resumed"]
)
def test_every_step_that_is_due_is_saved_once_and_knows_of_its_validation(
    begun: int, expected: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every due step is saved once, after its validation; the last step is always validated.

    A run may have stopped at its last step without the validation, which is then saved again.
    """
    saved: list[tuple[int, int]] = []
    progress = SimpleNamespace(iteration=begun, validated_at=0)
    trainer = trainer_of(
        "--valid-data-path v.jsonl --eval-interval 2 --save a --save-interval 3",
        state=SimpleNamespace(progress=progress, saved=lambda wait=False: None),
    )

    def queue_next() -> None:
        progress.iteration += 1

    def validate(trainer: Trainer) -> tuple[dict[str, Any], bool]:
        progress.validated_at = progress.iteration
        return {}, False

    trainer.state.save = lambda options: saved.append((progress.iteration, progress.validated_at))  # type: ignore[assignment, return-value, func-returns-value]
    monkeypatch.setattr(trainer, "_queue_next", queue_next)
    monkeypatch.setattr(trainer_module, "evaluate_validation", validate)
    monkeypatch.setattr(trainer_module, "evaluate_end", lambda trainer, complete: None)
    assert trainer.run() == ExitCode.DONE
    assert saved == expected


def test_only_a_planned_end_is_replaced_by_another_reason() -> None:
    """A step that was queued before the planned end may have a non-finite value."""
    trainer = trainer_of("")
    for reason in (ExitCode.DONE, None, ExitCode.NONFINITE, ExitCode.PREEMPTED, ExitCode.DONE):
        trainer.stop(reason)
    assert trainer.exit_code is ExitCode.NONFINITE


def test_hashes_of_replicas_are_compared_at_their_intervals() -> None:
    """Weights and gradients have intervals of their own; without one, nothing is compared."""
    weights = "--check-weight-hash-across-dp-replicas-interval"
    grads = "--check-grad-hash-across-dp-replicas-interval"
    replicas = SimpleNamespace(weights="weights", gradients="gradients")

    def compared(words: str) -> list[tuple[int, str]]:
        trainer: Any = SimpleNamespace(config=config_of(words), replicas=replicas)
        checks = [(step, Trainer._checks(trainer, step)) for step in range(1, 7)]
        return [(step, one) for step, both in checks for one in both if one is not None]

    assert compared("") == []
    assert compared(f"{weights} 4") == [(4, "weights")]
    assert compared(f"{weights} 4 {grads} 3") == [
        (3, "gradients"),
        (4, "weights"),
        (6, "gradients"),
    ]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--save a --load a", "No checkpoint in a yet: starting from random weights."),
        ("--save a --load a --exit-on-missing-checkpoint", None),
        ("--save a --load b", None),
        ("--save a --load a --finetune", None),
    ],
)
def test_a_run_begins_at_step_0_only_in_its_own_directory(flags: str, said: str | None) -> None:
    def load(options: object) -> Callable[[], None]:
        raise NoCheckpointError("none")

    lines: list[str] = []
    with pytest.raises(NoCheckpointError) if said is None else nullcontext():
        restore(config_of(flags), SimpleNamespace(load=load), lines.append, pytest.fail)  # type: ignore[arg-type]
    assert lines == [said] * (said is not None)


def warnings_of(flags: str, monkeypatch: pytest.MonkeyPatch, **loaded: Any) -> list[str]:
    """Return the warnings of a run that restores a checkpoint."""
    monkeypatch.setattr(restoring, "refusal_of_use", lambda use, run, metadata: None)
    found = {"path": "a/step", "step": 0, "missing": [], "unused": [], "metadata": {}, **loaded}
    state = SimpleNamespace(
        load=lambda options: SimpleNamespace(**found), hashes=DataHashes(), run=None
    )
    warnings: list[str] = []
    restore(config_of(flags), state, lambda text: None, warnings.append)  # type: ignore[arg-type]
    return warnings


@pytest.mark.parametrize(
    ("flags", "step", "warned"),
    [
        ("--save a --load ./a --finetune", 4, True),
        ("--save b --load a --finetune", 4, False),
        ("--load a --finetune", 4, False),
        ("--save a --load a --finetune", 0, False),  # converted weights are step 0
    ],
)
def test_finetuning_in_the_folder_of_the_weights_is_a_warning(
    flags: str, step: int, warned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    warnings = warnings_of(flags, monkeypatch, step=step)
    assert ["saves its step 4, it replaces a/step" in text for text in warnings] == [True] * warned


@pytest.mark.parametrize(
    ("names", "said"),
    [(["rng/rank_1/torch"], False), (["rng/rank_1/torch", "model/x"], True)],
)
def test_random_states_of_ranks_that_a_run_has_not_are_no_warning(
    names: list[str], said: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run on fewer processes does not use the random states of the others."""
    flags = "--load a --finetune --dist-ckpt-strictness log_all"
    expected = [
        "missing in the checkpoint, start values are kept: model/x",
        "in the checkpoint but unused: model/x",
    ]
    warnings = warnings_of(flags, monkeypatch, missing=names, unused=names)
    assert warnings == (expected if said else [])


def test_ranks_that_share_a_pack_are_one_place_of_a_non_finite_value():
    """Ranks that share a pack are reported together, with their first bad micro-batch."""
    assert bad_places({2: 1, 3: 0}, 2) == ["micro-batch 0 of ranks 2 to 3"]
    assert bad_places({1: 3, 6: 2}, 4) == [
        "micro-batch 3 of ranks 0 to 3",
        "micro-batch 2 of ranks 4 to 7",
    ]
    assert bad_places({1: 1, 2: 0}, 1) == ["micro-batch 1 of rank 1", "micro-batch 0 of rank 2"]
