"""The recipes are valid command lines, and their models fit into the memory that they state."""

import json
import re
from pathlib import Path

import pytest

from megatron_packed.cli.main import main
from megatron_packed.config.parser.parse import parse_or_exit
from megatron_packed.config.parser.precedence import gather
from support import commands

ROOT = Path(__file__).parents[3]
RECIPES = sorted((ROOT / "examples" / "recipes").glob("*.args"))
OF_80_GB = [recipe for recipe in RECIPES if "_80gb" in recipe.name]
OF_LONG_DOCUMENTS = [recipe for recipe in RECIPES if ".long" in recipe.name]
OF_ADAPTERS = [recipe for recipe in RECIPES if ".lora" in recipe.name]
USABLE_GIB = {"24": 23.5, "80": 79.0, "141": 139.0}
"""Memory that a program can use on a GPU, in GiB, by the GB in the GPU's name."""


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.stem)
def test_a_recipe_fits_as_it_says(
    recipe: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    argument = f"@{recipe.relative_to(ROOT)}"
    said = re.search(
        r"^# plan( --gpu H100)?: (\d+) GPUs? of (24|80|141) GB, ([\d.]+) GiB each$",
        recipe.read_text(),
        re.MULTILINE,
    )
    assert said is not None
    kernels, gpus, size, gib = said.groups("")
    config = parse_or_exit(
        [argument], launched=False, world_size=int(gpus), on_this_machine=False
    )  # parses the complete command line as training does
    assert gather([argument]).warnings == []
    continues = ".pretrain" not in recipe.name
    assert (config.checkpoint.pretrained_checkpoint is not None) == continues
    assert config.data.sft == (continues and recipe not in OF_LONG_DOCUMENTS)
    assert (
        main(
            [
                "plan",
                argument,
                "--world-size",
                gpus,
                "--gpu-memory-gib",
                str(USABLE_GIB[size]),
                "--json",
                *kernels.split(),
            ]
        )
        == 0
    )
    found = json.loads(capsys.readouterr().out)
    assert all(found["fits"].values()), found["ranks"]
    totals = [rank["bytes"]["total"] / 2**30 for rank in found["ranks"].values()]
    assert totals[0] == pytest.approx(float(gib), abs=0.06), (
        "write the new number into the recipe and into the README"
    )
    page = (recipe.parent / "README.md").read_text()
    [row] = [line for line in page.splitlines() if line.startswith(f"| `{recipe.name}`")]
    assert f"| {gpus} of {size} GB | {gib} GiB" in row
    assert len(totals) == 1 or f"{totals[1]:.1f} if all" in row


ADAPTED = {"qwen3_5_9b", "moe_30b_a3b", "granite_4_h_7b_a1b", "llama_8b"}
ONLY_ADAPTED = {"granite_4_h_7b_a1b", "llama_8b"}


def test_there_is_a_recipe_for_each_model_and_kind() -> None:
    models = {path.stem for path in (RECIPES[0].parent / "models").glob("*.args")}
    assert len(models) == 10
    kinds = [(model, kind) for model in models - ONLY_ADAPTED for kind in ("pretrain", "sft")]
    kinds += [(model, kind) for model in ADAPTED for kind in ("lora", "lora_node")]
    kinds += [("qwen3_5_9b", "lora_24gb"), ("qwen3_5_9b", "long"), ("nemotron_h_8b", "long")]
    names = {f"{model}.{kind}" for model, kind in kinds}
    assert {recipe.stem for recipe in RECIPES} - {recipe.stem for recipe in OF_80_GB} == names
    assert len(OF_80_GB) == 3


@pytest.mark.parametrize("recipe", OF_ADAPTERS, ids=lambda recipe: recipe.stem)
def test_a_recipe_of_adapters_differs_in_layout_and_memory(
    recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It trains as the recipe for one GPU does, with adapters of all matrices of the layers."""
    monkeypatch.chdir(ROOT)
    one_gpu = recipe.with_name(f"{recipe.name.partition('.')[0]}.lora.args")
    large, small = (gather([f"@{one.relative_to(ROOT)}"]).values for one in (one_gpu, recipe))
    differing = {key for key in {*large, *small} if large.get(key) != small.get(key)}
    paths = {"checkpoint.save", "checkpoint.load", "logging.log_jsonl"}
    assert {key for key in differing - paths if not key.startswith(("memory.", "parallel."))} <= {
        "model.moe_token_dispatcher_type"
    }
    config = parse_or_exit(
        [f"@{recipe.relative_to(ROOT)}"], launched=False, world_size=8, on_this_machine=False
    )
    assert config.model.adapts_all_projections and config.model.lora_scale == 1


@pytest.mark.parametrize("recipe", OF_80_GB, ids=lambda recipe: recipe.stem)
def test_a_recipe_for_80_gb_differs_in_state_and_recomputation(
    recipe: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It leaves 5 % of the memory free, also if a rank gets 1.5 even shares of rows, or all rows."""
    monkeypatch.chdir(ROOT)
    other = recipe.with_name(recipe.name.replace("_80gb", ""))
    large, small = (gather([f"@{one.relative_to(ROOT)}"]).values for one in (other, recipe))
    differing = {key for key in {*large, *small} if large.get(key) != small.get(key)}
    others = {key for key in differing if not key.startswith(("memory.", "optim."))}
    paths = {"checkpoint.save", "checkpoint.load", "logging.log_jsonl"}
    assert others == {*paths, "parallel.main_grads_dtype"}
    argv = [f"@{recipe.relative_to(ROOT)}", "--world-size", 8, "--gpu", "h100"]
    found = commands.report(capsys, "plan", *argv)
    most = max(rank["bytes"]["total"] for rank in found["ranks"].values())
    assert most <= 0.95 * found["gpu_bytes"]


OWN = {"hybrid_1b", "gated_delta_1b"}
"""Models without published weights; their recipes continue their own pretraining."""


@pytest.mark.parametrize(
    "recipe",
    [
        recipe
        for recipe in RECIPES
        if ".pretrain" not in recipe.name and recipe not in OF_LONG_DOCUMENTS
    ],
    ids=lambda recipe: recipe.stem,
)
def test_a_recipe_for_published_weights_keeps_their_chat_format(
    recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    config = parse_or_exit(
        [f"@{recipe.relative_to(ROOT)}"], launched=False, world_size=32, on_this_machine=False
    )
    name, data = recipe.name.partition(".")[0], config.data
    start = config.checkpoint.pretrained_checkpoint
    if name in OWN:
        assert start == f"runs/{name}.pretrain/checkpoints" and data.chat_template == "chatml"
        return
    assert (start, data.tokenizer_model) == (f"weights/{name}", f"models/{name}")
    assert data.chat_template is None
    formats = [("nemotron-nano-v2", None), (None, '{"enable_thinking": false}')]
    if name in ONLY_ADAPTED:
        formats = [(None, None)]
    assert (data.sft_tokenizer_prompt_format, data.chat_template_kwargs) in formats
    assert f"| `{name}` |" in (recipe.parent / "README.md").read_text()
