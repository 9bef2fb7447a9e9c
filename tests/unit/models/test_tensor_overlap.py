"""``--tp-comm-overlap``: what runs under products, what ``--explain`` and ``plan`` say of it."""

from __future__ import annotations

import dataclasses
import shlex

import pytest
import torch

from megatron_packed.config.idle_options import without_effect
from megatron_packed.config.parser.parse import parse
from megatron_packed.config.resumed_options import overlap_as_stored
from megatron_packed.config.run import RunConfig
from megatron_packed.config.sections import collectives
from megatron_packed.config.serialise import to_dict
from megatron_packed.distributed.sequence_parallel_products import NO_OVERLAP, TensorOverlap
from megatron_packed.explain.capabilities import parallel_capabilities
from megatron_packed.models.tensor_overlap import overlap_of, overlap_words, symmetric_bytes
from support import commands

SHAPE = """--hybrid-layer-pattern M-*- --hidden-size 256 --num-attention-heads 4 --disable-bias-linear
    --normalization RMSNorm --squared-relu --seq-length 2048"""
RUN = "--train-iters 1 --lr 1e-3 --mock-data"
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel --bf16"
DEFAULT = TensorOverlap(all_gather=True, reduce_scatter=True, bulk_dgrad=True, bulk_wgrad=True)
GPU = torch.device("cuda")


def config_of(flags: str) -> RunConfig:
    return parse(shlex.split(f"{SHAPE} {RUN} {flags}"), world_size=2)


@pytest.mark.parametrize(
    "flags, wanted",
    [
        (f"{TP2} --tp-comm-overlap", DEFAULT),
        (f"{TP2}", NO_OVERLAP),
        (
            f"{TP2} --tp-comm-overlap --disable-tp-comm-overlap-ag --no-tp-comm-overlap-rs",
            TensorOverlap(bulk_dgrad=True, bulk_wgrad=True),
        ),
        (
            f"{TP2} --tp-comm-overlap --disable-tp-comm-bulk-dgrad --disable-tp-comm-bulk-wgrad "
            "--tp-comm-overlap-rs-dgrad",
            TensorOverlap(all_gather=True, reduce_scatter=True, reduce_scatter_dgrad=True),
        ),
        ("--tensor-model-parallel-size 2 --tp-comm-overlap", NO_OVERLAP),
        (f"{TP2} --tp-comm-overlap --lora-rank 4", NO_OVERLAP),
        (f"{TP2} --tp-comm-overlap --lora-rank 4 --lora-target-modules attention", DEFAULT),
        ("--sequence-parallel --tp-comm-overlap", NO_OVERLAP),
    ],
)
def test_flags_of_megatron_choose_the_collectives(flags: str, wanted: TensorOverlap) -> None:
    config = config_of(flags)
    assert overlap_of(config) == wanted
    idle = "parallel.tp_comm_overlap" in without_effect(config, 2)
    assert idle == (config.parallel.tp_comm_overlap is True and wanted == NO_OVERLAP)


def test_layers_of_transformer_engine_run_their_own_collectives() -> None:
    config = config_of(f"{TP2} --tp-comm-overlap")
    # The parser refuses this flag on a machine without the package.
    training = dataclasses.replace(config.training, transformer_impl="transformer_engine")
    config = dataclasses.replace(config, training=training)
    assert overlap_of(config) == NO_OVERLAP
    assert "parallel.tp_comm_overlap" in without_effect(config, 2)


def explained(flags: str, device: torch.device) -> tuple[str, str, str]:
    rows = parallel_capabilities(config_of(flags), 2, device)
    (row,) = (row for row in rows if row.name == "tensor-parallel overlap")
    return row.state, row.detail, row.fix


def test_explain_says_whether_it_is_on_and_why_not() -> None:
    bulk = "under another product: all-gather for dW, reduce-scatter of dX"
    fused = "fused with products: all-gather, reduce-scatter"
    on = f"{TP2} --tp-comm-overlap"
    assert explained(on, GPU) == (
        "on",
        f"{fused}; {bulk}; fused if the GPUs of the ranks can access each other's memory",
        "",
    )
    state, reason, _ = explained(on, torch.device("cpu"))
    assert state == "partial" and reason == (
        f"{bulk}; not fused with products: all-gather, reduce-scatter, because symmetric memory needs "
        "CUDA GPUs, but the device is cpu"
    )
    assert explained(TP2, GPU) == (
        "off",
        "collectives and products run one after the other; --tp-comm-overlap would make eager steps "
        "slower",
        "",
    )
    assert explained(f"{TP2} --cuda-graph-impl local", GPU)[::2] == ("off", "--tp-comm-overlap")
    without_rows = "--tensor-model-parallel-size 2 --tp-comm-overlap"
    assert explained(without_rows, GPU)[:2] == (
        "off",
        "without --sequence-parallel no rows are gathered or scattered",
    )
    assert overlap_words(TensorOverlap()) == "every collective is switched off"


@pytest.fixture
def by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "OVERLAPS_BY_DEFAULT", True)


GRAPHS = f"{TP2} --cuda-graph-impl local"


@pytest.mark.usefixtures("by_default")
@pytest.mark.parametrize(
    "flags, wanted",
    [
        (GRAPHS, DEFAULT),
        (f"{GRAPHS} --no-tp-comm-overlap", NO_OVERLAP),
        (TP2, NO_OVERLAP),
        (f"{TP2} --tp-comm-overlap", DEFAULT),
        (GRAPHS.replace("--bf16", ""), NO_OVERLAP),
        (GRAPHS.replace("--sequence-parallel", ""), NO_OVERLAP),
        (
            f"{GRAPHS} --tp-comm-overlap-rs-dgrad",
            dataclasses.replace(DEFAULT, reduce_scatter_dgrad=True),
        ),
    ],
)
def test_the_default_is_on_where_it_is_faster(flags: str, wanted: TensorOverlap) -> None:
    config = config_of(flags)
    if wanted.reduce_scatter_dgrad:
        wanted = dataclasses.replace(wanted, bulk_wgrad=True)
        assert not without_effect(config, 2)
    assert overlap_of(config) == wanted


@pytest.mark.usefixtures("by_default")
def test_explain_has_the_reason_of_the_default() -> None:
    state, detail, fix = explained(GRAPHS, GPU)
    assert (state, fix) == ("on", "")
    assert "; by default, because steps in graphs were measured to be faster; fused if" in detail
    assert explained(GRAPHS, torch.device("cpu")) == (
        "off",
        "collectives and products run one after the other, because symmetric memory needs CUDA GPUs, "
        "but the device is cpu",
        "",
    )


@pytest.mark.usefixtures("by_default")
def test_a_resumed_run_keeps_the_sums_of_its_checkpoint() -> None:
    config = config_of(GRAPHS)
    old = to_dict(config_of(f"{GRAPHS} --no-tp-comm-overlap"))
    kept, flags = overlap_as_stored(config, old)
    assert flags == ["--no-tp-comm-overlap"] and overlap_of(kept) == NO_OVERLAP
    for same, stored in (
        (config, to_dict(config)),
        (config_of(f"{GRAPHS} --tp-comm-overlap"), old),
        (config_of(TP2), old),
        (config_of("--bf16 --cuda-graph-impl local"), old),
    ):
        assert overlap_as_stored(same, stored) == (same, [])


def planned(capsys: pytest.CaptureFixture[str], flags: str) -> dict[str, int]:
    argv = shlex.split(f"plan {SHAPE} {flags} --vocab-size 512 --world-size 2")
    (rank,) = commands.report(capsys, *argv)["ranks"].values()
    found: dict[str, int] = rank["bytes"]
    return found


def test_plan_counts_the_symmetric_memory(capsys: pytest.CaptureFixture[str]) -> None:
    """A rank of two has four times its rows, also for collectives in bulk alone."""
    off, on = planned(capsys, TP2), planned(capsys, f"{TP2} --tp-comm-overlap")
    rows = 2048 // 2 * 256 * 2
    assert (off["symmetric memory"], on["symmetric memory"]) == (0, 4 * rows)
    assert on["total"] - off["total"] >= 4 * rows
    bulk = planned(
        capsys, f"{TP2} --tp-comm-overlap --disable-tp-comm-overlap-ag --disable-tp-comm-overlap-rs"
    )
    assert bulk["symmetric memory"] == 4 * rows
    assert symmetric_bytes(config_of("--tp-comm-overlap"), torch.bfloat16) == 0
    wide = config_of("--tensor-model-parallel-size 2 --sequence-parallel --tp-comm-overlap")
    assert symmetric_bytes(wide, torch.float32) == 8 * rows
    assert symmetric_bytes(wide, torch.float64) == 0


def test_deterministic_products_on_two_streams_have_two_workspaces(
    capsys: pytest.CaptureFixture[str],
) -> None:
    one, two = (
        planned(capsys, f"{TP2} --deterministic-mode {flag}")["cuBLAS workspaces"]
        for flag in ("", "--tp-comm-overlap")
    )
    assert two == 2 * one > 0
