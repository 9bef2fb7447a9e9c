"""Runs with multi-token prediction: losses in the log, their normalisation, and exact resume."""

import shutil

import numpy as np
import pytest

from megatron_packed.config.run import RunConfig
from megatron_packed.distributed.groups import ParallelGroups
from megatron_packed.packed.micro_batch import MicroBatch
from megatron_packed.training.build_job import build_job
from megatron_packed.training.from_python import train
from support import plain_model
from support.json_lines import read_lines

VOCAB = 61
FLAGS = f"""--hybrid-layer-pattern M*/*E/*E --hidden-size 32 --num-attention-heads 4
    --ffn-hidden-size 48 --squared-relu --disable-bias-linear --normalization RMSNorm
    --mamba-num-heads 4 --mamba-num-groups 2 --mamba-head-dim 8 --mamba-state-dim 8 --mamba-chunk-size 8
    --num-experts 4 --moe-ffn-hidden-size 16 --moe-aux-loss-coeff 0 --init-method-std 0.2
    --mtp-loss-scaling-factor 0.5 --seq-length 64 --global-batch-size 3 --train-iters 4 --lr 1e-2
    --mock-data --tokenizer-type NullTokenizer --vocab-size {VOCAB} --device cpu
    --no-isolation-self-test --save-interval 2"""


def config_of(folder, *more):
    files = ["--save", str(folder / "saved"), "--log-jsonl", str(folder / "log.jsonl")]
    return RunConfig.from_args([*FLAGS.split(), *files, *more])


def steps(folder):
    lines = read_lines(folder / "log.jsonl")
    names = ("iteration", "lm_loss", "mtp_1_loss", "mtp_2_loss", "grad_norm")
    return [[line[name] for name in names] for line in lines if "lm_loss" in line]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return the folder of a run, and the documents of each pack in the order of training."""
    folder, packs = tmp_path_factory.mktemp("run"), []
    build = MicroBatch.build.__func__

    def recorded(cls, documents, *args, **options):
        if any(np.any(tokens) for tokens, _ in documents):  # not the pack of a planned rank
            packs.append([(np.array(tokens), mask) for tokens, mask in documents])
        return build(cls, documents, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MicroBatch, "build", classmethod(recorded))
        train(config_of(folder))
    return folder, packs


def test_losses_are_means_over_the_targets_of_the_step(run):
    """Losses of the first step equal those of a loop over the documents of its three packs."""
    folder, packs = run
    model = build_job(config_of(folder), ParallelGroups.single(), VOCAB).model
    documents = [
        (tokens.astype(np.int64), np.ones(len(tokens), bool) if mask is None else mask)
        for pack in packs[:3]
        for tokens, mask in pack
    ]
    assert len(documents) > 3
    wanted, _ = plain_model.run_plain_depths(model, documents, VOCAB)
    assert steps(folder)[0][1:4] == pytest.approx(wanted, rel=1e-5)
    losses = np.array(steps(folder))[:, 1:4]
    assert losses.shape == (4, 3) and (losses[-1] < losses[0]).all()


def test_a_resumed_run_has_the_losses_of_an_uninterrupted_run(run, tmp_path, capsys):
    folder, _ = run
    shutil.copytree(folder, tmp_path / "again")
    shutil.rmtree(tmp_path / "again" / "saved" / "step_00000004")
    train(config_of(tmp_path / "again", "--load", str(tmp_path / "again" / "saved")))
    assert steps(tmp_path / "again") == steps(folder)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    assert len(lines) == 2 and all(" | mtp loss " in line for line in lines)
