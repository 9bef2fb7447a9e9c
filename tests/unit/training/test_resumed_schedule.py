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
def records(tmp_path: Path):
    """Return a function that trains in a folder and returns the records of its steps."""
    data = tmp_path / "documents.jsonl"
    lines = (json.dumps({"text": "hello " * (1 + n % 7)}) for n in range(1, 40))
    data.write_text("\n".join(lines) + "\n")

    def trained(folder: str, words: str) -> list[dict]:
        seen: list[dict] = []
        place = str(tmp_path / folder)
        argv = [*MODEL.split(), "--data-path", str(data), "--global-batch-size", "4"]
        argv += ["--save", place, "--load", place, *words.split()]
        assert train(RunConfig.from_args(argv), seen.append) is ExitCode.DONE
        return seen

    return trained


@pytest.fixture
def steps(records):
    """Return a function that trains and returns iteration, loss and learning rate of each step."""
    return lambda *run: [
        (one["iteration"], one["lm_loss"], one["learning_rate"]) for one in records(*run)
    ]


@pytest.fixture
def decays(records):
    """Return a function that trains and returns loss and logged weight decay of each step."""
    return lambda *run: [(one["lm_loss"], one.get("weight_decay")) for one in records(*run)]


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


RISE = "--weight-decay-incr-style linear --start-weight-decay 0.0 --end-weight-decay 0.8"


@pytest.mark.parametrize("length", ["--train-iters 8", "--train-samples 32", "--train-epochs 2"])
def test_a_rising_weight_decay_is_logged_and_continues(decays, length: str) -> None:
    """A resumed run has the weight decays and losses of a run that was not stopped."""
    whole = decays("whole", f"{SCHEDULE} {RISE} {length}")
    assert [decay for _, decay in whole] == pytest.approx([0.1 * step for step in range(8)])
    begun = decays("parts", f"{SCHEDULE} {RISE} {length} --exit-interval 3")
    assert begun == whole[:3]
    assert decays("parts", f"{SCHEDULE} {RISE} {length} --exit-interval 5") == whole[3:5]
    # The schedule of the checkpoint includes the length of the rise.
    assert decays("parts", f"{OTHER} --train-iters 999 {TAKE} --exit-interval 8") == whole[5:]


def test_the_weight_decay_of_each_step_counts(decays) -> None:
    rising = decays("rising", f"{SCHEDULE} {RISE} --train-iters 8")
    constant = decays("constant", f"{SCHEDULE} --weight-decay 0 --train-iters 8")
    assert [decay for _, decay in constant] == [None] * 8
    # The first step has weight decay 0. The effect of the second step is in the third loss.
    losses = [[loss for loss, _ in seen] for seen in (rising, constant)]
    assert losses[0][:2] == losses[1][:2] and losses[0][4:] != losses[1][4:]


def test_a_checkpoint_without_a_rise_keeps_its_constant_weight_decay(decays, capsys) -> None:
    decays("run", f"{SCHEDULE} --weight-decay 0.2 --train-iters 8 --exit-interval 3")
    capsys.readouterr()
    resumed = decays("run", f"{OTHER.replace('--weight-decay 0.3', RISE)} --train-iters 8 {TAKE}")
    assert {decay for _, decay in resumed} == {None}
    assert "--weight-decay-incr-style constant instead of linear" in capsys.readouterr().out
