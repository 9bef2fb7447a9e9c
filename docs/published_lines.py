"""Training command lines in the public repositories of Megatron-LM and Megatron-Bridge.

Functional tests are read as files. Shell scripts run with a launcher that writes down its arguments
and starts nothing. Recipes of Megatron-Bridge are read as syntax trees: literal values become the
flags of the same names.
"""

from __future__ import annotations

import ast
import os
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from megatron_packed.config.megatron.bridge_settings import (
    LORA_FLAGS,
    flag_of_setting,
    with_adapters,
)
from megatron_packed.config.megatron.model_config_file import read_model_config

TESTS = "tests/functional_tests/test_cases"
MODELOPT = "examples/post_training/modelopt"
RECIPES = "src/megatron/bridge/recipes"
RECIPE_FILES = ("nemotronh", "nemotron_nano_v2", "nemotron_3_nano")
VALUES = {"TOKENIZER_TYPE": "TikTokenizer", "CHECKPOINT_LOAD_PATH": "checkpoints"}
"""Values of variables that the runner of the functional tests sets."""
SCRIPTS = {
    "examples/gpt3/train_gpt3_175b_distributed.sh": "save logs vocab.json merges.txt data",
    "examples/mixtral/train_mixtral_8x7b_distributed.sh": "save tokenizer.model data",
}
"""Scripts with their arguments."""
LAUNCHER = '#!/bin/sh\nprintf "%s\\0" "$@" > "$LINE"\n'
FINE_TUNING = ("--sft", "--data-path", "data.jsonl")
RECIPE_DATA = {
    "pretrain": ("--data-path", "data"),
    "sft": ("--sft", "--train-data-path", "data.jsonl", "--valid-data-path", "valid.jsonl"),
}
RECIPE_DATA["peft"] = RECIPE_DATA["sft"]
DEFAULTS = ("--disable-bias-linear", "--bf16")
"""Defaults of Megatron-Bridge that differ from those of Megatron-LM's parser."""


class PublishedLine(NamedTuple):
    """Training command line.

    Args:
        words: flags and values; those of the launcher are not included.
        added: words that replace the data of the script.
    """

    group: str
    name: str
    words: tuple[str, ...]
    added: tuple[str, ...] = ()


def test_cases(root: Path) -> Iterator[PublishedLine]:
    """Yield the training lines of the functional tests."""
    for group in ("hybrid", "nemotron", "moe", "mixtral", "gpt"):
        for path in sorted((root / TESTS / group).glob("*/model_config.yaml")):
            try:
                line = read_model_config(str(path), VALUES)
            except ValueError:  # text generation, reinforcement learning, or YAML with aliases
                continue
            yield PublishedLine(f"tests/{group}", path.parent.name, line.arguments)


def script_lines(root: Path, scratch: Path) -> Iterator[PublishedLine]:
    """Yield the lines of the example scripts, whose launcher is replaced."""
    mamba = root / "examples/mamba/train.sh"
    for scale in ("800M", "8B"):
        text = mamba.read_text().replace('MODEL_SCALE="800M"', f'MODEL_SCALE="{scale}"')
        script = scratch / "train.sh"
        script.write_text(text)
        words = _launched([str(script), "data", "tokenizer.model"], {}, scratch)
        yield PublishedLine("examples/mamba", f"train.sh {scale}", words)
    for conf in sorted((root / MODELOPT / "conf").glob("*/*.sh")):
        model = f"{conf.parent.name}/{conf.stem}"
        environ = {"MLM_MODEL_CKPT": "checkpoints", "MLM_SKIP_INSTALL": "1"}
        words = _launched([str(root / MODELOPT / "finetune.sh"), model], environ, scratch)
        if words:
            words = _without(words, "--finetune-hf-dataset")
            yield PublishedLine("examples/modelopt SFT", model, words, FINE_TUNING)
    for name, arguments in SCRIPTS.items():
        words = _launched([str(root / name), *arguments.split()], {}, scratch)
        yield PublishedLine("examples", name, words)


def _launched(command: list[str], environ: Mapping[str, str], scratch: Path) -> tuple[str, ...]:
    """Return the arguments that a script passes to its training program."""
    stub, line = scratch / "bin" / "torchrun", scratch / "line"
    stub.parent.mkdir(exist_ok=True)
    stub.write_text(LAUNCHER)
    stub.chmod(0o755)
    line.unlink(missing_ok=True)
    path = f"{stub.parent}{os.pathsep}/usr/bin{os.pathsep}/bin"
    subprocess.run(
        ["bash", *command],
        cwd=scratch,
        env={"PATH": path, "LINE": str(line), **environ},
        capture_output=True,
    )
    words = line.read_text().split("\0")[:-1] if line.exists() else []
    at = next((i for i, word in enumerate(words) if word.endswith(".py")), len(words))
    return tuple(words[at + 1 :])


def _without(words: tuple[str, ...], flag: str) -> tuple[str, ...]:
    """Return words without a flag and its value."""
    at = words.index(flag) if flag in words else len(words)
    return words[:at] + words[at + 2 :]


NAMED_VALUES = {
    "squared_relu": "--squared-relu",
    "float32": "fp32",
    "bfloat16": "bf16",
    "_NEMOTRON_3_NANO_MODEL_ID": "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
    "_NEMOTRON_3_5_LIGHTNING_MODEL_ID": "nvidia/NVIDIA-Nemotron-3.5-Lightning-30B-A3B-BF16",
    "DEFAULT_NULL_TOKENIZER_VOCAB_SIZE": "131072",
    "seq_length": "8192",
    "tensorboard_dir": "tensorboard",
    "checkpoint_dir": "checkpoints",
}
"""Names in recipes with the text of their values."""


def recipe_lines(root: Path, flags: frozenset[str]) -> Iterator[PublishedLine]:
    """Yield the recipes of Megatron-Bridge as command lines.

    Args:
        flags: flags of Megatron-LM. Settings without a flag are left out.
    """
    common = _functions(root / RECIPES / "common.py")
    for machine in ("h100", "gb200"):
        for name in RECIPE_FILES:
            path = root / RECIPES / "nemotronh" / machine / f"{name}.py"
            functions = _functions(path) if path.exists() else {}
            for function, tree in functions.items():
                settings = _settings(tree, common | functions)
                if function.startswith("_") or "hybrid_layer_pattern" not in settings:
                    continue  # a part of a recipe, or a model that is not literal
                words = [word for key in settings for word in _as_words(key, settings[key], flags)]
                if "_peft_" in function:
                    words = with_adapters(words, _lora_settings(tree, common))
                data = next(data for kind, data in RECIPE_DATA.items() if f"_{kind}_" in function)
                recipe = function.removesuffix("_config")
                yield PublishedLine("Megatron-Bridge", recipe, tuple(words), (*DEFAULTS, *data))


def _functions(path: Path) -> dict[str, ast.FunctionDef]:
    tree = ast.parse(path.read_text())
    return {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}


def _settings(
    function: ast.FunctionDef, common: Mapping[str, ast.FunctionDef]
) -> dict[str, list[str] | bool]:
    """Return the literal settings of a recipe in order; a later assignment replaces an earlier one."""
    found: dict[str, list[str] | bool] = {}
    for statement in function.body:
        if isinstance(statement, ast.If):  # conditions depend on the arguments of the recipe
            continue
        for call in ast.walk(statement):
            if not isinstance(call, ast.Call):
                continue
            called = ast.unparse(call.func)
            if called in common:
                found |= _settings(common[called], common)
            if called == "set_cuda_graph_modules":
                found["cuda_graph_modules"] = _value(call.args[1]) or []
            for keyword in call.keywords:
                _set(found, keyword.arg or "", keyword.value)
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Attribute):
            _set(found, statement.targets[0].attr, statement.value)
    return found


def _lora_settings(
    function: ast.FunctionDef, common: Mapping[str, ast.FunctionDef]
) -> dict[str, list[str]]:
    """Return the literal settings of adapters in a recipe.

    They are those of ``LoRA(...)`` in the part that all recipes share, and the list of matrices that
    the recipe assigns to a variable.
    """
    found: dict[str, list[str]] = {}
    for tree in (common["_peft_common"], function):
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "LoRA":
                pairs = [(keyword.arg or "", keyword.value) for keyword in node.keywords]
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                pairs = [(node.targets[0].id.removeprefix("mamba_"), node.value)]
            else:
                continue
            for key, expression in pairs:
                value = _value(expression)
                if key in LORA_FLAGS and isinstance(value, list):
                    found[key] = value
    return found


def _set(found: dict[str, list[str] | bool], key: str, node: ast.expr) -> None:
    value = _value(node)
    if value is None:
        found.pop(key, None)
    else:
        found[key] = value


def _value(node: ast.expr) -> list[str] | bool | None:
    """Return the words of a literal; None for None and for other expressions."""
    if isinstance(node, ast.List):
        values = [_value(item) for item in node.elts]
        return [word for value in values if isinstance(value, list) for word in value]
    if isinstance(node, ast.Constant):
        if node.value is None or isinstance(node.value, bool):
            return node.value
        return [str(node.value)]
    name = node.id if isinstance(node, ast.Name) else getattr(node, "attr", "")
    return [NAMED_VALUES[name]] if name in NAMED_VALUES else None


def _as_words(key: str, value: list[str] | bool, flags: frozenset[str]) -> list[str]:
    if key == "mixed_precision":
        return ["--bf16"]
    if key == "activation_func" and isinstance(value, list):
        return value
    return flag_of_setting(key, value, flags)
