"""Checkpoints saved and loaded by two processes, with errors, damaged files and other world sizes."""

import os
import signal
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron_packed.checkpoint import load_attempt
from megatron_packed.checkpoint.directory import claim_directory
from megatron_packed.checkpoint.errors import (
    CheckpointError,
    CheckpointMismatchError,
    NoCheckpointError,
)
from megatron_packed.checkpoint.load import load_checkpoint, read_attachments
from megatron_packed.checkpoint.rank_agreement import Ranks
from megatron_packed.checkpoint.save import SavedCheckpoint, save_checkpoint
from megatron_packed.checkpoint.save_sites import SAVE_SITES
from megatron_packed.checkpoint.tensor_shard import TensorShard, split_replicated, whole_tensors
from megatron_packed.distributed.groups import ParallelGroups
from support.process_pools import DistributedError, run_distributed

State = dict[str, Tensor]


def make_state(seed: int) -> State:
    generator = torch.Generator().manual_seed(seed)
    return {
        "layers.0.weight": torch.randn(301, 57, generator=generator),
        "layers.0.norm": torch.randn(57, generator=generator).bfloat16(),
        "step": torch.tensor(seed),
        "nothing": torch.empty(0),
    }


def rng_state(rank: int, seed: int) -> State:
    return {f"rng/rank_{rank}/torch": torch.full((500,), seed + 100 * rank, dtype=torch.uint8)}


def save(
    root: str, step: int, groups: ParallelGroups, on_site=lambda site: None
) -> SavedCheckpoint:
    shards = split_replicated(make_state(step), groups.rank, groups.world_size)
    shards += whole_tensors(rng_state(groups.rank, step))
    return save_checkpoint(
        root,
        step,
        shards,
        {"step": step},
        rank=groups.rank,
        world_size=groups.world_size,
        group=groups.dp.group,
        keep_last=1,
        on_site=on_site,
        attached={"tokenizer.json": "{}"},
    )


def load(path: str, groups: ParallelGroups, **more) -> tuple[int, bool, str]:
    """Load a checkpoint; return its step, whether all state matches bit for bit, and warnings."""
    found = {name: torch.zeros_like(tensor) for name, tensor in make_state(0).items()}
    rng = {name: torch.zeros_like(tensor) for name, tensor in rng_state(groups.rank, 0).items()}
    lines: list[str] = []
    loaded = load_checkpoint(
        path,
        whole_tensors({**found, **rng}),
        rank=groups.rank,
        world_size=groups.world_size,
        group=groups.dp.group,
        allow_missing=("rng/",),
        allow_extra=("rng/",),
        warn=lines.append,
        **more,
    )
    good = all(torch.equal(found[name], tensor) for name, tensor in make_state(loaded.step).items())
    if not loaded.missing:
        good &= all(
            torch.equal(rng[name], tensor)
            for name, tensor in rng_state(groups.rank, loaded.step).items()
        )
    return loaded.step, good and loaded.metadata == {"step": loaded.step}, "\n".join(lines)


def flip_last_byte(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([byte ^ 1]))


def _round_trip(groups: ParallelGroups, root: str) -> dict:
    with pytest.raises(NoCheckpointError):
        load(root, groups)
    saved = save(root, 10, groups)
    return {
        "sizes": [f.stat().st_size for f in sorted(saved.path.glob("rank_*"))],
        "loaded": load(root, groups),
        "attached": read_attachments(root, ranks=Ranks.from_groups(groups)).texts,
    }


def _load(groups: ParallelGroups, root: str) -> tuple[int, bool, str]:
    return load(root, groups)


def test_two_processes_one_two(tmp_path):
    results = run_distributed(_round_trip, 2, str(tmp_path))
    one, two = results[0]["sizes"]
    assert (
        abs(one - two) < 200 and one > 30_000
    )  # Both ranks write the same amount of data, except for file headers.
    assert [result["loaded"] for result in results] == [(10, True, "")] * 2
    assert [result["attached"] for result in results] == [{"tokenizer.json": "{}"}] * 2
    alone = ParallelGroups.single()
    assert load(str(tmp_path), alone) == (10, True, "")
    save(str(tmp_path), 20, alone)
    assert sorted(os.listdir(tmp_path / "step_00000020")) == [
        "manifest.json",
        "rank_00000.safetensors",
        "tokenizer.json",
    ]
    assert run_distributed(_load, 2, str(tmp_path)) == [(20, True, "")] * 2


def _fail_everywhere(groups: ParallelGroups, root: str) -> list[str]:
    """Simulate a full disk at each file operation of a save, on one rank at a time. Return one line
    per case with the outcome.

    After each failure, check that the next load is sound.
    """
    save(root, 1, groups)
    newest, step, seen = 1, 1, []
    for failing in (0, 1):
        for site in SAVE_SITES:
            passed: list[str] = []

            def on_site(name: str, passed=passed, site=site, failing=failing) -> None:
                passed.append(name)
                if name == site and groups.rank == failing:
                    raise OSError(28, "No space left on device")

            step += 1
            begin = time.monotonic()
            try:
                saved = save(root, step, groups, on_site)
                outcome = "warned" if saved.warnings else "saved"
            except CheckpointError as error:
                outcome = str(error).replace(root, "ROOT")
            assert time.monotonic() - begin < 10
            if outcome in ("saved", "warned") or "checkpoint was published" in outcome:
                newest = step
            assert load(root, groups)[:2] == (newest, True), (site, outcome)
            seen.append(f"{failing} {site}: {outcome}")
            if groups.rank == 0:  # The other rank may read while this rank still removes files.
                assert not [name for name in os.listdir(root) if ".tmp-" in name]
    return seen


def test_an_error_on_one_rank_is_raised_on_both_and_nothing_hangs(tmp_path):
    one, two = run_distributed(_fail_everywhere, 2, str(tmp_path), timeout=90)
    # Both ranks report exactly the same error text.
    assert len(one) == 2 * len(SAVE_SITES) and one == two
    of_rank_1 = ("save.begin", *(site for site in SAVE_SITES if site.startswith("shard.")))
    for line in one:
        where, outcome = line.split(": ", 1)
        failing, site = where.split()
        if site == "save.old_moved" or (failing == "1" and site not in of_rank_1):
            assert outcome == "saved", line  # The failing rank does not reach this file operation.
        elif site.startswith("latest.") or site == "save.old_removed":
            assert outcome == "warned", line
        else:
            assert f"\n  rank {failing}: OSError: [Errno 28] No space left on device" in outcome, (
                line
            )
            assert "ROOT" in outcome and "failed on 1 of 2 ranks" in outcome
            published = SAVE_SITES.index(site) >= SAVE_SITES.index("save.published")
            assert ("checkpoint was published" in outcome, "nothing was published" in outcome) == (
                published,
                not published,
            )


def _damage(groups: ParallelGroups, root: str) -> dict:
    results: dict[str, object] = {}
    good = load(root, groups)
    assert good[:2] == (20, True)
    if groups.rank == 1:  # Only this rank cannot open the newer checkpoint's file.
        original = load_attempt.open_file

        def refuse(directory, manifest, index):
            if manifest.step == 20:
                raise CheckpointError(
                    "cannot be opened", path=directory, expected="a file", found="stale handle"
                )
            return original(directory, manifest, index)

        load_attempt.open_file = refuse
    results["one rank cannot read"] = load(root, groups)
    if groups.rank == 1:
        load_attempt.open_file = original
    wrong = make_state(0)
    if groups.rank == 1:
        wrong["layers.0.norm"] = torch.zeros(58, dtype=torch.bfloat16)
    try:
        load_checkpoint(
            root,
            whole_tensors(wrong),
            rank=groups.rank,
            world_size=2,
            group=groups.dp.group,
            allow_extra=("rng/",),
        )
    except CheckpointMismatchError as error:
        results["one rank wants another shape"] = str(error)
    wrong["layers.0.norm"] = torch.zeros(58, dtype=torch.bfloat16)
    pieces = 2 * whole_tensors(wrong)  # Each name occurs twice, as for a matrix with two pieces.
    try:
        load_checkpoint(
            root,
            pieces,
            rank=groups.rank,
            world_size=2,
            group=groups.dp.group,
            allow_extra=("rng/",),
        )
    except CheckpointMismatchError as error:
        results["both want another shape"] = str(error)
    overlapping = [
        TensorShard(
            name="w",
            global_shape=(4,),
            start=groups.rank,
            end=groups.rank + 2,
            tensor=torch.zeros(2),
        )
    ]
    try:
        save_checkpoint(
            root, 30, overlapping, {}, rank=groups.rank, world_size=2, group=groups.dp.group
        )
    except CheckpointError as error:
        results["overlap"] = str(error)
    torch.distributed.barrier()
    if groups.rank == 0:
        flip_last_byte(Path(root) / "step_00000020" / "rank_00001.safetensors")
    torch.distributed.barrier()
    results["flipped"] = load(root, groups)
    return results


def test_both_ranks_reach_the_same_decision(tmp_path):
    for step in (10, 20):
        run = ParallelGroups.single()
        shards = split_replicated(make_state(step), 0, 1) + whole_tensors(rng_state(0, step))
        save_checkpoint(tmp_path, step, shards, {"step": step}, rank=run.rank)
    results = run_distributed(_save_and_damage, 2, str(tmp_path))
    for rank, result in enumerate(results):
        for kind in ("one rank cannot read", "flipped"):
            step, good, lines = result[kind]
            assert (step, good) == (10, True)
            assert ("step_00000020 is rejected" in lines) == (rank == 0)
        assert (
            "rank 1: layers.0.norm is BF16 [57], but this run needs BF16 [58]"
            in result["one rank wants another shape"]
        )
        assert (
            "\n  ranks 0, 1: layers.0.norm is BF16 [57], but this run needs BF16 [58]"
            in result["both want another shape"]
        )
        assert result["both want another shape"].count("this run needs") == 1
        assert "do not cover its 4 elements once each" in result["overlap"]
        assert "rank 0:" in result["overlap"]
    assert (
        "rank 1" in results[0]["one rank cannot read"][2]
        and "stale handle" in results[0]["one rank cannot read"][2]
    )
    assert "expected crc32c" in results[0]["flipped"][2]


def _save_and_damage(groups: ParallelGroups, root: str) -> dict:
    shards = split_replicated(make_state(20), groups.rank, 2) + whole_tensors(
        rng_state(groups.rank, 20)
    )
    save_checkpoint(
        root, 20, shards, {"step": 20}, rank=groups.rank, world_size=2, group=groups.dp.group
    )
    return _damage(groups, root)


def _die(groups: ParallelGroups, root: str) -> None:
    def on_site(site: str) -> None:
        if groups.rank == 1 and site == "shard.before_sync":
            os.kill(os.getpid(), signal.SIGKILL)

    save(root, 20, groups, on_site)


def test_a_rank_that_dies_leaves_the_previous_checkpoint(tmp_path):
    alone = ParallelGroups.single()
    save(str(tmp_path), 10, alone)
    with pytest.raises(DistributedError):
        run_distributed(_die, 2, str(tmp_path), timeout=30)
    assert load(str(tmp_path), alone) == (10, True, "")
    assert [name for name in os.listdir(tmp_path) if ".tmp-" in name]
    save(str(tmp_path), 30, alone)
    assert sorted(os.listdir(tmp_path)) == [".lock", "latest", "step_00000030"]


def claim(groups: ParallelGroups, roots: list[str]) -> str:
    lock = claim_directory(roots[groups.rank], ranks=Ranks.from_groups(groups), patience=0.3)
    return "none" if lock is None else str(lock.path)


def test_a_directory_that_the_ranks_do_not_share_is_found_at_the_start(tmp_path: Path) -> None:
    shared, other = tmp_path / "a" / "run", tmp_path / "b" / "run"
    found = run_distributed(claim, 2, [str(shared), str(shared)])
    assert found == [str(shared / ".run.lock"), "none"]
    assert sorted(os.listdir(shared)) == [".lock", ".run.lock"]
    with pytest.raises(
        DistributedError,
        match=r"(?s)failed on 1 of 2 ranks; training did not start:.*rank 1: .*/b/run: on "
        r"\S+ this is not the directory of rank 0; give --save a directory on a file system",
    ):
        run_distributed(claim, 2, [str(shared), str(other)])
    assert sorted(os.listdir(shared)) == [".lock", ".run.lock"] and os.listdir(other) == []
