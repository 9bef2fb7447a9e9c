"""`benchmarks/offload.py` on the CPU, with a stand-in for capture."""

import copy

import torch

import harness
import offload
from layouts import quick
from offload import FULL_ITERATION, ONE, RECOMPUTE, SIDES, TWO
from support import stand_in

CPU = torch.device("cpu")
COPIES = {
    kind: {
        "per_step": 20.0,
        "copy_ms": [2.5, 2.4, 2.6],
        "gb_per_s": [54.0, 53.0, 55.0],
        "hidden": 0.95,
    }
    for kind in ("DtoH", "HtoD")
}


def test_all_sides_compute_the_same_on_shared_weights():
    result = offload.run(
        quick(offload.MODELS["hybrid1b"]),
        CPU,
        rounds=2,
        impls=offload.IMPLS,
        backend=stand_in.RecordingBackend,
    )
    plain = {"tiny": harness.plain(result)}
    assert list(result["sides"]) == list(SIDES) and list(result["graphs"]) == list(offload.IMPLS)
    assert offload.problems_of(plain) == []
    sides = [
        *result["sides"].values(),
        *(side for found in result["graphs"].values() for side in found.values()),
    ]
    assert len(sides) == len(SIDES) + 2 * len(offload.IMPLS)
    assert all(side["losses"] == sides[0]["losses"] and min(side["losses"]) > 1 for side in sides)
    assert len(set(sides[0]["losses"])) == 2  # The steps use different packs.
    assert [row["kept"] for row in offload.rows_of(plain)] == list(SIDES)
    moved = {name: figures["moved_mib"] for name, figures in result["figures"].items()}
    assert moved == dict.fromkeys(
        (ONE, TWO), 2 * result["layers"] * result["input_mib"]
    )  # float32 on a CPU
    assert [figures["buffers"] for figures in result["figures"].values()] == [1, 2]
    assert len(offload.graph_rows_of(plain)) == 4 and offload.copy_rows_of(plain) == []


def test_what_is_judged():
    side = {"losses": [2.0], "grad_norms": [1.0], "step_ms": [500.0, 490.0, 510.0]}
    of = {name: [1.0, 0.99, 1.01] for name in SIDES}
    sound = {
        "model": {
            "tokens": 32768,
            "layers": 20,
            "input_mib": 128.0,
            "plan_hash": "abc",
            "graphs": {},
            "figures": {},
            "sides": {name: {**side, "of": of} for name in SIDES},
            "copies": {ONE: COPIES, TWO: copy.deepcopy(COPIES)},
            "peaks": {
                name: {"peak_gib": gib} for name, gib in zip(SIDES, (40.0, 12.5, 10.125, 10.25))
            },
        }
    }
    assert offload.misses_of(sound) == offload.problems_of(sound) == []
    rows = offload.rows_of(sound)
    assert [row["inputs moved, freed"] for row in rows] == ["", "", "100 %, 95 %", "100 %, 90 %"]
    assert offload.copy_rows_of(sound)[0]["GB/s"] == "54 [53, 55]"
    wrong = copy.deepcopy(sound)["model"]
    wrong["sides"][TWO] |= {"losses": [2.1], "of": {**of, ONE: [1.02, 1.0, 1.04]}}
    wrong["copies"][TWO]["DtoH"]["per_step"], wrong["copies"][TWO]["HtoD"]["hidden"] = 10.0, 0.5
    wrong["graphs"][FULL_ITERATION] = {
        name: {**side, "of": {RECOMPUTE: [1.04, 1, 2]}} for name in (RECOMPUTE, TWO)
    }
    assert (
        len(offload.misses_of({"model": wrong})) == 4
        and len(offload.problems_of({"model": wrong})) == 1
    )
    wrong["graphs"][FULL_ITERATION] = {"failed": "RuntimeError: no"}
    assert len(offload.problems_of({"model": wrong})) == 2
    assert offload.graph_rows_of({"model": wrong})[0]["kept"] == "RuntimeError: no"
