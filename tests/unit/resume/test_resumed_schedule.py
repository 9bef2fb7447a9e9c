"""The schedule of a resumed run: kept by ``--use-checkpoint-opt_param-scheduler``, else a jump of the
learning rate is announced.
"""

import json
import re
import shutil
from pathlib import Path

import pytest

from megatron_packed.checkpoint.run_metadata import RunProgress
from megatron_packed.config.exit_codes import ExitCode
from megatron_packed.config.run import RunConfig
from megatron_packed.config.serialise import to_dict
from megatron_packed.resume.schedule_change import schedule_change
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


CHANGES = {
    "linear": ("linear --train-iters 4", "linear --train-iters 8", "--train-iters (8, was 4)"),
    "cosine": ("cosine --train-iters 4", "cosine --train-iters 8", "--train-iters (8, was 4)"),
    "WSD": (
        "WSD --lr-wsd-decay-iters 3 --train-iters 4",
        "WSD --lr-wsd-decay-iters 3 --train-iters 8",
        "--train-iters (8, was 4)",
    ),
    "fewer steps": (
        "linear --train-iters 16 --exit-interval 3",
        "linear --train-iters 5",
        "--train-iters (5, was 16)",
    ),
    "samples": (
        "cosine --train-samples 16",
        "cosine --train-samples 40",
        "--train-samples (40, was 16)",
    ),
    "epochs": (
        "linear --train-epochs 0.5",
        "linear --train-epochs 3",
        "--train-epochs (3, was 0.5)",
    ),
    "unit": (
        "linear --train-iters 4",
        "linear --train-samples 40",
        "--train-samples (40), not --train-iters (4)",
    ),
    "unit and batch": (
        "linear --train-iters 8 --exit-interval 4",
        "linear --train-samples 64 --global-batch-size 8",
        "--train-samples (64), not --train-iters (8)",
    ),
    "rate": (
        "constant --train-iters 4",
        "constant --train-iters 8 --lr 5e-3",
        "because --lr is 0.005 (was 0.02);",
    ),
    "style": (
        "cosine --train-iters 8 --exit-interval 3",
        "linear --train-iters 8",
        "because --lr-decay-style is linear (was cosine);",
    ),
    "warm-up": (
        "constant --train-iters 8 --lr-warmup-iters 1 --exit-interval 3",
        "constant --train-iters 8 --lr-warmup-iters 5",
        "because --lr-warmup-iters is 5 (was 1);",
    ),
    "warm-up fraction": (
        "constant --lr-warmup-fraction 0.5 --train-iters 4 --exit-interval 2",
        "constant --lr-warmup-fraction 0.5 --train-iters 10",
        "--train-iters (10, was 4);",
    ),
    "two causes": (
        "linear --train-iters 4",
        "linear --train-iters 8 --lr 5e-3",
        "because --lr is 0.005 (was 0.02), and its decay follows --train-iters (8, was 4);",
    ),
}
SENTENCE = re.compile(
    r"schedule has changed since the checkpoint: the learning rate (?:rises|falls) from (\S+) \(step (\d+)\) to "
    r"(\S+) \(step (\d+)\)(?: at once)?, (because .*;) give (.*?)(?: and leave out \S+)? to keep the schedule, "
    r"with which step \d+ has (\S+)\n"
)


@pytest.mark.parametrize("name", CHANGES)
def test_a_jump_of_the_learning_rate_is_announced(steps, capsys, tmp_path, name: str) -> None:
    first, second, cause = CHANGES[name]
    last = steps("run", f"--lr 2e-2 --lr-decay-style {first}")[-1]
    shutil.copytree(tmp_path / "run", tmp_path / "again")
    capsys.readouterr()
    following = steps("run", f"--lr 2e-2 --lr-decay-style {second}")[0]
    before_the_step = re.split(r"^step ", capsys.readouterr().out, flags=re.M)[0]
    said = SENTENCE.search(before_the_step)
    assert said is not None, before_the_step
    assert said.group(1, 2) == (f"{last[2]:.2e}", str(last[0]))
    assert said.group(3, 4) == (f"{following[2]:.2e}", str(following[0]))
    assert cause in said[5]
    # With the cure, the step has the promised rate, and nothing is said.
    kept = steps("again", f"--lr 2e-2 --lr-decay-style {second} {said[6]}")[0]
    assert f"{kept[2]:.2e}" == said[7]
    assert "schedule has changed" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("schedule", "change"),
    [
        ("constant --train-iters 3", "--train-iters 8 --exit-interval 4"),
        ("WSD --lr-wsd-decay-iters 2 --train-iters 8 --exit-interval 3", "--train-iters 9"),
        ("linear --lr-decay-iters 9 --train-iters 3", "--train-iters 8"),
        ("linear --train-iters 8 --exit-interval 3", "--exit-interval 4 --weight-decay 0.3"),
        ("linear --train-iters 8 --exit-interval 3", "--exit-interval 4 --global-batch-size 8"),
        ("cosine --train-samples 32 --exit-interval 3", "--global-batch-size 2 --exit-interval 7"),
        ("linear --train-iters 3", "--train-iters 3"),
        ("linear --train-iters 3", "--train-iters 6 --finetune --save-interval 9"),
    ],
)
def test_nothing_is_said_where_the_learning_rate_does_not_jump(
    steps, capsys, schedule: str, change: str
) -> None:
    steps("run", f"--lr 2e-2 --lr-decay-style {schedule}")
    capsys.readouterr()
    steps("run", f"--lr 2e-2 --lr-decay-style {schedule} {change}")
    assert "schedule has changed" not in capsys.readouterr().out


def test_a_growing_batch_counts_the_samples_of_its_last_step(steps, capsys) -> None:
    ramp = "--lr 2e-2 --rampup-batch-size 1 1 12"
    last = steps("run", f"{ramp} --train-samples 60 --exit-interval 5")[-1]
    capsys.readouterr()
    following = steps("run", f"{ramp} --train-samples 150 --exit-interval 6")[0]
    out = capsys.readouterr().out
    said = SENTENCE.search(out)
    assert said is not None, out
    assert said.group(1, 3) == (f"{last[2]:.2e}", f"{following[2]:.2e}")


def test_a_new_phase_and_an_older_checkpoint() -> None:
    argv = [*MODEL.split(), "--mock-data", "--lr", "1e-2", "--global-batch-size", "4"]
    config = RunConfig.from_args([*argv, "--train-iters", "20"])
    stored = to_dict(RunConfig.from_args([*argv, "--train-iters", "10"]))
    phase = RunProgress(iteration=10, consumed_packs=40, plan_packs=40, plan_samples=40)
    said = schedule_change(config, stored, phase)
    assert said is not None and "from 1.00e-03 (step 10) to 5.00e-03 (step 11) at once" in said
    little = RunConfig.from_args([*argv, "--train-iters", "11"])
    stored_early = RunProgress(iteration=5, consumed_packs=20)
    said_early = schedule_change(little, stored, stored_early)
    assert "falls from 6.00e-03 (step 5) to 5.45e-03 (step 6), because" in said_early
    million = RunConfig.from_args([*argv, "--train-iters", "1000000"])
    assert "--train-iters (1000000, was 10)" in schedule_change(million, stored, phase)
    # Another program's checkpoint has no packs, and an old one may lack options.
    for lacking in ({"packing"}, {"optim"}, {"training"}):
        parts = {name: section for name, section in stored.items() if name not in lacking}
        assert schedule_change(config, parts, phase) is None
    del stored["optim"]["lr_warmup_init"], stored["optim"]["lr_wsd_decay_samples"]
    assert schedule_change(config, stored, phase) == said
    assert schedule_change(config, stored, RunProgress()) is None
    stored["optim"]["lr_decay_style"] = "inverse-square-root"
    assert schedule_change(config, stored, phase) is None


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
