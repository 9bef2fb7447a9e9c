"""A run that goes on from an older checkpoint adds numbers up in the order of the checkpoint's run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_packed.checkpoint import load
from megatron_packed.config.options import Stored
from megatron_packed.config.parser.parse import parse
from megatron_packed.config.run import RunConfig
from megatron_packed.config.serialise import to_dict
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.resume.compared_runs import resumed_options

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


def resumed(
    config: RunConfig, stored: Stored, monkeypatch: pytest.MonkeyPatch
) -> tuple[RunConfig, list[str]]:
    """Return the options of a run that resumes a checkpoint, and the lines about them."""
    config = replace(config, checkpoint=replace(config.checkpoint, load="run"))
    metadata = {"config": stored, "progress": {"iteration": 3, "consumed_packs": 3}}
    monkeypatch.setattr(load, "newest_metadata", lambda *_, **__: metadata)
    taken, _, lines = resumed_options(config, ParallelGroups.single())
    return taken, lines
