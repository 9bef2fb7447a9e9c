"""Tokenizer that reads a Hugging Face ``tokenizer.json`` with the `tokenizers` library.

It needs neither the transformers library nor remote code.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray

from megatron_packed.config import flag_names as flags
from megatron_packed.data.errors import DataError, printable
from megatron_packed.data.tokenizers.base import (
    END_OF_DOCUMENT,
    InProcess,
    Offsets,
    TokenIds,
    fingerprint_of,
    probe_splits,
    read_text,
)

_KNOWN_END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eod|>")
_MAX_CONFIG_BYTES = 64 * 2**20
_UNMADE = 100
"""Largest allowed number of entries of a GPT-2 vocabulary that no merge produces: special tokens.

If 1 % of the vocabulary is more than this number, the limit is 1 %. Above the limit, the file of
merges is incomplete.
"""


class HuggingFaceTokenizer(InProcess):
    """Tokenizer read from a ``tokenizer.json``; see `base.Tokenizer` for the attributes.

    Args:
        path: ``tokenizer.json``, or a directory that contains it. The optional files
            ``tokenizer_config.json``, ``special_tokens_map.json`` and ``chat_template.jinja`` in
            the same directory are read too.
    Raises:
        DataError: a file is missing or damaged, or no file names the token that ends a document.
    """

    def __init__(self, path: str | Path) -> None:
        file = _tokenizer_file(Path(path))
        config = {
            **_read_json(file.with_name("special_tokens_map.json")),
            **_read_json(file.with_name("tokenizer_config.json")),
        }
        self._set_up(file, read_text(file), config, _chat_template(file, config))

    @classmethod
    def gpt2(cls, vocab_file: str | Path, merge_file: str | Path) -> HuggingFaceTokenizer:
        """Build GPT-2's tokenizer from its two files.

        Args:
            vocab_file: ``vocab.json`` or ``encoder.json``.
            merge_file: ``merges.txt`` or ``vocab.bpe``.
        Raises:
            DataError: a file is missing, damaged or cut off, or has no ``<|endoftext|>``.
        """
        try:
            vocabulary, merges = tokenizers.models.BPE.read_file(str(vocab_file), str(merge_file))
            model = tokenizers.models.BPE(vocabulary, merges)
        except Exception as error:  # the library raises Exception itself, not a subclass
            reason = printable(str(error))
            raise DataError(
                f"{vocab_file} and {merge_file} are not a vocabulary and merges of GPT-2: {reason}."
            ) from None
        made = {left + right for left, right in merges}
        unmade = sum(len(entry) > 1 and entry not in made for entry in vocabulary)
        if unmade > max(_UNMADE, len(vocabulary) // 100):  # missing merges would change the tokens
            raise DataError(
                f"{unmade} of the {len(vocabulary)} entries of {vocab_file} are not the result of any of the "
                f"{len(merges)} merges of {merge_file}. The merges are cut off, or the files do not belong together."
            )
        backend = tokenizers.Tokenizer(model)
        backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = tokenizers.decoders.ByteLevel()
        if backend.token_to_id(END_OF_DOCUMENT) is not None:
            backend.add_special_tokens([END_OF_DOCUMENT])
        made = cls.__new__(cls)
        made._set_up(Path(vocab_file), backend.to_str(), {"eos_token": END_OF_DOCUMENT}, None)
        return made

    def _set_up(
        self, file: Path, text: str, config: Mapping[str, Any], chat_template: str | None
    ) -> None:
        """Set all attributes.

        Args:
            file: path for messages.
            text: content of a tokenizer.json.
            config: content of the other JSON files of the tokenizer.
            chat_template: jinja2 source; None if there is no template.
        """
        self.path = file
        text = _without_dropout(text)
        self._with_specials = _load(file, text)
        self._plain = _load(file, text)
        self._plain.encode_special_tokens = True
        self.template_variables: Mapping[str, str] = _named_tokens(config)
        self.chat_template = chat_template
        added = self._with_specials.get_added_tokens_decoder()
        self.special_tokens: Mapping[str, int] = {
            t.content: n for n, t in sorted(added.items()) if t.special
        }
        self.vocab_size = 1 + max(
            self._with_specials.get_vocab(with_added_tokens=True).values(), default=-1
        )
        self.eod_id = self._end_token(file)
        self.pad_id = self._token_id("pad_token", default=self.eod_id)
        self.prefix_ids = self._prefix()
        self.splits_cleanly = probe_splits(self)
        self.fingerprint = fingerprint_of(
            "hf-1", text, self.template_variables, self.eod_id, self.prefix_ids
        )

    def encode(self, text: str, *, special: bool = False) -> TokenIds:
        return np.array(
            self._tokenizer_for(special).encode(text, add_special_tokens=False).ids, np.int32
        )

    def encode_batch(self, texts: Sequence[str], *, special: bool = False) -> list[TokenIds]:
        encoded = self._tokenizer_for(special).encode_batch_fast(
            list(texts), add_special_tokens=False
        )
        return [np.array(item.ids, np.int32) for item in encoded]

    def encode_with_offsets(self, text: str, *, special: bool = False) -> tuple[TokenIds, Offsets]:
        encoded = self._tokenizer_for(special).encode(text, add_special_tokens=False)
        return np.array(encoded.ids, np.int32), np.array(encoded.offsets, np.int64).reshape(-1, 2)

    def decode(
        self, ids: Sequence[int] | NDArray[np.integer], *, skip_special: bool = False
    ) -> str:
        return str(
            self._with_specials.decode([int(n) for n in ids], skip_special_tokens=skip_special)
        )

    def _tokenizer_for(self, special: bool) -> tokenizers.Tokenizer:
        return self._with_specials if special else self._plain

    def _token_id(self, name: str, default: int) -> int:
        content = self.template_variables.get(name)
        number = None if content is None else self._with_specials.token_to_id(content)
        return default if number is None else int(number)

    def _end_token(self, file: Path) -> int:
        number = self._token_id("eos_token", default=-1)
        if number >= 0:
            return number
        if "eos_token" in self.template_variables:
            name = printable(self.template_variables["eos_token"], 40)
            raise DataError(
                f"{file}: eos_token is {name!r}, which is not in the vocabulary; correct eos_token."
            )
        known = [name for name in _KNOWN_END_TOKENS if name in self.special_tokens]
        if len(known) != 1:
            found = "none" if not known else " and ".join(known)
            raise DataError(
                f"{file} does not name the token that ends a document (usual names in its vocabulary: {found}); put a "
                'tokenizer_config.json with "eos_token" into the same directory.'
            )
        return self.special_tokens[known[0]]

    def _prefix(self) -> tuple[int, ...]:
        """Return the tokens that the tokenizer's post-processing puts before every text.

        An example is a beginning-of-sequence token.
        """
        bare = self._with_specials.encode("a", add_special_tokens=False).ids
        full = self._with_specials.encode("a", add_special_tokens=True).ids
        for start in range(len(full) - len(bare) + 1):
            if full[start : start + len(bare)] == bare:
                return tuple(full[:start])
        return ()


def _tokenizer_file(path: Path) -> Path:
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise DataError(
            f"{file} does not exist; set {flags.TOKENIZER_MODEL} to a tokenizer.json or to the directory that contains "
            "it."
        )
    return file


def _without_dropout(text: str) -> str:
    """Return the content of a tokenizer.json without dropout of merges.

    With dropout the same text would give different tokens. A tokenizer.json without dropout is
    returned unchanged, so that its fingerprint does not change.
    """
    try:
        value = json.loads(text)
        if not value["model"].get("dropout"):
            return text
        value["model"]["dropout"] = None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return text  # the library reports the fault when it loads the text
    return json.dumps(value, ensure_ascii=False)


def _load(file: Path, text: str) -> tokenizers.Tokenizer:
    try:
        backend = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the library raises Exception itself, not a subclass
        reason = printable(str(error))
        raise DataError(
            f"{file} is not a tokenizer.json of the tokenizers library: {reason}."
        ) from None
    backend.no_truncation()
    backend.no_padding()
    return backend


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    if file.stat().st_size > _MAX_CONFIG_BYTES:
        raise DataError(
            f"{file} has {file.stat().st_size} bytes, too many for a tokenizer configuration; check the file."
        )
    try:
        value = json.loads(read_text(file))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file} is not JSON: {printable(str(error))}.") from None
    if not isinstance(value, dict):
        raise DataError(f"{file} must contain one JSON object.")
    return value


def _named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the entries named ``*_token`` of a configuration, as strings.

    In the configuration each entry is a string or an object with ``content``.
    """
    named = {}
    for name, value in config.items():
        content = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(content, str):
            named[name] = content
    return named


def _chat_template(file: Path, config: Mapping[str, Any]) -> str | None:
    separate = file.with_name("chat_template.jinja")
    if separate.is_file():
        return read_text(separate)
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {
            item.get("name"): item.get("template") for item in template if isinstance(item, dict)
        }
        template = named.get("default")
        if template is None:
            names = printable(", ".join(map(str, named)))
            raise DataError(
                f"{file}: none of its chat templates ({names}) has the name `default`; give {flags.CHAT_TEMPLATE}."
            )
    if template is not None and not isinstance(template, str):
        raise DataError(f"{file}: chat_template must be text or a list of named templates.")
    return template
