"""A run that goes on from an older checkpoint adds numbers up in the order of the checkpoint's run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_packed.checkpoint import load
from megatron_packed.config.parser.parse import parse
from megatron_packed.config.serialise import to_dict
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.resume.compared_runs import resumed_options

RUN = """--mock-data --tokenizer-type NullTokenizer --vocab-size 64 --null-tokenizer-eod-id 63
--seq-length 64 --train-iters 4 --lr 1e-3 --hidden-size 32 --mamba-num-heads 4 --mamba-head-dim 16
--mamba-num-groups 1 --hybrid-layer-pattern ME --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 16
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
    config = replace(config, checkpoint=replace(config.checkpoint, load="run"))
    stored = to_dict(config)
    del stored["model"]["moe_dispatch"]
    metadata = {"config": stored, "progress": {"iteration": 3, "consumed_packs": 3}}
    monkeypatch.setattr(load, "newest_metadata", lambda *_, **__: metadata)
    taken, _, lines = resumed_options(config, ParallelGroups.single())
    assert taken.model.moe_dispatch == expected
    said = "options taken from the checkpoint, so that sums keep their order: --moe-dispatch rows"
    assert (said in lines) == (expected == "rows")
