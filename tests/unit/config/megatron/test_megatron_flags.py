"""Test that every flag of Megatron-LM is an option, always on, without effect, or refused by name."""

from pathlib import Path

import pytest

from megatron_packed.config.errors import ConfigError
from megatron_packed.config.megatron.flags import ACCEPTED, ALWAYS, ANY, REFUSAL_OF, REFUSED, TAKEN
from megatron_packed.config.parser.command_line import META_FLAGS, spellings
from megatron_packed.config.parser.parse import parse, parse_or_exit, parse_with_sources
from support.command_lines import argv_of, problems_of

NAMES = (Path(__file__).parents[1] / "megatron_flag_names.txt").read_text().split()
SFT_COMMAND = """
    --spec megatron.core.models.hybrid.hybrid_layer_specs hybrid_stack_spec --hybrid-layer-pattern MEMEM*EMEMEM*E
    --hidden-size 2688 --num-attention-heads 32 --group-query-attention --num-query-groups 2 --kv-channels 128
    --ffn-hidden-size 1856 --mamba-num-heads 64 --mamba-head-dim 64 --mamba-state-dim 128 --mamba-num-groups 8
    --num-experts 128 --moe-router-topk 6 --moe-router-score-function sigmoid --moe-router-enable-expert-bias
    --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-4 --moe-grouped-gemm
    --moe-token-dispatcher-type alltoall --tensor-model-parallel-size 1 --sequence-parallel --context-parallel-size 1
    --expert-model-parallel-size 1 --sft --tokenizer-type SFTTokenizer --tokenizer-model tokenizer.json
    --data-path train.jsonl --seq-length 32768 --micro-batch-size 1 --global-batch-size 64 --train-iters 100 --lr 1e-5
    --lr-decay-style cosine --bf16 --position-embedding-type none --normalization RMSNorm --squared-relu
    --disable-bias-linear --no-create-attention-mask-in-dataloader --cuda-graph-impl none
    --accumulate-allreduce-grads-in-fp32 --calculate-per-token-loss --use-mcore-models --is-hybrid-model
    --attention-backend fused --save ckpt --load ckpt --transformer-impl local --use-distributed-optimizer
    --overlap-grad-reduce --overlap-param-gather
"""


def test_every_flag_of_megatron_is_in_one_class() -> None:
    """A refused flag may be accepted too, with some of its values or for some runs."""
    assert len(NAMES) > 980
    for name in NAMES:
        classes = [name in spellings(), name in ALWAYS, name in ACCEPTED]
        if name in REFUSAL_OF:
            taken = TAKEN.get(name)
            classes.append(taken is None or not (taken.values or taken.differs))
        assert sum(classes) == 1, name


def test_what_is_refused_or_true_anyway_is_a_flag_of_megatron_and_no_option_of_ours() -> None:
    for name in {*TAKEN, *REFUSAL_OF}:
        assert name in NAMES
        assert name not in spellings()
    flags = [flag for group in REFUSED for flag in group.flags]
    assert len(flags) == len(set(flags))
    for flag, always in ALWAYS.items():
        assert not always.values or flag in REFUSAL_OF, (
            f"{flag} has other values, which need a refusal"
        )


def test_every_refusal_says_why_and_what_to_use_instead() -> None:
    usable = {*spellings(), *ALWAYS, *META_FLAGS}
    for group in REFUSED:
        assert len(group.reason) > 15
        assert len(group.nearest) > 5
        assert not group.nearest.startswith("leave it out"), group.reason
        named = [word.strip(",;():") for word in group.nearest.split() if word.startswith("--")]
        assert [name for name in named if name not in usable] == [], group.nearest


@pytest.mark.parametrize("flag", sorted(REFUSAL_OF))
def test_a_refused_flag_is_one_problem_with_its_own_name(right, flag: str) -> None:
    (problem,) = problems_of([*argv_of(right), flag, "certainly-not"])
    assert problem.option == flag
    always = TAKEN.get(flag)
    # A flag that is accepted without a value has a separate rule for a given value.
    if always is None or always.values:
        assert problem.rule.startswith(REFUSAL_OF[flag].reason)
        assert problem.cure == REFUSAL_OF[flag].nearest


def test_a_typical_command_of_megatron_is_understood(right) -> None:
    Path("tokenizer.json").write_text("{}")
    parsed = parse_with_sources(SFT_COMMAND.split(), world_size=8)
    config = parsed.config
    assert config.model.num_layers == 14
    assert (config.model.num_query_groups, config.model.head_dim, config.model.d_inner) == (
        2,
        128,
        4096,
    )
    assert config.model.activation == "squared_relu"
    assert config.data.tokenizer_type == "HuggingFaceTokenizer"
    assert config.model.moe_token_dispatcher_type == "alltoall"
    assert config.training.attention_backend == "transformer_engine"
    assert config.training.transformer_impl == "local"
    assert config.micro_batches_per_step(8) == 8
    assert set(parsed.always) == {
        "--spec",
        "--group-query-attention",
        "--moe-grouped-gemm",
        "--no-create-attention-mask-in-dataloader",
        "--accumulate-allreduce-grads-in-fp32",
        "--calculate-per-token-loss",
        "--use-mcore-models",
        "--is-hybrid-model",
    }


EXAMPLES = {
    "--num-layers": ["3"],
    "--spec": ["module hybrid_stack_spec", "module mamba_stack_spec"],
    "--group-query-attention": ["--num-query-groups 2"],
    "--optimizer-cuda-graph": ["--cuda-graph-impl full_iteration"],
    "--num-dataset-builder-threads": ["4"],
    "--null-tokenizer-pad-id": ["-1"],
    "--log-memory-interval": ["10"],
}
"""Values, or the other flag without which the flag is refused, for flags without a list of values."""
EACH_ALWAYS = [
    (flag, example)
    for flag, always in ALWAYS.items()
    for example in EXAMPLES.get(flag) or always.values or [""]
]


@pytest.mark.parametrize(("flag", "example"), EACH_ALWAYS)
def test_a_flag_whose_effect_is_always_on_changes_nothing(right, flag: str, example: str) -> None:
    needed = example.split() if example.startswith("--") else []
    argv = [*argv_of(right), *needed]
    values = [] if needed else example.split()
    parsed = parse_with_sources([*argv, flag, *values])
    assert parsed.config == parse(argv)
    assert parsed.config.origins == parse_with_sources(argv).sources
    assert parsed.always == {flag: ALWAYS[flag].reason} and not parsed.accepted
    if needed:
        with pytest.raises(ConfigError, match=f"{flag}: needs {needed[0]}"):
            parse([*argv[: -len(needed)], flag])


@pytest.mark.parametrize("spelling", ["opt_param", "opt-param"])
def test_overriding_and_keeping_the_checkpoints_schedule_contradict(right, spelling: str) -> None:
    argv = argv_of(right)
    opposite = f"--override-{spelling}-scheduler"
    assert opposite in parse_with_sources([*argv, opposite]).always
    with pytest.raises(ConfigError, match="contradicts --use-checkpoint-opt_param-scheduler"):
        parse_with_sources([*argv, opposite, f"--use-checkpoint-{spelling}-scheduler"])


def given(flag: str, value: str = "") -> list[str]:
    """Return words that give an accepted flag one of its values; "" stands for any accepted one."""
    values = ACCEPTED[flag].values
    if values is None:
        return [flag]
    return [flag, value or (values or ("1",))[0]]


EACH_VALUE = [(flag, value) for flag in ACCEPTED for value in ACCEPTED[flag].values or ("",)]


@pytest.mark.parametrize(("flag", "value"), EACH_VALUE)
def test_a_flag_without_effect_changes_nothing_and_has_a_line(right, flag, value) -> None:
    """Model, data, optimizer and all else that a run reads are the same without the flag."""
    argv = argv_of(right)
    parsed = parse_with_sources([*argv, *given(flag, value)])
    assert parsed.config == parse(argv)
    assert parsed.config.origins == parse_with_sources(argv).sources
    assert parsed.accepted == {" ".join(given(flag, value)): ACCEPTED[flag].reason}


@pytest.mark.parametrize("flag", ACCEPTED)
def test_other_values_and_numbers_of_values_are_refused(right, flag: str) -> None:
    wrong = [flag] if ACCEPTED[flag].values == ANY else [flag, "no-such-value"]
    (problem,) = problems_of([*argv_of(right), *wrong])
    assert problem.option == flag


def test_values_that_change_the_model_are_refused(right) -> None:
    for text in (
        "--softmax-type learnable",
        "--export-kd-teacher-load teacher",
        "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params",
    ):
        with pytest.raises(ConfigError, match=text.split()[0]):
            parse(argv_of(right, text))


def test_a_run_prints_one_line_for_each_flag_without_effect(right, capsys) -> None:
    parse_or_exit([*argv_of(right), *(word for flag in ACCEPTED for word in given(flag))])
    block = capsys.readouterr().err.partition("accepted without effect:\n")[2].splitlines()
    assert block == [f"  {' '.join(given(flag))}: {ACCEPTED[flag].reason}" for flag in ACCEPTED]


def test_the_number_of_layers_leaves_out_multi_token_prediction(right) -> None:
    argv = argv_of(right)
    argv[argv.index("M*-")] = "M*|-/*-/*-"
    assert parse([*argv, "--num-layers", "3"]).model.hybrid_layer_pattern == "M*-/*-/*-"
    found = problems_of([*argv, "--num-layers", "9"])
    assert {problem.option for problem in found} == {"--num-layers"}


def test_marks_of_stages_are_left_out_of_a_pattern_with_one_stage(right) -> None:
    argv = argv_of(right)
    parsed = parse_with_sources(argv_of(right, "--hybrid-layer-pattern M|*|- --num-layers 3"))
    assert parsed.config == parse(argv)
    assert parsed.accepted == {"| in --hybrid-layer-pattern": "there is one pipeline stage"}
    for change in ("M|* --pipeline-model-parallel-size 2", "|"):
        with pytest.raises(ConfigError, match="it marks a pipeline stage"):
            parse(argv_of(right, f"--hybrid-layer-pattern {change}"))


def test_a_configuration_file_may_have_flags_without_effect(right, tmp_path) -> None:
    argv = argv_of(right)
    (tmp_path / "run.yaml").write_text(
        "ckpt-format: torch_dist\nlog-energy: true\nnvtx-ranges: false\n"
    )
    parsed = parse_with_sources([*argv, "--config", "run.yaml"])
    assert parsed.config == parse(argv)
    assert list(parsed.accepted) == ["--ckpt-format torch_dist", "--log-energy"]
