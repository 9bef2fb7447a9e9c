"""Command ``from-megatron``: words of a file, outcome of each flag, and a command for a shell."""

import os
import re
import shlex
import subprocess
import textwrap
import time

import pytest

from megatron_packed.cli.from_megatron import quoted
from megatron_packed.cli.main import main
from megatron_packed.cli.megatron_outcomes import FlagOutcome, line_outcome
from megatron_packed.config.megatron.model_config_file import read_model_config

CASE = """\
ENV_VARS:
  NCCL_ALGO: Ring
  LD_PRELOAD: /tmp/evil.so
  NVTE_SOMETHING: 1
TEST_TYPE: regular
MODEL_ARGS:
  --hybrid-layer-pattern: M*-M*-
  --hidden-size: 64
  --num-attention-heads: 4
  --mamba-head-dim: 16
  --spec: "[megatron.core.models.hybrid.hybrid_layer_specs hybrid_stack_spec]"
  --seq-length: 128
  --micro-batch-size: 2
  --lr: .001
  --min-lr: 1e-5
  --train-iters: 20
  --data-path: ${DATA_PATH}/a b_document
  --use-mcore-models: true
  --split: ""
  --tokenizer-type: ${TOKENIZER_TYPE}
AFTER_SCRIPT: echo done
"""
WORDS = shlex.split("""
    --hybrid-layer-pattern M*-M*- --hidden-size 64 --num-attention-heads 4 --mamba-head-dim 16
    --spec megatron.core.models.hybrid.hybrid_layer_specs hybrid_stack_spec --seq-length 128
    --micro-batch-size 2 --lr .001 --min-lr 1e-5 --train-iters 20
    --data-path '${DATA_PATH}/a b_document' --use-mcore-models --tokenizer-type ${TOKENIZER_TYPE}""")


def with_more(flags):
    """Return the case with more flags."""
    return CASE.replace("  --lr: .001", f"  --lr: .001\n  {flags}")


@pytest.fixture
def case(tmp_path):
    def write(text: str = CASE) -> str:
        path = tmp_path / "model_config.yaml"
        path.write_text(textwrap.dedent(text))
        return str(path)

    return write


def test_words_are_those_that_megatrons_script_passes(case) -> None:
    line = read_model_config(case(), {})
    assert list(line.arguments) == WORDS
    assert line.unset == ("DATA_PATH", "TOKENIZER_TYPE")
    assert line.environment == {
        "NCCL_ALGO": "Ring",
        "LD_PRELOAD": "/tmp/evil.so",
        "NVTE_SOMETHING": "1",
    }
    assert line.left_out == ("AFTER_SCRIPT",)


def test_variables_come_from_the_file_and_then_from_the_environment(case) -> None:
    text = "ENV_VARS: {A: file}\nMODEL_ARGS: {--save: '$A/${B}', --load: '${C}'}\n"
    line = read_model_config(case(text), {"A": "shell", "B": "b"})
    assert line.arguments == ("--save", "file/b", "--load", "${C}") and line.unset == ("C",)


def test_of_a_repeated_key_the_last_value_counts(case) -> None:
    text = "ENV_VARS: {NCCL_ALGO: Tree, NCCL_ALGO: Ring}\nMODEL_ARGS: {--lr: 1, --lr: 2}\n"
    line = read_model_config(case(text), {})
    assert line.arguments == ("--lr", "1", "--lr", "2") and line.environment == {
        "NCCL_ALGO": "Ring"
    }


def test_each_flag_has_its_outcome() -> None:
    outcomes = {use.flag: use for use in line_outcome([*WORDS, "--mtp-detach-heads"]).uses}
    found = {flag: use.outcome for flag, use in outcomes.items()}
    assert found["--hidden-size"] is FlagOutcome.SAME
    assert found["--use-mcore-models"] is found["--spec"] is FlagOutcome.ACCEPTED
    assert found["--micro-batch-size"] is FlagOutcome.DIFFERENT
    assert "which documents share a pack" in outcomes["--micro-batch-size"].reason
    assert found["--tokenizer-type"] is FlagOutcome.OPEN
    assert found["--data-path"] is not FlagOutcome.OPEN
    assert found["--mtp-detach-heads"] is FlagOutcome.REFUSED
    assert "multi-token" in outcomes["--mtp-detach-heads"].reason


def test_a_line_without_a_required_option_is_not_taken() -> None:
    complete = line_outcome(WORDS)
    assert complete.taken and not complete.missing
    at = WORDS.index("--lr")
    cut = line_outcome(WORDS[:at] + WORDS[at + 2 :])
    assert not cut.taken and [problem.option for problem in cut.missing] == ["--lr"]


def test_the_output_is_a_script_that_runs_the_same_flags(case, tmp_path, capsys) -> None:
    assert main(["from-megatron", case()]) == 0
    script = capsys.readouterr().out
    assert "Set these variables first: DATA_PATH, TOKENIZER_TYPE." in script
    assert "not taken over: LD_PRELOAD, NVTE_SOMETHING." in script and "evil" not in script
    assert "not read: AFTER_SCRIPT." in script
    assert "#   --micro-batch-size 2: Megatron-LM: " in script
    stub = tmp_path / "megatron-packed"
    stub.write_text('#!/bin/sh\necho "$NCCL_ALGO"\nprintf "%s\\n" "$@"\n')
    stub.chmod(0o755)
    environ = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "DATA_PATH": "/d",
        "TOKENIZER_TYPE": "NullTokenizer",
    }
    ran = subprocess.run(
        ["sh", "-c", script], env=environ, capture_output=True, text=True, check=True
    )
    expected = [word.replace("${DATA_PATH}", "/d") for word in WORDS]
    expected = [word.replace("${TOKENIZER_TYPE}", "NullTokenizer") for word in expected]
    assert ran.stdout.splitlines() == ["Ring", "train", *expected] and not ran.stderr


BRIDGE = (
    "torchrun run_recipe.py --recipe nemotronh_4b_{kind}_1gpu_config --lr 1e-4 "
    "train.train_iters=9 model.sequence_parallel=false model.num_moe_experts=4 dataset.unknown.key=1 "
    "model.masked_softmax_fusion=False model.transformer_impl=transformer_engine {more}\n"
)
SETTINGS = ["--train-iters", "9", "--num-experts", "4", "--no-masked-softmax-fusion"]


def bridge_line(tmp_path, capsys, kind: str, more: str) -> list[str]:
    """Return the words of the command for a line of Megatron-Bridge."""
    path = tmp_path / "train.sh"
    path.write_text(BRIDGE.format(kind=kind, more=more))
    assert main(["from-megatron", str(path)]) == 2
    command = capsys.readouterr().out.partition("megatron-packed train")[2].partition("\n\n")[0]
    return [word for word in shlex.split(command) if word.strip()]


@pytest.mark.parametrize(
    ("kind", "more", "adapters"),
    [
        (
            "peft",
            "",
            "--lora-rank 32 --lora-alpha 32 --lora-dropout 0.0 --lora-init xavier "
            "--lora-target-modules linear_qkv linear_proj linear_fc1 linear_fc2 in_proj out_proj",
        ),
        (
            "sft",
            "--mode lora peft.dim=8 peft.alpha=16 peft.dropout=0.1 'peft.target_modules=[in_proj, linear_qkv]'",
            "--lora-rank 8 --lora-alpha 16 --lora-dropout 0.1 --lora-init xavier "
            "--lora-target-modules in_proj linear_qkv",
        ),
    ],
)
def test_a_line_of_megatron_bridge_gets_flags_of_adapters(
    tmp_path, capsys, kind, more, adapters
) -> None:
    """Settings of a recipe become flags. The layers are local, which alone have adapters."""
    words = bridge_line(tmp_path, capsys, kind, more)
    implementation = ["--transformer-impl", "local"]
    assert words == ["--lr", "1e-4", *SETTINGS, *implementation, *adapters.split()]


def test_a_line_of_megatron_bridge_may_train_all_weights(tmp_path, capsys) -> None:
    words = bridge_line(tmp_path, capsys, "sft", "--mode sft model.bf16=true")
    implementation = ["--transformer-impl", "transformer_engine"]
    assert words == ["--lr", "1e-4", *SETTINGS, *implementation, "--bf16"]


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ("--mode dora", "has dora, and only adapters of --mode lora are supported"),
        ("--mode sft peft.dim=8", "has peft.dim=8 without --mode lora, and only"),
        (
            "peft.a2a_experimental=true",
            "has peft.a2a_experimental=true, and of peft only dim, alpha",
        ),
        ("peft.dim=null", "has peft.dim=null, and of peft only dim"),
    ],
)
def test_other_adapters_of_megatron_bridge_are_refused(tmp_path, capsys, more, sentence) -> None:
    path = tmp_path / "train.sh"
    path.write_text(BRIDGE.format(kind="peft", more=more))
    assert main(["from-megatron", str(path)]) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "pattern"),
    [("", "*-*-*-"), ("\n  --num-experts: 4\n  --disable-bias-linear: true", "*E*E*E")],
)
def test_a_gpt_model_gets_a_pattern_in_place_of_its_number_of_layers(
    case, capsys, more, pattern
) -> None:
    text = CASE.replace("--hybrid-layer-pattern: M*-M*-", "--num-layers: 3" + more)
    text = re.sub(r"  --(mamba-head-dim|spec): .*\n", "", text)
    assert main(["from-megatron", case(text)]) == 0
    script = capsys.readouterr().out
    assert f"  --hybrid-layer-pattern '{pattern}' \\\n" in script
    assert f"# In place of --num-layers 3: --hybrid-layer-pattern {pattern}, " in script


def test_a_number_of_layers_is_refused_if_it_gives_no_pattern(case, capsys) -> None:
    """With both flags the pattern counts. --moe-layer-freq decides which layers have experts."""
    both = with_more("--num-layers: 3")
    assert main(["from-megatron", case(both)]) == 2
    assert "--num-layers 3: must be the length of" in capsys.readouterr().out
    mixed = "--num-layers: 3\n  --moe-layer-freq: 2"
    assert main(["from-megatron", case(CASE.replace("--hybrid-layer-pattern: M*-M*-", mixed))]) == 2
    assert "In place of" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "hybrid",
    [
        "--spec: megatron.core.models.mamba.mamba_layer_specs mamba_stack_spec",
        "--is-hybrid-model: true",
        "--hybrid-attention-ratio: 0.1",
    ],
)
def test_a_hybrid_without_a_pattern_gets_no_layers_of_gpt(case, capsys, hybrid) -> None:
    """Megatron-LM takes its layers from ratios; without any, all of them are Mamba layers."""
    text = re.sub(r"  --spec: .*\n", "", CASE)
    text = text.replace("--hybrid-layer-pattern: M*-M*-", f"--num-layers: 3\n  {hybrid}")
    assert main(["from-megatron", case(text)]) == 2
    said = capsys.readouterr().out
    assert "In place of" not in said and "# missing: --hybrid-layer-pattern" in said


def test_defaults_of_the_model_that_differ_are_listed_unless_they_are_given(case, capsys) -> None:
    assert main(["from-megatron", case()]) == 0
    script = capsys.readouterr().out
    assert "# 3 flags of the model are not given and have other defaults:" in script
    assert "#   --position-embedding-type: Megatron-LM: learned_absolute; here: none;" in script
    given = "--hidden-dropout: 0.0\n  --attention-dropout: 0.0\n  --use-rotary-position-embeddings: true"
    assert main(["from-megatron", case(with_more(given))]) == 0
    assert "other defaults" not in capsys.readouterr().out


def test_refused_flags_are_left_out_and_end_with_code_2(case, capsys) -> None:
    text = with_more("--mtp-detach-heads: true")
    assert main(["from-megatron", case(text)]) == 2
    command, _, comments = capsys.readouterr().out.partition("\n# ")[2].partition("\n# ")
    assert "--mtp-detach-heads" not in command.partition("megatron-packed train")[2]
    assert "--mtp-detach-heads: this kind of multi-token prediction" in comments


@pytest.mark.parametrize(
    "word", ["", "a b", *"""'"`!$*~ü""", "`id`", "$(id)", "!x", "${", "a\\", "$1", "-x", "a;b"]
)
def test_a_shell_gives_quoted_words_back(word: str) -> None:
    script = f"printf %s {quoted(word + '${V}' + word)}"
    shown = subprocess.run(["sh", "-c", script], env={"V": "$(id) x"}, capture_output=True)
    assert shown.stdout.decode() == f"{word}$(id) x{word}"


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("[1]", "must contain keys"),
        ("", "has no key MODEL_ARGS"),
        ("ENV_VARS: {A: 1}", "has no key MODEL_ARGS"),
        ("MODEL_ARGS: [--lr]", "must contain keys with values in MODEL_ARGS"),
        ("MODEL_ARGS: {lr: 1}", "has the key lr in MODEL_ARGS, which is not a flag"),
        ("MODEL_ARGS: {--lr: {a: 1}}", "must contain plain values in --lr"),
        ("MODEL_ARGS: {--save: '@/etc/passwd'}", "write a path as ./@NAME"),
        ('MODEL_ARGS: {--save: "\'"}', "has an open quotation mark in --save"),
        ("MODEL_ARGS: {'--lr; rm x': 1}", "which is not a flag"),
        ("ENV_VARS: {'A; id': 1}\nMODEL_ARGS: {--lr: 1}", "not a name of a variable"),
        ("MODEL_ARGS: {--lr: 1}\nMODE: inference", "generates text, and only training"),
        ("MODEL_ARGS: {--lr: 1}\nMODE: rl", "is reinforcement learning"),
        ("a: &a [1]\nMODEL_ARGS: {--lr: *a}", "aliases are not supported"),
        ("MODEL_ARGS: !!python/object/apply:os.system [id]", "must contain keys"),
        ("MODEL_ARGS: {--lr: !!python/name:os.system x}\nb", "is not valid YAML"),
        ("MODEL_ARGS: " + "[" * 5000, "nested too deeply"),
        ("MODEL_ARGS:\n" + "  --a: 1\n" * 20_000, "more than 10,000 keys and values"),
        ('MODEL_ARGS: {--save: "a\\0b"}', "contains a zero character"),
        ("MODEL_ARGS: {--lr: 1}\n" + "#" * 300_000, "larger than 256 KiB"),
        ("MODEL_ARGS: {--lr: '" + "1" * 200_000 + "'}", ""),
    ],
)
def test_a_wrong_or_hostile_file_gives_one_sentence(case, capsys, text: str, rule: str) -> None:
    began = time.perf_counter()
    assert main(["from-megatron", case(text)]) == 2
    shown = capsys.readouterr()
    assert time.perf_counter() - began < 20
    if rule:
        assert rule in shown.err and shown.err.count("\n") == 1 and not shown.out
        assert len(shown.err) < 400
    else:
        assert len(shown.out) < 500_000


def test_a_file_that_is_no_file_is_refused(tmp_path, capsys) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name, rule in (("pipe", "not a regular file"), ("absent", "No such file")):
        assert main(["from-megatron", str(tmp_path / name)]) == 2
        assert rule in capsys.readouterr().err


def test_control_characters_do_not_leave_the_comments(case, capsys) -> None:
    text = 'MODEL_ARGS: {--tokenizer-type: "a\\nid\\x1b[31m", --foo: "b\\nid"}'
    assert main(["from-megatron", case(text)]) == 2
    lines = capsys.readouterr().out.splitlines()
    assert all(not line or line.startswith(("#", "megatron-packed train")) for line in lines)


NEMOTRON_3 = """
MODEL_ARGS:
  --hybrid-layer-pattern: MEM*E/*E/*E
  --num-layers: 5
  --hidden-size: 64
  --num-attention-heads: 4
  --group-query-attention: true
  --num-query-groups: 2
  --mamba-num-heads: 8
  --mamba-head-dim: 16
  --position-embedding-type: none
  --hidden-dropout: 0.0
  --attention-dropout: 0.0
  --normalization: RMSNorm
  --disable-bias-linear: true
  --squared-relu: true
  --use-fused-weighted-squared-relu: true
  --untie-embeddings-and-output-weights: true
  --num-experts: 8
  --moe-router-topk: 4
  --moe-router-topk-scaling-factor: 5.0
  --moe-router-num-groups: 1
  --moe-router-group-topk: 1
  --moe-router-score-function: sigmoid
  --moe-router-enable-expert-bias: true
  --moe-router-load-balancing-type: seq_aux_loss
  --moe-aux-loss-coeff: 1e-4
  --moe-shared-expert-intermediate-size: 96
  --moe-latent-size: 32
  --moe-router-padding-for-quantization: true
  --moe-token-dispatcher-type: alltoall
  --mtp-num-layers: 2
  --mtp-use-repeated-layer: true
  --mtp-loss-scaling-factor: 0.3
  --calculate-per-token-loss: true
  --seq-length: 128
  --micro-batch-size: 2
  --global-batch-size: 4
  --train-iters: 20
  --lr: 1.6e-3
  --eval-interval: 100
  --eval-iters: 14
  --data-path: some_document
  --grad-reduce-in-bf16: true
  --fp8-format: e4m3
"""


def test_flags_of_nemotron_3_are_taken_and_validation_has_megatrons_split(case, capsys) -> None:
    assert main(["from-megatron", case(NEMOTRON_3)]) == 2
    command, _, comments = capsys.readouterr().out.partition("\n\n#")
    refused = comments.partition("refused, and left out of the command:\n")[2].splitlines()
    assert refused[0].startswith("#   --fp8-format e4m3: ")
    assert "--grad-reduce-in-bf16" in command
    assert refused[1:] == ["# Added: --split 969,30,1, the default of Megatron-LM."]
    assert command.endswith("  --split 969,30,1") and "--mtp-use-repeated-layer" in command
    for text in ("", "  --split: 99,1,0\n"):
        case_without = NEMOTRON_3.replace("  --fp8-format: e4m3\n", text)
        assert main(["from-megatron", case(case_without)]) == 0
        assert ("Added: --split" in capsys.readouterr().out) == (not text)


def test_a_flex_dispatcher_is_taken_with_a_sentence(case, capsys) -> None:
    text = NEMOTRON_3.replace("  --fp8-format: e4m3\n", "").replace("alltoall", "flex")
    assert main(["from-megatron", case(text)]) == 0
    printed = capsys.readouterr().out
    assert "--moe-token-dispatcher-type flex" in printed
    assert "is taken as alltoall: the tokens go to the same experts" in printed
