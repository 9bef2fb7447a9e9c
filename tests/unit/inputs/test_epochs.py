"""Length of a run in epochs: its number of steps, its schedule, and its resume."""

from dataclasses import replace
from math import ceil

import numpy as np
import pytest

from megatron_packed.config.errors import ConfigError
from megatron_packed.config.exit_codes import ExitCode
from megatron_packed.config.run import RunConfig
from megatron_packed.config.serialise import from_dict, to_dict
from megatron_packed.data.packing.pack_plan import PackPlan
from megatron_packed.data.packing.packer import Packer
from megatron_packed.data.packing.pieces import Pieces
from megatron_packed.inputs.plan_packs import epochs_sentences, with_epochs
from megatron_packed.training.from_python import train
from support.json_lines import write_texts
from support.run_configs import run_config

MODEL = "--hybrid-layer-pattern - --hidden-size 8 --no-isolation-self-test --seq-length 64"


def plan_of(documents: int = 90, packs_per_step: int = 4) -> PackPlan:
    """Return a plan whose epochs have different numbers of packs."""
    lengths = np.random.default_rng(3).integers(5, 40, documents)
    pieces = Pieces.cut(lengths, 64, "truncate")
    packer = Packer(slots=64, method="sequential")
    return PackPlan(pieces, lengths - 1, packer=packer, packs_per_step=packs_per_step, seed=1)


def in_epochs(epochs: float) -> RunConfig:
    config = run_config({"cuda_graph_impl": "none"})
    return replace(config, training=replace(config.training, train_iters=None, train_epochs=epochs))


@pytest.mark.parametrize("epochs", [0.7, 1, 3, 2.5])
def test_the_steps_of_a_run_cover_its_epochs(epochs: float) -> None:
    """The steps are the fewest that train on all packs of the epochs, also after a second call."""
    plan, counted = plan_of(), plan_of()
    sizes = [len(counted.epoch(epoch)) for epoch in range(4)]
    assert len(set(sizes)) > 1  # otherwise one epoch's size would do for all
    whole = int(epochs)
    packs = sum(sizes[:whole]) + ceil(round((epochs - whole) * sizes[whole], 6))
    config = with_epochs(in_epochs(epochs), plan)
    assert config.last_iteration() == ceil(packs / 4) == config.decay_iters
    assert with_epochs(config, plan) == config == with_epochs(from_dict(to_dict(config)), plan)
    assert [plan.epoch(epoch).order.tolist() for epoch in (0, 1)] == [
        counted.epoch(epoch).order.tolist() for epoch in (0, 1)
    ]
    [line] = epochs_sentences(config, plan)
    assert f"--train-epochs {epochs:g} is {ceil(packs / 4)} steps: {packs} packs." in line
    assert ("of the next pack" in line) == bool(packs % 4)


def test_options_that_do_not_fit_the_steps_are_refused_after_packing() -> None:
    """The warm-up is compared with the number of steps, and another number of steps is refused."""
    config = in_epochs(1)
    config = replace(config, optim=replace(config.optim, lr_warmup_iters=500))
    with pytest.raises(ConfigError, match=r"--lr-warmup-iters 500: .*\(--train-epochs\)"):
        with_epochs(config, plan_of())
    config = with_epochs(in_epochs(1), plan_of())
    with pytest.raises(ConfigError, match=r"--train-epochs 1: .* but --train-iters is"):
        with_epochs(config, plan_of(documents=300))


def test_a_run_in_epochs_is_the_run_of_its_steps(tmp_path, capsys) -> None:
    """Losses, rates and resumes equal those of --train-iters, and more epochs go on."""
    data = tmp_path / "documents.jsonl"
    write_texts(data, ("hello " * (1 + n % 7) for n in range(1, 40)))

    def losses(folder: str, *length: str) -> list[tuple[int, float, float]]:
        seen: list[dict] = []
        words = [*MODEL.split(), "--data-path", str(data), "--lr", "1e-2", "--lr-warmup-fraction"]
        place = str(tmp_path / folder)
        words += ["0.25", "--global-batch-size", "4", "--save", place, "--load", place, *length]
        assert train(RunConfig.from_args(words), seen.append) is ExitCode.DONE
        return [(one["iteration"], one["lm_loss"], one["learning_rate"]) for one in seen]

    whole = losses("whole", "--train-epochs", "2")
    said = capsys.readouterr().out
    assert f"--train-epochs 2 is {len(whole)} steps" in said and f"step 1/{len(whole)} " in said
    assert losses("steps", "--train-iters", str(len(whole))) == whole
    parts = losses("parts", "--train-epochs", "2", "--exit-interval", "3")
    assert parts + losses("parts", "--train-epochs", "2") == whole
    capsys.readouterr()
    assert losses("parts", "--train-epochs", "2") == []
    assert f"--train-epochs 2 (step {len(whole)}) is reached" in capsys.readouterr().out
    assert losses("parts", "--train-epochs", "3")[0][0] == len(whole) + 1
    assert "changed since the checkpoint: --train-epochs 3.0, was 2.0\n" in capsys.readouterr().out
