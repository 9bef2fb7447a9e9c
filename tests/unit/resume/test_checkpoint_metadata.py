"""Checkpoint metadata that was changed on purpose: it is refused with a sentence, or harmless."""

import copy
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_packed.checkpoint.run_metadata import RunProgress, metadata_problem
from megatron_packed.config.sections.model import ModelConfig
from megatron_packed.config.serialise import model_differences
from megatron_packed.distributed.rng import RngState
from megatron_packed.resume.compared_runs import Resumed

MANIFEST = (
    Path(__file__).parents[2]
    / "end_to_end/old_checkpoints/text/checkpoints/step_00000012/manifest.json"
)
SOUND = json.loads(MANIFEST.read_text())["metadata"]
SOUND["phases"] = [{"name": "a", "iteration": 0}, {"name": "b", "iteration": 8}]
SOUND["progress"] |= {"plan_packs": 16, "plan_samples": 32}
OTHERS: list[Any] = [
    None,
    True,
    -1,
    0,
    10**30,
    1.5,
    1e308,
    "x",
    "",
    [],
    [1],
    ["x"],
    {},
    {"a": 1},
    {"a": []},
]
MODEL = ModelConfig(hybrid_layer_pattern="*-", hidden_size=8, num_attention_heads=2)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value in a JSON value."""
    if path:
        yield path
    for key in (
        value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    ):
        yield from places(value[key], (*path, key))


def changed(path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    metadata: Any = copy.deepcopy(SOUND)
    holder = metadata
    for key in path[:-1]:
        holder = holder[key]
    holder[path[-1]] = value
    return metadata


def use(metadata: dict[str, Any]) -> None:
    """Use metadata as a run does before its first step."""
    stored = Resumed(metadata)
    assert stored.progress.iteration >= 0 and stored.phases == (*stored.phases,)
    assert stored.config.packs_per_step() == stored.packs_per_step and stored.room != 0
    model_differences(metadata["config"]["model"], MODEL)
    for state in metadata["rng"]:
        captured = RngState.capture()
        RngState(tensors=captured.tensors, metadata=state).restore()


def test_what_runs_and_conversions_write_is_sound() -> None:
    assert metadata_problem(SOUND) is None
    converted = {
        "progress": {},
        "plan_hash": "",
        "data_hash": "",
        "layout": {},
        "rng": [],
        "config": {"model": SOUND["config"]["model"], "training": {"bf16": True}},
    }
    assert metadata_problem(converted) is None and Resumed(converted).progress == RunProgress()
    older = copy.deepcopy(SOUND)
    del (
        older["progress"]["consumed_packs"],
        older["progress"]["plan_packs"],
        older["config"]["packing"]["packing_window"],
        older["layout"],
    )
    assert metadata_problem(older) is None
    assert metadata_problem({**SOUND, "room": 7, "something new": []}) is None


@pytest.mark.parametrize("part", [*SOUND, "room"])
def test_another_value_anywhere_is_refused_or_harmless(part: str) -> None:
    refused = accepted = 0
    for path in places({part: SOUND.get(part, 7)}):
        for value in OTHERS:
            metadata = changed(path, value)
            problem = metadata_problem(metadata)
            if problem is None:
                use(metadata)
                accepted += 1
            else:
                assert problem.startswith(f"has invalid metadata: {part}") and len(problem) < 300
                refused += 1
    assert refused >= 9


@pytest.mark.parametrize("part", ["config", "plan_hash", "progress"])
def test_what_is_missing_is_named(part: str) -> None:
    metadata = copy.deepcopy(SOUND)
    del metadata[part]
    assert f"{part} is missing" in str(metadata_problem(metadata))
    metadata = changed(("progress",), {})
    assert "progress.iteration is missing" in str(metadata_problem(metadata))


@pytest.mark.parametrize(
    ("key", "value", "missing"), [("rng", [], "rng[0]"), ("layout", {}, "layout.world_size")]
)
def test_random_states_of_all_ranks_are_needed(key: str, value: Any, missing: str) -> None:
    assert f"{missing} is missing" in str(metadata_problem(changed((key,), value)))
    metadata = copy.deepcopy(SOUND)
    del metadata["rng"]
    assert "rng[0] is missing" in str(metadata_problem(metadata))


@pytest.mark.parametrize(
    "forged",
    [
        None,
        [],
        {},
        {"loss": [1.0]},
        {"loss": [1.0], "grad_norm": []},
        {"loss": 1.0, "grad_norm": 1.0},
        {"loss": ["1"], "grad_norm": ["1"]},
        {"loss": [math.nan], "grad_norm": [1.0]},
        {"loss": [True], "grad_norm": [1.0]},
        {"loss": [1e400], "grad_norm": [1.0]},
        {"loss": [None], "grad_norm": [1.0]},
        {"loss": [1.0], "grad_norm": [1.0], "more": [1.0]},
    ],
)
def test_a_spike_window_is_as_many_losses_as_gradient_norms(forged: object) -> None:
    assert (
        metadata_problem({**SOUND, "spike_window": {"loss": [2.5, 3.0], "grad_norm": [1.0, 0.5]}})
        is None
    )
    problem = metadata_problem({**SOUND, "spike_window": forged})
    assert (
        problem is not None
        and "spike_window is " in problem
        and "as many losses as gradient norms" in problem
    )
