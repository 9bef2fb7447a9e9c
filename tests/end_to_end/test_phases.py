"""Phases of a run: other data, lengths and blends with the moments kept (``--begin-phase``)."""

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megatron_packed.checkpoint.manifest import read_manifest
from megatron_packed.config.parser.parse import parse
from megatron_packed.data.packing.pack_plan import PackPlan
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.inputs.run_data import build_data
from megatron_packed.reporting.run_report import write_report
from support.faults import kill_at, kill_in_save
from support.phases import STEPS, three_phases
from support.runs import (
    Data,
    assert_same_log,
    assert_same_state,
    command_line,
    final_state,
    in_folder,
    run,
    steps,
    trained,
)

KILLED = -9
TENSOR = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
LAST = 3 * STEPS
NUMBERS = {"tokenizer_type": "NullTokenizer", "vocab_size": 300, "sft": None}
NUMBERS |= {"valid_data_path": None, "eval_interval": None, "eval_iters": None}


@pytest.fixture(scope="session")
def undisturbed(
    data: Data, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., tuple[list[dict[str, Any]], Path]]:
    """Return a function that maps a number of ranks to phases and the folder of their run."""
    made: dict[int, tuple[list[dict[str, Any]], Path]] = {}

    def phases_of(ranks: int = 1) -> tuple[list[dict[str, Any]], Path]:
        if ranks not in made:
            folder = tmp_path_factory.mktemp(f"phases_{ranks}")
            phases = three_phases(data, **(TENSOR if ranks == 2 else {}))
            for options in phases:
                trained(folder, ranks, options)
            made[ranks] = (phases, folder)
        return made[ranks]

    return phases_of


def copied(folder: Path, to: Path, *, keep: int) -> None:
    """Copy a run, without the checkpoints after step ``keep``."""
    shutil.copytree(folder, to, dirs_exist_ok=True)
    for path in (to / "checkpoints").glob("step_*"):
        if int(path.name[5:]) > keep:
            shutil.rmtree(path)
    (to / "checkpoints" / "latest").unlink()


def plan_of(options: dict[str, Any]) -> PackPlan:
    """Return the plan that a new run with these options has."""
    alone = {"begin_phase": None, "save_interval": None}
    config = parse(command_line({**options, **alone}), 1)
    return build_data(config, ParallelGroups.single(), lambda line: None).train.plan


def refusal(options: dict[str, Any], folder: Path) -> str:
    """Return the console of a run that ends with exit code 4."""
    finished = run({**options, **in_folder(folder)}, folder)
    assert finished.exit_code == 4, finished.console
    return finished.console


def test_three_phases_that_are_killed_equal_undisturbed_ones(
    undisturbed: Callable[..., tuple[list[dict[str, Any]], Path]], tmp_path: Path
) -> None:
    """Kills of a run with two ranks, before the first save of a phase, in it, and in its last save.

    `test_resume.py` kills runs with one rank.
    `tools/phases.py` kills each phase at random moments.
    """
    ranks = 2
    phases, expected = undisturbed(ranks)
    faults = (
        (partial(kill_at, "between all-reduce and update", 2, ranks - 1),),
        # The second phase begins twice: its first life ends before it has trained a step.
        (
            partial(kill_at, "before a micro-batch", 1, 0),
            partial(kill_in_save, "shard.synced", 1, ranks - 1),
        ),
        (partial(kill_in_save, "manifest.renamed", 2, 0),),
    )
    for options, of_phase in zip(phases, faults, strict=True):
        for fault in of_phase:
            finished = run({**options, **in_folder(tmp_path)}, tmp_path, ranks, fault)
            assert KILLED in finished.exit_codes, f"{fault} did not happen: {finished}"
        trained(tmp_path, ranks, options)
    assert_same_state(tmp_path / "checkpoints", expected / "checkpoints", LAST)
    assert steps(tmp_path / "log.jsonl") == steps(expected / "log.jsonl")


def test_each_phase_trains_on_the_packs_of_its_own_plan(
    undisturbed: Callable[..., tuple[list[dict[str, Any]], Path]],
) -> None:
    """Steps are totals, and each phase begins its plan at the first pack."""
    phases, folder = undisturbed()
    lines = [line for line in steps(folder / "log.jsonl") if "lm_loss" in line]
    assert [line["iteration"] for line in lines] == list(range(1, LAST + 1))
    for number, options in enumerate(phases):
        plan = plan_of(options)
        for step in range(STEPS):
            line, planned = lines[number * STEPS + step], plan.step(step)
            assert (line["plan_hash"], line["epoch"]) == (plan.hash, planned.epoch)
            assert line["real_tokens"] == planned.global_tokens
            assert line["target_tokens"] == planned.global_targets
    assert len({line["plan_hash"] for line in lines}) == 3
    assert [line["learning_rate"] for line in lines[-STEPS:]] == sorted(
        (line["learning_rate"] for line in lines[-STEPS:]), reverse=True
    )
    _, metadata = final_state(folder / "checkpoints", LAST)
    names = [(phase["name"], phase["iteration"]) for phase in metadata["phases"]]
    assert names == [("short", 0), ("long", STEPS), ("blend", 2 * STEPS)]
    assert metadata["progress"]["consumed_packs"] == 2 * LAST
    assert metadata["progress"]["plan_packs"] == metadata["progress"]["plan_samples"] == 4 * STEPS
    assert metadata["progress"]["best_at"] > 2 * STEPS
    page = folder / "page.html"
    write_report(folder / "log.jsonl", page)
    assert "short from step 1, long from step 6, blend from step 11" in page.read_text()


def test_a_phase_may_change_the_layout(
    undisturbed: Callable[..., tuple[list[dict[str, Any]], Path]], data: Data, tmp_path: Path
) -> None:
    """The second phase runs on two ranks; without dropout, its losses are those of one rank."""
    phases = [{**options, "hidden_dropout": 0} for options in three_phases(data)]
    for ranks, folder in ((1, tmp_path / "one"), (2, tmp_path / "two")):
        trained(folder, 1, phases[0])
        trained(folder, ranks, phases[1], **(TENSOR if ranks == 2 else {}))
    assert_same_log(tmp_path / "two", tmp_path / "one")


def test_a_changed_run_without_the_flag_is_refused_with_the_flag(
    undisturbed: Callable[..., tuple[list[dict[str, Any]], Path]], tmp_path: Path
) -> None:
    phases, folder = undisturbed()
    copied(folder, tmp_path, keep=STEPS)
    changed = {**phases[1], "begin_phase": None}
    other_packs = refusal(changed, tmp_path)
    assert "--seq-length 128, was 64" in other_packs
    assert "give --begin-phase NAME with a new name to go on with the changed" in other_packs
    routed = refusal({**phases[0], "moe_router_topk": 1, "begin_phase": None}, tmp_path)
    assert "change them in a new phase (--begin-phase NAME)" in routed
    # The name of the current phase begins no phase.
    assert "with a new name" in refusal({**changed, "begin_phase": "short"}, tmp_path)
    # An unchanged run continues its phase without the flag.
    assert "phase short, which began at step 1, continues" in trained(
        tmp_path, 1, {**phases[0], "begin_phase": None}
    )


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"hidden_size": 48}, "--hidden-size is 48"),
        (NUMBERS, "--tokenizer-type NullTokenizer, was ByteTokenizer"),
        ({"bf16": True}, "was trained without --bf16"),
    ],
)
def test_a_phase_keeps_model_tokenizer_and_precision(
    changes: dict[str, Any],
    reason: str,
    undisturbed: Callable[..., tuple[list[dict[str, Any]], Path]],
    tmp_path: Path,
) -> None:
    phases, folder = undisturbed()
    copied(folder, tmp_path, keep=STEPS)
    (tmp_path / "numbers.jsonl").write_text('{"text": "1 2 3 4"}\n' * 40)
    if "vocab_size" in changes:
        changes = {**changes, "train_data_path": tmp_path / "numbers.jsonl"}
    console = refusal({**phases[1], **changes}, tmp_path)
    assert reason in console and "give --begin-phase NAME" not in console


def test_a_phase_that_has_ended_does_not_begin_again(
    undisturbed: Callable[..., tuple[list[dict[str, Any]], Path]], tmp_path: Path
) -> None:
    """``--ckpt-step`` goes back to an earlier phase, and the same command then begins the next."""
    phases, folder = undisturbed()
    copied(folder, tmp_path, keep=LAST)
    assert "is of phase blend, and phase long ended before it" in refusal(phases[1], tmp_path)
    back = {**phases[1], "ckpt_step": STEPS + 1}
    assert "phase long, which began at step 6, continues" in trained(
        tmp_path, 1, back, train_iters=STEPS + 2
    )
    # The newest checkpoint is of phase long again, which a new phase leaves at once.
    console = trained(tmp_path, 1, {**phases[2], "begin_phase": "again"}, train_iters=STEPS + 3)
    assert "phase again begins at step 8 after phase long" in console


def test_a_damaged_checkpoint_does_not_move_the_beginning_of_a_phase(
    undisturbed: Callable[..., tuple[list[dict[str, Any]], Path]], tmp_path: Path
) -> None:
    """An older checkpoint is used if the phase began at it, or if the phase had begun before."""
    phases, folder = undisturbed()
    for keep, said in (
        (STEPS + 1, "resuming from {}/step_00000005"),
        (2 * STEPS, "resuming from {}/step_00000009"),
        (STEPS, "begins the phase of this run at step 3, and the newest checkpoint"),
    ):
        to = tmp_path / str(keep)
        copied(folder, to, keep=keep)
        shard = to / "checkpoints" / f"step_{keep:08}" / "rank_00000.safetensors"
        shard.write_bytes(shard.read_bytes()[:-8])
        finished = run({**phases[1], **in_folder(to)}, to)
        assert said.format(to / "checkpoints") in finished.console
        if keep == STEPS:
            assert finished.exit_code == 4 and "give --ckpt-step 3" in finished.console
        else:
            assert_same_state(to / "checkpoints", folder / "checkpoints", 2 * STEPS)


def test_a_phase_with_unchanged_packs_continues_with_the_next_pack(
    data: Data, tmp_path: Path
) -> None:
    """Only the router changes, so no pack is trained on twice. The best loss is that of the phase."""
    options = three_phases(data)[0]
    plain = {**options, "begin_phase": None}
    trained(tmp_path / "plain", 1, plain, train_iters=LAST)
    trained(tmp_path / "phase", 1, plain)
    more = {"begin_phase": "router", "moe_router_topk": 1, "train_iters": LAST}
    console = trained(tmp_path / "phase", 1, {**options, **more})
    assert "data and packs are unchanged, so it continues with the next pack" in console
    assert "--moe-router-topk 1, was 2" in console
    lines, others = (
        [line for line in steps(tmp_path / name / "log.jsonl") if "lm_loss" in line]
        for name in ("phase", "plain")
    )
    for name in ("real_tokens", "target_tokens", "epoch", "plan_hash"):
        assert [line[name] for line in lines] == [line[name] for line in others]
    assert lines[-1]["lm_loss"] != others[-1]["lm_loss"]


def test_early_stopping_and_the_best_checkpoint_count_within_a_phase(
    data: Data, tmp_path: Path
) -> None:
    """A run that has stopped early trains on in a new phase, whose best loss is not lower."""
    options = three_phases(data, save_best=True, early_stopping_patience=1)[0]
    # With this learning rate nothing changes, so the loss of the second validation is not lower.
    worse = {**options, "lr": 1e-30, "moe_router_bias_update_rate": 0}
    assert "Stopping: " in trained(tmp_path, 1, worse, train_iters=9)
    _, before = final_state(tmp_path / "checkpoints", 4)
    assert before["progress"]["best_at"] == 2
    assert "Nothing is trained" in trained(tmp_path, 1, worse, train_iters=9)
    calmer = {**worse, "begin_phase": "calm", "seq_length": 128, "train_iters": 8}
    assert "step 8/8" in trained(tmp_path, 1, calmer)
    _, after = final_state(tmp_path / "checkpoints", 8)
    assert after["progress"]["best_loss"] >= before["progress"]["best_loss"]
    assert after["best_step"] == after["progress"]["best_at"] == 6


def test_samples_and_epochs_count_over_phases_of_other_pack_sizes(
    data: Data, tmp_path: Path
) -> None:
    """20 samples in packs of one, then packs of two samples up to 60; then an epoch more."""
    first, second, _ = three_phases(data)
    first["global_batch_size"] = 4
    in_samples = {"train_iters": None, "lr_warmup_iters": None, "lr_warmup_samples": 8}
    trained(tmp_path, 1, {**first, **in_samples, "train_samples": 20})
    second = {**second, **in_samples, "micro_batch_size": 2, "global_batch_size": 8}
    console = trained(tmp_path, 1, {**second, "train_samples": 60})
    assert "step 10/10 | " in console
    lines = [line for line in steps(tmp_path / "log.jsonl") if "lm_loss" in line]
    assert [line["iteration"] for line in lines] == list(range(1, 11))
    third = {**second, "begin_phase": "epoch", "seq_length": 64, "train_epochs": 1}
    of_epoch = -(-len(plan_of({**third, "lr_warmup_samples": None}).epoch(0)) // 4)
    console = trained(tmp_path, 1, third, exit_interval=11)
    assert f"step 11/{10 + of_epoch} | " in console
    # The same command counts the epoch from the beginning of the phase again.
    assert f"step {10 + of_epoch}/{10 + of_epoch} | " in trained(tmp_path, 1, third)
    _, metadata = final_state(tmp_path / "checkpoints", 10 + of_epoch)
    assert metadata["progress"]["plan_samples"] == 60
    config = read_manifest(tmp_path / "checkpoints" / f"step_{10 + of_epoch:08}").metadata["config"]
    assert config["training"]["train_samples"] == 60 + 8 * of_epoch
