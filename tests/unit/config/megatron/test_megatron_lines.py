"""Page of Megatron's public command lines: it agrees with its result file, and its generator reads
test cases, scripts and recipes.
"""

import importlib
import json
import textwrap
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

DOCS = Path(__file__).parents[4] / "docs"

HYBRID = (
    *("--hybrid-layer-pattern", "M*-", "--hidden-size", "64", "--num-attention-heads", "4"),
    *("--mamba-head-dim", "16", "--seq-length", "128", "--lr", "1e-3", "--train-iters", "2"),
)
DATA = ("--data-path", "data")


@pytest.fixture(autouse=True)
def _docs(monkeypatch) -> None:
    """Let the modules of docs/ be imported."""
    monkeypatch.syspath_prepend(str(DOCS))


def megatron_lines() -> ModuleType:
    return importlib.import_module("megatron_lines")


def published_lines() -> ModuleType:
    return importlib.import_module("published_lines")


def test_the_page_is_the_page_of_its_result_file() -> None:
    result = json.loads(megatron_lines().RESULT.read_text())
    assert megatron_lines().page(result) + "\n" == megatron_lines().PAGE.read_text()
    assert megatron_lines().as_text(result) == megatron_lines().RESULT.read_text()


def line(*words: str, group: str = "a") -> Any:
    return published_lines().PublishedLine(group, "b", words, DATA)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (HYBRID, {"hybrid": True, "uses": 7, "refused": [], "missing": [], "needs": []}),
        ((*HYBRID, "--use-mcore-models"), {"uses": 8, "without_effect": 1, "refused": []}),
        ((*HYBRID, "--fp16"), {"uses": 8, "refused": ["--fp16"], "unknown": 0, "needs": []}),
        ((*HYBRID, "--no-such-flag", "1"), {"refused": ["--no-such-flag 1"], "unknown": 1}),
        ((*HYBRID, "--mtp-hsm"), {"needs": ["other kinds of multi-token prediction"]}),
        ((*HYBRID, "--eval-interval", "9"), {"uses": 8, "refused": [], "needs": []}),
        ((*HYBRID, "--pipeline-model-parallel-size", "2"), {"needs": ["pipelines"]}),
        ((*HYBRID, "--pipeline-model-parallel-size", "1"), {"uses": 8, "needs": []}),
        (HYBRID[:-2], {"uses": 6, "missing": ["--train-iters"]}),
    ],
)
def test_outcomes_of_a_line(words: tuple[str, ...], expected: dict) -> None:
    assert expected.items() <= megatron_lines().record(line(*words)).items()


def test_a_gpt_model_gets_a_pattern_that_is_not_counted() -> None:
    words = ("--num-layers", "3", *HYBRID[2:])
    assert megatron_lines().with_pattern(words)[:2] == ["--num-layers", "6"]
    assert megatron_lines().with_pattern(words)[-1] == "*-*-*-"
    assert megatron_lines().with_pattern((*words, "--num-experts", "4"))[-1] == "*E*E*E"
    found = megatron_lines().record(line(*words))
    assert (found["hybrid"], found["uses"], found["refused"]) == (False, 7, [])


def test_rows_count_uses_and_taken_lines() -> None:
    lines = [megatron_lines().record(line(*HYBRID, *more)) for more in ((), ("--fp16",))]
    text = megatron_lines().page({"commits": {"Megatron-LM": "c" * 40}, "lines": lines})
    assert "| a | 2 | 1 | 15 | 93.3 % | 0 |" in text
    assert "| `--fp16` | 1 | 1 |" in text and "at cccccccccccc." in text


def test_lines_of_functional_tests_leave_out_other_programs(tmp_path) -> None:
    for name, mode in (("train", ""), ("text", "MODE: inference\n")):
        folder = tmp_path / published_lines().TESTS / "hybrid" / name
        folder.mkdir(parents=True)
        (folder / "model_config.yaml").write_text(f"{mode}MODEL_ARGS: {{--bf16: true}}\n")
    assert list(published_lines().test_cases(tmp_path)) == [
        published_lines().PublishedLine("tests/hybrid", "train", ("--bf16",))
    ]


def test_a_script_runs_with_a_launcher_that_starts_nothing(tmp_path) -> None:
    folder = tmp_path / "examples/mamba"
    folder.mkdir(parents=True)
    (folder / "train.sh").write_text(
        textwrap.dedent("""\
        MODEL_SCALE="800M"
        case "$MODEL_SCALE" in "800M") SIZE=1;; *) SIZE=2;; esac
        torchrun --nproc_per_node 8 x/pretrain.py --hidden-size $SIZE \\
            --data-path "$1 $2"
        """)
    )
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    found = list(published_lines().script_lines(tmp_path, scratch))[:2]
    assert [one.words[1] for one in found] == ["1", "2"]
    assert found[0].words[2:] == ("--data-path", "data tokenizer.model")


def test_a_recipe_gives_flags_of_its_literal_settings(tmp_path) -> None:
    recipes = tmp_path / published_lines().RECIPES
    (recipes / "nemotronh/h100").mkdir(parents=True)
    (recipes / "common.py").write_text(
        "def _pretrain_common():\n    cfg = C(train=T(train_iters=9, lr=1e-3), bf16=True)\n"
    )
    (recipes / "nemotronh/h100/nemotronh.py").write_text(
        textwrap.dedent("""\
        def small_pretrain_config():
            cfg = _pretrain_common()
            cfg.model = Model(hybrid_layer_pattern="M*", activation_func=squared_relu,
                              num_moe_experts=4, hidden_size=None, unknown=1,
                              use_mamba_mem_eff_path=False, moe_grouped_gemm=True)
            cfg.train.train_iters = 1_000
            cfg.model.moe_grouped_gemm = False
            if cfg.x:
                cfg.train.train_iters = 5

        def no_pattern_pretrain_config():
            cfg = _pretrain_common()
        """)
    )
    names = frozenset(megatron_lines().NAMES)
    (found,) = published_lines().recipe_lines(tmp_path, names)
    assert found.name == "small_pretrain" and found.added == (
        "--disable-bias-linear",
        "--bf16",
        "--data-path",
        "data",
    )
    assert " ".join(found.words) == (
        "--bf16 --train-iters 1000 --lr 0.001 --hybrid-layer-pattern M* --squared-relu "
        "--num-experts 4 --disable-mamba-mem-eff-path"
    )


def test_a_recipe_of_adapters_has_the_flags_of_its_settings(tmp_path) -> None:
    """Matrices come from the recipe, and rank and start from the part that all recipes share."""
    recipes = tmp_path / published_lines().RECIPES
    (recipes / "nemotronh/h100").mkdir(parents=True)
    (recipes / "common.py").write_text(
        textwrap.dedent("""\
        def _peft_common():
            cfg = C(lr=1e-4, peft=LoRA(dim=24, alpha=48, lora_A_init_method="xavier",
                                       target_modules=["linear_qkv"], dropout_position="pre"))
        """)
    )
    (recipes / "nemotronh/h100/nemotronh.py").write_text(
        textwrap.dedent("""\
        def small_peft_config(peft_scheme="lora"):
            cfg = _peft_common()
            cfg.model = Model(hybrid_layer_pattern="M*", transformer_impl="transformer_engine")
            mamba_target_modules = ["in_proj", "out_proj"]
            if peft_scheme:
                cfg.peft = default_peft_config(peft_scheme, target_modules=mamba_target_modules)
        """)
    )
    (found,) = published_lines().recipe_lines(tmp_path, frozenset(megatron_lines().NAMES))
    assert " ".join(found.words) == (
        "--lr 0.0001 --hybrid-layer-pattern M* --transformer-impl local --lora-rank 24 "
        "--lora-alpha 48 --lora-dropout 0.0 --lora-init xavier --lora-target-modules in_proj out_proj"
    )
    assert "--sft" in found.added
