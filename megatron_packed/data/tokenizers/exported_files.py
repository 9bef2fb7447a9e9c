"""Files of a tokenizer for a Hugging Face model directory.

Files that a tokenizer was read from are copied. A byte tokenizer is written as the ``tokenizer.json``
of a byte-level BPE without merges.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Engine

from megatron_packed.data.tokenizers.base import (
    END_OF_DOCUMENT,
    OWN_SPECIAL_TOKENS,
    ByteTokenizer,
)
from megatron_packed.data.tokenizers.huggingface_settings import (
    ADDED_TOKENS,
    CONFIG,
    PROCESSOR_TEMPLATE,
    SPECIAL_TOKENS_MAP,
    TEMPLATE,
    TEMPLATE_FOLDER,
    TOKENIZER_JSON,
    TOOL_USE,
    default_template,
    read_json,
    read_templates,
)

Files = dict[str, "str | Path"]
"""Name of each file, with its text or with the file to copy."""


def files_of_huggingface(path: Path, chat_template: str | None) -> Files:
    """Return the files next to a tokenizer.json, with the chat template of the training.

    Args:
        path: ``tokenizer.json``, or a directory that contains it.
        chat_template: jinja2 source; None, or the default template of the files, leaves their
            templates, also that for conversations with tools.
    """
    file = path / TOKENIZER_JSON if path.is_dir() else path
    files: Files = {TOKENIZER_JSON: file}
    for name in (SPECIAL_TOKENS_MAP, ADDED_TOKENS):
        if os.path.lexists(file.with_name(name)):
            files[name] = file.with_name(name)
    config = _settings(read_json(file.with_name(CONFIG)))
    templates = read_templates(file)
    if chat_template is not None and chat_template != default_template(templates):
        templates = chat_template
    if isinstance(templates, dict):
        named = [{"name": name, "template": text} for name, text in templates.items()]
        config["chat_template"] = named
    elif templates is not None:
        config["chat_template"] = templates
    files[CONFIG] = _text(config)
    return files


def files_of_template(
    directory: Path,
    chat_template: str,
    for_tools: str | None = None,
    *,
    settings: str | Path | None = None,
) -> Files:
    """Return the files of a model's directory that contain its chat template, with another one.

    transformers reads chat_template.jinja first; other programs read tokenizer_config.json.

    Args:
        directory: directory of the model.
        chat_template: jinja2 source.
        for_tools: template for conversations with tools; None for ``chat_template``.
        settings: text of a tokenizer_config.json, or its path, that takes the place of the
            directory's.
    """
    files: Files = {TEMPLATE: chat_template}
    if for_tools is not None:
        files[f"{TEMPLATE_FOLDER}/{TOOL_USE}.jinja"] = for_tools
    for name in (CONFIG, PROCESSOR_TEMPLATE):
        if name == CONFIG or os.path.lexists(directory / name):
            replacement = settings if name == CONFIG else None
            fields = (
                json.loads(replacement)
                if isinstance(replacement, str)
                else read_json(replacement or directory / name)
            )
            files[name] = _text({**fields, "chat_template": chat_template})
    return files


def files_of_gpt2(vocab_file: Path, merge_file: Path, chat_template: str | None) -> Files:
    """Return the two files of a GPT-2 tokenizer, and the settings for transformers."""
    fields = {"tokenizer_class": "GPT2Tokenizer", "eos_token": END_OF_DOCUMENT}
    return {
        "vocab.json": vocab_file,
        "merges.txt": merge_file,
        CONFIG: _text(_settings(fields, chat_template)),
    }


def files_of_bytes(tokenizer: ByteTokenizer, chat_template: str | None) -> Files:
    """Return a tokenizer.json that encodes every text as ``tokenizer`` does."""
    alphabet = _byte_characters()
    engine = Engine(models.BPE({alphabet[byte]: byte for byte in range(256)}, []))
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    engine.decoder = decoders.ByteLevel()
    engine.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in OWN_SPECIAL_TOKENS]
    )
    named = {name: token for name, token in tokenizer.template_variables.items() if token}
    config = _text(_settings(named, chat_template))
    return {TOKENIZER_JSON: engine.to_str(pretty=True), CONFIG: config}


def _byte_characters() -> dict[int, str]:
    """Return the character that stands for each byte in the vocabulary of a byte-level BPE.

    Printable bytes stand for themselves; the others follow after character 255, in order.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    printable = [ord(character) for character in alphabet if ord(character) < 256]
    others = [byte for byte in range(256) if byte not in printable]
    return dict(zip([*printable, *others], alphabet))


def _settings(fields: Mapping[str, Any], chat_template: str | None = None) -> dict[str, Any]:
    """Return the content of tokenizer_config.json, with the defaults of an export.

    transformers would otherwise remove spaces before punctuation when it decodes.
    """
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **fields,
        **({} if chat_template is None else {"chat_template": chat_template}),
    }


def _text(fields: Mapping[str, Any]) -> str:
    return json.dumps(fields, indent=2, ensure_ascii=False) + "\n"
