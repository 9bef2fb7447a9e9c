"""``--all-to-all-backend``: choice, set-up, refusal, and what ``--explain`` and ``plan`` say of it."""

from __future__ import annotations

import shlex
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_packed.config.errors import ConfigError
from megatron_packed.config.exchanged_heads import exchanges_of_run
from megatron_packed.config.parser.parse import parse
from megatron_packed.config.run import RunConfig
from megatron_packed.distributed import symmetric_exchange
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.distributed.symmetric_exchange import staging_bytes
from megatron_packed.explain.capabilities import parallel_capabilities
from megatron_packed.models.equal_exchanges import (
    connect_exchanges,
    exchange_bytes,
    exchange_line,
    uses_symmetric_memory,
)
from support import commands

SHAPE = """--hybrid-layer-pattern M-*E --hidden-size 256 --num-attention-heads 4 --disable-bias-linear
    --normalization RMSNorm --squared-relu --seq-length 2048 --num-experts 4 --mamba-num-groups 2
    --moe-token-dispatcher-type alltoall"""
RUN = "--train-iters 1 --lr 1e-3 --mock-data"
CP2, EP2 = "--context-parallel-size 2", "--expert-model-parallel-size 2"
ZIGZAG = "--cp-comm-type p2p --cp-partition-mode zigzag"
BOUNDED = f"{EP2} --moe-expert-rank-capacity-factor 1.5"
GRAPHS = "--cuda-graph-impl local"
FORCED, AUTO = (f"--all-to-all-backend {name}" for name in ("symmetric_memory", "auto"))
GPU, CPU = torch.device("cuda"), torch.device("cpu")


def config_of(flags: str) -> RunConfig:
    return parse(shlex.split(f"{SHAPE} {RUN} {flags}"), world_size=2)


@pytest.mark.parametrize(
    "flags, wanted",
    [
        ("", {}),
        (EP2, {}),
        (f"{EP2} {GRAPHS}", {"ep": 2}),
        (BOUNDED, {"ep": 2}),
        (f"{BOUNDED} --moe-token-dispatcher-type allgather", {}),
        (CP2, {"cp": 2}),
        (f"{CP2} {BOUNDED}", {"cp": 2, "ep": 2}),
        (f"{CP2} {ZIGZAG} --mamba-cp-comm-type state", {"cp": 2}),
        (f"{CP2} {ZIGZAG} --hybrid-layer-pattern *GE --linear-cp-mode chunkwise", {"cp": 2}),
        (f"{CP2} --cp-comm-type p2p --cp-partition-mode contiguous", {}),
        (f"{CP2} --hybrid-layer-pattern GE --linear-cp-mode chunkwise", {}),
        (f"{CP2} --cp-comm-type p2p --hybrid-layer-pattern *-*E", {}),
    ],
)
def test_exchanges_with_static_sizes(flags: str, wanted: dict[str, int]) -> None:
    assert exchanges_of_run(config_of(flags)) == wanted


def test_auto_uses_symmetric_memory_in_graphs_only() -> None:
    assert not uses_symmetric_memory(config_of(CP2))
    assert not uses_symmetric_memory(config_of(f"{CP2} {AUTO}"))
    assert uses_symmetric_memory(config_of(f"{CP2} {AUTO} {GRAPHS}"))
    assert uses_symmetric_memory(config_of(f"{CP2} {FORCED}"))
    assert exchange_bytes(config_of(f"{CP2} {BOUNDED} {FORCED}")) == 2 * staging_bytes(2)
    assert exchange_bytes(config_of(f"{CP2} {BOUNDED}")) == 0


class Connected:
    """Stand-in for `SymmetricExchange`."""


def model_of() -> Any:
    exchange = {
        axis: SimpleNamespace(exchange=SimpleNamespace(group=axis, memory=None, reason="not set"))
        for axis in ("cp", "ep")
    }
    return SimpleNamespace(**exchange)


def test_a_run_connects_each_group_once_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    groups: list[str] = []
    monkeypatch.setattr(
        symmetric_exchange,
        "connect_exchange",
        lambda group, _: Connected() if not groups.append(group) else None,
    )
    config, model = config_of(f"{CP2} {BOUNDED} {FORCED}"), model_of()
    connect_exchanges(model, config, ParallelGroups.single())
    assert groups == ["cp", "ep"]
    assert isinstance(model.cp.exchange.memory, Connected)
    assert exchange_line(model, config) == (
        "all-to-alls of equal parts: heads and rows for experts are copied through symmetric memory"
    )
    connect_exchanges(model_of(), config_of(f"{CP2} {BOUNDED}"), ParallelGroups.single())
    assert groups == ["cp", "ep"] and exchange_line(model, config_of(CP2)) == ""


def test_auto_falls_back_and_a_forced_backend_is_refused() -> None:
    reason = "symmetric memory needs CUDA GPUs, but the device is cpu"
    model = model_of()
    model.cp.exchange.group = SimpleNamespace(ranks=(0,))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megatron_packed.distributed.symmetric_memory.global_ranks", lambda _: [0])
        config = config_of(f"{CP2} {AUTO} {GRAPHS}")
        # An E layer in graphs exchanges nothing here: its experts are not shared.
        connect_exchanges(model, config, ParallelGroups.single())
        assert model.cp.exchange.memory is None and model.cp.exchange.reason == reason
        assert exchange_line(model, config) == (
            f"all-to-alls of equal parts: heads travel by the collective, because {reason}"
        )
        with pytest.raises(ConfigError) as raised:
            connect_exchanges(model, config_of(f"{CP2} {FORCED}"), ParallelGroups.single())
    (problem,) = raised.value.problems
    assert (problem.option, problem.value) == ("--all-to-all-backend", "symmetric_memory")
    assert problem.rule == reason and problem.cure == "give --all-to-all-backend auto"


def explained(flags: str, device: torch.device) -> tuple[str, str, str] | None:
    rows = parallel_capabilities(config_of(flags), 2, device)
    found = [row for row in rows if row.name == "all-to-alls of equal parts"]
    return (found[0].state, found[0].detail, found[0].fix) if found else None


def test_explain_says_how_equal_parts_travel() -> None:
    assert explained(EP2, GPU) is None
    assert explained(CP2, GPU) == ("off", "heads travel by the collective", "")
    both = f"{CP2} {EP2} {GRAPHS}"
    words = "heads and rows for experts"
    assert explained(both, GPU) == (
        "off",
        f"{words} travel by the collective",
        "--all-to-all-backend auto",
    )
    found = explained(f"{both} {AUTO}", GPU)
    assert found is not None and found[0] == "on"
    assert found[1].startswith(f"{words} are copied through symmetric memory, if the GPUs")
    assert explained(f"{both} {AUTO}", CPU) == (
        "partial",
        f"{words} travel by the collective, because symmetric memory needs CUDA GPUs, but the "
        "device is cpu",
        "",
    )


def test_plan_counts_the_staging_buffers(capsys: pytest.CaptureFixture[str]) -> None:
    found = []
    for flags in (CP2, f"{CP2} {FORCED}"):
        argv = shlex.split(f"plan {SHAPE} {flags} --vocab-size 512 --world-size 2")
        (rank,) = commands.report(capsys, *argv)["ranks"].values()
        found.append(rank["bytes"])
    off, on = found
    assert (off["symmetric memory"], on["symmetric memory"]) == (0, staging_bytes(2))
    assert on["total"] - off["total"] == staging_bytes(2)
