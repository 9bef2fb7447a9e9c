"""Checkpoints of runs with ``--lora-rank``: they hold adapters alone, and name their base."""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_packed.checkpoint.errors import CheckpointError
from megatron_packed.checkpoint.load import load_checkpoint, newest_checkpoint
from megatron_packed.checkpoint.manifest import read_manifest
from megatron_packed.checkpoint.read_tensors import read_tensor
from megatron_packed.checkpoint.sealed_json import seal, unseal
from megatron_packed.checkpoint.tensor_shard import whole_tensors
from megatron_packed.cli.main import main
from megatron_packed.config.errors import ConfigError
from megatron_packed.config.exit_codes import ExitCode
from megatron_packed.config.parser.parse import parse_or_exit
from megatron_packed.resume.stored_options import stored_options
from megatron_packed.training.from_python import train
from megatron_packed.training.trained_model import TrainedModel
from support.explained import explain
from support.json_lines import write_texts

MODEL = "--hybrid-layer-pattern M*-G --hidden-size 16 --ffn-hidden-size 24 --num-attention-heads 2"
MODEL += " --mamba-head-dim 8 --mamba-num-groups 1 --mamba-state-dim 8 --linear-num-key-heads 1"
MODEL += " --linear-num-value-heads 2 --linear-key-head-dim 8 --linear-value-head-dim 8 --swiglu"
MODEL += " --no-isolation-self-test --seq-length 64 --vocab-size 300 --mock-data --lr 1e-2"
MODEL += " --tokenizer-type ByteTokenizer --device cpu --global-batch-size 2 --bf16"
LORA = ["--lora-rank", "2", "--lora-modules-to-save", "final_norm.*"]


def run(folder: Path, *flags: str, **options: Any) -> ExitCode:
    """Train with checkpoints in ``folder``, and resume what is there."""
    return train([*MODEL.split(), "--save", str(folder), *flags], **options)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a base, and adapters of it after 4 steps, saved at steps 2 and 4."""
    root = tmp_path_factory.mktemp("made")
    assert run(root / "base", train_iters=1) is ExitCode.DONE
    start = ["--load", str(root / "base"), "--finetune"]
    assert (
        run(root / "lora", *start, *LORA, train_iters=4, save_interval=2, lr=0.1) is ExitCode.DONE
    )
    return root


def tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    names = read_manifest(checkpoint).tensors
    return {name: read_tensor(checkpoint, name) for name in names}


def edit(folder: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    """Change the metadata of each checkpoint in a folder, with valid seals; return the folder."""
    for path in folder.glob("step_*/manifest.json"):
        fields = unseal(path.read_bytes(), path)
        change(fields["metadata"])
        path.write_bytes(seal(fields))
    return folder


def moved(made: Path, folder: Path) -> Path:
    """Return a copy of the adapters, of which the base is not where they found it."""
    copy = shutil.copytree(made / "lora", folder)
    return edit(copy, lambda metadata: metadata["adapters"].update(path=str(folder / "gone")))


def same(one: Path, other: Path, *, kinds: tuple[str, ...] = ("",)) -> bool:
    """Return whether two checkpoints hold equal tensors with these beginnings of names."""
    first, second = (
        {name: tensor for name, tensor in tensors(path).items() if name.startswith(kinds)}
        for path in (one, other)
    )
    return first.keys() == second.keys() and all(
        torch.equal(tensor, second[name]) for name, tensor in first.items()
    )


def test_a_checkpoint_holds_what_is_trained(made: Path) -> None:
    manifest = read_manifest(newest_checkpoint(made / "lora"))
    model = {name for name in manifest.tensors if name.startswith("model/")}
    whole = {"model/final_norm.weight", "model/final_norm.bias"}
    assert len(model) == 2 * 8 + 2 and {name for name in model if ".lora." not in name} == whole
    of = {name.partition("/")[2] for name in model}
    kinds = ("master", "exp_avg", "exp_avg_sq")
    optimizer = {f"optimizer/{kind}/{name}" for kind in kinds for name in of}
    others = manifest.tensors.keys() - model - optimizer
    assert {name for name in others if not name.startswith("rng/")} == {"optimizer/step"}
    base = manifest.metadata["adapters"]
    assert base["path"] == str(newest_checkpoint(made / "base")) and len(base["hash"]) == 32


def test_a_resumed_run_equals_a_run_without_a_stop(made: Path, tmp_path: Path, capsys: Any) -> None:
    """Weights, masters and moments are equal bit for bit after two steps, a stop and two steps."""
    root = tmp_path / "run"
    shutil.copytree(made / "lora" / "step_00000002", root / "step_00000002")
    assert run(root, "--load", str(root), *LORA, train_iters=4, lr=0.1) is ExitCode.DONE
    said = capsys.readouterr().out
    assert "resuming from" in said and f"adapters of {made / 'base'}/step_00000001 (hash " in said
    assert same(made / "lora" / "step_00000004", root / "step_00000004")
    assert not same(root / "step_00000002", root / "step_00000004", kinds=("model/",))


def test_a_moved_base_is_found_by_its_flag(made: Path, tmp_path: Path) -> None:
    adapters = moved(made, tmp_path / "lora")
    resume = [*LORA, "--load", str(adapters)]
    with pytest.raises(CheckpointError, match=r"has no checkpoint; give --pretrained-checkpoint"):
        run(adapters, *resume, train_iters=5)
    base = ["--pretrained-checkpoint", str(made / "base")]
    assert run(adapters, *resume, *base, train_iters=5) is ExitCode.DONE
    stored = read_manifest(newest_checkpoint(adapters)).metadata["adapters"]
    assert stored["path"] == str(made / "base" / "step_00000001")  # where it is now


def test_another_base_is_refused_with_both_names(made: Path, tmp_path: Path) -> None:
    assert run(tmp_path / "other", train_iters=1, seed=5) is ExitCode.DONE
    other = str(tmp_path / "other")
    load = ["--load", str(made / "lora"), "--pretrained-checkpoint", other]
    found = rf"holds adapters of another base: {made}/base/step_00000001 \(hash \w+\), and this "
    found += rf"run has {other}/step_00000001 \(hash \w+\); give --pretrained-checkpoint"
    with pytest.raises(CheckpointError, match=found):
        run(tmp_path / "new", *load, *LORA, train_iters=5)
    start = ["--load", other, "--finetune", "--load-adapter", str(made / "lora"), *LORA]
    with pytest.raises(CheckpointError, match=found):
        run(tmp_path / "new", *start, train_iters=5)
    with pytest.raises(
        CheckpointError, match="holds adapters alone, and a base needs whole weights"
    ):
        run(tmp_path / "new", *load[:3], str(made / "lora"), *LORA, train_iters=5)


def test_adapters_begin_a_new_run(made: Path, tmp_path: Path, capsys: Any) -> None:
    adapters, base = str(made / "lora"), str(made / "base")
    starts = {
        "a": ["--load", adapters, "--finetune", *LORA],
        "b": ["--load", base, "--finetune", "--load-adapter", adapters, *LORA],
        "c": ["--pretrained-checkpoint", base, "--load-adapter", adapters, *LORA],
        "d": ["--load-adapter", adapters, *LORA],
    }
    for name, flags in starts.items():
        assert run(tmp_path / name, *flags, train_iters=1, lr=0.0) is ExitCode.DONE
        said = capsys.readouterr()
        assert f"weights of {adapters}/step_00000004 (iteration 4)" in said.out
        new = tmp_path / name / "step_00000001"
        assert same(made / "lora" / "step_00000004", new, kinds=("model/",))
    with pytest.raises(CheckpointError, match="--load-adapter names whole weights; give a folder"):
        run(tmp_path / "e", "--load-adapter", base, *LORA, train_iters=1)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            "--lora-rank 4 --lora-modules-to-save final_norm.*",
            "--lora-rank 4, was 2; give --lora-rank 2 to use them",
        ),
        (
            "--lora-rank 2 --lora-modules-to-save final_norm.* --lora-alpha 8",
            "--lora-alpha 8.0, was 32.0; leave out --lora-alpha to",
        ),
        (
            "--lora-rank 2 --lora-modules-to-save final_norm.* --lora-rslora",
            "--lora-rslora on, was off; leave out --lora-rslora to",
        ),
        (
            "--lora-rank 2 --lora-modules-to-save final_norm.* --lora-target-modules mamba",
            "mamba, was all-linear; give --lora-targ",
        ),
        (
            "",
            "give --lora-rank 2 --lora-modules-to-save 'final_norm.*' to use them, or merge them",
        ),
    ],
)
def test_other_options_are_refused_with_the_cure(
    made: Path, tmp_path: Path, flags: str, words: str
) -> None:
    for more in ([], ["--finetune"]):
        load = ["--load", str(made / "lora"), *more]
        with pytest.raises(CheckpointError) as error:
            run(tmp_path / "run", *load, *flags.split(), train_iters=5)
        assert "holds adapters of other trained parameters: " in str(error.value)
        assert words in str(error.value)


def test_whole_weights_are_not_restarted_in_silence(made: Path, tmp_path: Path) -> None:
    base = str(made / "base")
    with pytest.raises(
        CheckpointError, match=r"holds whole weights, and .* give --finetune to start"
    ):
        run(tmp_path / "run", "--load", base, *LORA, train_iters=5)
    with pytest.raises(CheckpointError, match=r"is the folder of the base .* give --save another"):
        run(made / "base", "--load", base, "--finetune", *LORA, train_iters=5)
    data = tmp_path / "lines.jsonl"
    write_texts(data, (f"{n:02d} hello" for n in range(40)))
    words = ["--data-path" if word == "--mock-data" else word for word in MODEL.split()]
    words.insert(words.index("--data-path") + 1, str(data))
    for start in ([], ["--save", str(tmp_path / "a"), "--load", str(tmp_path / "a")]):
        with pytest.raises(ConfigError, match="--lora-rank 2: trains adapters of existing weights"):
            train([*words, *LORA, *start], train_iters=1)


def test_adapters_of_random_weights_are_found_by_the_seed(made: Path, tmp_path: Path) -> None:
    """The base of --mock-data may be random: it is made again."""
    root = tmp_path / "run"
    resume = ["--load", str(root), *LORA]
    assert run(root, *resume, train_iters=1, seed=3) is ExitCode.DONE
    assert run(root, *resume, train_iters=2, seed=3) is ExitCode.DONE
    assert read_manifest(newest_checkpoint(root)).metadata["adapters"]["path"] is None
    begin = ["--load-adapter", str(root), *LORA]
    with pytest.raises(CheckpointError, match=r"random weights of --seed 3 .* give --seed 3"):
        run(tmp_path / "new", *begin, train_iters=2, seed=4)
    assert TrainedModel.load(root).model.config.lora_rank == 2


def test_text_generation_loads_the_base_and_the_adapters(
    made: Path, tmp_path: Path, capsys: Any
) -> None:
    """The adapters alone find their base; a base that was moved is named."""
    adapters, base = made / "lora", str(made / "base")
    first = TrainedModel.load(adapters)
    for name, tensor in tensors(newest_checkpoint(adapters)).items():
        if name.startswith("model/"):
            assert torch.equal(first.model.get_parameter(name.removeprefix("model/")), tensor)
    prompts = ["zzz", "one", "123", "~~"]
    answers = first.generate(prompts, 8)
    assert TrainedModel.load(base).generate(prompts, 8) != answers
    gone = moved(made, tmp_path / "lora")
    with pytest.raises(CheckpointError, match="has no checkpoint; give --pretrained-checkpoint"):
        TrainedModel.load(gone)
    with pytest.raises(ValueError, match="holds no adapters; leave base= out"):
        TrainedModel.load(base, base=base)
    assert TrainedModel.load(gone, base=base).generate(prompts, 8) == answers
    prompt = [
        "--prompt",
        prompts[0],
        "--prompt",
        prompts[1],
        "--max-new-tokens",
        "8",
        "--device",
        "cpu",
    ]
    both = ["--load", base, "--load-adapter", str(gone)]
    for words in (["--load", str(adapters)], both, ["--load-adapter", str(adapters)]):
        assert main(["generate", *words, *prompt]) == 0
        said = capsys.readouterr()
        assert [json.loads(line)["answer"] for line in said.out.splitlines()] == answers[:2]
        assert "ByteTokenizer, bf16, adapters of rank 2" in said.err
    assert main(["generate", "--load", base, "--load-adapter", base, *prompt]) == 4
    assert "--load-adapter names whole weights" in capsys.readouterr().err


def test_exports_of_adapters_are_refused_by_name(made: Path, tmp_path: Path, capsys: Any) -> None:
    for kind in ("--to-hf", "--to-megatron"):
        assert main(["convert", kind, str(tmp_path / "new"), "--load", str(made / "lora")]) == 4
        said = capsys.readouterr().err
        assert f"holds adapters alone, whose base is {made / 'base'}" in said
        assert "merge them with their base first" in said


def test_a_flipped_bit_of_adapters_is_found(made: Path, tmp_path: Path) -> None:
    """Flip bits all over the files of adapters: each load takes the checkpoint before, and says so."""
    root = shutil.copytree(made / "lora", tmp_path / "lora")
    newest, draw = root / "step_00000004", random.Random(7)
    wanted = {name: torch.empty_like(tensor) for name, tensor in tensors(newest).items()}
    for path in sorted(newest.iterdir()):
        sound = path.read_bytes()
        for at in range(0, len(sound), len(sound) // 60):
            data = bytearray(sound)
            data[at] ^= 1 << draw.randrange(8)
            path.write_bytes(data)
            said: list[str] = []
            assert load_checkpoint(root, whole_tensors(wanted), warn=said.append).step == 2
            assert any(path.name in line for line in said)
        path.write_bytes(sound)
    assert load_checkpoint(root, whole_tensors(wanted), warn=pytest.fail).step == 4


@pytest.mark.parametrize(
    "change",
    [
        lambda base: base.pop("hash"),
        lambda base: base.update(path=3),
        lambda base: base.update(seed=-1),
        lambda base: base.update(more=1),
    ],
)
def test_a_forged_base_is_refused(made: Path, tmp_path: Path, change: Callable[..., Any]) -> None:
    copy = shutil.copytree(made / "lora", tmp_path / "lora")
    edit(copy, lambda metadata: change(metadata["adapters"]))
    with pytest.raises(CheckpointError, match="invalid metadata: adapters is"):
        TrainedModel.load(copy)


def test_options_of_adapters_come_with_them(made: Path, capsys: Any) -> None:
    """LoRA options that are not given are those of --load-adapter, whatever the base says."""
    words = [*MODEL.split(), "--train-iters", "2", "--load", str(made / "base"), "--finetune"]
    words += ["--load-adapter", str(made / "lora")]
    for more in ([], ["--use-checkpoint-args"]):
        config = parse_or_exit([*words, *more], read_stored=stored_options)
        assert "--lora-rank 2" in capsys.readouterr().err
        assert config.model.lora_rank == 2
        assert config.model.lora_modules_to_save == ("final_norm.*",)
        origin = "with the weights of step_00000001 in {}, with the adapters of {}"
        assert origin.format(made / "base", made / "lora") in " ".join(explain(config).split())
    given = parse_or_exit([*words, "--lora-rank", "4"], read_stored=stored_options)
    assert given.model.lora_rank == 4  # the load refuses it
    model = ["--hidden-size", "16", "--hybrid-layer-pattern", "M*-G"]
    rest = [word for word in [*MODEL.split(), "--train-iters=2"] if word not in model]
    alone = ["--use-checkpoint-args", "--load-adapter", str(made / "lora")]
    assert parse_or_exit([*rest, *alone], read_stored=stored_options).model.hidden_size == 16
