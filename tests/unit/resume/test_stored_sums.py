"""A run that goes on from an older checkpoint adds numbers up in the order of the checkpoint's run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from megatron_packed.checkpoint import load
from megatron_packed.checkpoint.rank_agreement import Ranks
from megatron_packed.config.exit_codes import ExitCode
from megatron_packed.config.options import Stored
from megatron_packed.config.parser.parse import parse, parse_or_exit
from megatron_packed.config.run import RunConfig
from megatron_packed.config.serialise import to_dict
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.resume.compared_runs import resumed_options
from megatron_packed.training import pretrain
from megatron_packed.training.worker import explain_report

OF_ALL_LAYERS = """--mock-data --tokenizer-type NullTokenizer --vocab-size 64 --null-tokenizer-eod-id 63
--seq-length 64 --train-iters 4 --lr 1e-3 --hidden-size 32 --mamba-num-heads 4 --mamba-head-dim 16
--mamba-num-groups 2"""
RUN = f"""{OF_ALL_LAYERS} --hybrid-layer-pattern ME --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 16
--expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall --disable-bias-linear"""


@pytest.mark.parametrize(
    ("given", "expected"),
    [("", "rows"), ("--moe-dispatch tokens", "tokens")],
    ids=["no flag", "flag"],
)
def test_experts_get_the_rows_of_before_unless_a_flag_says_otherwise(
    given: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = parse(f"{RUN} {given}".split(), 2)
    stored = to_dict(config)
    del stored["model"]["moe_dispatch"]
    taken, lines = resumed(config, stored, monkeypatch)
    assert taken.model.moe_dispatch == expected
    said = "options taken from the checkpoint, so that sums keep their order: --moe-dispatch rows"
    assert (said in lines) == (expected == "rows")


def test_options_that_do_not_fit_the_layout_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks cannot share one key head; the layers of the checkpoint exchanged heads."""
    layout = "--hybrid-layer-pattern MG --context-parallel-size 2 --linear-num-key-heads 1"
    config = parse(f"{OF_ALL_LAYERS} {layout} --linear-num-value-heads 2".split(), 2)
    stored = to_dict(config)
    stored["parallel"] |= {"mamba_cp_comm_type": "heads", "linear_cp_mode": "headwise"}
    taken, lines = resumed(config, stored, monkeypatch)
    assert taken.parallel.mamba_cp_comm_type == "heads"
    assert lines == [
        "options taken from the checkpoint, so that sums keep their order: --mamba-cp-comm-type heads",
        "options of the checkpoint that do not fit this run: --linear-cp-mode headwise; sums are "
        "added in another order",
    ]


IN_PARTS = f"""{OF_ALL_LAYERS.replace("groups 2", "groups 4")} --hybrid-layer-pattern M
--context-parallel-size 2 --cp-comm-overlap-parts 2 --rotary-base 5 --device cpu"""
NO_PARTS = "no layer exchanges heads in more than one part"


@pytest.mark.parametrize("mode", ["heads", "state"])
def test_idle_options_are_named_after_those_of_the_checkpoint(
    mode: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Heads travel in parts in the checkpoint's run, so the number of parts has an effect."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    config = parse_or_exit(f"{IN_PARTS} --load {tmp_path}".split())
    assert capsys.readouterr().err == ""  # the checkpoint was not read
    monkeypatch.setattr(load, "newest_metadata", lambda *_, **__: metadata_of(config, mode))
    lines: list[str] = []
    groups = SimpleNamespace(world_size=2, rank=0)
    launch = SimpleNamespace(
        config=config, groups=groups, console=SimpleNamespace(say=lines.append)
    )
    monkeypatch.setattr(Ranks, "from_groups", lambda groups: None)
    for launch.names_idle_options in (False, True):
        taken, _ = pretrain._with_stored_options(cast("pretrain.Launch", launch))
        assert taken.parallel.mamba_cp_comm_type == mode
    if mode == "heads":
        sums, again, idle = lines
        assert sums == again and "--mamba-cp-comm-type heads" in sums
    else:
        (idle,) = lines
    assert idle.startswith("no effect in this run: ") and "--rotary-base" in idle
    assert ("--cp-comm-overlap-parts" in idle) == (NO_PARTS in idle) == (mode == "state")


@pytest.mark.parametrize("start", ["", "--load . --finetune"], ids=["new run", "weights"])
def test_a_run_that_does_not_resume_names_idle_options_at_once(
    start: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    parse_or_exit(f"{IN_PARTS} {start}".split())
    assert NO_PARTS in capsys.readouterr().err


def test_the_report_of_a_resumed_run_has_the_options_of_its_checkpoint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    config = parse(IN_PARTS.split(), 2)
    monkeypatch.setattr(load, "newest_metadata", lambda *_, **__: metadata_of(config, "heads"))
    config = replace(config, checkpoint=replace(config.checkpoint, load="run"))
    sums, idle, report = explain_report(config).split("\n", 2)
    assert "--mamba-cp-comm-type heads" in sums
    assert "--rotary-base" in idle and NO_PARTS not in idle
    assert "pass states" not in report


def test_the_report_of_a_run_that_a_resume_refuses_is_the_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The checkpoint has no schedule, which the run requests."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    config = parse([*IN_PARTS.split(), "--use-checkpoint-opt_param-scheduler"], 2)
    metadata = metadata_of(config, "heads")
    del metadata["config"]["optim"]
    monkeypatch.setattr(load, "newest_metadata", lambda *_, **__: metadata)
    with pytest.raises(SystemExit) as end:
        explain_report(replace(config, checkpoint=replace(config.checkpoint, load="run")))
    assert end.value.code == ExitCode.CHECKPOINT
    assert "has no schedule" in capsys.readouterr().err


def metadata_of(config: RunConfig, mode: str) -> dict[str, Any]:
    """Return metadata of a checkpoint whose Mamba layers exchange ``mode``."""
    stored = to_dict(config)
    stored["parallel"]["mamba_cp_comm_type"] = mode
    return {"config": stored, "progress": {"iteration": 3, "consumed_packs": 3}}


def resumed(
    config: RunConfig, stored: Stored, monkeypatch: pytest.MonkeyPatch
) -> tuple[RunConfig, list[str]]:
    """Return the options of a run that resumes a checkpoint, and the lines about them."""
    config = replace(config, checkpoint=replace(config.checkpoint, load="run"))
    metadata = {"config": stored, "progress": {"iteration": 3, "consumed_packs": 3}}
    monkeypatch.setattr(load, "newest_metadata", lambda *_, **__: metadata)
    taken, _, lines = resumed_options(config, ParallelGroups.single())
    return taken, lines
