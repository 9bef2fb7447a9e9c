"""`benchmarks/layouts.py`: layouts are compared with one process, and exchanges are measured."""

import json
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import layouts

ROOT = Path(__file__).parents[3]
FOUND = {"loss": [2.0, 1.0], "grad_norm": [1.0, 0.5], "tokens_per_second_per_gpu": 100.0}


def test_two_processes_do_what_one_does(tmp_path, quick_programs):
    options = "--quick --device cpu --models hybrid1b_moe --layouts"
    command = [
        *(quick_programs / "torchrun", "--nproc_per_node", "2", "benchmarks/layouts.py"),
        *(*options.split(), "tp2 sp overlap", "ep2 allgather", "--results", tmp_path),
    ]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHON_EXEC": str(quick_programs / "python"),
        },
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, (
        done.stdout[-2000:] + done.stderr[-8000:]
    )  # torchrun's own error summary takes 3,000 characters
    found = json.loads((tmp_path / "layouts_2_hybrid1b_moe.json").read_text())["results"][
        "hybrid1b_moe"
    ]["layouts"]
    assert list(found) == [layouts.ONE, "tp2 sp overlap", "ep2 allgather"]
    for one in found.values():
        assert len(one["loss"]) == layouts.QUICK_STEPS and one["loss"][-1] < one["loss"][0]
        assert one["loss_difference"] < 1e-5 and one["grad_norm_difference"] < 1e-5


def test_names_of_layouts_say_what_overlaps():
    """Results of before keep their names, and mean the same options."""
    words = {"overlap_grad_reduce": "grad-reduce", "overlap_param_gather": "param-gather"}
    for world, named in layouts.LAYOUTS.items():
        for name, options in named.items():
            for option, word in words.items():
                assert options.get(option, False) == (word in name), name
        assert not layouts.EARLIER_NAMES.keys() & named.keys()
        for file in (ROOT / "benchmarks/results").glob(f"layouts_{world}_*.json"):
            for model in json.loads(file.read_text())["results"].values():
                names = model["layouts"].keys() - {layouts.ONE}
                assert names <= layouts.recorded_layouts(world).keys(), file
    recorded = layouts.recorded_layouts(2)
    for old, new in layouts.EARLIER_NAMES.items():
        assert recorded[old] == recorded[new] == layouts.LAYOUTS[2][new]


def test_packs_are_the_same_for_every_layout_and_need_no_padding():
    c = layouts.quick(layouts.MODELS["hybrid1b"])
    steps = layouts.steps_of(c, 3, 2, torch.device("cpu"))
    for packs in steps:
        for pack in packs:
            assert (
                pack.num_real_tokens == c["T"]
                and (pack.packed.cu_seqlens_cpu % layouts.ALIGNMENT == 0).all()
            )
        assert sum(pack.num_target_tokens for pack in packs) == pytest.approx(
            1 / packs[0].scales[0].item(), rel=1e-6
        )
    assert not torch.equal(steps[0][0].tokens, steps[1][0].tokens)


def test_the_worst_step_counts():
    found = layouts.compared({**FOUND, "loss": [2.0, 1.1]}, FOUND)
    assert found["loss_difference"] == pytest.approx(0.1) and found["grad_norm_difference"] == 0.0
    assert found["scaling"] == 1.0


def event(name, start, end):
    return SimpleNamespace(name=name, time_range=SimpleNamespace(start=start, end=end))


def test_an_exchange_is_exposed_while_no_kernel_computes():
    """Times of events are in microseconds, the result in milliseconds of one of two steps."""
    events = [
        event("nvjet_tst_128x256", 0, 4_000),
        event("ncclDevKernel_AllGather_RING_LL", 2_000, 6_000),  # 2 ms under the product
        event("Memcpy PtoP (Device -> Device)", 7_000, 8_000),
        event("void barrier_kernel(unsigned int**, unsigned long)", 8_000, 9_000),
        event("Memcpy HtoD (Pinned -> Device)", 9_000, 9_500),
        event("_chunk_scan_fwd_kernel", 9_000, 10_000),
    ]
    assert layouts.exchange_ms(events, 2) == {
        "exchange_ms": 3.0,
        "exposed_ms": 2.0,
        "idle_ms": 0.5,
        "barriers": 0.5,
    }
    assert sum(layouts.exposed_by_name(events, 2).values()) == 2.0


def test_exposed_time_of_each_exchange():
    """Kernels that overlap and follow each other cover parts of exchanges, at both ends and inside."""
    events = [
        event("ncclDevKernel_AllGather", 0, 10_000),
        event("gemm", 1_000, 3_000),
        event("norm", 2_000, 4_000),
        event("ncclDevKernel_ReduceScatter", 3_000, 7_000),
        event("gemm", 6_000, 12_000),
        event("ncclDevKernel_ReduceScatter", 11_000, 14_000),
    ]
    assert layouts.exposed_by_name(events, 1) == {
        "ncclDevKernel_ReduceScatter": 4.0,
        "ncclDevKernel_AllGather": 3.0,
    }
