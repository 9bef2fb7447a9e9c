"""Tokenizer that reads a Hugging Face ``tokenizer.json`` with the `tokenizers` library.

It needs neither the transformers library nor remote code.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from megatron_packed.config import flag_names as flags
from megatron_packed.data.errors import DataError, printable
from megatron_packed.data.tokenizers.base import (
    END_OF_DOCUMENT,
    Ids,
    InProcess,
    Offsets,
    TokenIds,
    fingerprint_of,
    probe_splits,
    read_bytes,
    read_text,
)
from megatron_packed.data.tokenizers.huggingface_settings import (
    CONFIG,
    SPECIAL_TOKENS_MAP,
    TOKEN_FLAGS,
    ListedToken,
    Settings,
    default_template,
    read_settings,
    read_templates,
    tool_template,
)
from megatron_packed.data.tokenizers.turn_markers import DOCUMENT_ENDS

_UNMADE = 100
"""Largest allowed number of entries of a GPT-2 vocabulary that no merge produces: special tokens.

If 1 % of the vocabulary is more than this number, the limit is 1 %. Above the limit, the file of
merges is incomplete.
"""


class HuggingFaceTokenizer(InProcess):
    """Tokenizer read from a ``tokenizer.json``; see `base.Tokenizer` for the attributes.

    Args:
        path: ``tokenizer.json``, or a directory that contains it. The optional files in the same
            directory are read too, as transformers reads them (`huggingface_settings`).
    Raises:
        DataError: a file is missing or damaged, files give one number to several tokens, or no file
            names the token that ends a document.
    """

    def __init__(self, path: str | Path) -> None:
        file = _tokenizer_file(Path(path))
        text, content = _without_dropout(read_text(file))
        self._load(file, text)
        self._set_up(file, text, read_settings(file, content))
        templates = read_templates(file)
        self.chat_template = default_template(templates)
        self.tool_chat_template = tool_template(templates)

    @classmethod
    def gpt2(cls, vocab_file: str | Path, merge_file: str | Path) -> HuggingFaceTokenizer:
        """Build GPT-2's tokenizer from its two files.

        Args:
            vocab_file: ``vocab.json`` or ``encoder.json``.
            merge_file: ``merges.txt`` or ``vocab.bpe``.
        Raises:
            DataError: a file is missing, damaged or cut off, or has no ``<|endoftext|>``.
        """
        read_bytes(Path(merge_file))  # refuses a file that is too large for the library
        _check_numbers(Path(vocab_file))
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
        return cls.from_text(backend.to_str(), {"eos_token": END_OF_DOCUMENT}, Path(vocab_file))

    @classmethod
    def from_text(cls, text: str, named: Mapping[str, str], file: Path) -> HuggingFaceTokenizer:
        """Build a tokenizer without chat template from the text of a tokenizer.json.

        Args:
            text: content of the tokenizer.json.
            named: spelling of each named token, for example of ``eos_token``.
            file: path for messages.
        Raises:
            DataError: the library cannot load the text, or ``eos_token`` is not in the vocabulary.
        """
        tokenizer = cls.__new__(cls)
        tokenizer._load(file, text)
        tokenizer._set_up(file, text, Settings(dict(named)))
        return tokenizer

    def _load(self, file: Path, text: str) -> None:
        self.text = text
        """Content of the tokenizer.json."""
        self._with_specials = _engine(file, text)
        self._plain = _engine(file, text)
        self._plain.encode_special_tokens = True

    def _set_up(self, file: Path, text: str, settings: Settings) -> None:
        """Set all attributes except the chat templates.

        Args:
            file: path for messages.
            text: content of the loaded tokenizer.json.
            settings: tokens of the files next to it.
        """
        self.path = file
        self.template_variables: Mapping[str, str] = settings.named
        changes = self._add(file, settings)
        added = self._with_specials.get_added_tokens_decoder()
        self.special_tokens: Mapping[str, int] = {
            t.content: n for n, t in sorted(added.items()) if t.special
        }
        self.vocab_size = 1 + max(
            self._with_specials.get_vocab(with_added_tokens=True).values(), default=-1
        )
        self.eod_id = self._end_token(file, settings.ignores_map)
        self.pad_id = self._token_id("pad_token", default=self.eod_id)
        self.prefix_ids = self._prefix()
        self.splits_cleanly = probe_splits(self)
        identity = (text, self.template_variables, self.eod_id, self.prefix_ids)
        # Earlier versions read no changes. Without changes their caches and checkpoints stay valid.
        self.fingerprint = fingerprint_of("hf-1", *identity, *([changes] if changes else []))

    def _add(self, file: Path, settings: Settings) -> list[list[Any]]:
        """Add the tokens of the settings.

        Returns:
            Number, text and flags of the tokens that change the tokenizer.
        """
        engine = self._with_specials
        _check_listed(engine, settings.listed)
        by_content = {token.content: token for token in engine.get_added_tokens_decoder().values()}
        changing = []
        for token in settings.tokens:
            if token.content and by_content.get(token.content) != token:
                by_content[token.content] = token
                changing.append(token)
        if not changing:
            return []
        vocabulary = engine.get_vocab(with_added_tokens=True)
        for each in (self._plain, engine):
            each.add_tokens(list(settings.tokens))
        _check_new(file, vocabulary, engine.get_vocab(with_added_tokens=True))
        return [
            [
                engine.token_to_id(token.content),
                token.content,
                *(getattr(token, f) for f in TOKEN_FLAGS),
            ]
            for token in changing
        ]

    def encode(self, text: str, *, special: bool = False) -> TokenIds:
        return np.array(
            self._tokenizer_for(special).encode(text, add_special_tokens=False).ids, np.int32
        )

    def encode_batch(self, texts: Sequence[str], *, special: bool = False) -> list[TokenIds]:
        tokenizer = self._tokenizer_for(special)
        encoded = tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(item.ids, np.int32) for item in encoded]

    def encode_with_offsets(self, text: str, *, special: bool = False) -> tuple[TokenIds, Offsets]:
        encoded = self._tokenizer_for(special).encode(text, add_special_tokens=False)
        return np.array(encoded.ids, np.int32), np.array(encoded.offsets, np.int64).reshape(-1, 2)

    def decode(self, ids: Ids, *, skip_special: bool = False) -> str:
        return str(
            self._with_specials.decode([int(n) for n in ids], skip_special_tokens=skip_special)
        )

    def _tokenizer_for(self, special: bool) -> tokenizers.Tokenizer:
        return self._with_specials if special else self._plain

    def _token_id(self, name: str, default: int) -> int:
        content = self.template_variables.get(name)
        number = None if content is None else self._with_specials.token_to_id(content)
        return default if number is None else int(number)

    def _end_token(self, file: Path, ignores_map: bool) -> int:
        number = self._token_id("eos_token", default=-1)
        if number >= 0:
            return number
        if "eos_token" in self.template_variables:
            name = printable(self.template_variables["eos_token"], 40)
            raise DataError(
                f"{file}: eos_token is {name!r}, which is not in the vocabulary; correct eos_token."
            )
        end_names = [name for name in DOCUMENT_ENDS if name in self.special_tokens]
        if len(end_names) != 1:
            shown = "none" if not end_names else " and ".join(end_names)
            cure = f'put a {CONFIG} with "eos_token" into the same directory'
            if ignores_map:
                cure = (
                    f"add eos_token to {CONFIG}, because {SPECIAL_TOKENS_MAP} is not read beside "
                    "its added_tokens_decoder"
                )
            raise DataError(
                f"{file} does not name the token that ends a document (usual names in its vocabulary: {shown}); {cure}."
            )
        return self.special_tokens[end_names[0]]

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


def _check_numbers(file: Path) -> None:
    """Raise an error if entries of a vocab.json have no number or the same one.

    The library passes over entries without a number.
    """
    try:
        numbers = list(json.loads(read_text(file)).values())
    except (ValueError, AttributeError, RecursionError):
        return  # the library reports the fault when it loads the file
    invalid = next(
        (number for number in numbers if type(number) is not int or not 0 <= number < 2**31), None
    )
    if invalid is not None or len(set(numbers)) != len(numbers):
        problem = (
            "the same number" if invalid is None else f"the number {printable(repr(invalid), 60)}"
        )
        raise DataError(
            f"{file} gives {problem} to an entry; numbers are different whole numbers from 0, so make or copy the file "
            "again."
        )


def _tokenizer_file(path: Path) -> Path:
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise DataError(
            f"{file} does not exist; set {flags.TOKENIZER_MODEL} to a tokenizer.json or to the directory that contains "
            "it."
        )
    return file


def _without_dropout(text: str) -> tuple[str, dict[str, Any]]:
    """Return a tokenizer.json without dropout of merges, as text and as its content.

    With dropout the same text would give different tokens. A tokenizer.json without dropout is
    returned unchanged, so that its fingerprint does not change.
    """
    try:
        content = json.loads(text)
        if content["model"].get("dropout"):
            content["model"]["dropout"] = None
            text = json.dumps(content, ensure_ascii=False)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return text, {}  # the library reports the fault when it loads the text
    return text, content


def _check_listed(engine: tokenizers.Tokenizer, listed: Iterable[ListedToken]) -> None:
    """Raise an error if two tokens have one number in the files, and one of them no other number.

    transformers forgets the first of two such tokens of one file. A token whose number another
    token of tokenizer.json has, gets a number that no file contains.
    """
    owners: dict[int, str] = {}
    for file, number, content in listed:
        if engine.token_to_id(content) is not None:
            continue
        other = engine.id_to_token(number) or owners.setdefault(number, content)
        if other != content:
            raise DataError(
                f"{file} gives the number {number} to {printable(content, 60)!r}, but the token {number} is "
                f"{printable(other, 60)!r}; correct the number, or rename the token in tokenizer.json too."
            )


def _check_new(file: Path, old_numbers: Mapping[str, int], new_numbers: Mapping[str, int]) -> None:
    """Raise an error if the library gave a new token the number of another token.

    The library counts the entries of the vocabulary, so it does so if numbers are missing.

    Args:
        old_numbers: number of each token of tokenizer.json.
        new_numbers: number of each token after new tokens were added.
    """
    owners = {number: token for token, number in old_numbers.items()}
    for content in new_numbers.keys() - old_numbers.keys():
        other = owners.get(new_numbers[content])
        if other is not None:
            raise DataError(
                f"{file} has {len(old_numbers)} tokens, but numbers up to {max(owners)}, so the tokenizers library "
                f"gives the new token {printable(content, 60)!r} the number {new_numbers[content]} of "
                f"{printable(other, 60)!r}; number the tokens of tokenizer.json without holes."
            )


def _engine(file: Path, text: str) -> tokenizers.Tokenizer:
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
