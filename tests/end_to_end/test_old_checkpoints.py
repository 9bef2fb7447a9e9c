"""Runs resume from checkpoints of older versions, whose defaults made other packs.

If a run cannot resume, its error names the flags that restore the old packs. `old_checkpoints`
contains the data, the options and step 12 of three runs, and the expected results of steps 13 to
24. All runs pack two samples and have documents longer than a pack. In one run, some pieces of
conversations have no target. The run ``rules`` has lines from which today's rules make other tokens,
and the cache that its version left.
"""

import json
import os
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megatron_packed.checkpoint.sealed_json import seal, unseal
from support.json_lines import read_lines
from support.runs import Finished, run

OLD = Path(__file__).parent / "old_checkpoints"
TOLERANCE = 1e-5
"""Tolerance of losses on other processors. The processor that wrote the results gives equal losses.
"""


def resumed(kind: str, folder: Path, **options: Any) -> Finished:
    """Resume a copy of the old run with its own options, plus the given options.

    All options of the old run existed in the old version.
    """
    shutil.copytree(OLD / kind, folder, dirs_exist_ok=True)
    own = {"config": "run.yaml", "load": "checkpoints", "log_jsonl": "log.jsonl"}
    if kind == "rules":
        own["data_cache_path"] = "cache"
    return run({**own, **options}, folder, 1, partial(os.chdir, folder))


OLD_RULES = {
    "sft": "--split-order file --max-document-length 128 --overlong-policy truncate --keep-pieces-without-targets "
    "--answer-end document --data-rules 1",
    "text": "--max-document-length 64 --overlong-policy truncate",
    "rules": "--data-rules 1",
}


@pytest.mark.parametrize(
    ("kind", "graphs"), [("sft", None), ("text", None), ("text", "local"), ("rules", None)]
)
def test_it_goes_on_as_if_nothing_had_changed(
    kind: str, graphs: str | None, tmp_path: Path
) -> None:
    """The run resumes with the old packing rules, and again from its own new checkpoint.

    The new checkpoint contains the options. The second resume uses no graphs.
    """
    said = "options taken from the checkpoint, so that packs do not change: "
    first = resumed(kind, tmp_path, save="checkpoints", exit_interval=18, cuda_graph_impl=graphs)
    assert first.exit_code == 0, first.console
    second = run(
        {
            "config": "run.yaml",
            "load": "checkpoints",
            "log_jsonl": "log.jsonl",
            "save": "checkpoints",
            **({"data_cache_path": "cache"} if kind == "rules" else {}),
        },
        tmp_path,
        1,
        partial(os.chdir, tmp_path),
    )
    for finished in (first, second):
        assert finished.exit_code == 0, finished.console
        [line] = [line for line in finished.console.splitlines() if said in line]
        assert set(line.partition(said)[2].split()) == set(OLD_RULES[kind].split())
    expected = read_lines(tmp_path / "expected.jsonl")
    lines = map(json.loads, (tmp_path / "log.jsonl").read_text().splitlines())
    found = [line for line in lines if not {"checkpoint", "end"} & line.keys()]
    assert len(found) == len(expected)
    for line, wanted in zip(found, expected):
        losses = {name for name in wanted if name.endswith("loss") or name == "grad_norm"}
        assert {name: line[name] for name in wanted} == {
            name: pytest.approx(value, rel=TOLERANCE) if name in losses else value
            for name, value in wanted.items()
        }


def test_what_the_user_gives_is_honoured(tmp_path: Path) -> None:
    """If an explicit flag changes packs, the refusal names the flags that restore the old packs."""
    finished = resumed(
        "sft", tmp_path, overlong_policy="split", split_order="shuffled", answer_end="turn"
    )
    assert finished.exit_code == 4, finished.console
    assert "--overlong-policy split, was truncate" in finished.console
    [cure] = [line for line in finished.console.splitlines() if "checkpoint error" in line]
    cures = "--overlong-policy truncate --split-order file --answer-end document"
    assert f"give {cures} to resume, " in cure


def test_tokens_of_earlier_rules_that_are_lost_are_named(tmp_path: Path) -> None:
    """Without the cache of the earlier version, its packs cannot be made again."""
    finished = resumed("rules", tmp_path, data_cache_path="other")
    assert finished.exit_code == 4 and "Traceback" not in finished.console, finished.console
    assert "other has no tokens that an earlier version made of these files" in finished.console
    [refusal] = [line for line in finished.console.splitlines() if "checkpoint error" in line]
    assert "an earlier version made its tokens, and today's rules make other tokens" in refusal
    assert "give --data-cache-path with the folder" in refusal


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("config", None, "config is None, but must be sections of options"),
        (
            "progress",
            {"iteration": 12, "consumed_packs": 10**30},
            "progress.consumed_packs is 1000",
        ),
    ],
)
def test_a_forged_manifest_ends_in_a_sentence(
    key: str, value: Any, said: str, tmp_path: Path
) -> None:
    """A manifest with a valid seal and wrong content ends the run with one sentence."""
    shutil.copytree(OLD / "text", tmp_path, dirs_exist_ok=True)
    manifest = tmp_path / "checkpoints" / "step_00000012" / "manifest.json"
    fields = unseal(manifest.read_bytes(), manifest)
    fields["metadata"][key] = value
    manifest.write_bytes(seal(fields))
    finished = run(
        {"config": "run.yaml", "load": "checkpoints"}, tmp_path, 1, partial(os.chdir, tmp_path)
    )
    assert finished.exit_code == 4 and "Traceback" not in finished.console, finished.console
    assert f"step_00000012: has invalid metadata: {said}" in finished.console
