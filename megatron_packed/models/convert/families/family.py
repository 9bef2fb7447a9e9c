"""Description of a Hugging Face family: options of config.json and names of tensors.

In the tables of names, ``{n}`` is the number of a layer and ``{e}`` the number of an expert. A name
with ``{e}`` stands for the tensors of all experts, in order. If a table lists several names for one
parameter, the parameter contains the rows of these tensors one after another. `Joined` describes
other orders.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from megatron_packed.config.sections.model import ModelConfig
from megatron_packed.models.convert.row_maps import RowMap

TABLE, OUTPUT = "embedding.weight", "output.weight"
"""Parameters of the embedding and of the output projection; a tied model has only the first."""
OUTSIDE = {
    TABLE: "{model}embed_tokens.weight",
    "final_norm.weight": "{model}norm.weight",
    OUTPUT: "lm_head.weight",
}
"""Names of tensors outside of the layers in most families."""
Fields = Mapping[str, Any]
"""The keys of a config.json and their values."""


class Joined(NamedTuple):
    """Hugging Face tensors of one parameter whose rows have an order of their own."""

    names: tuple[str, ...]
    rows: RowMap


Tensors = str | tuple[str, ...] | Joined
"""Hugging Face names of one parameter."""


class OneOf(NamedTuple):
    """Names of one parameter in files of different origin.

    Files are read with the first choice whose names and shapes they have. The first choice is
    written.
    """

    choices: tuple[Tensors, ...]


Entry = Tensors | OneOf
Names = Mapping[str, Entry]
"""Names of the parameters of one kind of layer, and the Hugging Face names of each."""


MTP = "mtp."
"""Prefix of the tensors of multi-token prediction."""


@dataclass(frozen=True, kw_only=True)
class Depths:
    """Multi-token prediction of a family."""

    stored: Callable[[Fields], tuple[str, int]]
    """Function that returns the layers of one depth, and the number of depths with weights of their
    own. It raises ValueError with a sentence.
    """
    derive: Callable[[Fields], Fields]
    """Function that returns further fields of `ModelConfig`."""
    written: Callable[[ModelConfig], Fields]
    """Function that returns the keys of a new config.json."""
    unfit: Callable[[ModelConfig], Iterator[str]] = lambda model: iter(())
    """Function that yields, as clauses, depths of a trained model that the family does not have."""
    layer: str
    """Hugging Face prefix of one layer's tensors. All layers of all depths have one numbering."""
    outside: Mapping[str, str]
    """Names of a depth's parameters outside its layers, and the Hugging Face name of each.
    ``{first}`` and ``{last}`` are the numbers of the first and last layer of the depth.
    """


@dataclass(frozen=True, kw_only=True)
class Family:
    """Options and tensor names of one family of models.

    Tables are keyed by a symbol of the layer pattern: its entries apply to models whose pattern has
    that symbol. Entries under ``""`` apply to all models. Names under two symbols, such as ``*-``,
    apply to the second of two layers that follow each other.
    """

    model_type: str
    architecture: str
    """Class of transformers that reads the model; empty if no new config.json is written."""
    spelled: Callable[[Fields], Fields]
    """Function that flattens the fields to the keys of the tables and fills in derived values."""
    pattern: Callable[[Fields], str] | None = None
    """Function that returns the layer pattern; raises ValueError with a sentence. By default, all
    layers are the only one of `blocks`.
    """
    blocks: tuple[str, ...]
    """Layers of ours that one Hugging Face layer can be."""
    fixed: Mapping[str, Mapping[str, Any]]
    """Fields of `ModelConfig` that are the same in all models of the family."""
    options: Mapping[str, Mapping[str, str]]
    """Required keys of config.json, and the field of `ModelConfig` for each."""
    must_be: Mapping[str, Mapping[str, Any]]
    """Keys of config.json and the only supported value of each, which is also the default."""
    repeats: Mapping[str, str] = field(default_factory=dict)
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
    outside: Mapping[str, str] = field(default_factory=lambda: OUTSIDE)
    """Names of parameters outside the layers, and the Hugging Face name of each. ``{model}`` stands
    for one of the prefixes.
    """
    layer: str = "{model}layers.{n}."
    """Hugging Face prefix of one layer's tensors, with ``{model}`` as in ``outside``."""
    names: Mapping[str, Names]
    """Names of parameters inside a layer, by its symbol, and the Hugging Face names of each."""
    loaded: Mapping[str, str] = field(default_factory=dict)
    """Parts of names in files that models of transformers spell otherwise, with their spelling."""
    stacked: Names = field(default_factory=dict)
    """Names in models of transformers of the parameters that hold the weights of all experts."""
    unties: bool = False
    """True if transformers ignores ``tie_word_embeddings``, so that files need both tables."""
    prefixes: tuple[str, ...] = ("model.",)
    """Prefixes of the model's names. Files decide between them; the first is written."""
    set_aside: tuple[str, ...] = ()
    """Prefixes of tensors that are not part of the text model. An import passes over them."""
    derive: Callable[[Fields, str], Fields] = lambda fields, pattern: {}
    """Function that returns fields of `ModelConfig` that depend on several keys or on the pattern."""
    derived: tuple[str, ...] = ()
    """Names of the fields that ``derive`` returns."""
    derived_from: str = ""
    """Keys, separated by spaces, that only ``derive``, ``pattern`` and ``rules`` read."""
    nullable: str = ""
    """Keys, separated by spaces, for which null has a meaning in this family alone."""
    unfit: Callable[[ModelConfig], Iterator[str]] = lambda model: iter(())
    """Function that yields, as clauses, sizes of a trained model that transformers refuses."""
    depths: Depths | None = None
    """Multi-token prediction; None if the files of the family have none."""

    @property
    def symbols_per_layer(self) -> int:
        """Number of symbols of the layer pattern that one Hugging Face layer becomes."""
        return len(self.blocks[0])

    @property
    def deciding_keys(self) -> frozenset[str]:
        """Keys that decide what a model of the family computes."""
        tables = (*self.options.values(), *self.must_be.values(), self.repeats)
        return frozenset(self.derived_from.split()).union(*tables)

    @property
    def read_keys(self) -> frozenset[str]:
        """Keys that the functions of the family read, and whose null would have no meaning."""
        return frozenset({*self.derived_from.split(), "tie_word_embeddings"}) - set(
            self.nullable.split()
        )

    def aside(self, model: ModelConfig) -> tuple[str, ...]:
        """Return the prefixes of tensors that are not part of ``model``."""
        return tuple(prefix for prefix in self.set_aside if prefix != MTP or not model.mtp_depths)


LIBRARY = """_name_or_path architectures auto_map bos_token_id dtype eos_token_id initializer_range model_type
    output_attentions output_hidden_states pad_token_id return_dict tokenizer_class torch_dtype transformers_version
    use_cache """
"""Keys of the transformers library that do not affect the model's output."""
