"""Flags of Hugging Face trainers: each is refused with a cure that works in this project."""

import re

import pytest

from megatron_packed.cli.main import COMMANDS
from megatron_packed.config.parser.command_line import known_flags, spellings
from megatron_packed.config.parser.precedence import gather
from megatron_packed.config.trainer_flags import FLAG, TRAINER_FLAGS, trainer_cure


def test_every_cure_names_flags_and_commands_that_exist() -> None:
    """Flags in cures and rules are options of a run, or follow a command's name in backticks."""
    names = {command.name for command in COMMANDS}
    for group in TRAINER_FLAGS:
        text = f"{group.rule} {trainer_cure(group, '')} {group.without}"
        for command in re.findall("`megatron-packed ([^`]*)`", text):
            assert command.split()[0] in names, command
        outside = re.sub("`[^`]*`", "", text)
        assert {*FLAG.findall(outside)} <= {*known_flags()}, text


def test_every_flag_is_answered_by_its_entry() -> None:
    """No flag is listed twice, and no flag is an option of this project."""
    listed = [name for group in TRAINER_FLAGS for name in group.names]
    assert len(listed) == len({*listed})
    for name in listed:
        for flag in (f"--{name}", "--" + name.replace("_", "-")):
            assert flag not in spellings(), flag
        [problem] = [p for p in gather([f"--{name}", "x"]).problems if p.option == f"--{name}"]
        assert "--help-all" not in problem.cure and "did you mean" not in problem.cure


@pytest.mark.parametrize(
    ("given", "cure"),
    [
        ("--epochs 3", "give --train-epochs 3"),
        ("--num-train-epochs=3", "give --train-epochs 3"),
        ("--learning_rate 1e-4", "give --lr 1e-4"),
        ("--max_steps -1", "give --train-epochs or --train-iters"),
        ("--warmup_steps 20", "give --lr-warmup-iters 20"),
        ("--warmup_steps 0.03", "give --lr-warmup-fraction 0.03"),
        ("--lr_scheduler_type constant_with_warmup", "give --lr-decay-style constant"),
        ("--val_set_size 0.02", "give --split 98,2"),
        ("--validation_split_percentage 10", "give --split 90,10"),
        ("--report_to none", "leave it out"),
        ("--report_to wandb", "give --wandb-project NAME"),
        ("--torch_dtype bfloat16", "give --bf16"),
        ("--gradient_checkpointing False", "leave it out"),
        ("--ddp_timeout 90", "give --distributed-timeout-minutes 2"),
        ("--lora_r 8", "give --lora-rank 8"),
        ("--adapter lora", "give --lora-rank N, and --lora-alpha"),
        ("--finetuning_type full", "leave it out"),
        ("--target_modules ['q_proj','v_proj']", "give --lora-target-modules q_proj v_proj"),
        ("--lora_target q_proj,v_proj", "give --lora-target-modules q_proj v_proj"),
        ("--use_dora", "leave it out, or give --lora-rslora"),
        ("--use_rslora false", "leave it out"),
        ("--peft_scheme lora", "give --lora-rank N, and --lora-alpha"),
        (
            "--peft_layers_to_transform [0,1]",
            "give --lora-target-modules with shell patterns of names, such as 'model.layers.3.*'",
        ),
        ("--trainable_token_indices [5]", "give --lora-modules-to-save 'embedding.*'"),
        ("--lora_bias false", "leave it out"),
        ("--loraplus_lr_ratio 16", "leave it out"),
        ("--output_dir", "give --save DIR"),
        ("--dataset_name org/name", "give --data-path hf://datasets/org/name"),
        (
            "--base_model org/name",
            "run `megatron-packed convert --from-hf hf://org/name --save weights`, and give "
            "@weights/model.args and --pretrained-checkpoint weights",
        ),
    ],
)
def test_values_are_converted(given, cure) -> None:
    """The cure has the value in the form of this project."""
    [problem] = gather(given.split()).problems
    assert problem.cure == cure


def test_the_option_of_the_cure_is_not_reported_as_missing() -> None:
    """The required --lr is not missing, too, if --learning-rate was given."""
    assert "optim.lr" in gather(["--learning-rate", "1e-4"]).unsound


def test_keys_of_a_file_have_the_same_answers(tmp_path) -> None:
    """Keys at the top level, in a section, and with the name of a section are answered."""
    path = tmp_path / "run.yaml"
    path.write_text(
        "num_epochs: 3\npacking: true\nload_in_4bit: true\noptim:\n  learning_rate: 1e-4\n"
    )
    problems = gather(["--config", str(path)]).problems
    assert sorted((p.option, p.cure) for p in problems) == [
        (f"{path}:1 num_epochs", "give --train-epochs 3"),
        (f"{path}:2 packing", "leave it out"),
        (
            f"{path}:3 load_in_4bit",
            "give --lora-rank N; `megatron-packed plan` says what else saves memory",
        ),
        (f"{path}:5 optim.learning_rate", "give --lr 1e-4"),
    ]
