"""Paths on the Hugging Face Hub (``hf://``), and names of the Hub given as local paths."""

from __future__ import annotations

import os
import re
import shlex
from typing import NamedTuple

from megatron_packed.config.data_files import is_data_name
from megatron_packed.config.errors import Fault
from megatron_packed.config.optional_packages import is_installed

DATASET, MODEL = "dataset", "model"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
)
"""Files of a model on the Hub that a HuggingFaceTokenizer reads, as names and patterns."""
_PREFIX = "hf://"
_WORD = r"[A-Za-z0-9][\w.-]{0,95}"
_NAME = re.compile(f"{_WORD}/{_WORD}")
_PATH = re.compile(
    rf"hf://(?P<datasets>datasets/)?(?P<name>(?!(?:datasets|models|spaces)/){_WORD}/{_WORD})"
    r"(?:@(?P<revision>refs/(?:convert|pr)/[\w.-]+|[\w.-]+))?(?:/(?P<inside>.*))?"
)
_ADDRESS = re.compile(
    rf"https?://(?:(?:www\.)?(?:huggingface\.co|hf\.co)/datasets/(?P<name>{_WORD}/{_WORD}))?"
)
_FORMS = {
    DATASET: "hf://datasets/ORGANISATION/NAME[@REVISION][/FILE or DIRECTORY]",
    MODEL: "hf://ORGANISATION/NAME[@REVISION][/FILE]",
}
_FILES = (".bin", ".idx", ".txt", ".model", ".csv", ".arrow", ".zip", ".tiktoken")


class HubPath(NamedTuple):
    """File, directory or all files of a data set or model on the Hugging Face Hub."""

    kind: str
    """``dataset`` or ``model``."""
    name: str
    """``ORGANISATION/NAME``."""
    revision: str | None
    """Branch, tag or commit; None for the default branch."""
    inside: str
    """Path inside the data set or model; empty for all files."""


def is_hub_path(path: str) -> bool:
    return path.startswith(_PREFIX)


def parse_hub_path(path: str) -> HubPath | None:
    """Return the parts of an ``hf://`` path; None if the path does not have the right form.

    Example:
        ``hf://datasets/org/name@v1/train.jsonl`` is the file ``train.jsonl`` of the revision ``v1``
        of the data set ``org/name``.
    """
    match = _PATH.fullmatch(path)
    inside = "" if match is None else (match["inside"] or "").strip("/")
    if match is None or ".." in inside.split("/"):
        return None
    kind = DATASET if match["datasets"] else MODEL
    return HubPath(kind, match["name"], match["revision"], inside)


def hub_problem(path: str, kind: str) -> Fault | None:
    """Check an ``hf://`` path of the given kind, without network; return (rule, cure) or None."""
    parsed = parse_hub_path(path)
    if parsed is None or parsed.kind != kind:
        return f"is no path of a {kind} on the Hugging Face Hub", f"write {_FORMS[kind]}"
    if not is_installed("huggingface_hub"):
        return "needs huggingface_hub, which is not installed", "pip install huggingface_hub"
    return None


def is_hub_name(path: str) -> bool:
    """Return whether a path that does not exist looks like ``ORGANISATION/NAME`` of the Hub."""
    return (
        _NAME.fullmatch(path) is not None
        and not os.path.lexists(path)
        and not os.path.isdir(os.path.dirname(path))
        and not is_data_name(path)
        and not path.endswith(_FILES)
    )


def download_cure(name: str, kind: str, flag: str, files: tuple[str, ...] = ()) -> str:
    """Return how to download a data set or model of the Hub, and the flag to give afterwards.

    Args:
        files: files to download; all files when empty.
    """
    local = f"{'data' if kind == DATASET else 'models'}/{name.partition('/')[2]}"
    argv = ["hf", "download", name, *files, *["--repo-type", kind] * (kind == DATASET)]
    command = shlex.join([*argv, "--local-dir", local])
    hub = f"hf://{'datasets/' * (kind == DATASET)}{name}"
    return (
        f"correct the path; for a {kind} of that name on the Hugging Face Hub, run `{command}` and "
        f"give `{flag} {local}`, or give `{flag} {hub}`"
    )


def address_cure(path: str, flag: str) -> str | None:
    """Return the cure for an address of the web, which is no path; None for other paths."""
    match = _ADDRESS.match(path)
    if match is None:
        return None
    if match["name"] is None:
        return f"download the file, and give its path to `{flag}`"
    return f"give `{flag} hf://datasets/{match['name']}`"


def convert_cure(name: str, flag: str) -> str:
    """Return how to make a checkpoint of a model of the Hub, and the flag to give afterwards."""
    local = f"checkpoints/{name.partition('/')[2]}"
    return (
        "correct the path; for a model of that name on the Hugging Face Hub, run `megatron-packed "
        "convert --from-hf "
        f"hf://{name} --save {local}` and give `{flag} {local}`"
    )
