"""A run with ``--use-checkpoint-opt_param-scheduler`` continues the schedule of its checkpoint."""

import json
from pathlib import Path

import pytest

from megatron_packed.config.run import RunConfig
from megatron_packed.training.exit_codes import ExitCode
from megatron_packed.training.from_python import train

MODEL = "--hybrid-layer-pattern - --hidden-size 8 --no-isolation-self-test --seq-length 64"
SCHEDULE = "--lr 1e-2 --min-lr 1e-4 --lr-decay-style cosine --lr-warmup-fraction 0.25"
OTHER = "--lr 5e-3 --lr-decay-style linear --lr-warmup-iters 1 --weight-decay 0.3"
TAKE = "--use-checkpoint-opt_param-scheduler"


@pytest.fixture
def steps(tmp_path: Path):
    """Return a function that trains in a folder and returns the records of its steps."""
    data = tmp_path / "documents.jsonl"
    lines = (json.dumps({"text": "hello " * (1 + n % 7)}) for n in range(1, 40))
    data.write_text("\n".join(lines) + "\n")

    def trained(folder: str, words: str) -> list[tuple[int, float, float]]:
        seen: list[dict] = []
        place = str(tmp_path / folder)
        argv = [*MODEL.split(), "--data-path", str(data), "--global-batch-size", "4"]
        argv += ["--save", place, "--load", place, *words.split()]
        assert train(RunConfig.from_args(argv), seen.append) is ExitCode.DONE
        return [(one["iteration"], one["lm_loss"], one["learning_rate"]) for one in seen]

    return trained


@pytest.mark.parametrize("length", ["--train-iters 8", "--train-samples 32", "--train-epochs 2"])
def test_the_schedule_of_the_checkpoint_counts(steps, capsys, length: str) -> None:
    whole = steps("whole", f"{SCHEDULE} {length}")
    begun = steps("parts", f"{SCHEDULE} {length} --exit-interval 3")
    assert begun == whole[:3]
    capsys.readouterr()
    resumed = steps("parts", f"{OTHER} {length} {TAKE} --exit-interval 6")
    said = capsys.readouterr().out
    assert resumed == whole[3:6]
    assert "schedule of the checkpoint: --lr 0.01 instead of 0.005; --min-lr 0.0001 instead" in said
    assert "--weight-decay 0.01 instead of 0.3" in said
    assert "changed since the checkpoint: --exit-interval 6, was 3\n" in said
    # The checkpoint of the resumed run stores the schedule that it used. A longer run keeps it.
    assert steps("parts", f"{OTHER} --train-iters 999 {TAKE} --exit-interval 8") == whole[6:8]


def test_without_the_flag_or_the_optimizer_the_flags_of_the_run_count(steps) -> None:
    steps("run", f"{SCHEDULE} --train-iters 8 --exit-interval 3")
    with_flag = steps("run", f"{OTHER} --train-iters 8 {TAKE} --no-load-optim --exit-interval 4")
    assert with_flag[0][2] == pytest.approx(5e-3 * (8 - 3) / 7)
    without = steps("run", f"{OTHER} --train-iters 8 --exit-interval 5")
    assert without[0][2] == pytest.approx(5e-3 * (8 - 4) / 7)
