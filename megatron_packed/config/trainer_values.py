"""Conversion of values of Hugging Face trainers to values of this project.

Each function takes a value as text. It returns the text for this project, or None if the value
needs no flag.
"""

from __future__ import annotations

import re

from megatron_packed.config.hub_paths import is_hub_name

TRACKERS = {
    "wandb": "--wandb-project NAME",
    "tensorboard": "--tensorboard-dir DIR",
    "mlflow": "--mlflow-experiment NAME",
}
"""Values of ``report_to``, and the flag for each."""


def steps(text: str) -> str | None:
    """Return a number of steps; -1 means that epochs give the length."""
    return None if text == "-1" else text


def on(text: str) -> str | None:
    """Return None for a feature that is switched off."""
    return None if text.lower() in ("false", "no", "none", "0", "") else text


def adapter(text: str) -> str | None:
    """Return None for a method that trains all weights."""
    return None if text.lower() == "full" else on(text)


def words(text: str) -> str:
    """Return the words of a list in YAML, or of a text with commas."""
    return " ".join(re.findall(r"[^\s,\[\]'\"]+", text))


def warmup(text: str) -> str:
    """Return the flag for ``warmup_steps``, which is a fraction if it is below 1."""
    try:
        fraction = 0 < float(text) < 1
    except ValueError:
        fraction = False
    return f"--lr-warmup-fraction {text}" if fraction else f"--lr-warmup-iters {text}"


def schedule(text: str) -> str:
    """Return the value of ``--lr-decay-style``, or the possible values."""
    names = {"constant_with_warmup": "constant", "warmup_stable_decay": "WSD"}
    shape = names.get(text.lower(), text.lower())
    is_supported = shape in ("linear", "cosine", "constant", "WSD")
    return shape if is_supported else "linear, cosine, constant or WSD"


def split(text: str) -> str:
    """Return ``--split`` for a fraction of validation data: 0.05 gives 95,5."""
    try:
        share = 100 * float(text)
    except ValueError:
        share = 0.0
    return f"{100 - share:g},{share:g}" if 0 < share < 100 else "95,5"


def percent(text: str) -> str:
    """Return ``--split`` for a percentage of validation data: 5 gives 95,5."""
    try:
        return split(str(float(text) / 100))
    except ValueError:
        return "95,5"


def dtype(text: str) -> str | None:
    """Return the flag for a dtype of 16 bits."""
    return "--bf16" if text.lower() in ("bf16", "bfloat16", "fp16", "float16", "auto") else None


def tracker(text: str) -> str | None:
    """Return the flag of a tracking service."""
    if text.lower() in ("none", ""):
        return None
    return TRACKERS.get(text.lower(), " or ".join(TRACKERS.values()))


def model(text: str) -> str:
    """Return the path of a model for the Hub's names, such as ``org/name``."""
    return f"hf://{text}" if is_hub_name(text) else text


def data_set(text: str) -> str:
    """Return the path of a data set for the Hub's names, such as ``org/name``."""
    if text.startswith(("{", "[")):  # a list of data sets in YAML
        return "FILE"
    return f"hf://datasets/{text}" if is_hub_name(text) else text


def minutes(text: str) -> str:
    """Return seconds as minutes, rounded up."""
    return str(-(-int(text) // 60)) if text.isdecimal() else "MINUTES"
