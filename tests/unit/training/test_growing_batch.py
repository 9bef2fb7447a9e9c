"""Runs whose global batch grows with ``--rampup-batch-size``."""

import json
from pathlib import Path

import numpy as np
import pytest

from megatron_packed.config.exit_codes import ExitCode
from megatron_packed.config.run import RunConfig
from megatron_packed.data.packing.pack_plan import PackPlan
from megatron_packed.data.packing.packer import Packer
from megatron_packed.data.packing.pieces import Pieces
from megatron_packed.training.from_python import train

MODEL = "--hybrid-layer-pattern - --hidden-size 8 --no-isolation-self-test --seq-length 64"
RAMP = "--global-batch-size 6 --rampup-batch-size 2 2 12"
PACKS = [2, 2, 2, 4, 4, 6, 6, 6]
"""Packs of each step of a run of 36 samples: 32 in whole steps."""


@pytest.fixture
def records(tmp_path: Path):
    """Return a function that trains in a folder and returns the records of its steps."""
    data = tmp_path / "documents.jsonl"
    lines = (json.dumps({"text": f"{n} hello " * (1 + n % 7)}) for n in range(1, 60))
    data.write_text("\n".join(lines) + "\n")

    def trained(folder: str, words: str) -> list[dict]:
        seen: list[dict] = []
        place = str(tmp_path / folder)
        argv = [*MODEL.split(), "--data-path", str(data), "--save", place, "--load", place]
        argv += f"--lr 1e-2 --lr-warmup-samples 8 {words}".split()
        assert train(argv, seen.append) is ExitCode.DONE
        return [one for one in seen if "lm_loss" in one]

    return trained


def compared(records: list[dict]) -> list[tuple]:
    fields = ("iteration", "lm_loss", "learning_rate", "real_tokens", "padded_tokens", "grad_norm")
    return [tuple(record[field] for field in fields) for record in records]


def packs_of(records: list[dict], seq_length: int = 64) -> list[int]:
    return [(one["real_tokens"] + one["padded_tokens"]) // seq_length for one in records]


def check_growth(records: list[dict], seq_length: int = 64, begun: int = 0) -> None:
    """Check the packs and the rates of the steps after the first ``begun`` ones."""
    assert packs_of(records, seq_length) == PACKS[begun:]
    before = np.cumsum([0, *PACKS])[begun:-1]
    expected = [1e-2 * min(n / 8, 1 - (n - 8) / (33 - 8)) for n in before]
    assert [record["learning_rate"] for record in records] == pytest.approx(expected)


def test_the_batch_grows_and_the_rate_counts_samples(records, capsys) -> None:
    whole = records("whole", f"{RAMP} --train-samples 33")
    check_growth(whole)
    assert "(grows from 2" in capsys.readouterr().out
    full = "--global-batch-size 6 --train-samples 33"
    constant = records("constant", full)
    assert [record["iteration"] for record in constant] == [1, 2, 3, 4, 5]
    assert compared(records("at once", f"{full} --rampup-batch-size 2 2 0")) == compared(constant)
    assert "(grows" not in capsys.readouterr().out


@pytest.mark.parametrize("stops", [(1,), (2, 4), (3, 5, 6, 7)])
def test_a_resumed_run_goes_on_in_the_middle_of_the_growth(records, capsys, stops) -> None:
    words = f"{RAMP} --train-samples 33"
    whole = compared(records("whole", words))
    said = capsys.readouterr().out
    assert "6 packs a step (grows from 2 over the first 12 samples)" in said
    assert "step 1/8 " in said
    parts = []
    for stop in stops:
        parts += compared(records("parts", f"{words} --exit-interval {stop}"))
    assert len(parts) == stops[-1]
    assert parts + compared(records("parts", words)) == whole


def test_growth_may_be_added_or_left_out_when_a_run_resumes(records) -> None:
    """The next step has the size that the new flags give after the samples so far."""
    begun = "--global-batch-size 2 --train-samples 32"
    records("added", f"{begun} --exit-interval 2")
    added = records("added", f"{RAMP} --train-samples 32")
    assert packs_of(added) == [2, 4, 4, 6, 6, 6]
    records("left", f"{RAMP} --train-samples 32 --exit-interval 4")
    left = records("left", "--global-batch-size 6 --train-samples 32")
    assert [one["iteration"] for one in left] == [5, 6, 7]


@pytest.mark.parametrize("change", ["--seq-length 128", "--micro-batch-size 2"])
def test_a_phase_goes_on_with_the_growth(records, change: str) -> None:
    """The samples of all phases decide the size of a step. The phase begins with its first pack."""
    words = f"{RAMP} --train-samples 33"
    seq_length = 128 if "128" in change else 64
    phases = {}
    for folder, stops in (("whole", ()), ("parts", (4, 6))):
        records(folder, f"{words} --begin-phase short --exit-interval 3")
        longer = f"{words} --begin-phase long {change}"
        lives = [f"{longer} --exit-interval {stop}" for stop in stops]
        phases[folder] = [one for life in (*lives, longer) for one in records(folder, life)]
    phase = phases["whole"]
    check_growth(phase, seq_length, begun=3)
    assert compared(phases["parts"]) == compared(phase)
    fresh = records("fresh", f"--global-batch-size 2 --train-samples 10 {change}")
    tokens = [sum(one["real_tokens"] for one in some) for some in (phase[:2], fresh[:4])]
    assert tokens[0] == tokens[1]


def test_every_layout_trains_on_the_same_packs(tmp_path: Path) -> None:
    data = tmp_path / "x.jsonl"
    data.write_text("{}")
    lengths = np.random.default_rng(3).integers(5, 40, 90)
    pieces = Pieces.cut(lengths, 64, "truncate")
    packer = Packer(slots=64, method="sequential")
    words = f"{MODEL} {RAMP} --data-path {data} --lr 1 --train-samples 50"
    config = RunConfig.from_args(words.split())
    ramp = config.packing.batch_ramp
    made = {"packer": packer, "packs_per_step": 6, "seed": 1}
    alone = PackPlan(pieces, lengths - 1, **made, ramp=ramp)
    shared = PackPlan(pieces, lengths - 1, **made, ramp=ramp, dp_size=2)
    plain = PackPlan(pieces, lengths - 1, **{**made, "packs_per_step": 1})
    first = 0
    for step, count in enumerate(PACKS):
        [packs] = alone.step(step).packs
        assert len(packs) == count == alone.packs_of_step(step)
        stream = [plain.step(first + number).packs[0][0].tolist() for number in range(count)]
        assert sorted(pack.tolist() for pack in packs) == sorted(stream)
        of_ranks = shared.step(step).packs
        assert [len(of_rank) for of_rank in of_ranks] == [count // 2] * 2
        assert sorted(p.tolist() for of_rank in of_ranks for p in of_rank) == sorted(stream)
        assert alone.step(step).global_targets == shared.step(step).global_targets
        first += count
    assert alone.hash == shared.hash
    assert config.last_iteration() == config.last_iteration(alone.origin)
    assert config.last_iteration() == len(PACKS) + (50 - sum(PACKS)) // 6
