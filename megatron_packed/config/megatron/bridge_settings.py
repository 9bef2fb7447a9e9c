"""Settings of Megatron-Bridge as flags: its recipes, and the lines of its ``run_recipe``.

A setting such as ``train.train_iters=100`` is the flag of Megatron-LM with the same name. Settings
of adapters (LoRA) have no flag in Megatron-LM; they become those of this project.
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping, Sequence

from megatron_packed.config.errors import printable

RENAMED = {
    "num_moe_experts": "--num-experts",
    "max_lr": "--lr",
    "use_te_rng_tracker": "--te-rng-tracker",
    "grad_reduce_in_fp32": "--accumulate-allreduce-grads-in-fp32",
    "fully_parallel_save": "--ckpt-fully-parallel-save",
    "random_seed": "--seed",
    "skip_getting_attention_mask_from_dataset": "--no-create-attention-mask-in-dataloader",
}
"""Settings whose flag has another name."""
SWITCHED_OFF = {
    "use_mamba_mem_eff_path": "--disable-mamba-mem-eff-path",
    "masked_softmax_fusion": "--no-masked-softmax-fusion",
    "apply_rope_fusion": "--no-rope-fusion",
    "mmap_bin_files": "--no-mmap-bin-files",
}
"""Settings that a flag switches off."""
LORA_FLAGS = {
    "dim": "--lora-rank",
    "alpha": "--lora-alpha",
    "dropout": "--lora-dropout",
    "lora_A_init_method": "--lora-init",
    "target_modules": "--lora-target-modules",
}
"""Settings of ``LoRA`` in Megatron-Bridge with their flags."""
LORA_DEFAULTS = {
    "dim": ["32"],
    "alpha": ["32"],
    "dropout": ["0.0"],
    "lora_A_init_method": ["xavier"],
    "target_modules": [
        "linear_qkv",
        "linear_proj",
        "linear_fc1",
        "linear_fc2",
        "in_proj",
        "out_proj",
    ],
}
"""Defaults of recipes for hybrid models."""
_IMPLEMENTATION = "--transformer-impl"
_RECIPE = "--recipe"
_MODES = ("--mode", "--peft-scheme", "--peft_scheme")
"""Flags of which the value ``lora`` requests adapters."""
_SETTING = re.compile(r"(?:(\w+)\.)(?:\w+\.)*(\w+)=(.*)", re.DOTALL)
_NONE = ("null", "None", "")


def flag_of_setting(key: str, value: list[str] | bool, flags: Container[str]) -> list[str]:
    """Return a setting as a flag with its values; empty if it has no flag.

    Args:
        key: last part of the setting's name.
        flags: flags of Megatron-LM.
    """
    if value is False:
        return [SWITCHED_OFF[key]] if key in SWITCHED_OFF else []
    flag = RENAMED.get(key, "--" + key.replace("_", "-"))
    if flag not in flags:
        return []
    return [flag] if value is True else [flag, *value]


def with_adapters(words: Sequence[str], settings: Mapping[str, list[str]]) -> list[str]:
    """Return the words of a line with the flags of adapters.

    Layers of TransformerEngine have no adapters here, so ``--transformer-impl`` becomes ``local``,
    which computes the same.

    Args:
        settings: settings of ``LoRA``; others have their defaults.
    """
    kept = list(words)
    if _IMPLEMENTATION in kept:
        at = kept.index(_IMPLEMENTATION) + 1
        kept[at : at + 1] = ["local"]
    values = {**LORA_DEFAULTS, **settings}
    return [*kept, *(word for key, flag in LORA_FLAGS.items() for word in (flag, *values[key]))]


def words_of_bridge(words: Sequence[str], flags: Container[str]) -> list[str]:
    """Return the words of a line of ``run_recipe`` with flags in place of its settings.

    Lines of other programs stay as they are. ``--mode lora`` becomes the flags of adapters, and so
    does a recipe whose name contains ``peft``.

    Args:
        flags: flags of Megatron-LM.
    Raises:
        ValueError: a clause about settings of adapters that this project does not have.
    Example:
        ``--mode lora train.train_iters=9 peft.dim=8`` gives ``--train-iters 9 --lora-rank 8 ...``.
    """
    if _RECIPE not in words:
        return list(words)
    rest = list(words)
    mode = "lora" if "_peft_" in rest[rest.index(_RECIPE) + 1 :][0] else ""
    for flag in _MODES:
        while flag in rest:
            at = rest.index(flag)
            mode = (*rest[at + 1 : at + 2], "")[0]
            del rest[at : at + 2]
    settings = [match for word in rest if (match := _SETTING.fullmatch(word))]
    of_adapters = [match for match in settings if match[1] == "peft"]
    result = [word for word in rest if not _SETTING.fullmatch(word)]
    for match in settings:
        if match not in of_adapters:
            result += flag_of_setting(match[2], _value(match[3]), flags)
    if mode == "lora":
        return with_adapters(result, dict(map(_lora_setting, of_adapters)))
    if mode == "dora" or of_adapters:
        shown = printable(f"{of_adapters[0][0]} without --mode lora" if of_adapters else mode, 60)
        raise ValueError(f"has {shown}, and only adapters of --mode lora are supported")
    return result


def _lora_setting(match: re.Match[str]) -> tuple[str, list[str]]:
    value = _value(match[3])
    if match[2] not in LORA_FLAGS or isinstance(value, bool):
        shown, names = printable(match[0], 60), ", ".join(LORA_FLAGS)
        raise ValueError(f"has {shown}, and of peft only {names} are supported")
    return match[2], value


def _value(text: str) -> list[str] | bool:
    """Return the words of a value; False for a value that is not set."""
    if text.lower() in ("true", "false") or text in _NONE:
        return text.lower() == "true"
    return [word for word in re.split(r"[\[\],'\"\s]+", text) if word]
