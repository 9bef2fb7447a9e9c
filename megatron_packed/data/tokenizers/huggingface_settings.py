"""Files next to a ``tokenizer.json``, read as transformers 5 reads them.

They name tokens (``eos_token``), add tokens that tokenizer.json lacks, change the flags of tokens,
and contain chat templates. transformers is not needed.

Rules of transformers (``PreTrainedTokenizerBase._from_pretrained``, ``TokenizersBackend.__init__``):

- If tokenizer_config.json has ``added_tokens_decoder``, then special_tokens_map.json and
  added_tokens.json are not read. Otherwise special_tokens_map.json wins over tokenizer_config.json,
  also with a null.
- ``additional_special_tokens`` is an older name of ``extra_special_tokens``, and is used if there
  is no list of the newer name. A dict of ``extra_special_tokens`` names tokens, as do all entries
  ``*_token``.
- Tokens that tokenizer.json lacks get the next free numbers. First come those with a number in the
  files, in the order of these numbers, then named tokens, then ``extra_special_tokens``.
- Files with chat templates win over the ``chat_template`` of tokenizer_config.json.
- chat_template.json holds the template of a processor (``ProcessorMixin``), and no tokenizer of
  transformers reads it. Here it is the template of a folder that has no other.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken

from megatron_packed.config import flag_names as flags
from megatron_packed.data.errors import DataError, printable
from megatron_packed.data.tokenizers.base import read_text

TOKENIZER_JSON = "tokenizer.json"
CONFIG, SPECIAL_TOKENS_MAP = "tokenizer_config.json", "special_tokens_map.json"
ADDED_TOKENS, TEMPLATE = "added_tokens.json", "chat_template.jinja"
TEMPLATE_FOLDER = "additional_chat_templates"
PROCESSOR_TEMPLATE = "chat_template.json"
"""File in which older models with vision have the chat template."""
DEFAULT, TOOL_USE = "default", "tool_use"
"""Names of chat templates: the template of all conversations, and the one of those with tools."""

TOKEN_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
"""Flags of a token that decide where it is found in a text."""

_MAX_BYTES = 64 * 2**20
_STANDARD = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
"""Names of tokens in all tokenizers, in the order in which missing tokens get numbers."""
_EXTRA, _ADDITIONAL = "extra_special_tokens", "additional_special_tokens"
_SPECIFIC, _DECODER = "model_specific_special_tokens", "added_tokens_decoder"
_TOKEN = (str, AddedToken)


Templates = Mapping[str, str] | str | None
"""One chat template, or each template by its name; None without one."""


class ListedToken(NamedTuple):
    """Token to which a file next to tokenizer.json gives a number."""

    file: Path
    number: int
    content: str


class Settings(NamedTuple):
    """Tokens in the files next to a tokenizer.json."""

    named: dict[str, str]
    """Spelling of each named token, for example of ``eos_token``."""
    tokens: Sequence[AddedToken] = ()
    """Tokens to give to ``add_tokens`` of the library, in this order. Tokens that tokenizer.json has
    keep their number and take over the flags."""
    listed: Sequence[ListedToken] = ()
    """Tokens to which a file gives a number."""
    ignores_map: bool = False
    """True if there is a special_tokens_map.json that transformers does not read."""


def read_settings(file: Path, tokenizer: Mapping[str, Any]) -> Settings:
    """Read the tokens of the files next to a tokenizer.json.

    Args:
        file: path of the tokenizer.json.
        tokenizer: its content, which the library could load.
    Raises:
        DataError: a file is damaged, or has a value that transformers does not accept either.
    """
    config, token_map = (
        read_json(file.with_name(CONFIG)),
        read_json(file.with_name(SPECIAL_TOKENS_MAP)),
    )
    reads_map = _DECODER not in config
    added = tokenizer.get("added_tokens") or []
    fields = _SpecialTokenFields(file.with_name(CONFIG), config)
    if reads_map:
        fields.update(file.with_name(SPECIAL_TOKENS_MAP), token_map)
        numbered, listed = _numbered_file(file.with_name(ADDED_TOKENS), fields.special_texts())
        # A number of tokenizer.json replaces the same number of added_tokens.json.
        numbered |= {item["id"]: _token(item, file) for item in added}
    else:
        numbered, listed = _numbered_config(file.with_name(CONFIG), config[_DECODER])
    named, extra = fields.named(tokenizer.get("padding") or {}), fields.extra()
    # The order of earlier versions, because it is part of the tokenizer's fingerprint.
    order = {name: place for place, name in enumerate({**token_map, **config})}
    ordered = sorted(named, key=lambda name: order.get(name, len(order)))
    return Settings(
        {name: _text(named[name]) for name in ordered},
        _to_add({item["content"] for item in added}, numbered, named.values(), extra),
        listed,
        bool(token_map) and not reads_map,
    )


class _SpecialTokenFields:
    """Fields of tokenizer_config.json and special_tokens_map.json that name tokens.

    Args:
        file: path of tokenizer_config.json.
        config: its content.
    """

    def __init__(self, file: Path, config: Mapping[str, Any]) -> None:
        self._file = file
        self._values = values = dict(config)
        if _ADDITIONAL in values and not values.get(_EXTRA):
            values[_EXTRA] = values.pop(_ADDITIONAL)
        specific = {
            name: values.pop(name)
            for name in list(values)
            if _is_specific(name) and isinstance(values[name], str)
        }
        if isinstance(values.get(_EXTRA), dict):
            specific.update(values.pop(_EXTRA))
        self._list(_EXTRA)
        self._specific = specific or values.pop(_SPECIFIC, None) or {}
        if not isinstance(self._specific, dict):
            raise _unusable(file, _SPECIFIC, self._specific, "an object of names and tokens")

    def update(self, file: Path, fields: Mapping[str, Any]) -> None:
        """Apply special_tokens_map.json.

        Args:
            file: path of special_tokens_map.json.
            fields: its content.
        """

        def special(value: Any) -> Any:
            is_token = isinstance(value, dict)
            return _token({**value, "special": True}, file) if is_token else value

        for name, value in fields.items():
            if isinstance(value, list) and name in (_EXTRA, _ADDITIONAL):
                earlier = self._list(_EXTRA) if name == _EXTRA else []
                self._values[name] = [*earlier, *map(special, value)]
            else:
                self._values[name] = value if name == _EXTRA else special(value)
        if isinstance(self._values.get(_EXTRA), dict):
            self._specific = {**self._specific, **self._values.pop(_EXTRA)}

    def special_texts(self) -> set[str]:
        """Return the tokens that are special if added_tokens.json lists them.

        Objects of tokenizer_config.json and model-specific names do not count in transformers.
        """
        values = [*(self._values.get(name) for name in _STANDARD), *self._list(_EXTRA)]
        return {_text(value) for value in values if isinstance(value, _TOKEN)}

    def named(self, padding: Mapping[str, Any]) -> dict[str, str | AddedToken]:
        """Return the named tokens, in the order in which missing ones get numbers.

        Args:
            padding: ``padding`` of tokenizer.json.
        """
        values = {"pad_token": padding.get("pad_token"), **self._values}
        named: dict[str, str | AddedToken] = {}
        for name in _STANDARD:
            # transformers refuses an object without `__type`, but its meaning is clear.
            if values.get(name) is not None:
                named[name] = self._one(name, values[name])
        for name, value in values.items():
            if _is_specific(name) and (isinstance(value, _TOKEN) or _has_type(value)):
                named[name] = self._one(name, value)
        return named | {name: self._one(name, value) for name, value in self._specific.items()}

    def extra(self) -> list[str | AddedToken]:
        """Return the special tokens without a name."""
        name = _EXTRA if _EXTRA in self._values else _ADDITIONAL
        return [self._one(name, value) for value in self._list(name)]

    def _list(self, name: str) -> list[Any]:
        values = self._values.get(name) or []
        if not isinstance(values, list):
            raise _unusable(self._file, name, values, "a list of tokens, or an object with names")
        return values

    def _one(self, name: str, value: Any) -> str | AddedToken:
        if isinstance(value, _TOKEN):
            return value
        if not isinstance(value, dict):
            raise _unusable(self._file, name, value, "text, the spelling of a token")
        return _token(value if _has_type(value) else {"special": True, **value}, self._file)


def _numbered_config(file: Path, decoder: Any) -> tuple[dict[int, AddedToken], list[ListedToken]]:
    """Read ``added_tokens_decoder`` of tokenizer_config.json."""
    if not isinstance(decoder, dict):
        raise _unusable(file, _DECODER, decoder, "an object of numbers and tokens")
    numbered, listed = {}, []
    for key, value in decoder.items():
        if not (key.isascii() and key.isdecimal() and len(key) < 10):
            raise _unusable(file, _DECODER, key, "a number, for each of its tokens")
        numbered[int(key)] = token = _token(value, file)
        listed.append(ListedToken(file, int(key), token.content))
    return numbered, listed


def _numbered_file(
    file: Path, special: Container[str]
) -> tuple[dict[int, AddedToken], list[ListedToken]]:
    """Read added_tokens.json.

    Args:
        special: texts of the special tokens.
    """
    numbered, listed = {}, []
    for content, number in read_json(file).items():
        if type(number) is not int or number < 0:
            raise _unusable(file, content, number, "a number, the number of this token")
        is_special = content in special
        numbered[number] = AddedToken(content, normalized=not is_special, special=is_special)
        listed.append(ListedToken(file, number, content))
    return numbered, listed


def _to_add(
    added_texts: Iterable[str],
    numbered: Mapping[int, AddedToken],
    named: Collection[str | AddedToken],
    extra: Iterable[str | AddedToken],
) -> list[AddedToken]:
    """Return the tokens for ``add_tokens`` of the library, as transformers gives them to it.

    Args:
        added_texts: spellings of the added tokens of tokenizer.json.
    """
    tokens: list[str | AddedToken] = [token for _, token in sorted(numbered.items())]
    listed_texts = {*added_texts, *map(_text, tokens)}
    for token in (*named, *extra):
        if _text(token) not in listed_texts and token not in tokens:
            tokens.append(token)
    texts = set(map(_text, named))
    added = [AddedToken(t, special=True) if isinstance(t, str) else t for t in tokens]
    for token in added:
        token.special = token.special or token.content in texts
    return added


def _is_specific(name: str) -> bool:
    """Return whether a field names a token that only some models have."""
    return name.endswith("_token") and name not in _STANDARD


def _has_type(value: Any) -> bool:
    """Return whether transformers reads a value as a token wherever it stands."""
    return isinstance(value, dict) and value.get("__type") == "AddedToken"


def _text(token: str | AddedToken) -> str:
    return token if isinstance(token, str) else str(token.content)


def _token(value: Any, file: Path) -> AddedToken:
    if not isinstance(value, dict) or not isinstance(value.get("content"), str):
        raise _unusable(file, "a token", value, "an object with the text `content`")
    token_flags = {name: value[name] for name in TOKEN_FLAGS if value.get(name) is not None}
    for name, flag in token_flags.items():
        if not isinstance(flag, bool):
            raise _unusable(file, f"{name} of {value['content']}", flag, "true or false")
    return AddedToken(value["content"], **token_flags)


def _unusable(file: Path, name: str, value: Any, wanted: str) -> DataError:
    shown = printable(json.dumps(value, ensure_ascii=False), 60)
    return DataError(f"{file}: {printable(name, 60)} is {shown}; it must be {wanted}.")


def read_json(file: Path) -> dict[str, Any]:
    """Return the object of a JSON file; an empty one if there is no file.

    Raises:
        DataError: the file cannot be read, is too large, or has no object.
    """
    if not os.path.lexists(file):
        return {}
    try:
        value = json.loads(read_text(file, _MAX_BYTES))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file} is not JSON: {printable(str(error))}.") from None
    if not isinstance(value, dict):
        raise DataError(f"{file} must contain one JSON object.")
    return value


def read_templates(file: Path) -> Templates:
    """Return the chat templates next to a tokenizer.json.

    Args:
        file: path of the tokenizer.json.
    Returns:
        The jinja2 source of one template, or of each template by its name; None if there is none.
    """
    separate = {}
    if os.path.lexists(file.with_name(TEMPLATE)):
        separate[DEFAULT] = read_text(file.with_name(TEMPLATE))
    for other in sorted(file.with_name(TEMPLATE_FOLDER).glob("*.jinja")):
        separate[other.name.removesuffix(".jinja")] = read_text(other)
    if separate:
        return separate[DEFAULT] if list(separate) == [DEFAULT] else separate
    source = file.with_name(CONFIG)
    templates = read_json(source).get("chat_template")
    if templates is None:
        source = file.with_name(PROCESSOR_TEMPLATE)
        templates = read_json(source).get("chat_template")
    if isinstance(templates, list) and all(isinstance(item, dict) for item in templates):
        templates = {item.get("name"): item.get("template") for item in templates}
    texts = [*templates, *templates.values()] if isinstance(templates, dict) else [templates]
    if templates is not None and not all(isinstance(text, str) for text in texts):
        raise DataError(f"{source}: chat_template must be text or a list of named templates.")
    return templates


def default_template(templates: Templates) -> str | None:
    """Return the template for conversations without tools.

    If templates have names, and none has the name ``default``, the result is a template that raises
    an error: the templates are no fault where no conversation needs them.
    """
    if templates is None or isinstance(templates, str):
        return templates
    if DEFAULT in templates:
        return templates[DEFAULT]
    names = printable(", ".join(templates)) or "no names"
    error = f"none of the tokenizer's chat templates ({names}) has the name `default`; give {flags.CHAT_TEMPLATE}"
    return f"{{{{- raise_exception({json.dumps(error)}) -}}}}"


def tool_template(templates: Templates) -> str | None:
    """Return the template for conversations with tools; None if the default template prints them."""
    return templates.get(TOOL_USE) if isinstance(templates, Mapping) else None
