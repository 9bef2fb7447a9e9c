"""Description of a Hugging Face family: options of config.json and names of tensors.

In the tables of names, ``{n}`` is the number of a layer and ``{e}`` the number of an expert. A name
with ``{e}`` stands for the tensors of all experts, in order. If a table lists several names for one
parameter, the parameter contains the rows of these tensors one after another. `Joined` describes
other orders.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from megatron_packed.config.sections.model import ModelConfig
from megatron_packed.models.convert.row_maps import RowMap

TABLE, OUTPUT = "embedding.weight", "output.weight"
"""Parameters of the embedding and of the output projection; a tied model has only the first."""
Fields = Mapping[str, Any]
"""The keys of a config.json and their values."""


class Joined(NamedTuple):
    """Hugging Face tensors of one parameter whose rows have an order of their own."""

    names: tuple[str, ...]
    rows: RowMap


Entry = str | tuple[str, ...] | Joined
"""Hugging Face names of one parameter."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """Options and tensor names of one family of models.

    Tables are keyed by a symbol of the layer pattern: its entries apply to models whose pattern has
    that symbol. Entries under ``""`` apply to all models.
    """

    model_type: str
    architecture: str
    """Class of transformers that reads the model."""
    spelled: Callable[[Fields], Fields]
    """Function that flattens the fields to the keys of the tables and fills in derived values."""
    pattern: Callable[[Fields], str]
    """Function that returns the layer pattern; raises ValueError with a sentence."""
    block: str
    """Pattern that every model of the family repeats; empty if all patterns are possible."""
    fixed: Mapping[str, Mapping[str, Any]]
    """Fields of `ModelConfig` that are the same in all models of the family."""
    options: Mapping[str, Mapping[str, str]]
    """Required keys of config.json, and the field of `ModelConfig` for each."""
    must_be: Mapping[str, Mapping[str, Any]]
    """Keys of config.json and the only supported value of each, which is also the default."""
    repeats: Mapping[str, str]
    """Keys that some files have in addition to another key or in place of it. If both are present,
    their values must be equal.
    """
    no_effect: str
    """Keys, separated by spaces, that do not affect the model's output. They concern
    initialization, text generation and the origin of the file.
    """
    rules: Callable[[Fields], Iterator[str]]
    """Function that checks the fields beyond the tables. It yields each problem as a clause without a
    full stop.
    """
    written: Callable[[ModelConfig], Fields]
    """Function that returns the keys of a new config.json that the tables do not describe."""
    outside: Mapping[str, str]
    """Names of parameters outside the layers, and the Hugging Face name of each."""
    layer: str
    """Prefix of the Hugging Face names of one layer's tensors."""
    symbols_per_layer: int
    """Number of symbols of the layer pattern that one Hugging Face layer becomes."""
    names: Mapping[str, Mapping[str, Entry]]
    """Names of parameters inside a layer, by its symbol, and the Hugging Face names of each."""
    unties: bool = False
    """True if transformers ignores ``tie_word_embeddings``, so that files need both tables."""


LIBRARY = """_name_or_path architectures auto_map bos_token_id dtype eos_token_id initializer_range model_type
    output_attentions output_hidden_states pad_token_id return_dict tokenizer_class torch_dtype transformers_version
    use_cache """
"""Keys of the transformers library that do not affect the model's output."""
